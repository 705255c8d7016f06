"""Reader of the original SuperGLUE files, without TensorFlow; examples have the TFDS schema."""

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
COMBINED_ZIP = 'combined.zip'


@dataclasses.dataclass(frozen=True)
class Config:
  """Files and schema of a config of the TFDS dataset super_glue:1.0.2.

  Attributes:
    folder: folder name, and name of the zip without its suffix.
    fields: type of each field of an example, except idx and label.
    labels: class names.
    bytes, sha256: size and digest of the official zip.
    splits: available splits.
  """

  folder: str
  fields: Mapping[str, type]
  labels: tuple[str, ...]
  bytes: int
  sha256: str
  splits: tuple[str, ...] = SPLITS

  @property
  def zip(self) -> str:
    """Name of the zip."""
    return f'{self.folder}.zip'

  def file(self, split: str) -> str:
    """Returns the path of the file of a split, in a folder or in a zip."""
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
  """Reads the examples of a split, in file order and in the TFDS schema.

  A label is the index of a class, or -1 if there is none.

  Args:
    folder: folder that contains the task folder with .jsonl files, the task zip, or the combined
      zip of all tasks; or the path of a zip.
    config: a key of CONFIGS.
    split: one of SPLITS. The diagnostic sets axb and axg have only 'test'.

  Raises:
    BadInput: the config or split does not exist, or its file is missing, damaged or malformed.
  """
  if config not in CONFIGS:
    nearest, *_ = difflib.get_close_matches(config, CONFIGS, n=1, cutoff=0.0)
    raise errors.BadInput(
      f'no SuperGLUE config {config!r}: did you mean {nearest!r}? Available: {", ".join(CONFIGS)}'
    )
  splits = CONFIGS[config].splits
  if split not in splits:
    raise errors.BadInput(
      f'SuperGLUE config {config} has no split {split!r}: it has {", ".join(splits)}'
    )
  folder = pathlib.Path(folder).expanduser()
  return [
    example
    for location, row in _read_rows(folder, config, split)
    for example in _to_examples(config, split, location, row)
  ]


def _read_rows(
  folder: pathlib.Path, config: str, split: str
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the JSON objects of the lines that are not blank, each with a text of its location."""
  path, member = _find_file(folder, config, split)
  name = str(path) if member is None else f'{path}/{member}'
  for number, line in enumerate(_read_lines(path, member), 1):
    location = f'{name}, line {number}'
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError as error:  # invalid JSON or UTF-8
      raise errors.BadInput(
        f'{location}: not JSON ({error}), expected one object per line; download the file again'
      ) from error
    yield location, _check_type(location, 'the line', row, dict)


def _find_file(folder: pathlib.Path, config: str, split: str) -> tuple[pathlib.Path, str | None]:
  """Returns the path of the file of a split, and its name inside if the path is a zip."""
  files = CONFIGS[config]
  file = files.file(split)
  if (folder / file).is_file():
    return folder / file, None
  for path in (folder / files.zip, folder if folder.suffix == '.zip' else folder / COMBINED_ZIP):
    if not path.is_file():
      continue
    if path.name == files.zip:
      status = path.stat()
      _warn_if_not_official(config, path, status.st_size, status.st_mtime_ns)
    member = _find_member(path, file)
    if member is not None:
      return path, member
  raise errors.BadInput(
    f'{folder} has no {split} split of SuperGLUE {config}: expected the file {file}, which can '
    f'also be inside {files.zip} ({files.bytes:,} bytes, sha256 {files.sha256}) or {COMBINED_ZIP}; '
    f'download {URL}{files.zip}'
  )


def _find_member(path: pathlib.Path, file: str) -> str | None:
  """Returns the name of a file in a zip, in any folder there, or None."""
  with _translate_read_errors(path), zipfile.ZipFile(path) as archive:
    names = [
      name
      for name in archive.namelist()
      if f'/{name}'.endswith(f'/{file}') and not name.startswith('__MACOSX/')
    ]
  return min(names, key=lambda name: (name.count('/'), name), default=None)


def _read_lines(path: pathlib.Path, member: str | None) -> Iterator[bytes]:
  """Yields lines, split only at newlines: other line separators may be part of a text."""
  with _translate_read_errors(path):
    if member is None:
      with path.open('rb') as file:
        yield from file
    else:
      with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        yield from file


@contextlib.contextmanager
def _translate_read_errors(path: pathlib.Path) -> Iterator[None]:
  """Converts errors of reading into BadInput with the path."""
  try:
    yield
  except PermissionError as error:
    raise errors.BadInput(
      f'{path} cannot be read: {error.strerror}; grant yourself read permission'
    ) from error
  except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise errors.BadInput(f'{path} is truncated or damaged: {error}; download it again') from error


@functools.cache  # one warning per file; a replaced file is checked again
def _warn_if_not_official(config: str, path: pathlib.Path, size: int, modified_ns: int) -> None:
  """Logs a warning if a zip differs from the official one."""
  del modified_ns  # only part of the cache key
  official = CONFIGS[config]
  with _translate_read_errors(path), path.open('rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if (size, digest) != (official.bytes, official.sha256):
    logging.warning(
      '%s has %s bytes, sha256 %s, but the official file has %s bytes, sha256 %s: it is read, '
      'but its examples may differ; to compare with published results, download %s%s',
      path,
      f'{size:,}',
      digest,
      f'{official.bytes:,}',
      official.sha256,
      URL,
      official.zip,
    )


def _to_examples(
  config: str, split: str, location: str, row: dict[str, Any]
) -> Iterator[dict[str, Any]]:
  """Yields the examples of one line."""
  if config == 'multirc':
    yield from _multirc_examples(split, location, row)
  elif config == 'record':
    yield from _record_examples(split, location, row)
  else:
    yield _flat_example(config, split, location, row)


def _flat_example(config, split, location, row):
  """Returns the single example of a line, whose fields may be nested in `target`."""
  target = _field(location, row, 'target', dict) if config.startswith('wsc') else {}
  example = {}
  for name, kind in CONFIGS[config].fields.items():
    is_nested = bool(target) and name != 'text'
    source = target if is_nested else row
    example[name] = _field(location, source, name, kind, 'target' if is_nested else '')
  example['idx'] = _field(location, row, 'idx', int)
  example['label'] = _label(config, split, location, row)
  if config != 'wsc.fixed':
    return example
  try:
    return wsc.repair_spans(example)
  except errors.BadInput as error:
    raise errors.BadInput(f'{location}: {error}') from error


def _multirc_examples(split, location, row):
  """Yields one example per answer option."""
  passage = _field(location, row, 'passage', dict)
  number = _field(location, row, 'idx', int)
  text = _field(location, passage, 'text', str, 'passage')
  for i, question in _items(location, passage, 'questions', 'passage'):
    path = f'passage.questions[{i}]'
    texts = {'paragraph': text, 'question': _field(location, question, 'question', str, path)}
    idx = {'paragraph': number, 'question': _field(location, question, 'idx', int, path)}
    for j, answer in _items(location, question, 'answers', path):
      answer_path = f'{path}.answers[{j}]'
      yield {
        **texts,
        'answer': _field(location, answer, 'text', str, answer_path),
        'idx': {**idx, 'answer': _field(location, answer, 'idx', int, answer_path)},
        'label': _label('multirc', split, location, answer, answer_path),
      }


def _record_examples(split, location, row):
  """Yields one example per query."""
  passage = _field(location, row, 'passage', dict)
  number = _field(location, row, 'idx', int)
  text = _field(location, passage, 'text', str, 'passage')
  entities = set()
  for i, entity in _items(location, passage, 'entities', 'passage'):
    path = f'passage.entities[{i}]'
    first, last = (_field(location, entity, name, int, path) for name in ('start', 'end'))
    entities.add(text[first : last + 1])
  for i, query in _items(location, row, 'qas'):
    path = f'qas[{i}]'
    has_no_answers = split == 'test' and 'answers' not in query
    answers = [] if has_no_answers else _items(location, query, 'answers', path)
    yield {
      'passage': text,
      'query': _field(location, query, 'query', str, path),
      'entities': sorted(entities),
      'answers': sorted(
        {_field(location, answer, 'text', str, f'{path}.answers[{j}]') for j, answer in answers}
      ),
      'idx': {'passage': number, 'query': _field(location, query, 'idx', int, path)},
    }


def _items(location, row, name, parent='') -> list[tuple[int, dict[str, Any]]]:
  """Returns the objects of a list field, with their indices."""
  items = _field(location, row, name, list, parent)
  return [
    (i, _check_type(location, f'{_path(parent, name)}[{i}]', item, dict))
    for i, item in enumerate(items)
  ]


def _path(parent: str, name: str) -> str:
  return f'{parent}.{name}' if parent else name


def _field(location: str, row: dict[str, Any], name: str, kind: type, parent: str = '') -> Any:
  """Returns a value of a row. Raises BadInput if it is missing or has another type.

  Args:
    location: file and line, for errors.
    row: object that contains the field.
    name: name of the field.
    kind: expected type.
    parent: path of the object in the line, empty for the line itself.
  """
  if name not in row:
    raise errors.BadInput(
      f'{location}: field {_path(parent, name)!r} is missing, but it is required; '
      f'download the file again'
    )
  return _check_type(location, _path(parent, name), row[name], kind)


def _check_type(location: str, name: str, value: Any, kind: type) -> Any:
  """Returns a value if it has the expected type. Integers may be written as strings."""
  if kind is int and isinstance(value, str):  # the idx of AX-b is "0", "1", ...
    try:
      return int(value)
    except ValueError:
      pass
  if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
    return value
  expected = {str: 'a string', int: 'an integer', dict: 'an object', list: 'a list'}[kind]
  text = json.dumps(value)
  text = text if len(text) <= 60 else f'{text[:57]}...'
  raise errors.BadInput(
    f'{location}: {name} is {text}, expected {expected}; download the file again'
  )


def _label(config: str, split: str, location: str, row: dict[str, Any], parent: str = '') -> int:
  """Returns the index of the class, -1 if a test split does not have it."""
  name, labels = _path(parent, 'label'), CONFIGS[config].labels
  value = row.get('label')
  if value is None and split == 'test':
    return -1
  if value is None:
    raise errors.BadInput(
      f'{location}: field {name!r} is missing, but only a test split may omit it; '
      f'download the file again'
    )
  if isinstance(value, str) and value in labels:
    return labels.index(value)
  expected = labels
  if labels is BOOLEAN or config == 'copa':  # stored as 0 and 1, or as true and false
    expected = ('0', '1', 'false', 'true')
    if isinstance(value, int) and value in (0, 1):
      return int(value)
  raise errors.BadInput(
    f'{location}: {name} is {json.dumps(value)}, expected one of: {", ".join(expected)}; '
    f'download the file again'
  )
