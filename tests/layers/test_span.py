"""Spans against loops from the formulas, their gradients, and their limits."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from ngrammer_jax.layers import Attention, persistent, span
from tests.checks import assert_close, random_variables

B, T, M, N, H, S, R = 2, 5, 4, 3, 4, 4, 2
D = N * H


def test_the_mask_is_clipped_with_slope_one_at_both_ends():
  z = jnp.array([0.0, 2.0, 3.5])
  assert span.soft_mask(z[:, None], jnp.arange(6), 2).tolist() == [
    [1, 0.5, 0, 0, 0, 0],
    [1, 1, 1, 0.5, 0, 0],
    [1, 1, 1, 1, 0.75, 0.25],
  ]
  slopes = jax.vmap(jax.grad(lambda z, d: span.soft_mask(z, d, 2)), (None, 0))
  # Distance 0 is at the upper end, 2 at the lower one.
  assert slopes(0.0, jnp.arange(4.0)).tolist() == [0.5, 0.5, 0.5, 0]
  # Off the ends it is what finite differences say.
  check_grads(lambda z: span.soft_mask(z, jnp.arange(6.0), 3), (2.3,), order=1, modes=['rev'])


def slow_attention(params, x, z_of, vectors):
  """[B, T, D] for x [B, M + T, D]: a loop over all queries, with distances from 1 to S."""
  kernel = {name: np.asarray(params[name]['kernel']) for name in ('query', 'key', 'value', 'out')}
  out = np.zeros((B, T, D))
  for b in range(B):
    for t in range(T):
      for n in range(N):
        q = x[b, M + t] @ kernel['query'][:, n]
        logits, masks, values = [], [], []
        for d in range(1, S + 1):
          k = x[b, M + t - d] @ kernel['key'][:, n]
          logits.append(q @ k / math.sqrt(H))
          z = z_of(x[b, M + t], n)
          masks.append(min(max((z - (d - 1)) / R + 1, 0), 1))
          values.append(x[b, M + t - d] @ kernel['value'][:, n])
        for c in range(vectors):
          key = math.sqrt(H) * np.asarray(params['persistent']['persistent_keys'])[n, c]
          logits.append(q @ key / math.sqrt(H))
          masks.append(1.0)
          value = np.asarray(params['persistent']['persistent_values'])[n, c]
          values.append(math.sqrt(vectors) * value)
        probs = np.exp(logits) / np.exp(logits).sum() * masks
        probs /= probs.sum() + 1e-8
        out[b, t] += (probs @ np.array(values)) @ kernel['out'][n]
  return out


def layer_of(kind, vectors):
  learned = functools.partial(kind, limit=S, ramp=R, dtype=jnp.float64)
  return Attention(
    N, sees_itself=False, span=learned, persistent_vectors=vectors, dtype=jnp.float64
  )


def inputs():
  i, j = np.arange(T)[:, None], np.arange(M + T)
  distance = M + i - j
  visible = np.broadcast_to((distance >= 1) & (distance <= S), (B, T, M + T))
  return np.random.default_rng(3).normal(size=(B, M + T, D)), jnp.asarray(visible)


@pytest.mark.parametrize('vectors', [0, 5])
@pytest.mark.parametrize('kind', [span.AdaptiveSpan, span.DynamicSpan])
def test_attention_with_spans_and_persistent_vectors(x64, kind, vectors):
  layer, (x, visible) = layer_of(kind, vectors), inputs()
  params = random_variables(layer, x, visible, dtype='float64')['params']
  if kind is span.AdaptiveSpan:
    params['span']['span'] = jnp.array([0.0, 0.4, 0.85])
    z_of = lambda _, n: S * float(params['span']['span'][n])
    mean = S * np.mean([0.0, 0.4, 0.85])
  else:
    v, b = (np.asarray(params['span'][f'span_{name}']) for name in ('kernel', 'bias'))
    z_of = lambda x, n: S / (1 + math.exp(-(x @ v[:, n] + b[n])))
    mean = np.mean([z_of(row, n) for row in x[:, M:].reshape(-1, D) for n in range(N)])
  y, kept = layer.apply({'params': params}, x, visible)
  assert_close(y, slow_attention(params, x, z_of, vectors), 1e-12)
  assert kept['span'].mean == pytest.approx(mean, abs=1e-12)
  # Off the kinks of the mask.
  of = lambda params: jnp.sin(layer.apply({'params': params}, x, visible)[0]).sum()
  if kind is span.AdaptiveSpan:
    params['span']['span'] = jnp.array([0.1, 0.4, 0.85])
  check_grads(of, (params,), order=1, modes=['rev'], atol=1e-5, rtol=1e-5)


def test_the_whole_span_is_attention_over_the_window(x64):
  layer, (x, visible) = layer_of(span.AdaptiveSpan, 0), inputs()
  params = random_variables(layer, x, visible, dtype='float64')['params']
  params['span']['span'] = jnp.ones(N)
  y = layer.apply({'params': params}, x, visible)[0]
  plain = Attention(N, sees_itself=False, dtype=jnp.float64)
  bare = {name: params[name] for name in params if name != 'span'}
  assert_close(y, plain.apply({'params': bare}, x, visible)[0], 2e-8)  # the 1e-8 of the mass


def test_no_persistent_vectors_are_no_persistent_part(x64):
  layer, (x, visible) = layer_of(span.AdaptiveSpan, 0), inputs()
  variables = random_variables(layer, x, visible, dtype='float64')
  assert 'persistent' not in variables['params']
  other = layer.clone(persistent_kind='attention_split')
  assert_close(other.apply(variables, x, visible)[0], layer.apply(variables, x, visible)[0], 0)


def test_padding_does_not_count_in_the_mean_span(x64):
  layer, (x, visible) = layer_of(span.DynamicSpan, 0), inputs()
  params = random_variables(layer, x, visible, dtype='float64')['params']
  valid = jnp.asarray(np.arange(T) < [[T], [2]], jnp.int32)
  mean = lambda x: layer.apply({'params': params}, x, visible, valid_BxT=valid)[1]['span'].mean
  assert mean(x) == mean(x.copy()) == mean(jnp.asarray(x).at[1, M + 2 :].set(7.0))
  assert mean(x) != mean(jnp.asarray(x).at[1, M + 1].set(7.0))


def test_persistent_vectors_begin_with_unit_variance():
  layer = persistent.PersistentVectors(512)
  params = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((1, 1, 8, 32)))['params']
  keys, values = (params[f'persistent_{name}'].unbox() for name in ('keys', 'values'))
  assert keys.shape == values.shape == (8, 512, 32)
  assert float(keys.var()) * 32 == pytest.approx(1, rel=0.02)
  assert float(values.var()) * 512 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize('kind', [span.AdaptiveSpan, span.DynamicSpan])
@pytest.mark.parametrize(
  'sizes, error',
  [
    ((0, 4, 8), 'a limit of 0'),
    ((16, 0, 8), 'a ramp of 0'),
    ((16, 4, 0), 'a width of the inputs of 0'),
  ],
)
def test_a_span_without_a_width(kind, sizes, error):
  limit, ramp, width = sizes
  with pytest.raises(ValueError, match=f'a span with {error}: it must be at least 1'):
    kind(2, limit, ramp).init(jax.random.key(0), jnp.ones((1, 3, width)), jnp.zeros((1, 3, 3)))
