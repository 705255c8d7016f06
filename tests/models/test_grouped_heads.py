"""Several query heads share a head of keys and values: on any mesh, and in every kernel."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers.attention import blocks
from ngrammer_jax.models import language_model
from tests.checks import random_variables

B, V, M = 4, 11, 4
CONFIG = model_config.ModelConfig(
  layers=1,
  width=16,
  heads=8,
  key_value_heads=2,
  head_width=4,
  feed_forward_width=0,
  attention=model_config.AttentionConfig(
    query_key_norm='head', window=5, layer_pattern=('window',)
  ),
)
PLAIN = dataclasses.replace(CONFIG, attention=None)
MEMORY = model_config.MemoryConfig(M, same_length='memory_and_self')


@functools.cache
def arrays():
  rng = np.random.default_rng(0)
  model = language_model.build(CONFIG, V)
  memory = model.empty_memory(1)
  variables = random_variables(model, jnp.zeros((1, 2), jnp.int32), memory)
  return nn.unbox(variables)['params'], rng.integers(0, V, (B, 256)), rng.random((B, 256)) < 0.1


def loss_and_gradient(config, slots, T):
  """Of two segments, the second after the memory of the first."""
  params, tokens, starts = arrays()
  if config.attention is None:
    params = {
      name: dict(tree) for name, tree in params.items() if name.startswith('layer')
    } | params
    params = without_norms(params)
  model = language_model.build(config, V)

  @jax.jit
  def run(params):
    def segment(params, memory, inputs):
      tokens, starts = inputs
      hidden, memory, _ = model.apply({'params': params}, tokens, memory, starts_BxT=starts)
      weights = jnp.sin(jnp.arange(hidden.size).reshape(hidden.shape))
      return memory, jnp.square(hidden * weights).sum()

    def loss(params):
      segments = [array[:, : 2 * T].reshape(B, 2, T).swapaxes(0, 1) for array in (tokens, starts)]
      step = functools.partial(segment, params)
      return jax.lax.scan(step, model.empty_memory(B, slots), segments)[1].sum()

    return jax.value_and_grad(loss)(params)

  return jax.device_get(run(params))


def without_norms(params):
  """The same parameters for heads whose queries and keys have no norm."""
  names = ('query_norm', 'key_norm')
  remove = lambda tree: {
    name: remove(leaf) if isinstance(leaf, dict) else leaf
    for name, leaf in tree.items()
    if name not in names
  }
  return remove(params)


@pytest.mark.parametrize(
  'kernel, memory, slots',
  [
    ('blocks', MEMORY, 0),
    pytest.param('blocks', MEMORY, M, marks=pytest.mark.slow),
    pytest.param('xla', MEMORY, M, marks=pytest.mark.slow),
    pytest.param('splash', None, 0, marks=pytest.mark.slow),
  ],
)
def test_two_key_heads_on_four_devices_along_model(monkeypatch, kernel, memory, slots):
  """There are more devices than key heads, so each has the one of its query heads."""
  monkeypatch.setattr(blocks, 'BLOCK', 8)
  config = PLAIN if kernel == 'splash' else CONFIG
  config = dataclasses.replace(config, memory=memory, kernel=kernel)
  arguments = slots, 128 if kernel == 'splash' else 24
  expected = loss_and_gradient(config, *arguments)
  with sharding.use(sharding.make_mesh(2, 1, 4)):
    actual = loss_and_gradient(config, *arguments)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
  jax.tree.map(close, actual, expected)
  if kernel == 'splash':
    reference = loss_and_gradient(dataclasses.replace(config, kernel='xla'), *arguments)
    jax.tree.map(close, reference, expected)


@pytest.mark.full
def test_no_program_repeats_the_keys():
  """The KV cache has the key heads, and attention makes no array of all query heads of keys."""
  config = dataclasses.replace(CONFIG, memory=model_config.MemoryConfig(96), kernel='xla')
  model = language_model.build(config, V)
  memory = model.empty_memory(B, 96)
  assert memory['layers'][0]['cache'].keys.shape == (B, 2, 96, 4)
  params, tokens, _ = arrays()
  step = lambda params, memory: model.apply({'params': params}, tokens[:, :1], memory)[0]
  text = str(jax.make_jaxpr(step)(params, memory))
  assert f'f32[{B},2,96,4]' in text and f'f32[{B},8,96,4]' not in text
