"""Windows follow the spans, and training does not notice."""

import dataclasses
import itertools
import logging
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import streams
from ngrammer_jax.layers import documents
from ngrammer_jax.layers import span as span_layer
from ngrammer_jax.models import language_model
from ngrammer_jax.training import loop, manifest, programs, windows
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step
from tests.checks import mesh_of
from tests.training.helpers import records

SPAN = model_config.SpanConfig(limit=256, ramp=4, penalty=0.01, initial=0.9, reserve=8)
MODEL = {
  'position': 'table',
  'positional': model_config.PositionalConfig(max_length=256),
  'memory': model_config.MemoryConfig(256, same_length='memory_alone'),
  'span': SPAN,
}
CONFIG = model_config.ModelConfig(layers=1, width=16, heads=4, feed_forward_width=0, **MODEL)


def chosen(*spans, **given):
  return windows.chosen(CONFIG, np.array([spans], float), **given)[0]


def test_a_window_holds_span_ramp_and_reserve_in_powers_of_two():
  # 64 tokens hold 51 + 4 and the key at the end, and 8.
  assert chosen(0, 51, 52, 200) == (64, 64, 128, 256)
  assert chosen(0, 59, 60, 200, reserve=0) == (64, 64, 128, 256)


def test_a_window_is_not_changed_to_and_fro():
  before = ((128, 128, 128, 128),)
  # It shrinks where there are two reserves left, and grows where there is not one.
  assert chosen(43, 44, 115, 116, before=before) == (64, 128, 128, 256)


def test_after_many_changes_windows_only_grow():
  before = ((128, 128, 128, 64),)
  assert chosen(0, 60, 120, 60, before=before, changes=windows.CHANGES) == (128, 128, 256, 256)


@pytest.mark.parametrize('span, window', [(0.0, 64), (59.9, 64), (60.0, 128), (123.9, 128)])
def test_the_device_knows_which_windows_hold_a_span(span, window):
  params = {'layer_0': {'attention': {'span': {'span': jnp.array([span, 0, 0, 0]) / 256}}}}
  for size in (64, 128, 256):
    fits = windows.fit(CONFIG, params, ((size, 64, 64, 64),))
    assert bool(fits) == (size >= window)
  # And those that are chosen hold it, however it is rounded.
  fitted = windows.chosen(CONFIG, windows.spans(CONFIG, params))
  assert windows.fit(CONFIG, params, fitted)
  # One that is not a number stops no step: the loss of the step says what is wrong.
  params['layer_0']['attention']['span']['span'] *= np.nan
  assert windows.fit(CONFIG, params, fitted)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_a_run_whose_spans_are_fitted(tiny, tmp_path):
  span = dataclasses.replace(SPAN, initial=0.0)
  optimizer = {'learning_rate': 1e30, 'clip_norm': None}
  span = dataclasses.replace(span, check_every=12)
  config = tiny(MODEL | {'span': span}, optimizer)
  with pytest.raises(errors.BadInput, match='training diverged at step'):
    loop.train(config, tmp_path / 'run')


def config_of(tiny, **model):
  training = {'checkpoint_every': 2, 'keep_checkpoints': 9}
  model = MODEL | model
  model['span'] = dataclasses.replace(model['span'], check_every=2)
  return tiny(model, {'learning_rate': 0.1}, training)


@pytest.mark.slow
def test_programs_are_exchanged_and_a_resume_is_exact(tiny, tmp_path, caplog, monkeypatch):
  caplog.set_level(logging.INFO)
  whole = tmp_path / 'whole'
  assert loop.train(config_of(tiny), whole)
  sizes = [manifest.read(whole / 'checkpoints' / str(step)).windows for step in range(2, 13, 2)]
  assert sizes[0] == [[256, 256]] * 2 and sizes[-1] != sizes[0]
  assert 'windows, heads x tokens: ' in caplog.text and '(program 2)' in caplog.text
  logged = [record for record in records(whole) if 'loss' in record]
  assert logged[-1]['flops_per_token'] < logged[0]['flops_per_token']
  assert logged[-1]['span/average'] < logged[0]['span/average']

  for last in (4, 8):  # before and after a change
    run = tmp_path / f'run_{last}'
    shutil.copytree(whole, run)
    for step in range(last + 2, 13, 2):
      shutil.rmtree(run / 'checkpoints' / str(step))
    assert loop.train(config_of(tiny), run)
    leaves = [manifest.verify(path / 'checkpoints' / '12').leaves for path in (run, whole)]
    assert leaves[0] == leaves[1] and records(run) == records(whole)

  # And the same but for rounding without any windows.
  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config_of(tiny), tmp_path / 'unfitted')
  unfitted = [record for record in records(tmp_path / 'unfitted') if 'loss' in record]
  for one, other in zip(logged, unfitted, strict=True):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-4)


@pytest.mark.slow
def test_a_span_that_outgrows_its_window_is_noticed_at_that_step(
  tiny, tmp_path, monkeypatch, caplog
):
  """In the middle of a call, between two checks; and the memory holds what it then looks at."""
  caplog.set_level(logging.INFO)
  span = dataclasses.replace(SPAN, penalty=0.0, initial=0.17, reserve=1, check_every=24)
  optimizer = {'learning_rate': 0.02, 'schedule': 'constant', 'warmup_steps': 12}
  every = {'log_every': 4, 'evaluate_every': 0}
  training = {'steps': 24, 'segments_per_call': 4, 'checkpoint_every': 4, 'keep_checkpoints': 9}
  config = tiny(MODEL | {'span': span}, optimizer, training | every)
  whole = tmp_path / 'whole'
  assert loop.train(config, whole)
  sizes = {step: manifest.read(whole / 'checkpoints' / str(step)).windows for step in (4, 12, 24)}
  assert sizes[4] == [[64, 64]] * 2 and max(sum(sizes[24], [])) > 64
  changed = re.findall(r'step (\d+)  windows', caplog.text)
  assert any(int(step) % 4 for step in changed)

  run = tmp_path / 'run'  # killed before the last of the changes
  shutil.copytree(whole, run)
  before = max(step for step in range(4, int(changed[-1]), 4))
  for later in range(before + 4, 25, 4):
    shutil.rmtree(run / 'checkpoints' / str(later))
  assert loop.train(config, run)
  leaves = [manifest.verify(path / 'checkpoints' / '24').leaves for path in (run, whole)]
  assert leaves[0] == leaves[1] and records(run) == records(whole)

  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config, tmp_path / 'unfitted')
  pairs = zip(records(whole), records(tmp_path / 'unfitted'), strict=True)
  for one, other in (pair for pair in pairs if 'loss' in pair[0]):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-5)
    assert one['gradient_norm/dense'] == pytest.approx(other['gradient_norm/dense'], rel=1e-3)


@pytest.mark.slow
def test_a_span_may_leap_as_far_as_the_optimiser_takes_it(x64, tiny, tmp_path, monkeypatch):
  """At once beyond twice its window, where the rate rises; what it then reaches was kept."""
  monkeypatch.setattr(span_layer, 'EPSILON', 1e-30)  # times the mass of what is left out
  model = MODEL | {
    'dtype': 'float64',
    'positional': model_config.PositionalConfig(max_length=1024),
    'memory': model_config.MemoryConfig(1024, same_length='memory_alone'),
    'span': dataclasses.replace(
      SPAN, limit=1024, penalty=0.0, initial=0.04, reserve=1, check_every=24
    ),
  }
  optimizer = {'learning_rate': 1e-4, 'schedule': 'constant', 'warmup_steps': 0}
  optimizer['drop'] = experiment.DropConfig(steps=4, fraction=1500)
  every = {'log_every': 4, 'evaluate_every': 0, 'segment_length': 128}
  config = tiny(model, optimizer, {'steps': 20, 'segments_per_call': 4} | every)
  found, chosen = [], windows.chosen

  def noted(*args, **given):
    found.append(chosen(*args, **given))
    return found[-1]

  monkeypatch.setattr(windows, 'chosen', noted)
  assert loop.train(config, tmp_path / 'fitted')
  both = [zip(sum(a, ()), sum(b, ()), strict=True) for a, b in itertools.pairwise(found)]
  assert any(after > 2 * before for pairs in both for before, after in pairs)
  assert windows.growth(config) < 1024
  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config, tmp_path / 'unfitted')
  pairs = zip(records(tmp_path / 'fitted'), records(tmp_path / 'unfitted'), strict=True)
  for one, other in (pair for pair in pairs if 'loss' in pair[0]):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-12)
    assert one['gradient_norm/dense'] == pytest.approx(other['gradient_norm/dense'], rel=1e-9)


@pytest.mark.parametrize(
  'change',
  [
    {'persistent': model_config.PersistentConfig(4, 'single_head')},
    {'persistent': model_config.PersistentConfig(4, 'head_split')},
    {
      'ngram': model_config.NGramConfig(
        clusters=4, vocabulary_size=64, dim=4, layer='attention', pairing=('attended', 'previous')
      )
    },
  ],
  ids=['single_head', 'head_split', 'attended'],
)
@pytest.mark.slow
def test_windows_of_other_attention(x64, tiny, tmp_path, monkeypatch, caplog, change):
  """They follow the spans, change nothing but for rounding, and a resume is exact."""
  monkeypatch.setattr(span_layer, 'EPSILON', 1e-30)  # times the mass of what is left out
  caplog.set_level(logging.INFO)
  config, whole, run = (
    config_of(tiny, dtype='float64', **change),
    tmp_path / 'whole',
    tmp_path / 'run',
  )
  assert loop.train(config, whole)
  sizes = [manifest.read(whole / 'checkpoints' / str(step)).windows for step in range(2, 13, 2)]
  assert sizes[0] != sizes[-1]
  assert all(len(set(layer)) == 1 for layer in sum(sizes, []))  # one for all heads of a layer
  shutil.copytree(whole, run)
  for step in range(6, 13, 2):
    shutil.rmtree(run / 'checkpoints' / str(step))
  assert loop.train(config, run)
  leaves = [manifest.verify(path / 'checkpoints' / '12').leaves for path in (run, whole)]
  assert leaves[0] == leaves[1] and records(run) == records(whole)

  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config, tmp_path / 'unfitted')
  pairs = zip(records(whole), records(tmp_path / 'unfitted'), strict=True)
  for one, other in (pair for pair in pairs if 'loss' in pair[0]):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-7)
    assert one['span/average'] == pytest.approx(other['span/average'], abs=1.01)


@pytest.mark.slow
@pytest.mark.parametrize(
  'ngram',
  [
    None,
    model_config.NGramConfig(
      clusters=4, vocabulary_size=64, dim=4, layer='attention', pairing=('attended', 'previous')
    ),
  ],
)
def test_windows_chosen_by_the_spans_of_tokens(x64, tiny, tmp_path, monkeypatch, ngram):
  """As with the whole memory, in training and after; costs move; a resume is exact."""
  monkeypatch.setattr(span_layer, 'EPSILON', 1e-30)  # times the mass of what is left out
  span = model_config.SpanConfig('dynamic', limit=256, ramp=4, penalty=0.01, initial=-1.3)
  config = config_of(tiny, dtype='float64', span=span, ngram=ngram)
  whole, run = tmp_path / 'a', tmp_path / 'b'
  assert loop.train(config, whole)
  shutil.copytree(whole, run)
  for step in range(6, 13, 2):
    shutil.rmtree(run / 'checkpoints' / str(step))
  assert loop.train(config, run)
  leaves = [manifest.verify(path / 'checkpoints' / '12').leaves for path in (run, whole)]
  assert leaves[0] == leaves[1] and records(run) == records(whole)
  logged = [record for record in records(whole) if 'loss' in record]
  assert logged[-1]['flops_per_token'] < logged[0]['flops_per_token']

  loaded = runs.load_run(whole)
  assert loaded.evaluated.windows == ((64, 128, 256),) * 2
  everywhere = runs.load_run(whole)
  object.__setattr__(everywhere, 'evaluated', loaded.evaluated.clone(windows=None))
  nats = [each.evaluate('validation')['nll_nats_per_token'] for each in (loaded, everywhere)]
  assert nats[0] == pytest.approx(nats[1], abs=1e-9)
  texts = [each.generate(['the union ', 'states'], 40, 0) for each in (loaded, everywhere)]
  assert [made.text for made in texts[0]] == [made.text for made in texts[1]]

  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config, tmp_path / 'unfitted')
  pairs = zip(records(whole), records(tmp_path / 'unfitted'), strict=True)
  for one, other in (pair for pair in pairs if 'loss' in pair[0]):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-7)
    assert one['span/average'] == other['span/average']
    assert one['flops_per_token'] <= other['flops_per_token']


def test_what_is_kept_beyond_windows_covers_the_growth_until_segments_have_filled_it(tiny):
  def kept(rate, length=64, **optimizer):
    optimizer = {'learning_rate': rate, 'algorithm': 'adagrad'} | optimizer
    config = tiny(MODEL | {'span': SPAN}, optimizer, {'segment_length': length})
    return windows.growth(config)

  assert kept(0.125) == 33  # 256 / 8, and one for rounding
  # Seven more steps of 32 while segments bring 16 each.
  assert kept(0.125, length=16) == 32 + 7 * 16 + 1
  assert kept(2.0) == 256
  assert kept(1e-3, algorithm='adam') == 2  # 2.35 times the rate: 0.6 tokens


def params_of(*spans_LxN):
  """Parameters of spans, in tokens."""
  span = lambda tokens: {'attention': {'span': {'span': np.array(tokens, np.float32) / SPAN.limit}}}
  return {f'layer_{i}': span(tokens) for i, tokens in enumerate(spans_LxN)}


def test_programs_follow_the_spans_and_evaluation_holds_them(tiny, caplog):
  caplog.set_level(logging.INFO)
  config = config_of(tiny, span=dataclasses.replace(SPAN, initial=0.0))
  config = dataclasses.replace(config, optimizer=experiment.OptimizerConfig(learning_rate=1e-3))
  run = programs.Programs(config, 11, sharding.make_mesh())
  assert run.windows == ((64, 64), (64, 64)) and windows.growth(config) == 2
  more = windows.growth(config)
  memory = language_model.empty_memory(config.model, 8, 0, run.windows, more)
  state = types.SimpleNamespace(step=6, memory=memory, params=params_of([0, 0], [20, 77]))
  state.replace = lambda memory: types.SimpleNamespace(**vars(state) | {'memory': memory})
  assert run.evaluated(state).windows == ((64, 64), (64, 128))
  assert run.engine(state) is run.engine(state)  # compiled once
  assert run.windows == ((64, 64), (64, 64))  # a resume does not depend on evaluations
  assert run.checked(state, 7) is state and run.windows[1] == (64, 64)  # it is not time for that
  lengths = [layer['hidden'].shape[1] for layer in memory['layers']]
  fitted = run.checked(state, 6)
  assert run.windows == ((64, 64), (64, 128)) and run.changes == 1
  assert 'step 6  windows, heads x tokens: layer 0: 2 x 64; layer 1: 1 x 64, 1 x 128' in caplog.text
  longer = [layer['hidden'].shape[1] for layer in fitted.memory['layers']]
  assert longer == [lengths[0], lengths[1] + 64] and not run.ready
  assert run.checked(fitted, 8) is fitted and run.changes == 1

  # A checkpoint brings its own.
  known = types.SimpleNamespace(windows=[[64, 64], [256, 64]], changes=5)
  assert run.abstract(known).memory['layers'][1]['hidden'].shape[1] == 256
  assert run.windows == ((64, 64), (256, 64)) and run.changes == 5


def test_the_last_tokens_of_the_memory_stay_in_other_windows(tiny):
  config, more = config_of(tiny).model, 3
  memory = language_model.empty_memory(config, 8, 0, ((64, 64), (64, 64)), more)
  rng = np.random.default_rng(0)
  draw = lambda leaf: rng.integers(0, 100, leaf.shape).astype(leaf.dtype)
  memory = jax.tree.map(draw, memory)
  longer = windows.resized(config, memory, ((64, 64), (128, 64)), more)
  like = language_model.empty_memory(config, 8, 0, ((64, 64), (128, 64)), more)
  shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)
  assert shapes(longer) == shapes(like)
  back = windows.resized(config, longer, ((64, 64), (64, 64)), more)
  jax.tree.map(np.testing.assert_array_equal, back, memory)
  added = longer['layers'][1]['hidden'].shape[1] - memory['layers'][1]['hidden'].shape[1]
  assert added == 64 and not np.asarray(longer['layers'][1]['hidden'][:, :added]).any()
  assert (np.asarray(longer['recent']['positions'][:, :added]) == documents.NONE).all()


def test_a_call_ends_before_the_step_whose_spans_outgrow_their_windows():
  """And when it is made again in longer ones, the metrics of all its steps come together."""

  class Growing:
    """A model that does nothing but widen its span, by 4 tokens a step."""

    config = dataclasses.replace(CONFIG, heads=1)

    def __init__(self, sizes):
      self.windows = sizes

    def apply(self, variables, *given, method=None, **how):
      span = variables['params']['layer_0']['attention']['span']['span']
      if method == 'scores':
        return types.SimpleNamespace(nll_BxT=-given[0])
      tokens_BxT, memory = given
      return (span[0] + 0 * tokens_BxT, {'seen': memory['seen'] + 1}, {}), {'codebook': {}}

  grow = optax.GradientTransformation(
    lambda params: (),
    lambda gradients, state, params: (
      jax.tree.map(lambda g: jnp.full_like(g, 4 / SPAN.limit), gradients),
      state,
    ),
  )
  mesh = mesh_of(1, 1, 1)
  place = sharding.replicated(mesh)
  state = train_state.TrainState(
    step=np.int32(5),
    params=params_of([47]),
    codebook={},
    opt_state=(),
    memory={'seen': np.zeros(1)},
  )
  abstract = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state
  )
  tokens = np.zeros((6, 1, 2), np.int32)
  segments = streams.Segment(tokens, tokens, tokens > 0, np.ones(tokens.shape, np.float32))
  run = programs.Programs.__new__(programs.Programs)
  training = types.SimpleNamespace(segments_per_call=6)
  run._config, run._fitted, run._compiled = types.SimpleNamespace(training=training), True, {}
  metrics, ends = None, []
  with sharding.use(mesh):
    state = jax.device_put(state, place)
    for size in (64, 128):
      run.windows = ((size,),)
      model = Growing(run.windows)
      run._compiled[run.windows] = train_step.make_call(model, grow, 0, abstract)
      state, metrics, finished = run.call(state, segments, 5, metrics)
      ends.append((int(state.step), float(state.memory['seen'][0]), finished))
  # With a ramp of 4, a window of 64 holds a span below 60: those of 47, 51, 55 and 59 tokens.
  assert ends == [(9, 4, False), (11, 6, True)]
  spans = -SPAN.limit * np.asarray(metrics['loss'])
  np.testing.assert_allclose(spans, [47, 51, 55, 59, 63, 67], rtol=1e-6)


@pytest.mark.slow
def test_a_trained_run_evaluates_and_writes(tiny, tmp_path):
  run = tmp_path / 'run'
  loop.train(config_of(tiny, persistent=model_config.PersistentConfig(4)), run)
  loaded = runs.load_run(run)
  assert loaded.evaluated.windows is not None
  assert max(map(max, loaded.evaluated.windows)) < 256
  whole = runs.load_run(run)
  object.__setattr__(whole, 'evaluated', loaded.evaluated.clone(windows=None))
  nats = [each.evaluate('validation')['nll_nats_per_token'] for each in (loaded, whole)]
  assert nats[0] == pytest.approx(nats[1], abs=1e-5)
  prompts = ['the union ', 'states']
  texts = [[made.text for made in each.generate(prompts, 40, 0)] for each in (loaded, whole)]
  assert texts[0] == texts[1]
