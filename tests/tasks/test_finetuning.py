"""Fine-tuning as a user does it: from a checkpoint to answers, and on after a kill."""

import json
import pathlib
import shutil
import types

import numpy as np
import pytest

pytest.importorskip('seqio')

from ngrammer_jax import evaluate, finetune, runs  # noqa: E402
from ngrammer_jax.tasks.superglue import evaluation, formats, metrics  # noqa: E402
from ngrammer_jax.training import loop, manifest  # noqa: E402
from tests.checks import bad_input  # noqa: E402
from tests.tasks import superglue_examples, superglue_files  # noqa: E402

CONFIG = pathlib.Path(__file__).resolve().parents[2] / 'configs' / 'superglue.py'


@pytest.fixture
def begun(tiny, tmp_path):
  """A run to begin with, and the files of two tasks."""
  assert loop.train(tiny(training={'steps': 2}), tmp_path / 'begun')
  lines = superglue_files.rte
  hidden = lines(6, labelled=False)
  superglue_files.write(tmp_path, 'RTE', train=lines(40), val=lines(12, 40), test=hidden)
  superglue_files.write(
    tmp_path, 'ReCoRD', **dict.fromkeys(('train', 'val', 'test'), superglue_files.record(9))
  )
  return tmp_path


def arguments(root, workdir, task='rte', **changes):
  values = {
    'init_from': root / 'begun',
    'data.superglue_dir': root / 'superglue',
    'training.steps': 8,
    'training.batch_size': 8,
    'training.segment_length': 96,
    'training.segments_per_call': 2,
    'training.log_every': 2,
    'training.evaluate_every': 4,
    'training.checkpoint_every': 4,
    'finetune.targets_length': 20,
  } | {key.replace('__', '.'): value for key, value in changes.items()}
  overrides = [f'--config.{key}={value}' for key, value in values.items() if value is not None]
  return [f'--config={CONFIG}:{task}', f'--workdir={root / workdir}', *overrides]


def result(workdir, split='validation'):
  return json.loads((workdir / 'evaluation' / f'{split}.json').read_text())


def test_from_a_checkpoint_to_answers(begun, capsys):
  easy = {'optimizer__learning_rate': 0.02, 'training__steps': 80, 'training__evaluate_every': 40}
  assert finetune.main(arguments(begun, 'rte', **easy)) == 0
  out, run = capsys.readouterr().out, begun / 'rte'
  assert 'best checkpoint, validation' in out and 'newest checkpoint, validation' in out
  known = result(run)
  assert known['accuracy'] == 100 and known['n'] == 12 and known['error_percent'] == 0
  assert known['protocol'] == {
    'choosing': 'rank',
    'prefix': 'causal',
    'length': 96,
    'targets_length': 20,
  }
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  assert [r['step'] for r in records if 'validation/accuracy' in r] == [40, 80]

  # What it has learned, it also writes.
  evaluate.main([f'--workdir={run}', '--split=validation', '--config.finetune.choosing=greedy'])
  assert result(run)['accuracy'] == 100 and result(run)['protocol']['choosing'] == 'greedy'
  evaluate.main([f'--workdir={run}', '--split=test'])
  answers = [json.loads(line) for line in (run / 'evaluation' / 'RTE.jsonl').open()]
  assert answers == [{'idx': i, 'label': ('entailment', 'not_entailment')[i % 2]} for i in range(6)]
  assert 'accuracy' not in result(run, 'test')

  # The codebook was kept.
  before, after = runs.load_run(begun / 'begun').state, runs.load_run(run).state
  for a, b in zip(*map(_leaves, (before.codebook, after.codebook)), strict=True):
    np.testing.assert_array_equal(a, b)


def _leaves(tree):
  import jax

  return jax.tree.leaves(jax.device_get(tree))


@pytest.mark.parametrize(
  'change',
  [
    {'finetune.codebook': 'learning', 'finetune.prefix': 'bidirectional'},
    pytest.param({}, marks=pytest.mark.slow),
  ],
)
def test_a_resume_is_exact(begun, change):
  finetune.main(arguments(begun, 'whole', **change))
  shutil.copytree(begun / 'whole', begun / 'run')
  shutil.rmtree(begun / 'run' / 'checkpoints' / '8')
  # All of the beginning is in the workdir.
  (begun / 'begun').rename(begun / 'moved')
  finetune.main(arguments(begun, 'run', **change))
  (begun / 'moved').rename(begun / 'begun')
  leaves = [manifest.verify(begun / name / 'checkpoints' / '8').leaves for name in ('whole', 'run')]
  assert leaves[0] == leaves[1]
  learned = bool(change)
  before, after = (runs.load_run(begun / name).state.codebook for name in ('begun', 'whole'))
  moved = [not np.array_equal(a, b) for a, b in zip(_leaves(before), _leaves(after), strict=True)]
  assert any(moved) == learned


def test_a_start_that_was_killed_is_repeated_with_the_same_checkpoint(begun, tiny):
  other, run = begun / 'other' / 'checkpoints', begun / 'run'
  assert loop.train(tiny(training={'steps': 4, 'checkpoint_every': 2}), begun / 'other')
  (other / '4').rename(begun / 'later')
  finetune.main(arguments(begun, 'run', init_from=begun / 'other'))
  leaves = manifest.verify(run / 'checkpoints' / '8').leaves
  (begun / 'later').rename(other / '4')
  shutil.rmtree(run / 'checkpoints')
  finetune.main(arguments(begun, 'run', init_from=begun / 'other'))
  assert manifest.verify(run / 'checkpoints' / '8').leaves == leaves
  assert json.loads((run / 'begun_with.json').read_text())['step'] == 2


def test_record_is_written_or_chosen_among_the_entities(begun):
  finetune.main(arguments(begun, 'record', 'record', training__segment_length=128))
  known = result(begun / 'record')
  assert known['protocol']['choosing'] == 'greedy' and known['n'] == 9
  choosing = ['--split=validation', '--config.finetune.choosing=rank']
  evaluate.main([f'--workdir={begun / "record"}', *choosing])
  known = result(begun / 'record')
  assert known['protocol']['choosing'] == 'rank' and known['f1'] == known['exact_match']


def test_what_is_wrong_is_said_before_anything_is_trained(begun):
  with bad_input('set init_from to the workdir of a trained run: --config.init_from=DIR'):
    finetune.main(arguments(begun, 'run', init_from=None))
  with bad_input(
    '--config.model.width: the model and the vocabulary are those of the checkpoint, '
    f'init_from={begun / "begun"}; leave it out, or pre-train another'
  ):
    finetune.main(arguments(begun, 'run', model__width=32))
  with pytest.raises(ValueError, match="no row 'rtx'; there are: boolq, cb, "):
    finetune.main(arguments(begun, 'run', 'rtx'))
  with pytest.raises(ValueError, match='BoolQ'):  # the first of those that are missing
    finetune.main(arguments(begun, 'run', 'all'))
  with pytest.raises(ValueError, match='training.segment_length=21 leaves nothing for inputs'):
    finetune.main(arguments(begun, 'run', training__segment_length=21))
  with pytest.raises(ValueError, match='holds no config.json: not a run'):
    finetune.main(arguments(begun, 'run', init_from=begun))
  with bad_input(
    'finetune.choosing="rank": wsc_simple has nothing to choose from, its referents are written; '
    'use finetune.choosing="greedy", or the task wsc'
  ):
    finetune.main(arguments(begun, 'run', 'wsc_simple', finetune__choosing='rank'))
  with pytest.raises(ValueError, match='inputs of 42 tokens, and there is room for 40'):
    length = {'training__segment_length': 60, 'finetune__truncate': False}
    finetune.main(arguments(begun, 'run', **length))
  assert not (begun / 'run').exists()


@pytest.mark.slow
def test_it_ends_where_there_is_no_more_progress(begun):
  """At the first evaluation all is right, at no later one more than that."""
  easy = {'optimizer__learning_rate': 0.02, 'training__steps': 400, 'training__evaluate_every': 40}
  given = arguments(begun, 'run', finetune__patience=1, training__checkpoint_every=80, **easy)
  finetune.main(given)
  validated = lambda: [
    record['step']
    for record in map(json.loads, (begun / 'run' / 'metrics.jsonl').open())
    if 'validation/error_percent' in record
  ]
  steps = validated()
  assert steps == list(range(40, steps[-1] + 1, 40)) and steps[-1] < 400
  assert int(runs.load_run(begun / 'run').state.step) == steps[-1]
  finetune.main(given)  # there is nothing left to do
  assert validated() == steps
  # Stopped after the last checkpoint, before its validation was on record.
  path = begun / 'run' / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(
    ''.join(line for line in lines if f'"step": {steps[-1]}, "validation' not in line)
  )
  assert validated() == steps[:-1]
  finetune.main(given)
  assert validated() == steps
  assert int(runs.load_run(begun / 'run').state.step) == steps[-1]


@pytest.mark.slow
def test_another_mesh_than_that_of_the_checkpoint(begun):
  finetune.main(arguments(begun, 'run', mesh__fsdp=2, mesh__model=2, training__steps=4))
  finetune.main(arguments(begun, 'other', training__steps=4))
  losses = [
    [r['loss'] for r in map(json.loads, (begun / name / 'metrics.jsonl').open()) if 'loss' in r]
    for name in ('run', 'other')
  ]
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize('name', formats.TASKS)
def test_answers_are_written_as_the_benchmark_takes_them(tmp_path, name):
  labels = formats.task(name).labels
  keys = {'multirc': [(7, 3, 0), (7, 3, 1)], 'record': [(5, 8), (5, 9)]}.get(name, [(0,), (1,)])
  examples = [types.SimpleNamespace(key=key, answers=('the cat',)) for key in keys]
  answers = [-1, 1] if labels else ['dogs', 'a cat']
  path = evaluation.submission(name, examples, answers, tmp_path)
  found = [json.loads(line) for line in path.open()]
  if name == 'multirc':
    options = [{'idx': 0, 'label': 0}, {'idx': 1, 'label': 1}]
    assert found == [{'idx': 7, 'passage': {'questions': [{'idx': 3, 'answers': options}]}}]
    return
  expected = {
    'cb': ['entailment', 'contradiction'],
    'copa': [0, 1],
    'record': ['dogs', 'a cat'],
    **dict.fromkeys(('boolq', 'wic', 'wsc', 'wsc_simple'), ['false', 'true']),
    **dict.fromkeys(('rte', 'axb', 'axg'), ['entailment', 'not_entailment']),
  }[name]
  assert found == [{'idx': key[-1], 'label': e} for key, e in zip(keys, expected, strict=True)]


def test_all_tasks_at_once(begun, capsys):
  superglue_examples.write_folders(begun / 'superglue')
  changes = {'training__steps': 4, 'training__segment_length': 256, 'finetune__choosing': 'rank'}
  finetune.main(arguments(begun, 'mixture', 'mixture', **changes))
  known, out = result(begun / 'mixture'), capsys.readouterr().out
  assert sorted(known['tasks']) == sorted(formats.EIGHT)
  assert known['average'] == pytest.approx(metrics.average(known['tasks']))
  assert f'average of 8 tasks: {known["average"]:.2f}' in out


@pytest.mark.slow
def test_one_task_after_the_other(begun, capsys):
  superglue_examples.write_folders(begun / 'superglue')
  changes = {'training__steps': 4, 'training__segment_length': 128}
  given = arguments(begun, 'all', 'all', **changes)
  finetune.main(given)
  tables = capsys.readouterr().out
  assert tables.count('average of 8 tasks: ') == 2
  finetune.main(given)  # again: there is nothing left but to say it
  assert capsys.readouterr().out == tables
  assert result(begun / 'all' / 'wic')['task'] == 'wic'
