"""Spans against loops from the formulas, their gradients, and their limits."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import Attention
from ngrammer_jax.layers.attention import attention, persistent, span
from ngrammer_jax.layers.context import Context, Keys
from tests.checks import assert_close, random_variables
from tests.layers.programs import apply, assert_gradient

B, T, M, N, H, S, R = 2, 5, 4, 3, 4, 4, 2
D = N * H
CAP = 0.9


def test_the_mask_is_clipped_with_slope_one_at_both_ends():
  z, places = np.array([0.0, 2.0, 3.5], 'float32'), np.arange(6)
  slope = jax.vmap(jax.grad(lambda z, d: span.soft_mask(z, d, 2)), (None, 0))
  mask, at_0, off = jax.jit(
    lambda z: (
      span.soft_mask(z[:, None], places, 2),
      slope(z[0], places[:4] * 1.0),
      slope(z[2], places * 1.0),
    )
  )(z)
  assert mask.tolist() == [[1, 0.5, 0, 0, 0, 0], [1, 1, 1, 0.5, 0, 0], [1, 1, 1, 1, 0.75, 0.25]]
  # Distance 0 is at the upper end, 2 at the lower one.
  assert at_0.tolist() == [0.5, 0.5, 0.5, 0]
  # Of a longer span, those on the ramp alone.
  assert off.tolist() == [0, 0, 0, 0, 0.5, 0.5]


def slow_attention(params, x, z_of, vectors):
  """[B, T, D] for x [B, M + T, D]: a loop over all queries, with distances from 1 to S."""
  kernel = {name: np.asarray(params[name]['kernel']) for name in ('query', 'key', 'value', 'out')}
  q, k, v = (np.einsum('btd,dnh->btnh', x, kernel[name]) for name in ('query', 'key', 'value'))
  out = np.zeros((B, T, D))
  for b, t, n in np.ndindex(B, T, N):
    behind = [M + t - d for d in range(1, S + 1)]
    query, values = q[b, M + t, n], [v[b, s, n] for s in behind]
    logits = [query @ k[b, s, n] / math.sqrt(H) for s in behind]
    z = z_of(params, x[b, M + t], n)
    masks = [min(max((z - d) / R + 1, 0), 1) for d in range(S)]
    for c in range(vectors):
      key = math.sqrt(H) * params['persistent']['persistent_keys'][n, c]
      logits.append(query @ key / math.sqrt(H))
      masks.append(1.0)
      values.append(math.sqrt(vectors) * params['persistent']['persistent_values'][n, c])
    if vectors:  # these cases have a cap
      logits = CAP * np.tanh(np.array(logits) / CAP)
    probs = np.exp(logits) / np.exp(logits).sum() * masks
    probs /= probs.sum() + 1e-8
    out[b, t] += (probs @ np.array(values)) @ kernel['out'][n]
  return out


def z_of(kind):
  """The span of a token and head, from the formula."""
  if kind is span.AdaptiveSpan:
    return lambda params, _, n: S * params['span']['span'][n]
  logit = lambda p, x, n: x @ p['span_kernel'][:, n] + p['span_bias'][n]
  return lambda params, x, n: S / (1 + math.exp(-logit(params['span'], x, n)))


def layer_of(kind, vectors):
  make_span = functools.partial(kind, limit=S, ramp=R, dtype=jnp.float64)
  fields = {'dtype': jnp.float64, 'logit_cap': CAP if vectors else None}
  return Attention(N, span=make_span, persistent=persistent.Persistent(vectors), **fields)


def inputs():
  i, j = np.arange(T)[:, None], np.arange(M + T)
  distance = M + i - j
  visible = np.broadcast_to((distance >= 1) & (distance <= S), (B, T, M + T))
  context = Context(keys=Keys(visible, sees_itself=False))
  return np.random.default_rng(3).normal(size=(B, M + T, D)), context


def parts(x):
  """The inputs of a segment, and those before it as a memory."""
  return x[:, M:], attention.LayerInputs(x[:, :M])


def run_layer(layer):
  x, context = inputs()
  x, memory = parts(x)
  return jax.device_get(random_variables(layer, x, context, memory, dtype='float64')['params'])


@functools.partial(jax.jit, static_argnums=0)
def gradients(layer, params, x, context):
  x, memory = parts(x)

  def loss(params):
    y, projected = layer.apply({'params': params}, x, context, memory)
    return jnp.sin(y).sum(), (y, projected.spans.mean)

  return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
  'kind, vectors',
  [(span.AdaptiveSpan, 5), (span.DynamicSpan, 0)]
  + [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in ((span.AdaptiveSpan, 0), (span.DynamicSpan, 5))
  ],
)
def test_attention_with_spans_and_persistent_vectors(x64, kind, vectors):
  layer, (x, context) = layer_of(kind, vectors), inputs()
  params, z = run_layer(layer), z_of(kind)
  spans = ([0.1, 0.4, 0.85], [0.0, 0.4, 0.85]) if kind is span.AdaptiveSpan else [None]
  for values in spans:
    if values:
      params['span']['span'] = np.array(values)
    gradient, (y, mean) = gradients(layer, params, x, context)
    assert_close(y, slow_attention(params, x, z, vectors), 1e-12)
    row_spans = [z(params, row, n) for row in x[:, M:].reshape(-1, D) for n in range(N)]
    assert mean == pytest.approx(np.mean(row_spans), abs=1e-12)
    if values is None or values[0]:  # off the kinks of the mask
      slow = lambda params: np.sin(slow_attention(params, x, z, vectors)).sum()
      assert_gradient(gradient, slow, params, tolerance=1e-6)


def test_the_whole_span_is_attention_over_the_window(x64):
  """No persistent vectors are no persistent part, of whatever kind."""
  layer, (x, context) = layer_of(span.AdaptiveSpan, 0), inputs()
  params = run_layer(layer)
  assert 'persistent' not in params
  params['span']['span'] = np.ones(N)
  other = layer.clone(persistent=persistent.Persistent(0, 'attention_split'))
  plain = Attention(N, dtype=jnp.float64)
  bare = {name: params[name] for name in params if name != 'span'}

  @jax.jit
  def run_all(x):
    x, memory = parts(x)
    output = lambda layer, params: layer.apply({'params': params}, x, context, memory)[0]
    return output(layer, params), output(other, params), output(plain, bare)

  y, split, window = run_all(x)
  assert_close(y, window, 2e-8)  # the 1e-8 of the mass
  assert_close(split, y, 0)


def test_padding_does_not_count_in_the_mean_span(x64):
  layer, (x, context) = layer_of(span.DynamicSpan, 0), inputs()
  variables = {'params': run_layer(layer)}
  valid = (np.arange(T) < [[T], [2]]).astype('int32')
  padded = context.replace(valid_BxT=valid)

  def mean(x):
    x, memory = parts(x)
    return float(apply(layer, variables, x, padded, memory)[1].spans.mean)

  row_span = lambda at: z_of(span.DynamicSpan)(variables['params'], x[at[0], M + at[1]], at[2])
  expected = np.mean([row_span((*at, n)) for at in np.argwhere(valid) for n in range(N)])
  assert mean(x) == pytest.approx(expected, abs=1e-12)
  x[1, M + 2 :] = 7
  assert mean(x) == pytest.approx(expected, abs=1e-12)


def test_persistent_vectors_begin_with_unit_variance():
  layer = persistent.PersistentVectors(512)
  x = np.zeros((1, 1, 8, 32), 'float32')
  params = jax.jit(layer.init)(jax.random.key(0), x)['params']
  keys, values = (np.asarray(params[f'persistent_{name}'].unbox()) for name in ('keys', 'values'))
  assert keys.shape == values.shape == (8, 512, 32)
  assert float(keys.var()) * 32 == pytest.approx(1, rel=0.02)
  assert float(values.var()) * 512 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize('kind', [span.AdaptiveSpan, span.DynamicSpan])
@pytest.mark.parametrize(
  'sizes, name',
  [
    ((0, 4, 8), 'limit'),
    ((16, 0, 8), 'ramp'),
    ((16, 4, 0), 'width of the inputs'),
  ],
)
def test_a_span_without_a_width(kind, sizes, name):
  limit, ramp, width = sizes
  layer, x, distance = kind(2, limit, ramp), np.ones((1, 3, width)), np.zeros((1, 3, 3))
  with pytest.raises(ValueError, match=f'the {name} of a span must be at least 1, not 0'):
    jax.eval_shape(layer.init, jax.random.key(0), x, distance)


@pytest.mark.full
@pytest.mark.parametrize(
  'kind, initial, shapes',
  [
    (span.AdaptiveSpan, 0, {'span': (2,)}),
    (span.DynamicSpan, -4, {'span_kernel': (8, 2), 'span_bias': (2,)}),
  ],
)
def test_the_mask_of_a_span_without_attention(kind, initial, shapes):
  layer, x, distance = kind(2, 16, 4), np.zeros((3, 5, 8)), np.tile(np.arange(6.0), (3, 5, 1))
  params = nn.unbox(layer.init(jax.random.key(0), x, distance))['params']
  assert {name: leaf.shape for name, leaf in params.items()} == shapes
  np.testing.assert_array_equal(params.get('span_bias', params.get('span')), [initial] * 2)
  mask, spans = layer.apply({'params': params}, x, distance)
  z = 16 / (1 + np.exp(4)) if initial else 0
  expected = np.clip((z - distance[:, None]) / 4 + 1, 0, 1)
  assert_close(np.broadcast_to(mask, (3, 2, 5, 6)), np.tile(expected, (1, 2, 1, 1)), 1e-6)
  assert float(spans.mean) == pytest.approx(z) and spans.longest_BxN.shape == (3, 2)
