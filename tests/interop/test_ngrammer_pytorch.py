"""Compares a loaded state_dict of n-grammer-pytorch 0.0.14 with a loop over its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.interop import ngrammer_pytorch
from ngrammer_jax.layers import NGrammer
from tests.checks import assert_close, assert_same_arrays, bad_input

N, H, E, V, K, B, T = 2, 6, 3, 50, 8, 2, 9
PRIMES = (53, 59)


@pytest.fixture
def arrays():
  rng = np.random.default_rng(0)
  arrays = {'vq.means': rng.normal(size=(N, K, H))}
  arrays['ngram.ngram_embeds.weight'] = rng.normal(size=(N * V, E))
  for name, size in (('ngram', E), ('embeds', H)):
    for letter in 'gb':
      arrays[f'ngram.{name}_layernorm.{letter}'] = rng.normal(size=(N, size))
  return arrays


def reference_output(x, a):
  """Computes the layer one token and head at a time; the norm divides by deviation + 1e-5."""
  norm = lambda v, name, n: (
    (v - v.mean()) / (v.std() + 1e-5) * a[f'ngram.{name}_layernorm.g'][n]
    + a[f'ngram.{name}_layernorm.b'][n]
  )
  y = np.zeros((B, T, N, H))
  for b, n in np.ndindex(B, N):
    tokens = x[b].reshape(T, N, H)[:, n]
    ids = [int(((token - a['vq.means'][n]) ** 2).sum(axis=-1).argmin()) for token in tokens]
    for t in range(T):
      gram = ids[t] + K * (ids[t - 1] if t else 0)
      row = (gram * (n + 1) + n + 1) % PRIMES[n] % V
      ngram = norm(a['ngram.ngram_embeds.weight'][n * V + row], 'ngram', n)
      y[b, t, n] = np.concatenate([norm(tokens[t], 'embeds', n)[: H - E], ngram])
  return y.reshape(B, T, N * H)


def test_loaded_layer_matches_reference_loop(x64, arrays):
  x = np.random.default_rng(1).normal(size=(B, T, N * H))
  layer = NGrammer(heads=N, clusters=K, vocabulary_size=V, dim=E, dtype=jnp.float64)
  variables = ngrammer_pytorch.load_ngrammer(arrays, layer, N * H)
  shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x))
  assert jax.tree.structure(variables) == jax.tree.structure(
    jax.tree.map(lambda leaf: 0, shapes, is_leaf=lambda leaf: hasattr(leaf, 'names'))
  )
  exported = ngrammer_pytorch.export_ngrammer(variables, layer, N * H)
  assert_same_arrays(exported, arrays, 0)
  y, _ = jax.jit(layer.apply)(variables, x)
  assert_close(y, reference_output(x, arrays), 1e-4)


def test_mismatches_raise_bad_input(arrays):
  layer = NGrammer(heads=N, clusters=K, vocabulary_size=V, dim=E)
  del arrays['vq.means']
  with bad_input(
    '1 array does not match a VQNgrammer of n-grammer-pytorch. Check the config against the '
    'arrays.\n  missing: vq.means (2, 8, 6)'
  ):
    ngrammer_pytorch.load_ngrammer(arrays, layer, N * H)
  with bad_input('clusters=None: an N-Grammer of n-grammer-pytorch needs clusters'):
    ngrammer_pytorch.load_ngrammer({}, layer.clone(clusters=None), N * H)
  with bad_input(
    f'the layer does not fit inputs of width {N * H + 1}: width {N * H + 1} must be divisible by '
    f'heads={N}'
  ):
    ngrammer_pytorch.load_ngrammer({}, layer, N * H + 1)
  for option, default in (({'orders': (2, 3)}, (2,)), ({'distinct_start': True}, False)):
    ((key, value),) = option.items()
    with bad_input(f'{key}={value!r} must be {default!r} for these weights'):
      ngrammer_pytorch.load_ngrammer({}, layer.clone(**option), N * H)
