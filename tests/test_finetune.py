"""Which task and which checkpoint the result files of fine-tuned runs are of.

What trains and evaluates is replaced, so these tests do without TensorFlow.
"""

import json
import pathlib
import types

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import evaluate, finetune, runs
from ngrammer_jax.checkpoints import reader
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

  def fake_evaluate(run, split, folder=None, limit=None):
    name, step = run
    evaluated.append(step)
    task = name if name in formats.SUPERGLUE_TASKS else 'rte'
    names = metrics.METRICS_BY_TASK[task]
    score = {'best': 60.0, 'newest': 50.0}[step]
    scores = dict.fromkeys(names, score)
    result = {'task': task, 'n': 4, **scores, 'error_percent': 100 - score}
    return result | {'step': best_steps[step]}, [{'answer': step}]

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
    *((256, 16), (1024, 16), (768, 32))
  }
  args = ['--config.training.segment_length=99', f'--workdir={tmp_path / "other"}']
  finetune.main([f'--config={CONFIG}:all', *args])
  assert lengths['copa'] == (99, 16) and lengths['multirc'] == (99, 16)
  finetune.main([f'--config={CONFIG}:cb', '--config.finetune.task=all', args[1]])
  assert set(lengths.values()) == {(384, 16)}  # of the variant cb
  combined = json.loads((tmp_path / 'all' / 'evaluation' / 'best.json').read_text())
  assert combined['average'] == 60 and len(combined['tasks']) == 8

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


def test_diagnostic_set_has_its_own_result_file(tmp_path, finetuning, monkeypatch):
  """Evaluates a model that was trained on RTE on AX-b too."""
  calls = []

  def fake_evaluate(run, split, folder=None, limit=None):
    calls.append((run.config.finetune.task, run.config.data.superglue_dir, split))
    return {'task': run.config.finetune.task, 'n': 1, 'accuracy': 50.0, 'step': 3}, [{'idx': 0}]

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
