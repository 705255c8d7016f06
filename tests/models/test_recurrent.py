"""Recurrent models: equal to slow loops, whatever segments the text is taken in."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.models import language_model
from tests import equation_names
from tests.checks import assert_close, random_variables, rest_is_full, rest_is_slow
from tests.models import attention_lstm_loop as loop

V, W, B, T = 11, 4, 2, 9
MODELS = {
  'lstm': {'hidden': 5},
  'rnn': {'hidden': 5, 'cell': 'rnn'},
  'attention': {'hidden': 5, 'readout': 'attention', 'window': 4},
  'attention of one': {'hidden': 5, 'readout': 'attention', 'window': 1},
  'zeros': {'hidden': 5, 'readout': 'attention', 'window': 4, 'empty_slots': 'zeros'},
  'key_value': {'hidden': 6, 'readout': 'key_value', 'window': 3},
  'key_value_predict': {'hidden': 6, 'readout': 'key_value_predict', 'window': 12},
  '4-gram': {'hidden': 8, 'readout': 'ngram', 'slices': 4},
  '2-gram': {'hidden': 6, 'readout': 'ngram', 'slices': 2},
  'memory': {'hidden': 5, 'readout': 'recurrent_memory', 'window': 4},
  'memory of one': {'hidden': 5, 'readout': 'recurrent_memory', 'window': 1},
  "memory of the authors' code": {
    'hidden': 5,
    'readout': 'recurrent_memory',
    'window': 3,
    'temporal_tables': 2,
    'gate_bias': True,
  },
}
NAMES = list(MODELS)
QUICK = ('lstm', 'key_value_predict', 'memory')


def config_of(name, carry=True, dtype='float64', **fields):
  r = recurrent_config.RecurrentConfig(carry_memory=carry, **MODELS[name])
  options = equation_names.MODEL_OPTIONS | {'dtype': dtype, 'width': W} | fields
  config = model_config.ModelConfig(recurrent=r, **options)
  config.check()
  return config


def model_of(config, vocabulary_size=V):
  """The model, random variables and an empty memory of B rows."""
  model = language_model.build(config, vocabulary_size)
  memory = language_model.empty_memory(config, B)
  variables = random_variables(model, jnp.zeros((B, 1), jnp.int32), memory, dtype=config.dtype)
  return model, variables, memory


def text(length=T, seed=0):
  """Tokens, and where documents start: in the middle, at neighbours, at the end."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, V, (B, length)).astype(np.int32)
  starts = np.zeros((B, length), bool)
  starts[0, [0, length // 2]] = True
  starts[1, [3, 4, length - 1]] = True
  return tokens, starts


SPLITS = np.repeat([[T, 0, 0, 0], [2, 0, 6, 1], [1, 1, 3, 4]], B, axis=0)  # rows by split
WHOLE, REST = slice(0, B), range(B, len(SPLITS))


def run_segments(config, params, lengths=SPLITS):
  """The text in segments padded to one length, each row in its own.

  Hidden states, log-probabilities and attention weights [R, T, ...], and the memory after them.
  """
  model, memory = language_model.build(config, V), language_model.empty_memory(config, len(lengths))
  text_BxT, starts_BxT = (np.tile(each, (len(lengths) // B, 1)) for each in text())

  @jax.jit
  def run(params, tokens, memory, starts, valid):
    (hidden, memory, _), intermediates = model.apply(
      params, tokens, memory, starts_BxT=starts, valid_BxT=valid, mutable=['intermediates']
    )
    weights = jax.tree.leaves(intermediates.get('intermediates', {}).get('readout', {}))
    return (hidden, model.apply(params, hidden, method='log_probs'), *weights), memory

  outputs, ends = None, lengths.cumsum(axis=1)
  padding_rng = np.random.default_rng(3)
  for i in range(lengths.shape[1]):
    place = (ends - lengths)[:, i, None] + np.arange(T)
    valid, place = place < ends[:, i, None], np.minimum(place, T - 1)
    tokens, starts = (np.take_along_axis(each, place, axis=1) for each in (text_BxT, starts_BxT))
    tokens = np.where(valid, tokens, padding_rng.integers(0, V, tokens.shape)).astype(np.int32)
    # Document starts at padding are ignored.
    parts, memory = run(params, tokens, memory, starts | ~valid, valid.astype(np.int32))
    row, column = np.nonzero(valid)
    outputs = outputs or [np.zeros((len(lengths), *part.shape[1:])) for part in parts]
    for total, part in zip(outputs, parts, strict=True):
      total[row, place[valid]] = np.asarray(part)[row, column]
  return outputs, jax.tree.map(np.asarray, memory)


def loaded(config):
  """Random arrays by the names of the equations, and the parameters made of them."""
  r = config.recurrent
  kind = {'two_tables': r.temporal_tables == 2, 'gate_bias': r.gate_bias}
  arrays = loop.parameters(
    np.random.default_rng(1), r.readout, V, W, r.hidden, r.window, r.slices, r.num_slices, **kind,
    gates=1 if r.cell == 'rnn' else 4,
  )  # fmt: skip
  return arrays, equation_names.load(arrays, config, V)


def looped(config, arrays, row, lengths):
  """Hidden states, log-probabilities, weights, and the state after them, by the loop."""
  r, (tokens, starts) = config.recurrent, (each[row] for each in text())
  state, parts, first = ((np.zeros(r.hidden), np.zeros(r.hidden)), []), [], 0
  for length in lengths[lengths > 0]:
    part, first = slice(first, first + length), first + length
    if not r.carry_memory:
      state = (state[0], [])
    args = r.readout, tokens[part], starts[part], state, r.window
    part_outputs, state = loop.run(arrays, *args, r.empty_slots == 'zeros', r.slices)
    parts.append(part_outputs)
  _, weights, star, log_probs = (np.concatenate(each) for each in zip(*parts, strict=True))
  return (star, log_probs, weights), state[0]


FEW = ('attention of one', '2-gram', 'memory of one')  # like another one, but for a number


@pytest.mark.parametrize(
  'name',
  [
    *rest_is_full([name for name in NAMES if name not in FEW], QUICK),
    *(pytest.param(name, marks=pytest.mark.slow) for name in FEW),
  ],
)
def test_any_segmentation_equals_a_loop_over_tokens(x64, name):
  """With padding at the end of segments, some of which are empty."""
  config = config_of(name)
  arrays, params = loaded(config)
  outputs, memory = run_segments(config, params)
  for row in range(B):
    expected, (h, _) = looped(config, arrays, row, SPLITS[row])
    for actual, reference in zip(outputs, expected, strict=False):  # weights where there are
      assert_close(actual[row], reference, 1e-12)
    assert_close(memory['state']['h'][row], h, 1e-12)
  weighs = config.recurrent.readout in (*recurrent_config.ATTENTION, 'recurrent_memory')
  assert len(outputs) == 2 + weighs
  take_rows = lambda tree, rows: jax.tree.map(lambda leaf: leaf[rows], tree)
  for part in (slice(B, 2 * B), slice(2 * B, 3 * B)):
    same = lambda a, b: assert_close(a, b, 1e-12)
    jax.tree.map(same, take_rows((outputs, memory), part), take_rows((outputs, memory), WHOLE))


@pytest.mark.parametrize('name', rest_is_slow(NAMES, ('attention',)))
def test_what_is_looked_back_at_is_not_carried(x64, name):
  """Unless it is asked for: a segment begins with nothing but the state."""
  config = config_of(name, carry=False)
  arrays, params = loaded(config)
  outputs, _ = run_segments(config, params)
  for row in (0, *REST):
    expected, _ = looped(config, arrays, row % B, SPLITS[row])
    for actual, reference in zip(outputs, expected, strict=False):
      assert_close(actual[row], reference, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
  'fields',
  [
    {'readout': 'key_value_predict'},
    pytest.param(
      {'readout': 'recurrent_memory', 'temporal_tables': 2, 'gate_bias': True},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_parameters_begin_as_in_the_paper(fields):
  r = recurrent_config.RecurrentConfig(hidden=60, **fields)
  config = model_config.ModelConfig(width=30, recurrent=r, **equation_names.MODEL_OPTIONS)
  model, memory = language_model.build(config, 50), language_model.empty_memory(config, 1)
  init = jax.jit(lambda key: nn.unbox(model.init(key, np.zeros((1, 1), np.int32), memory)))
  params = jax.tree.map(np.asarray, init(jax.random.key(0))['params'])
  np.testing.assert_array_equal(params['recurrence']['bias'][1], 1)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    leaf = np.delete(leaf, 1, axis=0) if 'bias' in str(path) and leaf.ndim == 2 else leaf
    assert np.abs(leaf).max() <= 0.1 and leaf.min() < -0.05 < 0.05 < leaf.max(), path
    assert abs(leaf.std() - 0.1 / 3**0.5) < 0.02


@pytest.mark.parametrize(
  'readout, slices, hidden, small',
  [
    ('none', 4, 300, 128),
    ('attention', 4, 296, 123),
    ('key_value', 4, 560, 214),
    ('key_value_predict', 4, 786, 279),
    ('ngram', 2, 564, 218),
    ('ngram', 3, 786, 279),
    ('ngram', 4, 968, 320),
    ('ngram', 5, 1120, 355),
  ],
)
def test_the_size_for_a_budget(readout, slices, hidden, small):
  r = recurrent_config.RecurrentConfig(readout=readout, slices=slices)
  assert r.matched(23_898_200, 300, 77_000).hidden == hidden
  lstm = recurrent_config.RecurrentConfig(hidden=128)
  assert r.matched(lstm.parameters(128, 10_000), 128, 10_000).hidden == small


def test_latent_bigrams_at_the_input(x64):
  """One switch: segments are handed on, and what is looked up matters."""
  n = model_config.NGramConfig(clusters=4, vocabulary_size=16, dim=2, heads=2)
  config = config_of('lstm', ngram=n)
  _, variables, _ = model_of(config)
  (hidden, _), _ = run_segments(config, variables)
  for row in REST:
    assert_close(hidden[row], hidden[row % B], 1e-12)
  table = variables['params']['ngrammer']['table']
  variables['params']['ngrammer']['table'] = np.asarray(table)[::-1]
  (changed, _), _ = run_segments(config, variables)
  assert np.abs(changed - hidden).max() > 1e-3


@pytest.mark.full
def test_an_adaptive_softmax_at_both_ends(x64):
  a = model_config.AdaptiveSoftmaxConfig(cutoffs=(4, 8), divisor=2)
  config = config_of('attention', width=5, adaptive_softmax=a, tie_embeddings=True)
  model, variables, memory = model_of(config)
  tokens, starts = text()

  @jax.jit
  def run_both(variables):
    hidden, _, _ = model.apply(variables, tokens, memory, starts_BxT=starts)
    scores = model.apply(variables, hidden, tokens, method='scores')
    return scores.nll_BxT, model.apply(variables, hidden, method='log_probs')

  nll, log_probs = run_both(variables)
  expected = -np.take_along_axis(np.asarray(log_probs), tokens[..., None], axis=-1)[..., 0]
  assert_close(nll, expected, 1e-12)
  assert_close(np.exp(log_probs).sum(axis=-1), np.ones((B, T)), 1e-12)


def test_a_prefix_is_refused():
  config = config_of('lstm', dtype='float32')
  model, variables, memory = model_of(config)
  tokens, _ = text()
  with pytest.raises(ValueError, match='prefix_BxT attends to later tokens'):
    model.apply(variables, tokens, memory, prefix_BxT=tokens > 0)


def test_what_is_read_is_not_carried_unless_it_is_asked_for():
  config = config_of('attention', carry=False, dtype='float32')
  assert 'window' not in language_model.empty_memory(config, 1)
  assert 'window' in language_model.empty_memory(config, 1, 1)  # token by token
  assert 'window' in language_model.empty_memory(config_of('attention', dtype='float32'), 1)
  r = dataclasses.replace(config.recurrent, readout='none', carry_memory=True)
  assert 'window' not in language_model.empty_memory(dataclasses.replace(config, recurrent=r), 1)
