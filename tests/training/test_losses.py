"""Losses of a task, and those of docs/python_api.md to the letter."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import command_line, errors, runs
from ngrammer_jax import config as experiment
from ngrammer_jax.models import language_model
from ngrammer_jax.training import loop, losses, programs, train_task
from tests import documentation
from tests.checks import bad_input, full, mesh_of, random_variables
from tests.loops import each
from tests.training.helpers import arrays, records, write_config

PAGE = documentation.ROOT / 'docs' / 'python_api.md'
TASKS = ('SmoothedTask', 'WordsTask', 'HardTokensTask')
# Those of the page by hand are quick. The other two are much like the first.
BY_TASK = pytest.mark.parametrize(
  'name', [full(TASKS[0]), *(pytest.param(name, marks=pytest.mark.slow) for name in TASKS[1:])]
)
SMALL = {'layers': 1, 'ngram': None}


def documented_tasks():
  """The task classes of the page by name."""
  names = {}
  for block in documentation.blocks(PAGE):
    if any(f'class {name}' in block.text for name in TASKS):
      assert len(block.text.strip().splitlines()) <= 20
      exec(block.text, names)
  return {name: names[name] for name in TASKS}


@pytest.fixture
def small(tiny):
  """The config of a model of one layer, for 6 steps, with a validation after 3."""

  def make(**training):
    model = SMALL | {'dropout': 0.1}
    intervals = {'steps': 6, 'evaluate_every': 3, 'checkpoint_every': 4, 'log_every': 1}
    return tiny(model, training=intervals | training)

  return make


@BY_TASK
def test_a_run_with_a_loss_resumes_bit_identically_and_is_evaluated(
  small, one_device, tmp_path, name
):
  config = small()
  reference, resumed = tmp_path / 'reference', tmp_path / 'resumed'
  make_task = documented_tasks()[name]
  assert loop.train(config, reference, make_task)
  shutil.copytree(reference, resumed)
  shutil.rmtree(resumed / 'checkpoints' / '6')
  assert loop.train(config, resumed, make_task)
  assert arrays(resumed) == arrays(reference) and records(resumed) == records(reference)

  # Validation keeps its protocol, whatever is trained on.
  validations = [line for line in records(reference) if 'validation/perplexity' in line]
  assert [line['step'] for line in validations] == [3, 6]
  result = runs.load_run(reference).evaluate('validation')
  assert validations[-1]['validation/nll_nats_per_token'] == result['nll_nats_per_token']


def first_step(config, make_task):
  """The metrics of the first step of a run, and the update of its parameters."""
  task = make_task(config)
  mesh = mesh_of(1, 1, 1)
  run = programs.Programs(config, task.vocabulary.size, mesh, loss=task.loss)
  state = run.create()
  before = jax.device_get(state.params)
  segment = task.segment(0, slice(0, config.training.batch_size))
  segments = jax.tree.map(lambda array: array[None], segment)
  run.compile(state, segments)
  state, metrics = run.call(state, segments, 1)
  update = jax.tree.map(np.subtract, jax.device_get(state.params), before)
  return {name: float(column[0]) for name, column in metrics.items()}, update


@BY_TASK
def test_accumulation_equals_the_whole_batch(tiny, one_device, name):
  make_task = documented_tasks()[name]
  sgd = {'warmup_steps': 0, 'clip_norm': None}

  def result(parts):
    accumulation = experiment.AccumulationConfig(parts=parts)
    training = {'segments_per_call': 1, 'accumulation': accumulation}
    return first_step(tiny(SMALL, sgd, training), make_task)

  (metrics, update), (metrics_of_parts, update_of_parts) = result(1), result(4)
  for key in metrics_of_parts:  # those of a whole batch have codebook/changed too
    np.testing.assert_allclose(metrics_of_parts[key], metrics[key], rtol=2e-5, err_msg=key)
  assert any(key.startswith('loss/') for key in metrics) or name == 'WordsTask'
  difference = jax.tree.map(lambda a, b: np.abs(a - b).mean(), update, update_of_parts)
  size = jax.tree.map(lambda a: np.abs(a).mean(), update)
  assert sum(jax.tree.leaves(difference)) < 1e-3 * sum(jax.tree.leaves(size))


def test_documented_losses_by_hand(tiny, one_device):
  config = tiny(SMALL)
  tasks = {name: task(config) for name, task in documented_tasks().items()}
  task = train_task.CorpusTask(config)
  batch = config.training.batch_size
  model = language_model.build(config.model, task.vocabulary.size)
  segment = task.segment(0, slice(0, batch))
  memory = language_model.empty_memory(config.model, batch)
  variables = random_variables(model, segment.tokens_BxT, memory)

  @jax.jit
  def apply(variables):
    hidden, *_ = model.apply(variables, segment.tokens_BxT, memory, **segment.marks)
    return hidden, model.apply(variables, hidden, method='log_probs')

  hidden, log_probs_BxTxV = apply(variables)
  nll_BxTxV = -np.asarray(log_probs_BxTxV)
  nll_BxT = np.take_along_axis(nll_BxTxV, segment.targets_BxT[..., None], axis=-1)[..., 0]

  def metrics_of(name):
    own = tasks[name].segment(0, slice(0, batch))
    counts = own.valid_BxT if own.counts_BxT is None else own.counts_BxT
    context = losses.LossContext(model, variables['params'], own, counts, counts.sum())
    return losses.means(tasks[name].loss, hidden, context)

  config_of_key = tiny(SMALL, training={'label_smoothing': 0.1})
  smoothed = losses.smoothed(config_of_key.training.label_smoothing)
  context = losses.LossContext(
    model, variables['params'], segment, segment.valid_BxT, segment.valid_BxT.sum()
  )
  by_key = losses.means(smoothed, hidden, context)

  smoothed_BxT = 0.9 * nll_BxT + 0.1 * nll_BxTxV.mean(axis=-1)
  metrics = metrics_of('SmoothedTask')
  assert metrics['loss'] == pytest.approx(smoothed_BxT.mean(), rel=1e-5)
  assert metrics['loss/nll'] == pytest.approx(nll_BxT.mean(), rel=1e-5)
  assert by_key == metrics  # the key is the loss of the page

  is_word = (segment.targets_BxT != ord(' ')) & (segment.targets_BxT != ord('\n'))
  assert 0.1 < is_word.mean() < 0.9
  assert metrics_of('WordsTask') == {'loss': pytest.approx(nll_BxT[is_word].mean(), rel=1e-5)}

  tasks['HardTokensTask'].loss.__globals__['KNOWN'] = 0.004  # of what a new model knows
  is_hard = nll_BxT > -np.log(0.004)
  assert 0.1 < is_hard.mean() < 0.9
  metrics = metrics_of('HardTokensTask')
  assert metrics['loss'] == pytest.approx(np.where(is_hard, nll_BxT, 0).mean(), rel=1e-5)
  assert metrics['loss/hard'] == pytest.approx(is_hard.mean(), rel=1e-5)


def context_of(counts_BxT, targets_BxT):
  segment = types.SimpleNamespace(targets_BxT=targets_BxT)
  return losses.LossContext(None, {}, segment, counts_BxT, counts_BxT.sum())


def test_means_are_over_the_tokens_that_count():
  counts_BxT = jnp.array([[1.0, 0.0], [1.0, 1.0]])
  context = context_of(counts_BxT, jnp.array([[5, 6], [7, 8]]))

  def loss(hidden, targets_BxT, context):
    loss_BxT = targets_BxT + jnp.array([[0.0, jnp.nan], [0.0, 0.0]])  # where nothing counts
    return loss_BxT, {'hidden': hidden}

  metrics = losses.means(loss, jnp.array([[1.0, 9.0], [1.0, 4.0]]), context)
  assert metrics == {'loss': pytest.approx(20 / 3), 'loss/hidden': pytest.approx(2)}


def test_rows_without_a_token_that_counts_have_the_loss_0_and_no_gradient():
  context = context_of(jnp.zeros((2, 2)), jnp.array([[5, 6], [7, 8]]))

  def mean(scale):
    def loss(hidden, targets_BxT, context):
      return scale * targets_BxT, {}

    return losses.means(loss, None, context)['loss']

  assert jax.value_and_grad(mean)(2.0) == (0, 0)


def test_a_subclass_of_the_interface_has_the_loss_of_the_next_token(monkeypatch):
  class Task(train_task.TrainTask):
    """A task of the names of data alone."""

  monkeypatch.setattr(losses, 'next_token', lambda *arguments: arguments)
  task = Task()
  assert task.loss(1, 2, 3) == (1, 2, 3)
  assert task.initial_state(4) == 4
  assert task.row_states(5) is None


@each(
  'result, name, shape',
  [((jnp.float32(1), {}), 'loss', '[]'), ((jnp.ones((2, 2)), {'x': jnp.ones(2)}), 'loss/x', '[2]')],
)
def test_a_loss_returns_one_value_for_each_token(result, name, shape):
  context = context_of(jnp.ones((2, 2)), jnp.ones((2, 2)))
  with bad_input(
    f'{name} of the task has the shape {shape}: return one value for each token, [2, 2]'
  ):
    losses.means(lambda *args: result, None, context)


def test_the_documented_task_of_other_data_trains_and_resumes(tiny, toy_model, tmp_path):
  (block,) = (b for b in documentation.blocks(PAGE) if 'class CopyTask' in b.text)
  names = {}
  exec(block.text, names)
  task = names['CopyTask'](tiny())
  segment = task.segment(3, slice(1, 3))
  T = segment.targets_BxT.shape[1]
  assert (segment.targets_BxT[:, : T // 2] == segment.targets_BxT[:, T // 2 :]).all()
  assert (segment.tokens_BxT[:, 1:] == segment.targets_BxT[:, :-1]).all()
  assert segment.counts_BxT.sum() == segment.valid_BxT.sum() / 2
  whole = task.segment(3, slice(0, 4))
  assert (whole.targets_BxT[1:3] == segment.targets_BxT).all()

  assert loop.train(tiny(), tmp_path / 'reference', names['CopyTask'])
  shutil.copytree(tmp_path / 'reference', tmp_path / 'resumed')
  shutil.rmtree(tmp_path / 'resumed' / 'checkpoints' / '12')
  assert loop.train(tiny(), tmp_path / 'resumed', names['CopyTask'])
  assert arrays(tmp_path / 'resumed') == arrays(tmp_path / 'reference')


@pytest.mark.slow
def test_the_documented_training_runs(tiny, one_device, tmp_path, monkeypatch, capsys):
  config = tiny(SMALL)
  monkeypatch.setattr(command_line, 'resolve', lambda name, overrides: config)
  monkeypatch.chdir(tmp_path)
  (block,) = (b for b in documentation.blocks(PAGE) if 'loop.train(' in b.text)
  exec(block.text, documented_tasks())
  assert "'nll_nats_per_token'" in capsys.readouterr().out
  assert records(tmp_path / 'runs' / 'smoothed')[0]['loss/nll'] > 0


@pytest.mark.slow
def test_a_killed_training_with_a_loss_resumes_bit_identically(tiny, tmp_path):
  config = tiny(
    training={'steps': 80, 'log_every': 10, 'checkpoint_every': 10, 'evaluate_every': 0}
  )
  path = write_config(tmp_path / 'config.py', config)
  code = (
    'import pathlib, sys; from ngrammer_jax import command_line; '
    'from ngrammer_jax.training import loop; from tests.training import test_losses; '
    'task = test_losses.documented_tasks()["SmoothedTask"]; '
    'loop.train(command_line.resolve(sys.argv[1], []), pathlib.Path(sys.argv[2]), task)'
  )
  command = [sys.executable, '-c', code, str(path), str(tmp_path / 'killed')]
  with (tmp_path / 'log').open('w') as log:
    process = subprocess.Popen(
      command, cwd=documentation.ROOT, env=os.environ, stdout=log, stderr=log
    )
    end = time.monotonic() + 240
    try:
      while not (tmp_path / 'killed' / 'checkpoints' / '10').exists():
        assert time.monotonic() < end, 'no checkpoint in four minutes'
        assert process.poll() is None, (tmp_path / 'log').read_text()
        time.sleep(0.005)
    finally:
      process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, 'the run was over before it was killed'
  task = documented_tasks()['SmoothedTask']
  assert loop.train(config, tmp_path / 'killed', task)
  loop.train(config, tmp_path / 'reference', task)
  assert arrays(tmp_path / 'killed') == arrays(tmp_path / 'reference')
  assert records(tmp_path / 'killed') == records(tmp_path / 'reference')


class OtherTask(train_task.CorpusTask):
  """A task with a loss of its own, which is that of the next token."""

  def loss(self, hidden_BxTxJ, targets_BxT, context):
    return losses.next_token(hidden_BxTxJ, targets_BxT, context)


def test_a_resume_with_another_loss_is_refused(tiny, tmp_path, monkeypatch, toy_model):
  config = tiny()
  shorter = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=12))
  assert loop.train(shorter, tmp_path / 'own', OtherTask)
  assert runs.load_run(tmp_path / 'own').config.training.loss == 'OtherTask.loss'
  for name, make_task, other in (
    ('own', train_task.CorpusTask, 'next_token'),
    ('plain', OtherTask, 'OtherTask.loss'),
  ):
    if name == 'plain':
      assert loop.train(shorter, tmp_path / 'plain')
    before = runs.load_run(tmp_path / name).config.training.loss
    with bad_input(
      f'--workdir={tmp_path}/{name} was started with the loss {before!r}, now it is {other!r}: use '
      f'the task with the old loss, or another workdir'
    ):
      loop.train(shorter, tmp_path / name, make_task)
  # A run of an earlier version has no name, and may have had any loss.
  path = tmp_path / 'plain' / 'config.json'
  path.write_text(path.read_text().replace('"loss": "next_token"', '"loss": null'))
  assert not loop.train(shorter, tmp_path / 'plain', OtherTask)
  monkeypatch.setattr(OtherTask, 'loss_name', 'of this test', raising=False)
  assert loop.train(shorter, tmp_path / 'named', OtherTask)
  assert runs.load_run(tmp_path / 'named').config.training.loss == 'of this test'
  smoothed = tiny(training={'label_smoothing': 0.1})
  with bad_input(
    'training.label_smoothing=0.1 is for the loss of the next token, but the task has a loss of '
    "its own, 'of this test': use 0, and smooth the labels there"
  ):
    loop.train(smoothed, tmp_path / 'both', OtherTask)
  with bad_input(
    "training.loss='x', but the loss of the task is 'next_token': use that task, or None"
  ):
    loop.train(tiny(training={'loss': 'x'}), tmp_path / 'x')


def test_label_smoothing_needs_all_logits(tiny):
  """In the dtype of `log_probs`, which does not depend on `loss_dtype`."""
  for key, value in (('vocabulary_chunk', 8), ('loss_dtype', 'bfloat16')):
    message = f'^training.label_smoothing=0.1 is not for model.{key}='
    with pytest.raises(errors.BadInput, match=message):
      tiny({key: value}, training={'label_smoothing': 0.1}).check()
