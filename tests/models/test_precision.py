from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import precision


def test_auto_dtype_is_float32_on_cpu():
  assert precision.compute_dtype(model_config.ModelConfig()) == 'float32'
  assert precision.compute_dtype(model_config.ModelConfig(dtype='bfloat16')) == 'bfloat16'
