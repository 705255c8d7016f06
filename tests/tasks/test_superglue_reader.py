"""The files of SuperGLUE in every form, the schema of TFDS, and what is refused."""

import hashlib
import json
import logging
import pathlib

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
def test_every_form_has_the_same_examples(tmp_path, layout):
  root = layout(tmp_path)
  for config, split in PAIRS:
    assert reader.read(root, config, split) == expected(config, split), (config, split)


def test_names_and_numbers_are_plain(tmp_path):
  write_folders(tmp_path)

  def kinds(value):
    if isinstance(value, dict):
      return set().union(*(kinds(v) for v in value.values()))
    return set().union(*(kinds(v) for v in value)) if isinstance(value, list) else {type(value)}

  for config, split in PAIRS:
    (*_, example) = reader.read(tmp_path, config, split)
    assert kinds(example) <= {str, int}
    fields = {*reader.CONFIGS[config].fields, 'idx'}
    if config != 'record':
      fields.add('label')
    assert set(example) == fields


def test_configs_are_those_of_tfds():
  assert list(reader.CONFIGS) == list(EXAMPLES)
  assert {known.zip: known.bytes for known in reader.CONFIGS.values()} == {
    'BoolQ.zip': 4_118_001,
    'CB.zip': 75_482,
    'COPA.zip': 43_986,
    'MultiRC.zip': 1_116_225,
    'ReCoRD.zip': 51_757_880,
    'RTE.zip': 750_920,
    'WiC.zip': 396_213,
    'WSC.zip': 32_751,
    'AX-b.zip': 33_950,
    'AX-g.zip': 10_413,
  }
  assert all(len(bytes.fromhex(known.sha256)) == 32 for known in reader.CONFIGS.values())


def test_a_folder_comes_before_a_zip_and_that_before_the_combined_one(tmp_path):
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


def test_the_zip_of_a_task_can_be_given_itself(tmp_path):
  write_zips(tmp_path)
  assert reader.read(tmp_path / 'CB.zip', 'cb', 'train') == EXAMPLES['cb']


def test_blank_lines_are_no_examples(tmp_path):
  folder = tmp_path / 'CB'
  folder.mkdir()
  text = jsonl(LINES['CB'])
  (folder / 'train.jsonl').write_bytes(('\ufeff' + text.replace('\n', '\r\n') + '\r\n').encode())
  assert reader.read(tmp_path, 'cb', 'train') == EXAMPLES['cb']


def test_home_folder_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  write_folders(tmp_path / 'superglue')
  assert reader.read(pathlib.Path('~/superglue'), 'rte', 'train') == EXAMPLES['rte']


@pytest.mark.parametrize('official', [True, False])
def test_another_zip_is_read_with_a_warning(tmp_path, monkeypatch, caplog, official):
  path = write_zips(tmp_path) / 'CB.zip'
  known, size = reader.CONFIGS['cb'], path.stat().st_size
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  if official:
    same = reader.Config('CB', known.fields, known.labels, size, digest)
    monkeypatch.setitem(reader.CONFIGS, 'cb', same)
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      assert reader.read(tmp_path, 'cb', 'train') == EXAMPLES['cb']
  warning = (
    f'{path} has {size:,} bytes, sha256 {digest}, but the official one has 75,482 bytes, sha256 '
    f'{known.sha256}: it is read, but its examples may be others; to compare with published '
    f'results, download {reader.URL}CB.zip'
  )
  assert [record.getMessage() for record in caplog.records] == [] if official else [warning]


def test_unknown_config_or_split(tmp_path):
  with bad_input(
    "no SuperGLUE config 'boolQ': did you mean 'boolq'? There are: boolq, cb, copa, multirc, "
    'record, rte, wic, wsc, wsc.fixed, axb, axg'
  ):
    reader.read(tmp_path, 'boolQ', 'train')
  with bad_input("SuperGLUE config axb has no split 'train': it has test"):
    reader.read(tmp_path, 'axb', 'train')
  with bad_input("SuperGLUE config cb has no split 'dev': it has train, validation, test"):
    reader.read(tmp_path, 'cb', 'dev')


@pytest.mark.parametrize('beside', ['nothing', 'a folder', 'zips'])
def test_missing_file_says_what_was_looked_for(tmp_path, beside):
  root = tmp_path / 'none' if beside == 'nothing' else tmp_path
  if beside == 'a folder':
    (tmp_path / 'CB').mkdir()
  if beside == 'zips':
    write_zip(tmp_path / 'CB.zip', {'CB/train.jsonl': ''})
    write_zip(tmp_path / 'combined.zip', {'CB/train.jsonl': '', 'NotCB/val.jsonl': ''})
  with bad_input(
    f'{root} has no validation split of SuperGLUE cb: expected CB/val.jsonl, or it in CB.zip '
    '(75,482 bytes, sha256 8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535) or in '
    'combined.zip; download https://dl.fbaipublicfiles.com/glue/superglue/data/v2/CB.zip'
  ):
    reader.read(root, 'cb', 'validation')


def change(rows, *path, value=None):
  """A copy of the first line with one value replaced, or removed."""
  changed = json.loads(json.dumps(rows[:1]))
  inner = changed
  for key in path[:-1]:
    inner = inner[key]
  if value is None:
    del inner[path[-1]]
  else:
    inner[path[-1]] = value
  return changed[0]


WRONG = [
  ('cb', (0, 'premise'), None, "no field 'premise', which every such line has"),
  ('wsc', (0, 'target'), None, "no field 'target', which every such line has"),
  (
    'wsc.fixed',
    (0, 'target', 'span1_text'),
    None,
    "no field 'target.span1_text', which every such line has",
  ),
  (
    'multirc',
    (0, 'passage', 'questions', 1, 'answers', 0, 'text'),
    None,
    "no field 'passage.questions[1].answers[0].text', which every such line has",
  ),
  (
    'multirc',
    (0, 'passage', 'questions', 0, 'answers', 1, 'label'),
    None,
    "no field 'passage.questions[0].answers[1].label', which only a test split may lack",
  ),
  (
    'record',
    (0, 'qas', 1, 'answers'),
    None,
    "no field 'qas[1].answers', which every such line has",
  ),
  (
    'record',
    (0, 'passage', 'entities', 2, 'end'),
    None,
    "no field 'passage.entities[2].end', which every such line has",
  ),
  ('boolq', (0, 'label'), None, "no field 'label', which only a test split may lack"),
  ('boolq', (0, 'idx'), True, 'idx is true, expected an integer'),
  ('wic', (0, 'start1'), '2nd', 'start1 is "2nd", expected an integer'),
  ('cb', (0, 'premise'), 3, 'premise is 3, expected a text'),
  ('multirc', (0, 'passage'), 'x' * 80, f'passage is "{"x" * 56}..., expected an object'),
  ('record', (0, 'qas'), {}, 'qas is {}, expected a list'),
  ('record', (0, 'qas', 0), 'x', 'qas[0] is "x", expected an object'),
  (
    'cb',
    (0, 'label'),
    'unknown',
    'label is "unknown", expected one of: entailment, contradiction, neutral',
  ),
  ('rte', (0, 'label'), 1, 'label is 1, expected one of: entailment, not_entailment'),
  ('copa', (0, 'label'), 2, 'label is 2, expected one of: 0, 1, false, true'),
  ('boolq', (0, 'label'), 'yes', 'label is "yes", expected one of: 0, 1, false, true'),
  (
    'multirc',
    (0, 'passage', 'questions', 0, 'answers', 0, 'label'),
    -1,
    'passage.questions[0].answers[0].label is -1, expected one of: 0, 1, false, true',
  ),
]


@pytest.mark.parametrize('zipped', [False, True])
@each('config, path, value, message', WRONG)
def test_wrong_line_is_named(tmp_path, config, path, value, message, zipped):
  known = reader.CONFIGS[config]
  rows = LINES[known.folder]
  text = jsonl([rows[0], change(rows, *path, value=value)])
  file = tmp_path / known.file('train')
  if zipped:
    write_zip(tmp_path / 'combined.zip', {known.file('train'): text})
    file = tmp_path / 'combined.zip' / known.file('train')
  else:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding='utf-8')
  with bad_input(f'{file}, line 2: {message}; download the file again'):
    reader.read(tmp_path, config, 'train')


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"idx": 1', "not JSON (Expecting ',' delimiter: line 2 column 1 (char 10)), expected one"),
    (b'{"idx": "\xff"}', "not JSON ('utf-8' codec can't decode byte 0xff in position 9"),
    (b'[1, 2]', 'the line is [1, 2], expected an object; download the file again'),
  ],
)
def test_malformed_line_is_named(tmp_path, line, message):
  file = tmp_path / 'CB' / 'train.jsonl'
  file.parent.mkdir()
  file.write_bytes(jsonl(LINES['CB']).encode() + line + b'\n')
  with pytest.raises(errors.BadInput) as caught:
    reader.read(tmp_path, 'cb', 'train')
  assert str(caught.value).startswith(f'{file}, line 3: {message}')


def cut(data):
  return data[: len(data) // 2]


def flip(data):
  """Some bytes of the first member changed."""
  return data[:50] + bytes(255 - byte for byte in data[50:70]) + data[70:]


@pytest.mark.parametrize('name', ['CB.zip', 'combined.zip'])
@pytest.mark.parametrize('damage', [cut, flip, lambda data: b''])
def test_damaged_zip_is_named(tmp_path, name, damage):
  path = write_zip(tmp_path / name, {'CB/train.jsonl': jsonl(LINES['CB'])})
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.BadInput) as caught:
    reader.read(tmp_path, 'cb', 'train')
  message = str(caught.value)
  assert message.startswith(f'{path} is truncated or damaged: ')
  assert message.endswith('; download it again')


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
    ('axb', 'test', 1104),
    ('axg', 'test', 356),
  ],
)
def test_real_files(config, split, size):
  examples = reader.read(data_root('data/superglue'), config, split)
  assert [example['idx'] for example in examples] == list(range(size))
  hides = split == 'test' and not config.startswith('ax')
  labels = {-1} if hides else set(range(len(reader.CONFIGS[config].labels)))
  assert {example['label'] for example in examples} == labels


@each('split', ['train', 'validation'])
def test_real_answers_are_entities(split):
  """Of the first lines of ReCoRD, where that is all there is."""
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
  for known in reader.CONFIGS.values():
    path = folder / known.zip
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    infos[reader.URL + known.zip] = checksums.UrlInfo(path.stat().st_size, digest, known.zip)

  source = registration.Source(tfds_dir=tmp_path / 'data')
  key = lambda example: json.dumps(example, sort_keys=True)
  for config, known in reader.CONFIGS.items():
    builder = tfds.builder(f'super_glue/{config}:1.0.2', data_dir=tmp_path / 'data')
    monkeypatch.setattr(type(builder), 'url_infos', infos)
    builder.download_and_prepare(
      download_dir=tmp_path / 'downloads',
      download_config=tfds.download.DownloadConfig(manual_dir=folder, try_download_gcs=False),
    )
    assert tuple(builder.info.splits) == known.splits
    features = dict(builder.info.features)
    assert known.labels == (tuple(features['label'].names) if 'label' in features else ())
    for split in known.splits:
      prepared = source.examples(config, split)
      assert sorted(prepared, key=key) == sorted(reader.read(folder, config, split), key=key)
