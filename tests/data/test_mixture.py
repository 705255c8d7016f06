"""Mixtures: rows of two kinds of parts against a slow loop, shared vocabularies, errors."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config.data import DataConfig, PartConfig
from ngrammer_jax.data import mixture, train_segments, vocabularies
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.rows import cached_rows, mixture_schedule
from ngrammer_jax.data.tokens import learned_vocabulary, token_cache
from ngrammer_jax.system import hosts
from tests.checks import bad_input
from tests.data import document_files

pytestmark = pytest.mark.usefixtures('cache')

B, T, BLOCK, STEPS = 5, 7, 2, 60
BYTES = vocabularies.ByteVocabulary()
SETTINGS = ('corpus', 'path', 'weight', 'name')


@pytest.fixture
def folder(tmp_path):
  """Two texts and a folder of shards, each with characters of its own."""
  rng = np.random.default_rng(0)
  for name, letters in (('lower', 'abcdef '), ('digits', '012345 ')):
    (tmp_path / f'{name}.txt').write_text(''.join(rng.choice(list(letters), 600)))
  (tmp_path / 'web').mkdir()
  for name, count in (('train-0', 9), ('train-1', 5), ('valid', 2)):
    lengths = rng.integers(1, 30, count)
    lines = [json.dumps({'text': ''.join(rng.choice(list('XYZ '), n)) + 'Z'}) for n in lengths]
    (tmp_path / 'web' / f'{name}.jsonl').write_text('\n'.join(lines))
  return tmp_path


@pytest.fixture
def data(folder):
  """Makes the data config of parts, (name, weight) each."""

  def make(*parts, **settings):
    kind = lambda name: 'shards' if name == 'web' else 'text'
    place = lambda name: str(folder / (name if name == 'web' else f'{name}.txt'))
    blocks = tuple(PartConfig(weight, None, kind(name), place(name)) for name, weight in parts)
    return DataConfig(**{'vocabulary': 'bytes', 'mixture_block': BLOCK} | settings, mixture=blocks)

  return make


def open_segments(config, workdir):
  training = experiment.TrainingConfig(batch_size=B, segment_length=T)
  whole = experiment.Config(data=config, training=training)
  return train_segments.TrainSegments(mixture.prepare(config), whole, workdir)


def single_row(part, row, workdir):
  """The segments that a row reads of a part that is not mixed, shuffled if it is streamed."""
  if part.train_shards is None:
    schedule = document_files.whole_batch(B)
    reader = cached_rows.CachedRows(part.splits['train'], T, schedule)
  else:
    reader = document_files.Packed(part.train_shards, BYTES, B, T, workdir / 'single', 3)
  for step in range(STEPS):
    yield reader.rows(step, range(B))[row]


@pytest.mark.parametrize(
  'parts',
  [[('lower', 3), ('digits', 1)], [('web', 1), ('lower', 0.5), ('digits', 0.25)], [('web', 1)]],
)
def test_rows_continue_each_part_where_they_stopped(data, tmp_path, parts):
  config = data(*parts, shuffle=3)
  prepared = mixture.prepare(config)
  segments = open_segments(config, tmp_path)
  actual = [segments.segment(step) for step in range(STEPS)]
  schedule = mixture_schedule.MixtureSchedule(config.weights(), B, BLOCK)
  for row in range(B):
    rows = [single_row(part, row, tmp_path) for part in prepared.parts.values()]
    for step, segment in enumerate(actual):
      part = schedule.parts(step)[row]
      inputs, targets, starts = next(rows[part])[:3]
      if step and part != schedule.parts(step - 1)[row]:
        assert step % BLOCK == 0
        inputs[0], starts[0] = BYTES.document_start, True
      for own, expected in zip(segment[:3], (inputs, targets, starts), strict=True):
        np.testing.assert_array_equal(own[row], expected)
      assert segment.valid_BxT.all()
  text = bytes(np.concatenate([s.targets_BxT for s in actual], None) % 256).decode('latin-1')
  assert 'a' in text or len(parts) == 1


def test_a_segment_depends_on_the_step_alone(data, tmp_path):
  config = data(('web', 1), ('lower', 2))
  segments = open_segments(config, tmp_path)
  expected, states = [], {}
  for step in range(STEPS):
    expected.append(segments.segment(step))
    states[step + 1] = segments.row_states(step + 1)
  assert len(list(tmp_path.glob(f'shards/*-{B}x{T}-0/files-0.jsonl'))) == 1
  assert [part is None for part in states[5]] == [False, True]
  assert len(states[5][0]['rows']) == B
  for step in (41, 0, 12, 13, 57):
    for saved in (states.get(step), None):  # with saved states, and without
      resumed = open_segments(config, tmp_path)
      resumed.restore_rows(step, saved)
      for rows in (slice(None), slice(0, 2), slice(2, 5), slice(3, 4)):
        actual = resumed.segment(step, rows)
        for own, other in zip(actual[:4], expected[step][:4], strict=True):
          np.testing.assert_array_equal(own, other[rows])


def test_row_states_of_several_hosts_are_merged(data, tmp_path):
  config = data(('web', 1), ('lower', 2))
  whole = open_segments(config, tmp_path)
  whole.segment(0)
  of_hosts = []
  for rows in (slice(0, 2), slice(2, B)):
    host = open_segments(config, tmp_path)
    host.segment(0, rows)
    of_hosts.append(host.row_states(1))
  assert train_segments.merge_row_states(of_hosts) == whole.row_states(1)
  assert train_segments.merge_row_states([None, None]) is None


def test_held_out_documents_in_another_part_are_counted(data, folder, caplog):
  validation = mixture.prepare(data(('digits', 1))).split('validation').tokens
  with (folder / 'web' / 'train-0.jsonl').open('a') as file:
    file.write('\n' + json.dumps({'text': bytes(validation.tolist()).decode()}))
  caplog.set_level(logging.INFO)
  caplog.clear()
  mixture.prepare(data(('lower', 1), ('web', 1), ('digits', 1)))
  end = ' in the training text (of shards, the first 16 MB)'
  lines = [(r.getMessage(), r.levelname) for r in caplog.records if r.getMessage().endswith(end)]
  assert [(line.rpartition('; ')[2].removesuffix(end), level) for line, level in lines] == [
    ('no held-out document is', 'INFO'),
    ('no held-out document is', 'INFO'),
    ('1 of 1 validation documents (100.0%) are also', 'WARNING'),
  ]


def test_a_step_that_reads_a_whole_part_is_a_warning(data, tmp_path, caplog):
  hosts.warn_once.cache_clear()
  config = experiment.Config(data=data(('web', 2), ('lower', 1)))
  for length, parts in ((T, []), (200, ['web']), (400, ['lower', 'web'])):
    caplog.clear()
    training = experiment.TrainingConfig(batch_size=B, segment_length=length)
    config = dataclasses.replace(config, training=training)
    segments = train_segments.TrainSegments(mixture.prepare(config.data), config, tmp_path)
    for step in range(3):
      segments.segment(step)
    assert sorted(r.message for r in caplog.records if r.levelno == logging.WARNING) == [
      f'a step of training.batch_size=5 x training.segment_length={length} reads the whole '
      f'training text of {part}: lower one of them'
      for part in parts
    ]


def test_completed_epochs_are_logged(data, tmp_path, caplog):
  caplog.set_level(logging.INFO)
  config = data(('web', 1), ('lower', 1))
  segments = open_segments(config, tmp_path)
  for step in range(STEPS):
    segments.segment(step)
  tokens = len(segments.readers['lower']._split.tokens)
  read = [segments.readers['lower'].epochs_before(step) * tokens for step in (0, 1, 2, STEPS)]
  assert read == pytest.approx([0, 3 * T, 6 * T, STEPS * B * T / 2])
  messages = [m for m in caplog.messages if 'epoch' in m]
  assert messages.count('lower: epoch 1 ends at step 31') == 1
  assert sum(m.startswith('web: epoch') for m in messages) == segments.readers['web'].epochs > 0


def test_content_hash_covers_parts_and_weights(data, folder):
  parts = [('lower', 1.0), ('digits', 2.0)]
  first = mixture.prepare(data(*parts)).content_hash
  (folder / 'lower.txt').rename(folder / 'renamed.txt')
  assert mixture.prepare(data(('renamed', 1.0), parts[1])).content_hash == first
  (folder / 'renamed.txt').rename(folder / 'lower.txt')
  changed = [
    data(('lower', 2.0), parts[1]),
    data(*parts[::-1]),
    data(*parts, mixture_temperature=2.0),
    data(*parts, mixture_block=3),
    data(('web', 1.0), parts[1]),
  ]
  assert len({first, *(mixture.prepare(config).content_hash for config in changed)}) == 6
  single = dataclasses.replace(data(), corpus='text', path=str(folder / 'lower.txt'))
  prepared = mixture.prepare(single)
  assert prepared.content_hash.split('-')[0] == document_files.prepare(single).content_hash
  assert prepared.split_names() == ['train', 'validation', 'test']


def test_splits_of_parts_and_of_all(data):
  prepared = mixture.prepare(data(('lower', 1), ('digits', 1)))
  assert prepared.split_names()[3:5] == ['train/lower', 'validation/lower']
  lower, digits = (prepared.split(f'test/{name}') for name in ('lower', 'digits'))
  joined = prepared.split('test')
  tokens = [*lower.tokens, BYTES.document_start, *digits.tokens]
  assert joined.tokens.tolist() == tokens and joined.tokens.dtype == lower.tokens.dtype
  assert joined.starts.tolist() == [0, len(lower.tokens) + 1] and joined.text_bytes is None
  assert 'train' not in mixture.prepare(data(('lower', 1), ('web', 1))).split_names()


def test_a_learned_vocabulary_has_the_words_of_all_parts(data, folder, monkeypatch):
  (folder / 'digits.txt').write_text('12 345 ' * 400)
  (folder / 'lower.txt').write_text('ab cde ' * 400)
  for kind in ('characters', 'words'):
    config = data(('lower', 1), ('digits', 1), vocabulary=kind)
    prepared = mixture.prepare(config)
    for part, text in (('lower', b'ab cde'), ('digits', b'12 345')):
      assert prepared.parts[part].vocabulary.definition == prepared.vocabulary.definition
      assert prepared.vocabulary.decode(prepared.vocabulary.encode(text)) == text
      split = prepared.parts[part].splits['train']
      assert text in prepared.vocabulary.decode(split.tokens)
    assert prepared.vocabulary.document_start not in prepared.vocabulary.encode(b'ab')
  monkeypatch.setattr(learned_vocabulary, '_learn', None)  # it is in the cache
  assert mixture.prepare(config).content_hash == prepared.content_hash


def test_a_sample_for_the_vocabulary_has_the_weights(data, folder, monkeypatch):
  samples = []
  monkeypatch.setattr(vocabularies, 'MAX_TRAINING_BYTES', 300)
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 16)

  def learn(texts, size):
    samples.append(b''.join(texts))
    return BYTES

  monkeypatch.setattr(vocabularies, 'learn_sentencepiece', learn)
  mixture.prepare(data(('web', 1), ('lower', 2), ('digits', 0), vocabulary='sentencepiece'))
  count = lambda letters: sum(byte in letters for byte in samples[0])
  assert 70 <= count(b'XYZ') <= 130 and 150 <= count(b'abcdef') <= 220 and not count(b'012345')


def test_parts_have_fields_of_their_own(tmp_path):
  for field in ('text', 'content'):
    (tmp_path / field).mkdir()
    for name in ('train', 'valid'):
      lines = json.dumps({field: f'in {field}'}) + '\n'
      (tmp_path / field / f'{name}.jsonl').write_text(lines * 20)
  values = [{'path': str(tmp_path / 'text')}]
  values += [{'path': str(tmp_path / 'content'), 'text_field': 'content'}]
  data = {'corpus': 'shards', 'vocabulary': 'bytes', 'mixture': values}
  config = experiment.resolve({'data': data}).data
  prepared = mixture.prepare(config)
  for name, part in prepared.parts.items():
    assert f'in {name}'.encode() in BYTES.decode(part.splits['validation'].tokens)


def test_sizes_of_damaged_files_are_those_of_their_part(data, tmp_path, monkeypatch):
  """Files of two parts may have the same name."""
  config, places = data(('web', 1), ('lower', 1)), tmp_path / 'run' / 'places'
  for index, size in enumerate((7, 8)):
    line = {'file': 0, 'name': 'train-0.jsonl', 'size': size, 'content': '', 'was_damaged': True}
    (places / f'abc-5x7-{index}').mkdir(parents=True)
    (places / f'abc-5x7-{index}' / 'files-0.jsonl').write_text(json.dumps(line))
  sizes, prepare = [], token_cache.prepare

  def record_sizes(part, corpus, *arguments):
    sizes.append(corpus.first_sizes)
    return prepare(part, corpus, *arguments)

  monkeypatch.setattr(token_cache, 'prepare', record_sizes)
  mixture.prepare(config, workdir=tmp_path / 'run')
  assert sizes == [{(0, 'train-0.jsonl'): 7}, {(0, 'train-0.jsonl'): 8}]


def test_characters_of_bytes_are_not_shared(data, folder, monkeypatch):
  corpus = corpora.open_corpus(DataConfig('text', str(folder / 'lower.txt')))
  open_corpus = lambda config: dataclasses.replace(corpus, encoding=config.corpus)
  parts = PartConfig(corpus='latin-1'), PartConfig(corpus='utf-8')
  with bad_input(
    "data.vocabulary='characters': the characters of enwik8 are bytes, so other parts of "
    'data.mixture cannot share them: use bytes or sentencepiece'
  ):
    mixture.prepare(DataConfig(vocabulary='characters', mixture=parts), open_corpus)


def test_places_that_are_refused(data, folder):
  with pytest.raises(
    ValueError,
    match=r"^data.path='x' is not for data.mixture=\(.*lower.txt'\)\), but for \(\): use None; a "
    r'mixture has data.mixture.0.path$',
  ):
    mixture.prepare(data(('lower', 1), path='x'))
  with bad_input(
    f'data.mixture.1.path={folder}/none.txt: the corpus was not found; expected a text file, or a '
    f'folder of them'
  ):
    mixture.prepare(data(('lower', 1), ('none', 1)))
  assert not list((folder / 'cache').glob('*'))  # before anything is tokenised
  (folder / 'web' / 'valid.jsonl').unlink()
  with pytest.raises(
    data_config.errors.BadInput, match=r'data.mixture.0.path=.* has no file for validation'
  ):
    mixture.prepare(data(('web', 1)))
  for split, text in (('train', '0 1'), ('valid', '2'), ('test', '3')):
    (folder / 'tiny').mkdir(exist_ok=True)
    (folder / 'tiny' / split).write_text(text)
  tiny = PartConfig(corpus='wikitext', path=str(folder / 'tiny'))
  with bad_input('training.batch_size=5 is more than the 3 training tokens of tiny'):
    open_segments(DataConfig(vocabulary='bytes', mixture=(tiny,)), folder)
