"""Fine-tuning end to end: from a pre-trained checkpoint to submission files, and resuming."""

import argparse
import dataclasses
import json
import pathlib
import shutil
import types
from typing import Any

from flax import struct
import jax
import numpy as np
import pytest

from ngrammer_jax import command_line, evaluate, finetune, runs
from ngrammer_jax.checkpoints import manifest
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.models.model_variables import ModelVariables
from ngrammer_jax.tasks.superglue import evaluation, formats, metrics
from ngrammer_jax.training import init_from, loop
from tests import tokenizer_files
from tests.checks import bad_input
from tests.tasks import superglue_examples, superglue_files

CONFIG = pathlib.Path(__file__).resolve().parents[2] / 'configs' / 'superglue.py'


def write_tasks(folder):
  """Writes the files of two tasks."""
  lines = superglue_files.rte
  hidden = lines(6, labelled=False)
  superglue_files.write(folder, 'RTE', train=lines(40), val=lines(12, 40), test=hidden)
  superglue_files.write(
    folder, 'ReCoRD', **dict.fromkeys(('train', 'val', 'test'), superglue_files.record(9))
  )


@pytest.fixture
def folder(trained, tmp_path, finetuning):
  """Returns a folder with a pre-trained run and the files of two tasks."""
  (tmp_path / 'pretrained').symlink_to(trained)
  write_tasks(tmp_path)
  return tmp_path


def arguments(root, workdir, task='rte', **changes):
  values = {
    'init_from': root / 'pretrained',
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


@pytest.mark.slow
def test_finetuning_from_checkpoint_to_submission(folder, capsys):
  easy = {'optimizer__learning_rate': 0.02, 'training__steps': 80, 'training__evaluate_every': 40}
  assert finetune.main(arguments(folder, 'rte', **easy)) == 0
  out, run = capsys.readouterr().out, folder / 'rte'
  assert 'best checkpoint, validation' in out and 'newest checkpoint, validation' in out
  scores = result(run)
  assert scores['accuracy'] == 100 and scores['n'] == 12 and scores['error_percent'] == 0
  assert scores['protocol'] == {
    'choosing': 'rank',
    'format': 't5',
    'prefix': 'causal',
    'length': 96,
    'targets_length': 20,
  }
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  assert [r['step'] for r in records if 'validation/accuracy' in r] == [40, 80]

  # The model also generates the correct labels.
  evaluate.main([f'--workdir={run}', '--split=validation', '--config.finetune.choosing=greedy'])
  assert result(run)['accuracy'] == 100 and result(run)['protocol']['choosing'] == 'greedy'
  evaluate.main([f'--workdir={run}', '--split=test'])
  answers = [json.loads(line) for line in (run / 'evaluation' / 'RTE.jsonl').open()]
  assert answers == [{'idx': i, 'label': ('entailment', 'not_entailment')[i % 2]} for i in range(6)]
  assert 'accuracy' not in result(run, 'test')

  # The codebook did not change.
  before, after = runs.load_run(folder / 'pretrained').state, runs.load_run(run).state
  for a, b in zip(*map(_leaves, (before.codebook, after.codebook)), strict=True):
    np.testing.assert_array_equal(a, b)


def _leaves(tree):
  return jax.tree.leaves(jax.device_get(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
  'change', [{'finetune.codebook': 'learning', 'finetune.prefix': 'bidirectional'}, {}]
)
def test_resume_is_exact(folder, change):
  finetune.main(arguments(folder, 'whole', **change))
  shutil.copytree(folder / 'whole', folder / 'run')
  shutil.rmtree(folder / 'run' / 'checkpoints' / '8')
  # The resumed run does not need the pre-trained run.
  (folder / 'pretrained').rename(folder / 'moved')
  finetune.main(arguments(folder, 'run', **change))
  (folder / 'moved').rename(folder / 'pretrained')
  leaves = [
    manifest.verify(folder / name / 'checkpoints' / '8').leaves for name in ('whole', 'run')
  ]
  assert leaves[0] == leaves[1]
  is_learning = bool(change)
  before, after = (runs.load_run(folder / name).state.codebook for name in ('pretrained', 'whole'))
  has_changed = [
    not np.array_equal(a, b) for a, b in zip(_leaves(before), _leaves(after), strict=True)
  ]
  assert any(has_changed) == is_learning


def test_dry_run_prepares_every_task_and_trains_none(folder, monkeypatch, capsys):
  prepared = []

  def dry_run(config, workdir, make_task):
    prepared.append((config.finetune.task, workdir.name, make_task(config).vocabulary.size))
    return 'a table'

  monkeypatch.setattr('ngrammer_jax.training.dry_run.dry_run', dry_run)
  monkeypatch.setattr(loop, 'train', lambda *_: pytest.fail('trained'))
  assert finetune.main([*arguments(folder, 'run'), '--dry_run']) == 0
  (entry,) = prepared
  assert entry[:2] == ('rte', 'run') and capsys.readouterr().out == 'rte\na table\n'
  assert not (folder / 'run').exists()


def test_input_errors_are_raised_before_training(folder):
  with bad_input('set init_from to the workdir of a trained run: --config.init_from=DIR'):
    finetune.main(arguments(folder, 'run', init_from=None))
  with bad_input(
    '--config.model.width: the model and the vocabulary are inherited from the checkpoint, '
    f'init_from={folder / "pretrained"}; omit this flag, or pre-train another model'
  ):
    finetune.main(arguments(folder, 'run', model__width=32))
  with bad_input(
    '--config.data.vocabulary: the model and the vocabulary are inherited from the checkpoint, '
    f'init_from={folder / "pretrained"}; omit this flag, or pre-train another model'
  ):
    finetune.main(arguments(folder, 'run', data__vocabulary='words'))
  with pytest.raises(ValueError, match="did you mean 'rte'. Available: boolq, cb, "):
    finetune.main(arguments(folder, 'run', 'rtx'))
  with pytest.raises(ValueError, match='BoolQ'):  # the first missing task
    finetune.main(arguments(folder, 'run', 'all'))
  with pytest.raises(
    ValueError,
    match='^finetune.targets_length=20 must be at most 19, which is training.segment_length=21 ',
  ):
    finetune.main(arguments(folder, 'run', training__segment_length=21))
  with pytest.raises(ValueError, match='holds no config.json; expected a run directory'):
    finetune.main(arguments(folder, 'run', init_from=folder))
  with bad_input(
    'finetune.choosing="rank": wsc_simple has no choices to rank, its referents are generated; '
    'use finetune.choosing="greedy", or the task wsc'
  ):
    finetune.main(arguments(folder, 'run', 'wsc_simple', finetune__choosing='rank'))
  with pytest.raises(ValueError, match=r'idx \[12\]: inputs has 52 tokens, but the maximum is 40'):
    length = {'training__segment_length': 60, 'finetune__truncate': False}
    finetune.main(arguments(folder, 'run', **length))
  assert not (folder / 'run').exists()


def test_hosts_read_their_rows_and_an_epoch_has_all_rows(folder, finetuning):
  config = finetuning_config(finetuning, folder, training__batch_size=6)
  task = finetuning.FinetuneTask(config, folder / 'run')
  segments = [task.segment(step, slice(0, 6)) for step in range(14)]
  for step in (0, 6, 13):  # steps 6 and 13 have rows of two epochs
    for rows in (slice(0, 2), slice(2, 6), slice(5, 6)):
      segment = task.segment(step, rows)
      for actual, batch in zip(segment, segments[step], strict=True):
        np.testing.assert_array_equal(actual, batch if batch is None else batch[rows])
  tokens = np.concatenate([segment.tokens_BxT for segment in segments])
  epochs = [sorted(map(bytes, tokens[first : first + 40])) for first in (0, 40)]
  assert epochs[0] == epochs[1] and len(set(epochs[0])) == 10  # five lengths of two words
  assert not np.array_equal(tokens[:40], tokens[40:80])


def test_how_the_model_is_computed_can_be_overridden(folder, finetuning):
  keys = ['model.kernel', 'model.remat']
  changes = {'model__kernel': 'xla', 'model__remat': 'full'}
  model = finetuning_config(finetuning, folder, keys, **changes).model
  assert (model.kernel, model.remat, model.width) == ('xla', 'full', 16)


def test_a_memory_can_be_added(folder, finetuning):
  key, plain = 'model.ngram_memories.0.preset', finetuning_config(finetuning, folder).model
  changes = {key.replace('.', '__'): 'engram'}
  model = finetuning_config(finetuning, folder, [key], **changes).model
  (memory,) = model.ngram_memories
  assert (memory.preset, memory.start, memory.layers) == ('engram', 'neutral', (1,))
  assert memory.rows[0] < 1000 and plain.ngram_memories == ()
  assert dataclasses.replace(model, ngram_memories=()) == plain
  key = 'model.ngram.clusters'
  with bad_input(
    f'init_from={folder / "pretrained"} was trained with model.ngram.clusters=8, now it is 4: use '
    f'the old value, or omit init_from'
  ):
    finetuning_config(finetuning, folder, [key], model__ngram__clusters=4)


def test_vocabulary_path_has_to_be_the_vocabulary_of_the_checkpoint(
  folder, finetuning, monkeypatch
):
  for name, text in (('same', b'a few words\n'), ('other', b'of a text\n')):
    (folder / name).mkdir()
    vocabularies.learn_sentencepiece([text * 9], 272).save(folder / name)
  same, other = (folder / name / 'vocabulary.model' for name in ('same', 'other'))
  data = data_config.DataConfig('text', 'text', vocabulary_path=str(same))
  pretrained = runs.load_run(folder / 'pretrained')
  source = types.SimpleNamespace(
    config=dataclasses.replace(pretrained.config, data=data),
    vocabulary=vocabularies.read('sentencepiece', same),
    workdir=folder / 'pretrained',
  )
  monkeypatch.setattr(init_from, 'open_initial_run', lambda _: source)
  monkeypatch.setattr(runs, 'load_run', lambda workdir: source)
  resolve = lambda path, **changes: finetuning_config(
    finetuning, folder, ['data.vocabulary_path'], data__vocabulary_path=path, **changes
  )
  # The run has the vocabulary, so the file is not needed any more.
  assert resolve(same).data == resolve(None).data
  assert resolve(same).data.vocabulary_path is None
  with bad_input(
    f'data.vocabulary_path={other}, with 272 token ids, is not the vocabulary of '
    f'--workdir={folder / "pretrained"}, which has 272: use that vocabulary, or another workdir'
  ):
    resolve(other)
  (folder / 'run' / 'checkpoints' / '2').mkdir(parents=True)  # resumed, without init_from
  assert resolve(same, init_from=None).data == resolve(same).data
  with bad_input(
    f'data.vocabulary_path={other}, with 272 token ids, is not the vocabulary of '
    f'--workdir={folder / "pretrained"}, which has 272: use that vocabulary, or another workdir'
  ):
    resolve(other, init_from=None)
  with bad_input(f'data.vocabulary_path={folder / "none"}: no such file'):
    resolve(folder / 'none')
  source.vocabulary = vocabularies.load(folder / 'same')  # learned: has the ids of its model
  assert resolve(same).data == resolve(None).data

  paths = [folder / 'tokenizer.json', folder / 'other.json']
  for path, size in zip(paths, (270, 280), strict=True):
    path.write_bytes(tokenizer_files.byte_level(size=size))
  fields = {'vocabulary': 'tokenizer', 'vocabulary_path': str(paths[0])}
  source.config = dataclasses.replace(source.config, data=dataclasses.replace(data, **fields))
  source.vocabulary = vocabularies.read('tokenizer', paths[0])
  for path in (paths[0], None):
    resolved = resolve(path).data
    assert (resolved.vocabulary, resolved.vocabulary_path) == ('tokenizer', None)
  for path in (paths[1], same):
    with pytest.raises(ValueError, match='is of another model|is a SentencePiece model'):
      resolve(path)


def finetuning_config(finetuning, root, override_keys=(), **changes):
  """Returns a config without packing: one example per row."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', type=pathlib.Path)
  argv = arguments(root, 'run', finetune__packed=False, **changes)
  _, config = command_line.parse(parser, argv)
  return finetuning.resolve_config(config, list(override_keys), root / 'run')


@struct.dataclass
class State:
  params: Any
  codebook: Any
  opt_state: Any
  step: int


def state(step):
  return State({'w': jax.numpy.full(3, 1.0 * step)}, {'c': jax.numpy.full(2, 2.0 * step)}, [], step)


def restored_of(state):
  """What a run restores of a state to infer."""
  return ModelVariables(int(state.step), state.params, state.codebook)


@pytest.mark.full
def test_start_uses_the_recorded_checkpoint(folder, finetuning, monkeypatch):
  """Checks a repeated start after a kill, when there is a newer checkpoint."""
  config = finetuning_config(finetuning, folder)
  task = finetuning.FinetuneTask(config, folder / 'run')
  (folder / 'run').mkdir()
  loaded = []

  def load_run(workdir, step):
    loaded.append((workdir, step))
    restored = restored_of(state(12 if step == 'newest' else step))
    return types.SimpleNamespace(restored=restored, origin={}, published=None, config=config)

  monkeypatch.setattr(init_from, 'open_initial_run', load_run)
  record = folder / 'run' / 'begun_with.json'
  new_state = state(0)
  for step in (12, 8):
    first_state = task.initial_state(new_state)
    np.testing.assert_array_equal(first_state.params['w'], np.full(3, step))
    np.testing.assert_array_equal(first_state.codebook['c'], np.full(2, 2 * step))
    assert first_state.opt_state is new_state.opt_state and first_state.step == 0
    assert json.loads(record.read_text()) == {'init_from': str(folder / 'pretrained'), 'step': step}
    record.write_text('{"step": 8}')
  assert loaded == [(str(folder / 'pretrained'), 'newest'), (str(folder / 'pretrained'), 8)]


def test_validation_and_evaluation_use_their_splits(folder, finetuning, monkeypatch, caplog):
  """Uses a fake evaluator."""
  caplog.set_level('INFO')
  config, created, calls = finetuning_config(finetuning, folder), [], []

  def make_evaluator(engine, vocabulary, config):
    created.append((engine, vocabulary.size, config))

    def evaluate(params, codebook, name, examples, report=None):
      texts = [vocabulary.decode(example.inputs).decode() for example in examples]
      calls.append((params['w'].tolist(), codebook['c'].tolist(), name, texts))
      scores = {'accuracy': 75.0, 'error_percent': 25.0} if examples[0].label >= 0 else {}
      labels = ('entailment', 'not_entailment')
      answers = [
        evaluation.TaskAnswer(i % 2, labels[i % 2], -1.0 * i) for i in range(len(examples))
      ]
      return {'task': name, 'n': len(examples), **scores}, answers

    return evaluate

  monkeypatch.setattr(evaluation, 'TaskEvaluator', make_evaluator)
  task = finetuning.FinetuneTask(config, folder / 'run')
  training = types.SimpleNamespace(engine='the engine of the run')
  for step in (2, 3):
    result = task.validate(training, state(step), lambda examples: None)
    assert (result['task'], result['n'], result[task.best_metric]) == ('rte', 12, 25)
  assert created == [('the engine of the run', 257, config)] * 2
  few = dataclasses.replace(config.evaluation, max_examples=5)
  limited = finetuning.FinetuneTask(dataclasses.replace(config, evaluation=few), folder / 'run')
  assert limited.validate(training, state(2), lambda examples: None)['n'] == 5
  assert calls[1][:3] == ([3.0] * 3, [6.0] * 2, 'rte') and len(calls[1][3]) == 12
  assert calls[1][3][1] == 'rte hypothesis: rain premise: It is very snow.'
  assert task.format_metrics(result) == ' rte accuracy 75.00, 12 examples'
  task.log_summary()
  assert caplog.messages[-1] == (
    'data: examples of rte 40, in 40 rows of 96 tokens, 68 % filled; 8 steps of 8 rows are 1.60 '
    'epochs'
  )
  run = {'config': config, 'vocabulary': task.vocabulary, 'engine': 'engine'}
  run = types.SimpleNamespace(**run, restored=restored_of(state(3)), workdir=folder / 'run')
  evaluated, lines, _ = finetuning.evaluate(run, 'validation')
  assert evaluated == {'split': 'validation', 'step': 3, **result}
  assert len(lines) == 12 and lines[1] == {
    'task': 'rte',
    'idx': 41,
    'input': 'rte hypothesis: rain premise: It is very snow.',
    'label': 'not_entailment',
    'answer': 'not_entailment',
    'score': -1.0,
  }
  unlabelled, lines, submissions = finetuning.evaluate(run, 'test')
  assert [line['label'] for line in lines] == [None] * 6
  assert unlabelled == {'split': 'test', 'step': 3, 'task': 'rte', 'n': 6}
  answers = [json.loads(line) for line in submissions['RTE.jsonl'].splitlines()]
  assert answers == [{'idx': i, 'label': ('entailment', 'not_entailment')[i % 2]} for i in range(6)]
  assert evaluation.format_table(unlabelled) == 'task  n  percent\nrte   6  without labels'


@pytest.mark.slow
def test_early_stopping_with_patience(folder):
  """The first evaluation is perfect, so later ones cannot be better."""
  easy = {'optimizer__learning_rate': 0.02, 'training__steps': 400, 'training__evaluate_every': 40}
  args = arguments(folder, 'run', finetune__patience=1, training__checkpoint_every=80, **easy)
  finetune.main(args)
  validated_steps = lambda: [
    record['step']
    for record in map(json.loads, (folder / 'run' / 'metrics.jsonl').open())
    if 'validation/error_percent' in record
  ]
  steps = validated_steps()
  assert steps == list(range(40, steps[-1] + 1, 40)) and steps[-1] < 400
  assert int(runs.load_run(folder / 'run').state.step) == steps[-1]
  finetune.main(args)  # already finished
  assert validated_steps() == steps
  # Stopped after the last checkpoint, before its validation was recorded.
  path = folder / 'run' / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(
    ''.join(line for line in lines if f'"step": {steps[-1]}, "validation' not in line)
  )
  assert validated_steps() == steps[:-1]
  finetune.main(args)
  assert validated_steps() == steps
  assert int(runs.load_run(folder / 'run').state.step) == steps[-1]


@pytest.mark.slow
def test_mesh_can_differ_from_the_checkpoint(folder):
  finetune.main(arguments(folder, 'run', mesh__fsdp=2, mesh__model=2, training__steps=4))
  finetune.main(arguments(folder, 'other', training__steps=4))
  losses = [
    [r['loss'] for r in map(json.loads, (folder / name / 'metrics.jsonl').open()) if 'loss' in r]
    for name in ('run', 'other')
  ]
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_mixture_of_all_tasks(folder, capsys):
  superglue_examples.write_folders(folder / 'superglue')
  changes = {'training__steps': 4, 'training__segment_length': 256, 'finetune__choosing': 'rank'}
  finetune.main(arguments(folder, 'mixture', 'mixture', **changes))
  scores, out = result(folder / 'mixture'), capsys.readouterr().out
  assert sorted(scores['tasks']) == sorted(formats.SUPERGLUE_TASKS)
  assert scores['average'] == pytest.approx(metrics.average(scores['tasks']))
  assert f'average of 8 tasks: {scores["average"]:.2f}' in out


@pytest.mark.full
def test_damage_of_the_initial_run_and_of_its_record_is_named(folder, finetuning, monkeypatch):
  for content in ('[]', '{}', '{"training": 5}', '[' * 100_000):
    damaged = folder / 'damaged'
    damaged.mkdir(exist_ok=True)
    (damaged / 'config.json').write_text(content)
    message = f'^init_from={damaged}: {damaged}/config.json is damaged: .*; restore it'
    with pytest.raises(ValueError, match=message):
      finetune.main(arguments(folder, 'run', init_from=damaged))
  assert not (folder / 'run').exists()
  task = finetuning.FinetuneTask(finetuning_config(finetuning, folder), folder / 'run')
  (folder / 'run').mkdir()
  for content in ('[]', '{}', '{"st'):
    (folder / 'run' / 'begun_with.json').write_text(content)
    with pytest.raises(ValueError, match='begun_with.json is damaged: .*; delete it'):
      task.initial_state(state(0))
  # Of another start, which saved no checkpoint.
  (folder / 'run' / 'begun_with.json').write_text('{"init_from": "other", "step": 8}')
  steps = []
  restored = restored_of(state(12))
  other = types.SimpleNamespace(restored=restored, origin={}, published=None, config=task._config)
  monkeypatch.setattr(init_from, 'open_initial_run', lambda _, step: steps.append(step) or other)
  task.initial_state(state(0))
  assert steps == ['newest']
