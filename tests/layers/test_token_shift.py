"""The token shift."""

from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.token_shift import TokenShift
from ngrammer_jax.models import transformer
from tests.checks import assert_close, random_variables


def test_equals_slow_loop_in_two_segments():
  rng = np.random.default_rng(0)
  W, T, D = 3, 7, 4
  x = rng.normal(size=(2, T, D)).astype('float32')
  taps = rng.normal(size=(W, 1, D)).astype('float32')
  starts = np.array([[0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1, 0]], bool)
  document = np.cumsum(starts, axis=1)
  expected = x.copy()
  for b, t in np.ndindex(2, T):
    for i in range(min(W, t + 1)):
      if document[b, t - i] == document[b, t]:
        expected[b, t] += taps[i, 0] * x[b, t - i]
  layer = TokenShift(W, D)
  variables = {'params': {'convolution': {'taps': taps}}}
  apply = jax.jit(layer.apply)
  for end in (1, 3):
    state, parts = layer.empty_state(2, None), []
    for first, length in ((0, end), (end, T - end)):
      place = np.minimum(first + np.arange(T), T - 1)  # padded to one length
      valid = np.tile(np.arange(T) < length, (2, 1))
      context = Context(starts_BxT=starts[:, place], valid_BxT=valid.astype(np.int32))
      y, state = apply(variables, x[:, place], context, state)
      parts.append(y[:, :length])
    assert_close(np.concatenate(parts, axis=1), expected, 1e-6)
    assert_close(state['rows'], x[:, 1 - W :], 0)
    assert state['position'].tolist() == [5, 2]


def test_it_acts_on_the_input_of_attention_and_not_on_the_residual_stream():
  """w_0 = -1 makes that input 0: then attention adds nothing, as with an output matrix of 0.

  A segment memory stores that input, so that two segments are like one.
  """
  config = experiment.ModelConfig(
    layers=1,
    width=8,
    heads=2,
    feed_forward_width=6,
    norm='pre',
    memory=experiment.MemoryConfig(length=5),
    token_shift=experiment.TokenShiftConfig(points=('before_attention',)),
  )
  model = transformer.TransformerLM(config, 11)
  tokens = np.arange(5, dtype=np.int32)[None]
  memory = model.empty_memory(1)
  variables = random_variables(model, tokens, memory)
  params = traverse_util.flatten_dict(variables['params'], sep='/')
  taps = 'layer_0/token_shift_attention_input/convolution/taps'
  out = 'layer_0/attention/out/kernel'
  none = params | {taps: 0 * params[taps]}
  minus = none | {taps: none[taps].at[0].set(-1)}
  without = none | {out: 0 * params[out]}
  apply = jax.jit(lambda params: model.apply({'params': params}, tokens, memory)[0])
  hidden = [apply(traverse_util.unflatten_dict(each, sep='/')) for each in (minus, without, none)]
  assert_close(hidden[0], hidden[1], 1e-6)
  assert np.abs(hidden[0] - hidden[2]).max() > 1e-2
  apply = jax.jit(lambda tokens, memory: model.apply(variables, tokens, memory)[:2])
  whole, _ = apply(tokens, memory)
  first, memory = apply(tokens[:, :2], memory)
  second, _ = apply(tokens[:, 2:], memory)
  assert_close(np.concatenate([first, second], axis=1), whole, 1e-5)
