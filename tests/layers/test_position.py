import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import position
from tests.checks import assert_close


@pytest.mark.parametrize('dtype, tolerance', [('float64', 1e-12), ('float32', 2e-5)])
@pytest.mark.parametrize('variant', ['default', 'ts100', 'min2'])
def test_rope_equals_praxis(x64, reference, variant, dtype, tolerance):
  f = reference('primer_rope')
  timescales = f[f'cfg/{variant}/min_timescale'], f[f'cfg/{variant}/max_timescale']
  timescales = [float(scale) for scale in timescales]
  x = jnp.asarray(f['x'], dtype)
  for places, expected in ((np.arange(12), 'y'), (f['position'], 'y_pos')):
    rotation = position.rotation(jnp.asarray(places), 8, *timescales, dtype=jnp.dtype(dtype))
    y = position.rotate(x, rotation)
    assert y.dtype == dtype
    assert_close(y, f[f'{variant}/{expected}'], tolerance)


def test_rope_of_a_single_head_with_default_timescales_equals_praxis(reference):
  f = reference('primer_rope')
  rotation = position.rotation(jnp.asarray(f['position']), 8)
  y = position.rotate(jnp.asarray(f['x'][:, :, :1], 'float32'), rotation)
  assert_close(y[:, :, 0], f['default/y_3d'], 2e-5)


def test_rope_turns_the_unit_vector_by_its_position(x64, reference):
  f = reference('primer_rope')
  rotation = position.rotation(jnp.arange(4), 2, dtype=jnp.float64)
  y = position.rotate(jnp.asarray(f['unit/x']), rotation)
  assert_close(y, f['unit/y'], 1e-12)
  assert_close(y[0, :, 0], np.stack([np.cos(np.arange(4)), np.sin(np.arange(4))], axis=-1), 1e-12)


def test_rope_of_bfloat16_turns_in_float32():
  x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  rotation = position.rotation(jnp.asarray([1001]), 2)  # 1000 in bfloat16
  y = position.rotate(x, rotation)
  assert y.dtype == jnp.bfloat16
  expected = [np.cos(1001) - np.sin(1001), np.cos(1001) + np.sin(1001)]
  assert_close(y.astype('float32')[0, 0, 0], np.array(expected), 2**-8)


@pytest.mark.parametrize('D', [2, 4, 10])
def test_sinusoid_equals_formula(x64, D):
  places, half = np.array([[0, 1, 2], [7, 0, 513]]), D // 2
  expected = np.zeros((2, 3, D))
  for j in range(half):
    frequency = np.exp(-j * np.log(10_000) / max(half - 1, 1))
    expected[..., j] = np.sin(places * frequency)
    expected[..., half + j] = np.cos(places * frequency)
  assert_close(position.sinusoid(jnp.asarray(places), D, jnp.float64), expected, 1e-12)
