import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import precision
from tests.checks import bad_input


def test_auto_dtype_is_float32_on_cpu():
  assert precision.compute_dtype(model_config.ModelConfig()) == 'float32'
  assert precision.compute_dtype(model_config.ModelConfig(dtype='bfloat16')) == 'bfloat16'


def test_dtypes_of_parameters_have_many_names():
  names = {
    'float32': ('float32', 'f4', np.float32, jnp.float32, np.dtype('float32')),
    'bfloat16': ('bfloat16', jnp.bfloat16, jnp.dtype(jnp.bfloat16)),
    'float16': ('float16', np.float16),
  }
  for name, spellings in names.items():
    for spelling in spellings:
      assert precision.loaded_dtype(spelling) == precision.stored_dtype(spelling) == name
  assert precision.loaded_dtype(None) is None
  for wrong in ('int8', 'float23', np.int32, 7, [1], 'complex64'):
    with bad_input(
      f'dtype={wrong!r} is no parameter dtype: use one of float32, bfloat16, float16, float64'
    ):
      precision.loaded_dtype(wrong)


def test_float64_needs_64_bit_mode():
  for dtype in ('float64', np.float64, float, 'double'):
    with bad_input('dtype="float64" needs the environment variable JAX_ENABLE_X64=1'):
      precision.loaded_dtype(dtype)
    assert precision.stored_dtype(dtype) == 'float64'  # a file may have it
  assert precision.available_dtype(np.dtype('float64')) == 'float32'


def test_64_bit_mode_has_float64(x64):
  assert precision.loaded_dtype(np.float64) == 'float64'
  assert precision.available_dtype(np.dtype('float64')) == 'float64'
  assert precision.compute_dtype(model_config.ModelConfig(dtype='float64')) == 'float64'
