"""The original files of SuperGLUE, read without TensorFlow into the schema of TFDS."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import logging
import pathlib
from typing import Any
import zipfile
import zlib

from ngrammer_jax import errors
from ngrammer_jax.tasks.superglue import wsc

SPLITS = ('train', 'validation', 'test')
URL = 'https://dl.fbaipublicfiles.com/glue/superglue/data/v2/'
COMBINED = 'combined.zip'


@dataclasses.dataclass(frozen=True)
class Config:
  """A config of super_glue:1.0.2 in TFDS.

  Attributes:
    folder: name of its folder, and of its zip without the ending.
    fields: of an example besides idx and label, with the type of each.
    labels: names of the classes.
    bytes, sha256: of the official zip.
    splits: that it has.
  """

  folder: str
  fields: Mapping[str, type]
  labels: tuple[str, ...]
  bytes: int
  sha256: str
  splits: tuple[str, ...] = SPLITS

  @property
  def zip(self) -> str:
    return f'{self.folder}.zip'

  def file(self, split: str) -> str:
    """The path of a split's file, in a folder or in a zip."""
    name = {'train': 'train', 'validation': 'val', 'test': 'test'}[split]
    return f'{self.folder}/{name if self.splits == SPLITS else self.folder}.jsonl'


def _texts(*names: str) -> dict[str, type]:
  return dict.fromkeys(names, str)


BOOLEAN, ENTAILMENT = ('False', 'True'), ('entailment', 'not_entailment')
_WSC = Config(
  'WSC',
  _texts('text', 'span1_text', 'span2_text') | {'span1_index': int, 'span2_index': int},
  BOOLEAN,
  32_751,
  '2ed6dfa94556b4a128ff0441efe365b2e883124e7e6aa00fb8d3a6cb1fd520a9',
)
CONFIGS = {
  'boolq': Config(
    'BoolQ',
    _texts('question', 'passage'),
    BOOLEAN,
    4_118_001,
    '853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436',
  ),
  'cb': Config(
    'CB',
    _texts('premise', 'hypothesis'),
    ('entailment', 'contradiction', 'neutral'),
    75_482,
    '8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535',
  ),
  'copa': Config(
    'COPA',
    _texts('premise', 'choice1', 'choice2', 'question'),
    ('choice1', 'choice2'),
    43_986,
    '405906cddac74bc1e1ce8220f1107d1025b66a25ef10149d91b10bb30651125f',
  ),
  'multirc': Config(
    'MultiRC',
    _texts('paragraph', 'question', 'answer'),
    BOOLEAN,
    1_116_225,
    'b3cd440856e72eb166b2edcd37b798455f1ebd51f2c3de64c0c2a4e1971d2737',
  ),
  'record': Config(
    'ReCoRD',
    _texts('passage', 'query') | dict.fromkeys(('entities', 'answers'), list),
    (),
    51_757_880,
    '30c7b651ab21b8bf8fab986495cd1084333010e040548f861b839eec0044ac18',
  ),
  'rte': Config(
    'RTE',
    _texts('premise', 'hypothesis'),
    ENTAILMENT,
    750_920,
    '6310aab3f000424c9d0318a1ff20692e07c7f4aa15e8f17a5972ea0a35c398b9',
  ),
  'wic': Config(
    'WiC',
    _texts('word', 'sentence1', 'sentence2')
    | dict.fromkeys(('start1', 'start2', 'end1', 'end2'), int),
    BOOLEAN,
    396_213,
    'ee7e67f4ae9eafbf533780faa198e62167f3cda54256cdf261877be3c0e90900',
  ),
  'wsc': _WSC,
  'wsc.fixed': _WSC,
  'axb': Config(
    'AX-b',
    _texts('sentence1', 'sentence2'),
    ENTAILMENT,
    33_950,
    '43b45c55a273575c58a33cd68f10a971f83daa3aa223bfbc4077b92fbdf960b3',
    splits=('test',),
  ),
  'axg': Config(
    'AX-g',
    _texts('premise', 'hypothesis'),
    ENTAILMENT,
    10_413,
    '2d4e00d3a7d23d2c3787ee4c1382cc81a72cb05a76fc9d78d142949247ed61b9',
    splits=('test',),
  ),
}


def read(folder: pathlib.Path, config: str, split: str) -> list[dict[str, Any]]:
  """The examples of a split in the order of its file, as TFDS has them.

  Labels are numbers of classes, -1 where there is none.

  Args:
    folder: holds, for the task, its folder of .jsonl files, its zip, or the combined zip of all
      tasks; or is itself a zip.
    config: a key of CONFIGS.
    split: one of SPLITS. The diagnostics axb and axg have 'test' alone.

  Raises:
    BadInput: no such config or split, or its file is missing, damaged or not as documented.
  """
  if config not in CONFIGS:
    near = difflib.get_close_matches(config, CONFIGS, n=1, cutoff=0.0)
    raise errors.BadInput(
      f'no SuperGLUE config {config!r}: did you mean {near[0]!r}? There are: {", ".join(CONFIGS)}'
    )
  known = CONFIGS[config]
  if split not in known.splits:
    raise errors.BadInput(
      f'SuperGLUE config {config} has no split {split!r}: it has {", ".join(known.splits)}'
    )
  folder = pathlib.Path(folder).expanduser()
  return [
    example
    for where, row in _rows(folder, config, split)
    for example in _examples(config, split, where, row)
  ]


def _rows(folder: pathlib.Path, config: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """The lines of a file that are not blank, each with its place in words."""
  path, member = _find(folder, config, split)
  name = str(path) if member is None else f'{path}/{member}'
  for number, line in enumerate(_lines(path, member), 1):
    where = f'{name}, line {number}'
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError as error:  # of json, or of UTF-8
      raise errors.BadInput(
        f'{where}: not JSON ({error}), expected one object on each line; download the file again'
      ) from error
    yield where, _typed(where, 'the line', row, dict)


def _find(folder: pathlib.Path, config: str, split: str) -> tuple[pathlib.Path, str | None]:
  """The file of a split: a path, and the member of it where that is a zip."""
  known = CONFIGS[config]
  wanted = known.file(split)
  if (folder / wanted).is_file():
    return folder / wanted, None
  for path in (folder / known.zip, folder if folder.suffix == '.zip' else folder / COMBINED):
    if not path.is_file():
      continue
    if path.name == known.zip:
      status = path.stat()
      _check_official(config, path, status.st_size, status.st_mtime_ns)
    member = _member(path, wanted)
    if member is not None:
      return path, member
  raise errors.BadInput(
    f'{folder} has no {split} split of SuperGLUE {config}: expected {wanted}, or it in {known.zip} '
    f'({known.bytes:,} bytes, sha256 {known.sha256}) or in {COMBINED}; download {URL}{known.zip}'
  )


def _member(path: pathlib.Path, wanted: str) -> str | None:
  """The name of a file in a zip, in whatever folder there."""
  with _reading(path), zipfile.ZipFile(path) as archive:
    found = [
      name
      for name in archive.namelist()
      if f'/{name}'.endswith(f'/{wanted}') and not name.startswith('__MACOSX/')
    ]
  return min(found, key=lambda name: (name.count('/'), name), default=None)


def _lines(path: pathlib.Path, member: str | None) -> Iterator[bytes]:
  """Lines that end at a newline: other separators may be part of a text."""
  with _reading(path):
    if member is None:
      with path.open('rb') as file:
        yield from file
    else:
      with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        yield from file


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
  """Says which file cannot be read."""
  try:
    yield
  except PermissionError as error:
    raise errors.BadInput(
      f'{path} cannot be read: {error.strerror}; give yourself the right to read it'
    ) from error
  except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise errors.BadInput(f'{path} is truncated or damaged: {error}; download it again') from error


@functools.cache  # one warning for each file, and for each that replaces it
def _check_official(config: str, path: pathlib.Path, size: int, changed: int) -> None:
  """Warns of a zip that is not the official one."""
  del changed
  known = CONFIGS[config]
  with _reading(path), path.open('rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if (size, digest) != (known.bytes, known.sha256):
    logging.warning(
      '%s has %s bytes, sha256 %s, but the official one has %s bytes, sha256 %s: it is read, but '
      'its examples may be others; to compare with published results, download %s%s',
      path,
      f'{size:,}',
      digest,
      f'{known.bytes:,}',
      known.sha256,
      URL,
      known.zip,
    )


def _examples(config: str, split: str, where: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """The examples of one line."""
  if config == 'multirc':
    yield from _multirc(split, where, row)
  elif config == 'record':
    yield from _record(split, where, row)
  else:
    yield _flat(config, split, where, row)


def _flat(config, split, where, row):
  target = _field(where, row, 'target', dict) if config.startswith('wsc') else {}
  example = {}
  for name, kind in CONFIGS[config].fields.items():
    inside = target and name != 'text'
    example[name] = _field(where, target if inside else row, name, kind, 'target' * bool(inside))
  example['idx'] = _field(where, row, 'idx', int)
  example['label'] = _label(config, split, where, row)
  if config != 'wsc.fixed':
    return example
  try:
    return wsc.cleaned(example)
  except errors.BadInput as error:
    raise errors.BadInput(f'{where}: {error}') from error


def _multirc(split, where, row):
  """One example for each answer."""
  passage = _field(where, row, 'passage', dict)
  number, text = _field(where, row, 'idx', int), _field(where, passage, 'text', str, 'passage')
  for i, question in _items(where, passage, 'questions', 'passage'):
    inside = f'passage.questions[{i}]'
    asked = {'paragraph': text, 'question': _field(where, question, 'question', str, inside)}
    idx = {'paragraph': number, 'question': _field(where, question, 'idx', int, inside)}
    for j, answer in _items(where, question, 'answers', inside):
      below = f'{inside}.answers[{j}]'
      yield {
        **asked,
        'answer': _field(where, answer, 'text', str, below),
        'idx': {**idx, 'answer': _field(where, answer, 'idx', int, below)},
        'label': _label('multirc', split, where, answer, below),
      }


def _record(split, where, row):
  """One example for each query."""
  passage = _field(where, row, 'passage', dict)
  number, text = _field(where, row, 'idx', int), _field(where, passage, 'text', str, 'passage')
  entities = set()
  for i, entity in _items(where, passage, 'entities', 'passage'):
    inside = f'passage.entities[{i}]'
    first, last = (_field(where, entity, name, int, inside) for name in ('start', 'end'))
    entities.add(text[first : last + 1])
  for i, query in _items(where, row, 'qas'):
    inside = f'qas[{i}]'
    hidden = split == 'test' and 'answers' not in query
    answers = [] if hidden else _items(where, query, 'answers', inside)
    yield {
      'passage': text,
      'query': _field(where, query, 'query', str, inside),
      'entities': sorted(entities),
      'answers': sorted(
        {_field(where, answer, 'text', str, f'{inside}.answers[{j}]') for j, answer in answers}
      ),
      'idx': {'passage': number, 'query': _field(where, query, 'idx', int, inside)},
    }


def _items(where, row, name, inside='') -> list[tuple[int, dict[str, Any]]]:
  """The objects of a list, with their numbers."""
  items = _field(where, row, name, list, inside)
  return [
    (i, _typed(where, f'{_path(inside, name)}[{i}]', item, dict)) for i, item in enumerate(items)
  ]


def _path(inside: str, name: str) -> str:
  return f'{inside}.{name}' if inside else name


def _field(where: str, row: dict[str, Any], name: str, kind: type, inside: str = '') -> Any:
  """A value of a row. Raises BadInput where it is missing, or of another type."""
  if name not in row:
    raise errors.BadInput(
      f'{where}: no field {_path(inside, name)!r}, which every such line has; download the file '
      f'again'
    )
  return _typed(where, _path(inside, name), row[name], kind)


def _typed(where: str, name: str, value: Any, kind: type) -> Any:
  if kind is int and isinstance(value, str):  # AX-b numbers its examples "0", "1", ...
    try:
      return int(value)
    except ValueError:
      pass
  if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
    return value
  expected = {str: 'a text', int: 'an integer', dict: 'an object', list: 'a list'}[kind]
  shown = json.dumps(value)
  shown = shown if len(shown) <= 60 else f'{shown[:57]}...'
  raise errors.BadInput(f'{where}: {name} is {shown}, expected {expected}; download the file again')


def _label(config: str, split: str, where: str, row: dict[str, Any], inside: str = '') -> int:
  """The number of a class, -1 where a test split hides it."""
  name, labels = _path(inside, 'label'), CONFIGS[config].labels
  value = row.get('label')
  if value is None and split == 'test':
    return -1
  if value is None:
    raise errors.BadInput(
      f'{where}: no field {name!r}, which only a test split may lack; download the file again'
    )
  if isinstance(value, str) and value in labels:
    return labels.index(value)
  expected = labels
  if labels is BOOLEAN or config == 'copa':  # written as numbers, or as true and false
    expected = ('0', '1', 'false', 'true')
    if isinstance(value, int) and value in (0, 1):
      return int(value)
  raise errors.BadInput(
    f'{where}: {name} is {json.dumps(value)}, expected one of: {", ".join(expected)}; '
    f'download the file again'
  )
