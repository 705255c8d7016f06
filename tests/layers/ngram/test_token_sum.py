"""Sums of token embeddings and n-gram vectors equal LongCat and BLT, and a slow loop."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers.ngram import token_sum
from tests.checks import assert_close


@pytest.mark.full
def test_amplification_equals_the_formula():
  rng = np.random.default_rng(0)
  x, e = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3, 2, 8))
  mean = (x + e.sum(axis=2)) / 3
  centred = mean - mean.mean(axis=-1, keepdims=True)
  normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
  with jax.enable_x64(True):
    for amplification, expected in (('sqrt_width', mean * 8**0.5), ('norm', normed)):
      layer = token_sum.TokenSum(
        is_mean=True, amplification=amplification, dtype=np.dtype('float64')
      )
      y, _ = layer.init_with_output(jax.random.key(0), x, e)
      assert_close(y, expected, 1e-12)


def test_vectors_of_another_width_need_projections():
  x, e = np.zeros((1, 1, 8), 'float32'), np.zeros((1, 1, 2, 4), 'float32')
  with pytest.raises(ValueError, match='width 4 do not fit width 8: add a projection'):
    token_sum.TokenSum().apply({}, x, e)
