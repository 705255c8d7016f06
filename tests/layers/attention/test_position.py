import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.attention import position
from tests.checks import assert_close


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
