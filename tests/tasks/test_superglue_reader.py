"""Reading SuperGLUE files: all layouts, the TFDS schema, and errors."""

import hashlib
import json
import logging
import pathlib
import re

import pytest

from ngrammer_jax import errors
from ngrammer_jax.tasks.superglue import reader
from tests.checks import bad_input, data_root
from tests.loops import each
from tests.tasks.superglue_examples import (
  EXAMPLES,
  LAYOUTS,
  LINES,
  PAIRS,
  expected,
  jsonl,
  write_folders,
  write_zip,
  write_zips,
)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_all_layouts_have_the_same_examples(tmp_path, layout):
  root = layout(tmp_path)
  for config, split in PAIRS:
    assert reader.read(root, config, split) == expected(config, split), (config, split)


def test_values_are_plain_python_types(tmp_path):
  write_folders(tmp_path)

  def types_in(value):
    if isinstance(value, dict):
      return set().union(*(types_in(v) for v in value.values()))
    return set().union(*(types_in(v) for v in value)) if isinstance(value, list) else {type(value)}

  for config, split in PAIRS:
    (*_, example) = reader.read(tmp_path, config, split)
    assert types_in(example) <= {str, int}
    fields = {*reader.CONFIGS[config].fields, 'idx'}
    if config != 'record':
      fields.add('label')
    assert set(example) == fields


def test_configs_match_tfds():
  assert list(reader.CONFIGS) == list(EXAMPLES)
  assert {name: size for name, (size, _) in reader.OFFICIAL_ZIPS.items()} == {
    'BoolQ': 4_118_001,
    'CB': 75_482,
    'COPA': 43_986,
    'MultiRC': 1_116_225,
    'ReCoRD': 51_757_880,
    'RTE': 750_920,
    'WiC': 396_213,
    'WSC': 32_751,
    'AX-b': 33_950,
    'AX-g': 10_413,
  }
  assert {config.folder for config in reader.CONFIGS.values()} == set(reader.OFFICIAL_ZIPS)
  assert all(len(bytes.fromhex(digest)) == 32 for _, digest in reader.OFFICIAL_ZIPS.values())


def test_folder_precedes_zip_precedes_combined_zip(tmp_path):
  row = {'premise': 'A', 'hypothesis': 'B', 'label': 'neutral'}
  numbered = lambda i: jsonl([row | {'idx': i}])
  first = lambda split='train': reader.read(tmp_path, 'cb', split)[0]['idx']
  write_zip(tmp_path / 'combined.zip', {'CB/train.jsonl': numbered(2), 'CB/val.jsonl': numbered(5)})
  assert first() == 2
  write_zip(tmp_path / 'CB.zip', {'CB/train.jsonl': numbered(1), 'CB/test.jsonl': numbered(4)})
  assert first() == 1
  (tmp_path / 'CB').mkdir()
  (tmp_path / 'CB' / 'train.jsonl').write_text(numbered(0))
  assert [first(), first('test'), first('validation')] == [0, 4, 5]


def test_folder_can_be_the_path_of_a_zip(tmp_path):
  write_zips(tmp_path)
  assert reader.read(tmp_path / 'CB.zip', 'cb', 'train') == EXAMPLES['cb']


def test_blank_lines_are_skipped(tmp_path):
  folder = tmp_path / 'CB'
  folder.mkdir()
  text = jsonl(LINES['CB'])
  (folder / 'train.jsonl').write_bytes(('\ufeff' + text.replace('\n', '\r\n') + '\r\n').encode())
  assert reader.read(tmp_path, 'cb', 'train') == EXAMPLES['cb']


def test_home_folder_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  write_folders(tmp_path / 'superglue')
  assert reader.read(pathlib.Path('~/superglue'), 'rte', 'train') == EXAMPLES['rte']


@pytest.mark.parametrize('is_official', [True, False])
def test_unofficial_zip_is_read_with_a_warning(tmp_path, monkeypatch, caplog, is_official):
  path = write_zips(tmp_path) / 'CB.zip'
  size, official_digest = path.stat().st_size, reader.OFFICIAL_ZIPS['CB'][1]
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  if is_official:
    monkeypatch.setitem(reader.OFFICIAL_ZIPS, 'CB', (size, digest))
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      assert reader.read(tmp_path, 'cb', 'train') == EXAMPLES['cb']
  warning = (
    f'{path} has {size:,} bytes, sha256 {digest}, but the official file has 75,482 bytes, sha256 '
    f'{official_digest}: it is read, but its examples may differ; to compare with published '
    f'results, download {reader.URL}CB.zip'
  )
  assert [record.getMessage() for record in caplog.records] == [] if is_official else [warning]


def test_missing_split(tmp_path):
  with bad_input("SuperGLUE config axb has no split 'train': it has test"):
    reader.read(tmp_path, 'axb', 'train')
  with bad_input("SuperGLUE config cb has no split 'dev': it has train, validation, test"):
    reader.read(tmp_path, 'cb', 'dev')


@pytest.mark.parametrize('existing', ['nothing', 'empty folder', 'zips'])
def test_missing_file_error_names_expected_files(tmp_path, existing):
  root = tmp_path / 'none' if existing == 'nothing' else tmp_path
  if existing == 'empty folder':
    (tmp_path / 'CB').mkdir()
  if existing == 'zips':
    write_zip(tmp_path / 'CB.zip', {'CB/train.jsonl': ''})
    write_zip(tmp_path / 'combined.zip', {'CB/train.jsonl': '', 'NotCB/val.jsonl': ''})
  with bad_input(
    f'{root} has no validation split of SuperGLUE cb: expected the file CB/val.jsonl, which '
    'can also be inside CB.zip (75,482 bytes, sha256 '
    '8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535) or combined.zip; download https://dl.fbaipublicfiles.com/glue/superglue/data/v2/CB.zip'
  ):
    reader.read(root, 'cb', 'validation')


def replace_value(rows, *path, value=None):
  """Returns a copy of the first line with one value replaced, or removed if it is None."""
  changed = json.loads(json.dumps(rows[:1]))
  inner = changed
  for key in path[:-1]:
    inner = inner[key]
  if value is None:
    del inner[path[-1]]
  else:
    inner[path[-1]] = value
  return changed[0]


MALFORMED = [
  ('cb', (0, 'premise'), None, "no 'premise'"),
  ('wsc', (0, 'target'), None, "no 'target'"),
  ('wsc.fixed', (0, 'target', 'span1_text'), None, "no 'span1_text'"),
  ('multirc', (0, 'passage', 'questions', 1, 'answers', 0, 'text'), None, "no 'text'"),
  (
    'multirc',
    (0, 'passage', 'questions', 0, 'answers', 1, 'label'),
    None,
    'label is null, expected one of [0, 1]',
  ),
  ('record', (0, 'qas', 1, 'answers'), None, "no 'answers'"),
  ('record', (0, 'passage', 'entities', 2, 'end'), None, "no 'end'"),
  ('boolq', (0, 'label'), None, 'label is null, expected one of [0, 1]'),
  ('cb', (0, 'idx'), '2nd', "invalid literal for int() with base 10: '2nd'"),
  (
    'cb',
    (0, 'label'),
    'unknown',
    'label is "unknown", expected one of ["entailment", "contradiction", "neutral"]',
  ),
  ('rte', (0, 'label'), 1, 'label is 1, expected one of ["entailment", "not_entailment"]'),
  ('copa', (0, 'label'), 2, 'label is 2, expected one of [0, 1]'),
  ('boolq', (0, 'label'), 'yes', 'label is "yes", expected one of [0, 1]'),
]


@pytest.mark.parametrize('zipped', [False, True])
@each('config, path, value, message', MALFORMED)
def test_malformed_field_error_names_the_line(tmp_path, config, path, value, message, zipped):
  files = reader.CONFIGS[config]
  rows = LINES[files.folder]
  text = jsonl([rows[0], replace_value(rows, *path, value=value)])
  file = tmp_path / files.file('train')
  if zipped:
    write_zip(tmp_path / 'combined.zip', {files.file('train'): text})
    file = tmp_path / 'combined.zip' / files.file('train')
  else:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding='utf-8')
  with bad_input(f'{file}, line 2 is damaged: {message}; download the file again'):
    reader.read(tmp_path, config, 'train')


@pytest.mark.parametrize(
  'line, message',
  [
    (
      b'{"idx": 1',
      " is not JSON: Expecting ',' delimiter: line 1 column 10 (char 9); download the file again",
    ),
    (b'{"idx": "\xff"}', ' is not valid UTF-8 at byte 9 (0xff): download the file again'),
    (
      b'[1, 2]',
      ' is damaged: list indices must be integers or slices, not str; download the file again',
    ),
  ],
)
def test_malformed_line_error_names_the_line(tmp_path, line, message):
  file = tmp_path / 'CB' / 'train.jsonl'
  file.parent.mkdir()
  file.write_bytes(jsonl(LINES['CB']).encode() + line + b'\n')
  with bad_input(f'{file}, line 3{message}'):
    reader.read(tmp_path, 'cb', 'train')


def row_with(**fields):
  row = {'idx': 7, 'premise': 'A', 'hypothesis': 'B', 'label': 'neutral'} | fields
  return jsonl([row]).encode()


@each(
  'lines, message',
  [
    (b'[' * 200_000, ', line 1 is not JSON: maximum recursion depth .*; download the file again'),
    (b'{"idx": %s}' % (b'9' * 5000), ', line 1 is not JSON: Exceeds the limit .*; download the '),
    (b'\n \n\t\n\n', ' has no examples: download the file again'),
    (b'', ' has no examples: download the file again'),
    (
      row_with(idx=2) + row_with(premise='C') + b'\n' + row_with(),
      ', line 4: idx 7 is also in line 2, expected a different idx in every example; download the '
      'file again',
    ),
  ],
)
def test_hostile_file_is_one_sentence(tmp_path, lines, message):
  file = tmp_path / 'CB' / 'train.jsonl'
  file.parent.mkdir(exist_ok=True)
  file.write_bytes(lines)
  with pytest.raises(errors.BadInput) as caught:
    reader.read(tmp_path, 'cb', 'train')
  assert re.match(re.escape(str(file)) + message, str(caught.value)), str(caught.value)
  assert '\n' not in str(caught.value)


def test_an_option_of_multirc_twice_is_an_error(tmp_path):
  row = replace_value(LINES['MultiRC'], 0, 'passage', 'questions', 0, 'answers', 1, 'idx', value=20)
  file = tmp_path / 'MultiRC' / 'train.jsonl'
  file.parent.mkdir()
  file.write_text(jsonl([row]))
  with bad_input(
    f'{file}, line 1: idx {{"paragraph": 4, "question": 7, "answer": 20}} is also in line 1, '
    'expected a different idx in every example; download the file again'
  ):
    reader.read(tmp_path, 'multirc', 'train')


def truncate(data):
  return data[: len(data) // 2]


def corrupt(data):
  """Changes some bytes of the first member."""
  return data[:50] + bytes(255 - byte for byte in data[50:70]) + data[70:]


@pytest.mark.parametrize('name', ['CB.zip', 'combined.zip'])
@pytest.mark.parametrize('damage', [truncate, corrupt, lambda data: b''])
def test_damaged_zip_error_names_the_file(tmp_path, name, damage):
  path = write_zip(tmp_path / name, {'CB/train.jsonl': jsonl(LINES['CB'])})
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.BadInput) as caught:
    reader.read(tmp_path, 'cb', 'train')
  message = str(caught.value)
  assert message.startswith(f'{path} is damaged: ')
  assert message.endswith('; download it again')


@pytest.mark.full
@each(
  'config, split, size',
  [
    ('boolq', 'train', 9427),
    ('boolq', 'validation', 3270),
    ('boolq', 'test', 3245),
    ('cb', 'train', 250),
    ('cb', 'validation', 56),
    ('cb', 'test', 250),
    ('copa', 'train', 400),
    ('copa', 'validation', 100),
    ('copa', 'test', 500),
    ('rte', 'train', 2490),
    ('rte', 'validation', 277),
    ('rte', 'test', 3000),
    ('wic', 'train', 5428),
    ('wic', 'validation', 638),
    ('wsc', 'train', 554),
    ('wsc', 'validation', 104),
    ('axb', 'test', 1104),
    ('axg', 'test', 356),
  ],
)
def test_official_files(config, split, size):
  examples = reader.read(data_root('data/superglue'), config, split)
  assert [example['idx'] for example in examples] == list(range(size))
  has_labels = split != 'test' or config.startswith('ax')
  labels = {-1} if not has_labels else set(range(len(reader.CONFIGS[config].labels)))
  assert {example['label'] for example in examples} == labels


@each('split', ['train', 'validation'])
def test_official_answers_are_entities(split):
  """Checks ReCoRD; the test data may contain only its first lines."""
  examples = reader.read(data_root('data/superglue'), 'record', split)
  for example in examples:
    assert set(example['answers']) <= set(example['entities']) and example['answers']
    assert '@placeholder' in example['query']


@pytest.mark.slow
def test_tfds_prepares_the_same_examples(tmp_path, monkeypatch):
  tfds = pytest.importorskip('tensorflow_datasets')
  pytest.importorskip('importlib_resources')
  from tensorflow_datasets.core.download import checksums

  from ngrammer_jax.tasks.superglue import registration

  folder = write_zips(tmp_path / 'downloads' / 'manual')
  infos = {}
  for files in reader.CONFIGS.values():
    path = folder / files.zip
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    infos[reader.URL + files.zip] = checksums.UrlInfo(path.stat().st_size, digest, files.zip)

  source = registration.ExampleSource(tfds_dir=tmp_path / 'data')
  key = lambda example: json.dumps(example, sort_keys=True)
  for config, files in reader.CONFIGS.items():
    builder = tfds.builder(f'super_glue/{config}:1.0.2', data_dir=tmp_path / 'data')
    monkeypatch.setattr(type(builder), 'url_infos', infos)
    builder.download_and_prepare(
      download_dir=tmp_path / 'downloads',
      download_config=tfds.download.DownloadConfig(manual_dir=folder, try_download_gcs=False),
    )
    assert tuple(builder.info.splits) == files.splits
    features = dict(builder.info.features)
    assert files.labels == (tuple(features['label'].names) if 'label' in features else ())
    for split in files.splits:
      prepared = source.examples(config, split)
      assert sorted(prepared, key=key) == sorted(reader.read(folder, config, split), key=key)
