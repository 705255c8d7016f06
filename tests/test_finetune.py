"""Which task and which checkpoint the result files of fine-tuned runs are of.

What trains and evaluates is replaced, so these tests do without TensorFlow.
"""

import json
import pathlib
import types

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, evaluate, finetune, runs
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.system import result_files
from ngrammer_jax.tasks import superglue
from ngrammer_jax.tasks.superglue import evaluation, formats, metrics
from ngrammer_jax.training import loop

CONFIG = pathlib.Path(__file__).resolve().parents[1] / 'configs' / 'superglue.py'


@pytest.fixture
def finetuning(monkeypatch):
  """Replaces the module that fine-tunes."""
  module = types.SimpleNamespace(
    FinetuneTask=lambda *args, **kwargs: None,
    resolve_config=lambda config, *_: config,
    check_examples=lambda config: None,
  )
  monkeypatch.setattr(superglue, 'finetuning', module, raising=False)
  return module


def no_space(path, content):
  raise errors.BadInput(f'{path}: No space left on device')


def test_best_and_newest_checkpoint_are_evaluated(tmp_path, finetuning, monkeypatch, capsys):
  """Checks the tables of one task, and of all tasks one after the other."""
  trained, lengths = [], {}

  def train(config, workdir, *_):
    trained.append((config.finetune.task, workdir))
    lengths[config.finetune.task] = config.training.segment_length, config.finetune.targets_length

  monkeypatch.setattr(loop, 'train', train)
  monkeypatch.setattr(runs, 'load_run', lambda workdir, step: (workdir.name, step))

  best_steps, evaluated = {'newest': 8, 'best': 4}, []
  monkeypatch.setattr(reader, 'best_step', lambda workdir: best_steps['best'])

  def fake_evaluate(run, split):
    name, step = run
    evaluated.append(step)
    task = name if name in formats.SUPERGLUE_TASKS else 'rte'
    names = metrics.METRICS_BY_TASK[task]
    score = {'best': 60.0, 'newest': 50.0}[step]
    scores = dict.fromkeys(names, score)
    result = {'task': task, 'n': 4, **scores, 'error_percent': 100 - score}
    return result | {'step': best_steps[step]}, [{'answer': step}], {}

  finetuning.evaluate = fake_evaluate
  for row, workdirs in (
    ('rte', {'rte': tmp_path / 'one'}),
    ('all', {name: tmp_path / 'all' / name for name in formats.SUPERGLUE_TASKS}),
  ):
    trained.clear()
    root = tmp_path / ('one' if row == 'rte' else 'all')
    assert finetune.main([f'--config={CONFIG}:{row}', f'--workdir={root}']) == 0
    assert trained == list(workdirs.items())
    out = capsys.readouterr().out
    best, newest = out.index('best checkpoint'), out.index('newest checkpoint')
    assert '60.00' in out[best:newest] and '50.00' in out[newest:]
    assert out.count('average of 8 tasks: ') == (2 if row == 'all' else 0)
    for workdir in workdirs.values():
      steps = {
        name: json.loads((workdir / 'evaluation' / f'{name}.json').read_text())['step']
        for name in ('validation', 'validation_best')
      }
      assert steps == {'validation': 8, 'validation_best': 4}
      answers = workdir / 'evaluation' / 'validation_best_answers.jsonl'
      assert json.loads(answers.read_text()) == {'answer': 'best'}
  # `all` has the lengths of the tasks' own variants, unless one is set.
  assert {lengths['copa'], lengths['multirc'], lengths['record']} == {
    (256, 16),
    (1024, 16),
    (768, 32),
  }
  args = ['--config.training.segment_length=99', f'--workdir={tmp_path / "other"}']
  finetune.main([f'--config={CONFIG}:all', *args])
  assert lengths['copa'] == (99, 16) and lengths['multirc'] == (99, 16)
  finetune.main([f'--config={CONFIG}:cb', '--config.finetune.task=all', args[1]])
  assert set(lengths.values()) == {(384, 16)}  # of the variant cb
  combined = json.loads((tmp_path / 'all' / 'evaluation' / 'best.json').read_text())
  assert combined['average'] == 60 and len(combined['tasks']) == 8

  # What finds the disk full is printed, also what comes after it.
  with monkeypatch.context() as patch:
    patch.setattr(result_files, 'write_output', no_space)
    with pytest.raises(errors.BadInput, match='validation.json: No space left'):
      finetune.main([f'--config={CONFIG}:rte', f'--workdir={tmp_path / "full"}'])
    out = capsys.readouterr().out
    assert all(f'"step": {step}' in out for step in best_steps.values())
    patch.setattr(evaluation, 'save', lambda *args: None)
    with pytest.raises(errors.BadInput, match='best.json: No space left'):
      finetune.main([f'--config={CONFIG}:all', f'--workdir={tmp_path / "full"}'])
  out = capsys.readouterr().out
  tables = out.index('best checkpoint'), out.index('newest checkpoint')
  assert max(tables) < out.index('"average": 50.0') < out.index('"average": 60.0')

  # The best checkpoint is the newest one: it is evaluated once.
  evaluated.clear()
  best_steps['best'] = 8
  capsys.readouterr()
  assert finetune.main([f'--config={CONFIG}:rte', f'--workdir={tmp_path / "same"}']) == 0
  assert evaluated == ['newest']
  folder = tmp_path / 'same' / 'evaluation'
  assert (folder / 'validation.json').read_text() == (folder / 'validation_best.json').read_text()
  out = capsys.readouterr().out
  assert out[out.index('best') :].count('50.00') == 2


def test_diagnostic_set_has_its_own_result_file(tmp_path, finetuning, monkeypatch, capsys):
  """Evaluates a model that was trained on RTE on AX-b too."""
  calls = []

  def fake_evaluate(run, split, limit):
    calls.append((run.config.finetune.task, run.config.data.superglue_dir, split))
    result = {'task': run.config.finetune.task, 'n': 1, 'accuracy': 50.0, 'step': 3}
    return result, [{'idx': 0}], {'AX-b.jsonl': '{}\n'} if split == 'test' else {}

  finetuning.evaluate = fake_evaluate
  monkeypatch.setattr(evaluation, 'format_table', lambda result: result['task'])
  tuned = experiment.resolve({'finetune': {'task': 'rte'}})
  experiment.save(tuned, tmp_path / 'config.json')
  for split, args in (
    ('validation', []),
    ('test', ['--config.finetune.task=axb', '--config.data.superglue_dir=there']),
  ):
    evaluate.main([f'--workdir={tmp_path}', f'--split={split}', *args])
  assert calls == [('rte', None, 'validation'), ('axb', 'there', 'test')]
  results = {
    path.name: json.loads(path.read_text()) for path in (tmp_path / 'evaluation').glob('*.json')
  }
  assert {name: result['task'] for name, result in results.items()} == {
    'validation.json': 'rte',
    'axb_test.json': 'axb',
  }
  assert (tmp_path / 'evaluation' / 'axb_test_answers.jsonl').read_text() == '{"idx": 0}\n'
  assert (tmp_path / 'evaluation' / 'AX-b.jsonl').read_text() == '{}\n'
  # What finds the disk full is printed: the result, all answers, and the submission file.
  capsys.readouterr()
  monkeypatch.setattr(result_files, 'write_output', no_space)
  with pytest.raises(errors.BadInput, match='test.json: No space left'):
    evaluate.main([f'--workdir={tmp_path}', '--split=test'])
  printed = capsys.readouterr().out
  assert '"accuracy": 50.0' in printed and printed.endswith('}\n{"idx": 0}\n{}\n')
