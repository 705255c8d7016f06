"""The token shift."""

import jax
import numpy as np

from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.token_shift import TokenShift
from tests.checks import assert_close


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
