"""A whole run: it trains, stops where it should, and goes on exactly where it was."""

import json
import math
import shutil
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import mesh as mesh_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.system import progress
from ngrammer_jax.training import accumulation, flops, loop, programs, recorder, step
from tests.checks import bad_input, mesh_of
from tests.training import toy
from tests.training.helpers import arrays, names, no_validation, records


def test_a_run_learns_records_and_is_finished(trained):
  run = trained
  lines = [line for line in records(run) if 'loss' in line]
  assert [line['step'] for line in lines] == [2, 4, 6, 8, 10, 12]
  assert lines[-1]['loss'] < lines[0]['loss'] - 0.05
  logged = [json.loads(line) for line in (run / 'metrics.jsonl').open()]
  rates = [line['tokens_per_second'] for line in logged if 'loss' in line]
  assert len(rates) == 6 and all(0 < rate < math.inf for rate in rates)
  assert {
    'learning_rate',
    'gradient_norm/dense',
    'gradient_norm/ngram_table',
    'codebook/perplexity',
    'codebook/changed',
  } < set(lines[0])
  validations = [line for line in records(run) if 'validation/perplexity' in line]
  assert [line['step'] for line in validations] == [6, 12]
  assert names(run) == ['12', '4', '8'] and reader.best_step(run) == 12
  assert list((run / 'tensorboard').iterdir())


SPAN = model_config.SpanConfig(limit=128, ramp=4, penalty=0.01, initial=0.2)
RICH = {
  'layers': 1,
  'dropout': 0.1,
  'ngram': model_config.NGramConfig(
    clusters=8, vocabulary_size=64, dim=4, empty='revive', distinct_start=True
  ),
  'position': 'table',
  'positional': model_config.PositionalConfig(max_length=128),
  'memory': model_config.MemoryConfig(128, same_length='memory_alone'),
  'span': SPAN,
}


def test_a_model_with_everything_goes_on_bit_identically(tiny, one_device, tmp_path, monkeypatch):
  """N-grams, a segment memory, spans, dropout."""
  no_validation(monkeypatch)
  config = tiny(RICH, training={'steps': 6, 'evaluate_every': 0})
  reference, run = tmp_path / 'reference', tmp_path / 'run'
  assert loop.train(config, reference)
  assert names(reference) == ['4', '6']  # the last one is saved, though not due
  shutil.copytree(reference, run)
  shutil.rmtree(run / 'checkpoints' / '6')
  assert loop.train(config, run)
  assert arrays(run) == arrays(reference) and records(run) == records(reference)


def test_a_run_goes_on_bit_identically_wherever_it_ends(tiny, tmp_path, monkeypatch, toy_model):
  config = tiny(training={'steps': 10})
  reference = tmp_path / 'reference'
  assert loop.train(config, reference)
  assert (
    names(reference) == ['10', '4', '8']
    and arrays(reference)['step'] != arrays(reference, 8)['step']
  )
  assert [line['step'] for line in records(reference)] == [2, 4, 6, 6, 8, 10, 10]
  before = records(reference)
  assert not loop.train(config, reference) and records(reference) == before
  add = recorder.Recorder.add
  for stop_at in (2, 6, 10):

    def stop(self, done, metrics, stop_at=stop_at):
      add(self, done, metrics)
      if done == stop_at:
        raise KeyboardInterrupt

    run = tmp_path / str(stop_at)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
      patch.setattr(recorder.Recorder, 'add', stop)
      loop.train(config, run)
    assert loop.train(config, run)
    assert arrays(run) == arrays(reference) and records(run) == records(reference), stop_at


UNEVEN = {'log_every': 3, 'evaluate_every': 5, 'checkpoint_every': 7}


@pytest.mark.full
@pytest.mark.parametrize('steps', [1, 7, 25])
def test_segments_per_call_changes_nothing_at_any_number_of_steps(tiny, tmp_path, toy_model, steps):
  results = []
  for calls in (1, 4, 10):
    run = tmp_path / str(calls)
    assert loop.train(tiny(training=UNEVEN | {'steps': steps, 'segments_per_call': calls}), run)
    results.append((arrays(run), names(run), [line['step'] for line in records(run)]))
  assert results[0] == results[1] == results[2]
  assert reader.steps(tmp_path / '1')[-1] == steps
  events = {steps, *range(3, steps, 3)}, {steps, *range(5, steps, 5)}
  assert results[0][2] == sorted([*events[0], *events[1]])


@pytest.mark.slow
@pytest.mark.parametrize(
  'steps, calls', [(7, (1, 4)), *((steps, (1, 4, 10)) for steps in (1, 7, 25))]
)
def test_segments_per_call_changes_no_bit_of_a_real_model(
  tiny, one_device, tmp_path, monkeypatch, steps, calls
):
  no_validation(monkeypatch)
  small = {'layers': 1, 'ngram': None, 'dropout': 0.1}
  intervals = {'evaluate_every': 3, 'checkpoint_every': 5, 'log_every': 7}
  for number in calls:
    config = tiny(small, training=intervals | {'steps': steps, 'segments_per_call': number})
    assert loop.train(config, tmp_path / str(number))
    assert arrays(tmp_path / str(number)) == arrays(tmp_path / '1')


def test_what_may_change_on_resume(tiny, tmp_path, toy_model):
  loop.train(tiny(optimizer={'schedule': 'constant'}), tmp_path / 'run')
  more = {'steps': 16, 'log_every': 4, 'checkpoint_every': 8, 'evaluate_every': 0}
  config = tiny(
    optimizer={'schedule': 'constant'},
    training=more,
    mesh=mesh_config.MeshConfig(data=2, fsdp=2, model=2),
    evaluation=evaluation_config.EvaluationConfig(streams=2),
  )
  assert loop.train(config, tmp_path / 'run')
  assert reader.steps(tmp_path / 'run')[-1] == 16
  loop.train(
    tiny(optimizer={'schedule': 'constant'}, training={'steps': 16}), tmp_path / 'reference'
  )
  losses = [[r['loss'] for r in records(tmp_path / name)[-2:-1]] for name in ('run', 'reference')]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize('value', [np.inf, -np.inf, np.nan])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoints(
  tiny, tmp_path, monkeypatch, toy_model, value
):
  call = toy.Programs.call

  def diverges(self, state, segments, steps):
    state, metrics = call(self, state, segments, steps)
    if state.step == 8:
      metrics['gradient_norm/dense'] = jax.numpy.array([1.0, value])
    return state, metrics

  monkeypatch.setattr(toy.Programs, 'call', diverges)
  with bad_input(
    f'training diverged at step 8, between steps 6 and 8: gradient_norm/dense is {value}. '
    'Last good checkpoint: step 4. Lower optimizer.learning_rate, raise '
    'optimizer.warmup_steps, or lower optimizer.clip_norm, with another --workdir'
  ):
    loop.train(tiny(), tmp_path / 'run')
  assert names(tmp_path / 'run') == ['4']


def test_an_extra_metric_that_is_not_finite_is_not_recorded(
  tiny, tmp_path, monkeypatch, toy_model, caplog
):
  call = toy.Programs.call

  def with_values(self, state, segments, steps):
    state, metrics = call(self, state, segments, steps)
    # The mean over tokens that a call need not have.
    metrics['loss/rare'] = jax.numpy.full(steps, np.nan if state.step in (4, 8) else 3.0)
    return state, metrics

  monkeypatch.setattr(toy.Programs, 'call', with_values)
  caplog.set_level('WARNING')
  assert loop.train(tiny(training={'log_every': 1}), tmp_path / 'run')
  lines = [line for line in records(tmp_path / 'run') if 'loss' in line]
  values = {line['step']: line.get('loss/rare') for line in lines}
  assert values[4] is None and values[8] is None
  assert {value for step, value in values.items() if step not in (4, 8)} == {3.0}
  messages = [record.getMessage() for record in caplog.records]
  assert [message for message in messages if 'loss/rare' in message] == [
    'step 4  loss/rare is nan: not recorded at steps where it is not finite'
  ]


def test_a_validation_shows_its_progress(tiny, tmp_path, monkeypatch, toy_model, caplog):
  caplog.set_level('INFO')
  monkeypatch.setattr(progress, 'FIRST_LOG', 0)
  toy_evaluate = toy.Programs.evaluate

  def evaluate(self, state, split, report):
    report(0)  # the first call starts the clock
    return toy_evaluate(self, state, split, report)

  monkeypatch.setattr(toy.Programs, 'evaluate', evaluate)
  assert loop.train(tiny(training={'steps': 4, 'evaluate_every': 2}), tmp_path / 'run')
  tokens = [line['validation/tokens'] for line in records(tmp_path / 'run') if 'loss' not in line]
  lines = [line for line in caplog.messages if line.startswith('validating')]
  lines = [line.partition(' tokens, ')[0] for line in lines]
  assert lines == [f'validating: {count:,}' for count in tokens] and len(lines) == 2


def test_utilisation_is_three_forward_passes_over_the_peak(tiny, tmp_path, monkeypatch, toy_model):
  model_flops = flops.ModelFlops(per_segment=0.0, per_token=10.0, per_key=1.0, length=8)
  monkeypatch.setattr(toy.Programs, 'flops', model_flops, raising=False)
  monkeypatch.setattr(flops, 'peak_flops', lambda kind: 1e6)
  assert loop.train(tiny(), tmp_path / 'run')
  records = map(json.loads, (tmp_path / 'run' / 'metrics.jsonl').open())
  lines = [line for line in records if 'mfu' in line]
  assert lines
  for line in lines:
    expected = line['tokens_per_second'] * 3 * (10 + 8 / 2) / (1e6 * jax.device_count())
    assert line['mfu'] == pytest.approx(expected)


def test_parts_of_a_batch_that_the_mesh_does_not_divide_are_refused(tiny, tmp_path):
  parts = {'accumulation': experiment.AccumulationConfig(parts=2)}
  with bad_input(
    'training.batch_size=8 is not divisible by the 8 devices of mesh.data=8 x mesh.fsdp=1 x '
    'training.accumulation.parts=2: use 16'
  ):
    loop.train(tiny(training=parts, mesh=mesh_config.MeshConfig(data=8)), tmp_path / 'run')


def test_a_kernel_that_cannot_do_the_segments_is_refused(tiny, tmp_path):
  wrong = tiny(model={'kernel': 'splash'}, training={'steps': 4})
  with pytest.raises(errors.BadInput, match="model.kernel='splash' is for segments that 128 div"):
    loop.train(wrong, tmp_path / 'wrong')


def test_an_option_that_the_compiler_does_not_have_is_refused(tiny, tmp_path):
  """Before anything is written; the message names the option of several."""
  options = 'xla_cpu_enable_fast_math=false', 'xla_none_such=1'
  with bad_input(
    "training.compiler_options='xla_none_such=1' is refused by the compiler for cpu "
    "(INVALID_ARGUMENT: No such compile option: 'xla_none_such'): correct it, or leave it out"
  ):
    loop.train(tiny(training={'compiler_options': options}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_run_with_options_of_another_compiler_can_be_described(tiny):
  config = tiny(training={'compiler_options': ('xla_tpu_none_such=true',)})
  assert programs.Programs(config, 11, mesh_of(1, 1, 1)).flops.forward() > 0


def test_the_config_reaches_the_step(tiny, monkeypatch):
  steps, mesh = [], mesh_of(1, 1, 1)
  monkeypatch.setattr(step, 'make_call', lambda *arguments: steps.append(arguments) or call)
  call = types.SimpleNamespace(trace=lambda *arguments: arguments)
  parts = {'half_loss': True, 'accumulation': experiment.AccumulationConfig(parts=4)}
  parts['compiler_options'] = ('xla_cpu_enable_fast_math=false', 'xla_backend_optimization_level=1')
  run = programs.Programs(tiny(training=parts, seed=7), 11, mesh)
  assert run.trace('state', 'segments') == ('state', 'segments', 0)
  made, state, options = steps[0]
  assert options == {'xla_cpu_enable_fast_math': False, 'xla_backend_optimization_level': '1'}
  assert (made.seed, made.half_loss, made.frozen_codebook, state) == (7, True, False, 'state')
  assert made.microbatches == accumulation.GradientAccumulation(4, mesh)


def final_state(workdir):
  return jax.device_get(runs.load_run(workdir).state)


@pytest.mark.slow
def test_a_run_with_a_kernel_equals_one_without(tiny, tmp_path):
  """Interpreted on a CPU; its evaluation, of other lengths, has the scores."""
  training = {'steps': 4, 'segment_length': 128, 'batch_size': 8, 'segments_per_call': 2}
  intervals = {'evaluate_every': 4, 'checkpoint_every': 4}
  for kernel in ('xla', 'splash'):
    config = tiny(model={'kernel': kernel}, training=training | intervals)
    assert loop.train(config, tmp_path / kernel)
  by_scores, in_kernel = records(tmp_path / 'xla'), records(tmp_path / 'splash')
  for a, b in zip(by_scores, in_kernel, strict=True):
    assert [a[k] for k in a if 'loss' in k] == pytest.approx([b[k] for k in b if 'loss' in k])


@pytest.mark.slow
def test_double_precision_throughout(tiny, tmp_path, x64):
  loop.train(tiny(model={'dtype': 'float64'}, training={'steps': 2}), tmp_path / 'run')
  state = final_state(tmp_path / 'run')
  leaves = jax.tree.leaves((state.params, state.codebook, state.opt_state))
  floats = {leaf.dtype.name for leaf in leaves if leaf.dtype.kind == 'f'}
  assert floats == {'float64'}
