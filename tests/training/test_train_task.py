"""Training on a corpus that is read as it is needed."""

import dataclasses
import functools
import json
import logging
import shutil
import signal
import types

import numpy as np
import pytest

from ngrammer_jax import errors, evaluate, runs
from ngrammer_jax.checkpoints import manifest, reader
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import mesh as mesh_config
from ngrammer_jax.data.rows import streamed_rows
from ngrammer_jax.data.tokens import learned_vocabulary
from ngrammer_jax.system import hosts, json_files
from ngrammer_jax.training import init_from, loop, train_task
from tests.checks import bad_input
from tests.training.helpers import arrays, flip, names, records, signal_at


@pytest.fixture
def config(tiny, tmp_path):
  """Three shards of train for eight rows, one of validation."""
  words = np.random.default_rng(0).choice(['the ', 'union ', 'of ', 'states\n'], (61, 40))
  texts = [json.dumps({'text': ''.join(row)}) + '\n' for row in words]
  (tmp_path / 'shards').mkdir()
  for shard in range(3):
    (tmp_path / 'shards' / f'train-{shard}.jsonl').write_text(''.join(texts[shard:60:3]))
  (tmp_path / 'shards' / 'valid.jsonl').write_text(texts[-1])
  data = data_config.DataConfig('shards', str(tmp_path / 'shards'), 'bytes')
  return dataclasses.replace(tiny(training={'keep_checkpoints': 9}), data=data)


def train(config, workdir):
  return loop.train(config, workdir, functools.partial(train_task.CorpusTask, workdir=workdir))


def test_a_resume_is_exact_on_other_devices_too(config, tmp_path, monkeypatch, toy_model):
  """From the states in the checkpoint; of version 0.3.0, from places/, or by reading again."""
  reference = tmp_path / 'reference'
  assert train(config, reference)
  assert not (reference / 'places').exists()
  steps, next_segments = [], streamed_rows._BatchReader.next_segments
  note = lambda reader: steps.append(reader.step) or next_segments(reader)
  monkeypatch.setattr(streamed_rows._BatchReader, 'next_segments', note)

  def resumed(name, places=None, mesh=config.mesh):
    workdir = tmp_path / name
    shutil.copytree(reference, workdir)
    shutil.rmtree(workdir / 'checkpoints' / '12')
    if places is not None:
      states = json.loads((workdir / 'checkpoints' / '8' / 'rows.json').read_text())[0]['rows']
      (folder,) = (workdir / 'shards').iterdir()
      (workdir / 'shards').rename(workdir / 'places')
      for rows in places:
        line = {'step': 8, 'first': rows[0], 'places': [states[str(row)] for row in rows]}
        line['order'] = [None, False]
        path = workdir / 'places' / folder.name / f'{rows[0]}-{rows[-1]}.0.jsonl'
        json_files.append_line(path, line)
      remove_rows(workdir / 'checkpoints' / '8')
    del steps[:]
    assert train(dataclasses.replace(config, mesh=mesh), workdir)
    return arrays(workdir)

  assert resumed('alike') == arrays(reference)
  assert steps == [8, 9, 10, 11]
  assert resumed('places', [range(8)]) == arrays(reference)
  assert steps == [8, 9, 10, 11]
  assert resumed('by_rows', [range(row, row + 1) for row in range(8)]) == arrays(reference)
  assert steps == [8, 9, 10, 11]
  assert resumed('nothing', []) == arrays(reference)
  assert steps == list(range(12))
  resumed('elsewhere', mesh=mesh_config.MeshConfig(data=2, model=4))
  losses = [records(tmp_path / name)[-2]['loss'] for name in ('reference', 'elsewhere')]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize('streamed', [True, False])
def test_the_text_goes_on_after_that_of_the_other_run(
  config, tiny, tmp_path, caplog, toy_model, streamed
):
  """The segments are those of a run that trains twice as long; also after two starts and a kill."""
  caplog.set_level(logging.INFO)
  source = config if streamed else tiny(training={'keep_checkpoints': 9})
  longer = dataclasses.replace(source, training=dataclasses.replace(source.training, steps=36))

  def make_task(config, workdir):
    start = init_from.Start(config, workdir) if config.init_from else None
    return train_task.CorpusTask(config, workdir, start=start)

  def read(workdir, config, restored=None):
    task = make_task(config, workdir)
    if restored is not None:
      task.restore_rows(restored, reader.read_rows(workdir, restored))
    return task

  expected = read(tmp_path / 'whole', longer)
  segments = [expected.segment(step, slice(0, 8)) for step in range(36)]
  assert train(source, tmp_path / 'run0')
  for number in (1, 2):
    data = dataclasses.replace(source.data, continue_text=True)
    next_config = dataclasses.replace(
      source, data=data, init_from=str(tmp_path / f'run{number - 1}')
    )
    workdir = tmp_path / f'run{number}'
    assert loop.train(next_config, workdir, functools.partial(make_task, workdir=workdir))
    assert f'the text continues after the {12 * number} steps read before' in caplog.text
    assert json_files.read(workdir / 'begun_with.json')['text_step'] == 12 * number
    resumed = read(workdir, next_config, restored=4)
    for step in range(4, 12):
      segment = resumed.segment(step, slice(0, 8))
      np.testing.assert_array_equal(segment.tokens_BxT, segments[12 * number + step].tokens_BxT)
    # All steps of the loop read the same: a run that trained on from its first step is equal.
    killed = tmp_path / f'killed{number}'
    shutil.copytree(workdir, killed)
    shutil.rmtree(killed / 'checkpoints' / '12')
    assert loop.train(next_config, killed, functools.partial(make_task, workdir=killed))
    assert arrays(killed) == arrays(workdir)


def test_a_text_that_cannot_go_on_is_refused(config, tiny, tmp_path, caplog, toy_model):
  caplog.set_level(logging.INFO)
  assert train(config, tmp_path / 'run')
  data = dataclasses.replace(config.data, continue_text=True)
  continued = dataclasses.replace(config, data=data, init_from=str(tmp_path / 'run'))

  def task(config):
    return train_task.CorpusTask(config, tmp_path / 'new', start=init_from.Start(config, tmp_path))

  key = f'data.continue_text=True with init_from={tmp_path}/run'
  t = continued.training
  with bad_input(
    f'{key} needs training.batch_size=8, as that run has, not 4: each row continues at its last '
    f'token'
  ):
    task(dataclasses.replace(continued, training=dataclasses.replace(t, batch_size=4)))
  for name, before, now in (('shuffle', None, 3), ('begin_of_text', False, True)):
    changed = dataclasses.replace(continued, data=dataclasses.replace(data, **{name: now}))
    with bad_input(
      f'{key} needs data.{name}={before}, as that run has, not {now}: each row continues at its '
      f'last token'
    ):
      init_from.Start(changed, tmp_path / 'new').text_step(
        runs.load_run(tmp_path / 'run').content_hash
      )
  other = dataclasses.replace(tiny().data, continue_text=True)
  with bad_input(f'{key} needs the text of that run: use its text, or False'):
    task(dataclasses.replace(continued, data=other))
  with pytest.raises(
    errors.BadInput, match='^data.continue_text=True needs init_from, which is No'
  ):
    dataclasses.replace(continued, init_from=None).check()
  assert 'the text starts at its first token' not in caplog.text
  plain = dataclasses.replace(config, init_from=str(tmp_path / 'run'))
  start = functools.partial(init_from.Start, workdir=tmp_path / 'plain')
  make_task = lambda config: train_task.CorpusTask(config, tmp_path / 'plain', start=start(config))
  assert loop.train(plain, tmp_path / 'plain', make_task)
  assert 'the text starts at its first token; with data.continue_text=True, it' in caplog.text


def remove_rows(checkpoint):
  """Makes a checkpoint one of version 0.3.0, which has no states of rows."""
  (checkpoint / 'rows.json').unlink()
  saved = manifest.read(checkpoint)
  saved.files.pop('rows.json')
  manifest.write(checkpoint, saved)


def test_damaged_states_of_rows_are_a_damaged_checkpoint(config, tmp_path, caplog, toy_model):
  reference, workdir = tmp_path / 'reference', tmp_path / 'damaged'
  assert train(config, reference)
  shutil.copytree(reference, workdir)
  flip(workdir / 'checkpoints' / '12' / 'rows.json')
  assert train(config, workdir)
  assert 'rows.json was changed: wrong checksum; falling back to the previous' in caplog.text
  assert names(workdir) == ['12', '12.damaged', '4', '8']
  assert arrays(workdir) == arrays(reference)


def test_a_signal_saves_the_states_of_the_trained_step(config, tmp_path, monkeypatch, toy_model):
  """Not those of the steps that are read ahead."""
  reference, workdir = tmp_path / 'reference', tmp_path / 'run'
  assert train(config, reference)
  signal_at(monkeypatch, {6: signal.SIGTERM})
  with pytest.raises(errors.Interrupted):
    train(config, workdir)
  assert '6' in names(workdir)
  assert train(config, workdir)
  assert arrays(workdir) == arrays(reference)
  last = [json.loads((w / 'checkpoints/12/rows.json').read_text()) for w in (reference, workdir)]
  assert last[0] == last[1]


@pytest.mark.full
def test_a_mixture_is_judged_by_the_mean_of_its_parts(config, tiny, tmp_path, toy_model):
  """Its losses are recorded by name, and a resume is exact."""
  parts = (
    data_config.PartConfig(3.0, 'web', 'shards', config.data.path),
    data_config.PartConfig(1.0, None, 'text', tiny().data.path),
  )
  data = data_config.DataConfig(vocabulary='bytes', mixture=parts, mixture_block=2)
  config = dataclasses.replace(config, data=data)
  reference, resumed = tmp_path / 'reference', tmp_path / 'resumed'
  assert train(config, reference)
  shutil.copytree(reference, resumed)
  shutil.rmtree(resumed / 'checkpoints' / '12')
  assert train(config, resumed)
  assert arrays(resumed) == arrays(reference) and records(resumed) == records(reference)
  task = train_task.CorpusTask(config, reference)
  losses = iter([1.0, 3.0])

  def evaluate(state, split, report):
    scores = {'nll_nats_per_token': next(losses), 'top1_accuracy': 0.5, 'tokens': 10}
    return scores | {'protocol': {'whole_split': True}}

  result = task.validate(
    types.SimpleNamespace(evaluate=evaluate), types.SimpleNamespace(step=4), None
  )
  assert result[task.best_metric] == 1.5 and result['tokens'] == 20
  assert result['web/loss'] == 1.0 and result['text/loss'] == 3.0
  text = task._mixture.parts['text'].splits['train'].tokens
  assert result['text/epochs'] == pytest.approx(4 * 8 * 16 / 4 / len(text))
  assert task.format_metrics(result).endswith('perplexity 4.48, web 1.0000, text 3.0000')
  for record in records(reference)[-1], records(reference)[3]:
    assert {'validation/web/loss', 'validation/text/loss', 'validation/text/epochs'} <= set(record)


def test_init_from_is_not_passed_over(tiny):
  task = train_task.CorpusTask(dataclasses.replace(tiny(), init_from='other'))
  with pytest.raises(errors.BadInput, match='init_from=other is ignored by this task'):
    task.initial_state(None)


def test_the_validation_split_is_what_judges(tiny):
  """The training split is what is learned from."""
  corpus = train_task.CorpusTask(tiny())
  scored = []
  run = types.SimpleNamespace(evaluate=lambda *args: scored.append(args))
  report = object()
  corpus.validate(run, 'state', report)
  splits = corpus._mixture.parts[''].splits
  assert scored == [('state', splits['validation'], report)]
  assert len({len(splits[name].tokens) for name in ('train', 'validation', 'test')}) >= 2
  assert splits['validation'] is not splits['test']
  tokens = corpus.segment(0, slice(0, 8)).tokens_BxT
  assert (tokens[0, 1:] == splits['train'].tokens[: tokens.shape[1] - 1]).all()


def test_splits_that_are_no_text_to_evaluate(config, tiny, tmp_path, caplog, toy_model):
  assert train(config, tmp_path / 'run')
  assert evaluate._existing_split(runs.load_run(tmp_path / 'run')) == 'validation'
  assert 'no test split: the validation split is evaluated' in caplog.text
  assert train(tiny(), tmp_path / 'other')
  assert evaluate._existing_split(runs.load_run(tmp_path / 'other')) == 'test'
  for split in ('train', 'test'):
    message = (
      f"--split={split}: data.corpus='shards' has no such split to evaluate; available: validation"
    )
    with pytest.raises(errors.BadInput, match=message):
      runs.load_run(tmp_path / 'run').evaluate(split)


@pytest.mark.full
def test_a_resume_on_other_shards(config, tmp_path, toy_model):
  assert train(config, tmp_path / 'run')
  with (tmp_path / 'shards' / 'train-1.jsonl').open('a') as file:
    file.write(json.dumps({'text': 'more'}))
  with pytest.raises(errors.BadInput, match='was started on another text'):
    train(config, tmp_path / 'run')


def test_a_resumed_run_learns_no_vocabulary(tiny, tmp_path, monkeypatch, toy_model):
  """Also where the cache was deleted; a damaged vocabulary is learned again."""
  data = dataclasses.replace(tiny().data, vocabulary='words', cache_dir=str(tmp_path / 'cache'))
  config, workdir = dataclasses.replace(tiny(), data=data), tmp_path / 'run'
  assert train(config, workdir)
  expected, learn, calls = arrays(workdir), learned_vocabulary._learn, []
  monkeypatch.setattr(learned_vocabulary, '_learn', lambda *a: calls.append(a) or learn(*a))
  for is_damaged in (False, True):
    shutil.rmtree(tmp_path / 'cache')
    shutil.rmtree(workdir / 'checkpoints' / '12')
    if is_damaged:
      flip(workdir / 'vocabulary.json')
    assert train(config, workdir)
    assert arrays(workdir) == expected and bool(calls) == is_damaged


class OldTask:
  """A task as version 0.3.0 asked for it: without a loss, and without states of rows."""

  names = ('vocabulary', 'content_hash', 'best_metric', 'patience', 'source_dtypes', 'segment')
  methods = ('initial_state', 'validate', 'format_metrics', 'log_summary')

  def __init__(self, config):
    task = train_task.CorpusTask(config)
    for name in (*self.names, *self.methods):
      setattr(self, name, getattr(task, name))


def test_a_task_of_version_0_3_0_trains(tiny, tmp_path, reference_run):
  assert loop.train(tiny(), tmp_path / 'old', OldTask)
  assert arrays(tmp_path / 'old') == arrays(reference_run)
  assert not (tmp_path / 'old' / 'checkpoints' / '12' / 'rows.json').exists()
  context = types.SimpleNamespace(scores=lambda *_: types.SimpleNamespace(nll_BxT='nll'))
  old = OldTask(tiny())
  assert train_task.add_defaults(old).loss(None, None, context) == ('nll', {})
  assert not hasattr(old, 'loss')  # the object of the user stays as it is


class CountingTask(OldTask):
  """A task with states of its own form."""

  def __init__(self, config, restored):
    super().__init__(config)
    self.restore_rows = lambda step, states: restored.append((step, states))

  def row_states(self, step):
    return {'next': step}


def test_states_of_rows_may_have_any_form(tiny, tmp_path, toy_model, monkeypatch):
  """Also those of several processes: a checkpoint has the list of them."""
  monkeypatch.setattr(hosts, 'all_gather', lambda value: [value, value])
  restored = []
  make_task = lambda config: CountingTask(config, restored)
  assert loop.train(tiny(), tmp_path / 'run', make_task)
  shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '12')
  assert loop.train(tiny(), tmp_path / 'run', make_task)
  assert restored == [(8, [{'next': 8}, {'next': 8}])]
