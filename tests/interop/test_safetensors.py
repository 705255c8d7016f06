"""Saves variables to safetensors files and loads them, bit-exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.interop import safetensors


def test_variables_round_trip(tmp_path):
  variables = {
    'params': {
      'layer_0': {'kernel': jax.random.normal(jax.random.key(0), (3, 4))},
      'scale': jnp.arange(5, dtype='bfloat16'),
    },
    'codebook': {'usage': jnp.float32(0.25), 'ids': jnp.arange(6).reshape(2, 3)},
  }
  safetensors.save(variables, tmp_path / 'model.safetensors')
  loaded = safetensors.load(tmp_path / 'model.safetensors')
  assert jax.tree.map(lambda x: x.dtype, loaded) == jax.tree.map(lambda x: x.dtype, variables)
  jax.tree.map(np.testing.assert_array_equal, loaded, variables)


def test_corrupt_or_missing_file_raises_bad_input(tmp_path):
  (tmp_path / 'model').write_bytes(b'not a safetensors file')
  for name in ('model', 'missing'):
    with pytest.raises(errors.BadInput, match=f'{tmp_path}/{name} cannot be read as safetensors'):
      safetensors.load(tmp_path / name)
