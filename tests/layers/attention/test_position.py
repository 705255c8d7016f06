import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.layers.attention import position
from tests.checks import assert_close, full


@pytest.mark.full
@pytest.mark.parametrize('dtype, tolerance', [('float64', 1e-12), ('float32', 2e-5)])
def test_rope_equals_praxis(x64, reference, dtype, tolerance):
  """Of all timescales, in one program."""
  f = reference('primer_rope')
  variants = ('default', 'ts100', 'min2')

  @jax.jit
  def turned(x, position_BxT):
    results = {}
    for variant in variants:
      scales = [float(f[f'cfg/{variant}/{end}_timescale']) for end in ('min', 'max')]
      for places, name in ((np.arange(12), 'y'), (position_BxT, 'y_pos')):
        rotation = position.rotation(places, 8, *scales, dtype=jnp.dtype(dtype))
        results[f'{variant}/{name}'] = position.rotate(x, rotation)
    return results

  for name, y in turned(f['x'].astype(dtype), f['position']).items():
    assert y.dtype == dtype
    assert_close(y, f[name], tolerance)


def test_rope_of_a_single_head_with_default_timescales_equals_praxis(reference):
  f = reference('primer_rope')
  rotate = jax.jit(lambda x, places: position.rotate(x, position.rotation(places, 8)))
  y = rotate(f['x'][:, :, :1].astype('float32'), f['position'])
  assert_close(np.asarray(y)[:, :, 0], f['default/y_3d'], 2e-5)


def test_rope_turns_the_unit_vector_by_its_position(x64, reference):
  f = reference('primer_rope')
  rotate = lambda x: position.rotate(x, position.rotation(np.arange(4), 2, dtype=jnp.float64))
  y = np.asarray(jax.jit(rotate)(f['unit/x']))
  assert_close(y, f['unit/y'], 1e-12)
  assert_close(y[0, :, 0], np.stack([np.cos(np.arange(4)), np.sin(np.arange(4))], axis=-1), 1e-12)


def test_rope_of_bfloat16_turns_in_float32():
  places = np.array([1001])  # 1000 in bfloat16
  rotate = jax.jit(lambda x: position.rotate(x, position.rotation(places, 2)))
  y = rotate(np.ones((1, 1, 1, 2), jnp.bfloat16))
  assert y.dtype == jnp.bfloat16
  expected = [np.cos(1001) - np.sin(1001), np.cos(1001) + np.sin(1001)]
  assert_close(np.asarray(y).astype('float32')[0, 0, 0], np.array(expected), 2**-8)


def test_far_tokens_turn_by_their_distance():
  """A stream without document starts has positions of millions."""
  places = np.array([[100, 101], [2**16 - 1, 2**16], [5_600_000, 5_600_001], [2 * 10**9] * 2])
  rotation = position.rotation(places, 64)
  angles = np.arctan2(rotation.sin, rotation.cos)[:, :, 0].astype('float64')
  expected = (places[:, 1] - places[:, 0])[:, None] * 10_000.0 ** (-np.arange(32) / 32)
  turned = np.angle(np.exp(1j * (angles[:, 1] - angles[:, 0])))
  np.testing.assert_allclose(turned, expected, atol=4e-3)


SCALINGS = {
  None: {},
  'linear': {'factor': 2.5},
  'llama3': {'factor': 8.0, 'original_length': 500, 'high_frequency_factor': 3.0},
  'yarn': {'factor': 4.0, 'original_length': 256},
  'yarn, not rounded': {'factor': 4.0, 'original_length': 256, 'truncate': False},
  'longrope': {'factor': 3.0, 'original_length': 48, 'short_factors': (1.0, 1.5, 2.0, 4.0)},
}
THETA, FEATURES = 500.0, 8


def slow_frequency(j, kind, fields):
  """The frequency of pair j, and the factor of sine and cosine."""
  f, F = THETA ** (-2 * j / FEATURES), fields.get('factor')
  M = fields.get('original_length')
  if kind == 'linear':
    return f / F, 1
  if kind == 'llama3':
    turns = M * f / (2 * math.pi)
    if turns < 1:
      return f / F, 1
    share = min((turns - 1) / (3 - 1), 1)
    return share * f + (1 - share) * f / F, 1
  if kind == 'longrope':
    return f / fields['short_factors'][j], math.sqrt(1 + math.log(F) / math.log(M))
  if kind is None:
    return f, 1
  low, high = (
    FEATURES * math.log(M / (2 * math.pi * turns)) / (2 * math.log(THETA)) for turns in (32, 1)
  )
  if 'truncate' not in fields:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, FEATURES - 1)
  ramp = min(max((j - low) / (high - low), 0), 1)
  return f * (1 - ramp) + f / F * ramp, 0.1 * math.log(F) + 1


@pytest.mark.parametrize('name', SCALINGS)
@pytest.mark.parametrize('interleaved', [False, full(True)])
def test_scaled_and_partial_rotation_equals_slow_loop(x64, name, interleaved):
  """Of the first 8 of 11 features."""
  kind, fields = name and name.split(',')[0], SCALINGS[name]
  scaling = None if kind is None else RotaryScalingConfig(kind, **fields)
  x, places = np.random.default_rng(0).normal(size=(1, 3, 2, 11)), np.array([0, 7, 300])
  options = FEATURES, 1.0, THETA, jnp.float64, scaling, interleaved
  rotate = jax.jit(lambda x: position.rotate(x, position.rotation(places, *options)))
  expected = x.copy()
  for t, j in np.ndindex(3, FEATURES // 2):
    frequency, factor = slow_frequency(j, kind, fields)
    turn = factor * np.exp(1j * places[t] * frequency)
    first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + FEATURES // 2)
    turned = (x[0, t, :, first] + 1j * x[0, t, :, second]) * turn
    expected[0, t, :, first], expected[0, t, :, second] = turned.real, turned.imag
  assert_close(rotate(x), expected, 1e-12)


def test_sinusoids_equal_formulas(x64):
  places, widths = np.array([[0, 1, 2], [7, 0, 513]]), (2, 4, 10)
  all_of = jax.jit(
    lambda places: {
      D: (
        position.sinusoid(places, D, jnp.float64),
        position.distance_sinusoid(places[1], D, jnp.float64),
      )
      for D in widths
    }
  )
  for D, (absolute, relative) in all_of(places).items():
    half = D // 2
    expected, by_distance = np.zeros((2, 3, D)), np.zeros((3, D))
    for j in range(half):
      frequency = np.exp(-j * np.log(10_000) / max(half - 1, 1))
      expected[..., j] = np.sin(places * frequency)
      expected[..., half + j] = np.cos(places * frequency)
      angle = places[1] / 10_000 ** (2 * j / D)
      by_distance[:, j], by_distance[:, half + j] = np.sin(angle), np.cos(angle)
    assert_close(absolute, expected, 1e-12)
    assert_close(relative, by_distance, 1e-12)


@pytest.mark.parametrize('dtype', ['bfloat16', full('float32')])
@pytest.mark.parametrize('interleaved', [False, full(True)])
@pytest.mark.parametrize('features', [8, full(6)])
def test_the_rotation_of_tpus_equals_that_of_other_devices(features, interleaved, dtype):
  x, weights = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 8)).astype(dtype)
  positions = jnp.arange(10).reshape(2, 5)
  rotation = position.rotation(positions, features, interleaved=interleaved)

  def result_and_gradient(rotate):
    result, gradient = jax.vjp(lambda x: rotate(x, rotation), x)
    return result, *gradient(weights)

  expected, actual = map(result_and_gradient, (position.rotate_pairs, position.rotate_by_product))
  for a, b in zip(expected, actual, strict=True):
    assert a.dtype == b.dtype == dtype
    np.testing.assert_allclose(*(np.asarray(each, 'float32') for each in (a, b)), rtol=1e-6)
