"""The width rule: factors of each parameter, and activations at several widths after some steps."""

import dataclasses

from flax import linen as nn
import jax
import numpy as np
import pytest

from benchmarks import width_rule as check
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import optimizer as optimizer_config
from ngrammer_jax.config import persistent as persistent_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.models import language_model, model_variables, width_rule
from ngrammer_jax.optimizers import muon, partition, weight_decay

V = 64
MUP = dataclasses.replace(check.RULE, learning_rate=0.1, weight_decay=0.5, base_width=4)
FOURTH = 16  # width of a model with r = 1/4
MODEL = model_config.ModelConfig(
  width=FOURTH,
  layers=1,
  heads=2,
  feed_forward_width=24,
  bias=True,
  convolution=3,
  per_dim_scale=True,
  persistent=persistent_config.PersistentConfig(vectors=3),
  ngram=model_config.NGramConfig(clusters=4, vocabulary_size=9, dim=2, layer='input'),
  ngram_memories=(
    NGramMemoryConfig(layers=(0,), join='gate', rows=(11,), heads=2, width=4),
    NGramMemoryConfig(
      layers=(0,),
      join='product',
      rows=(11,),
      heads=2,
      width=4,
      embedding_part=True,
    ),
  ),
)
GROWING_INPUTS = (
  *(f'layer_0/attention/{name}/kernel' for name in ('query', 'key', 'value', 'out')),
  *(f'layer_0/feed_forward/{name}/kernel' for name in ('gate', 'in', 'out')),
  *(f'layer_0/ngram_memory_1/product/{name}/kernel' for name in ('gate', 'embedding')),
)


def params_of(config):
  return model_variables.abstract(language_model.build(config, V))['params']


@pytest.mark.parametrize(
  'fields, initial, rate',
  [
    ({}, {'embedding': 1, 'final': 1 / 2}, {'embedding': 1 / 2, 'final': 1 / 2}),
    (
      {'scale_embeddings': False},
      {'embedding': 2, 'final': 1 / 4},
      {'embedding': 1, 'final': 1 / 4},
    ),
    (
      {'tie_embeddings': False},
      {'embedding': 1, 'softmax_weight': 1 / 2},
      {'embedding': 1 / 2, 'softmax_weight': 1 / 4},
    ),
  ],
)
def test_the_factors_of_each_parameter(fields, initial, rate):
  def with_final_norm(factors):
    final = factors.pop('final', None)
    if final is None:
      return factors
    return factors | {'final_norm/scale': final, 'final_norm/bias': final}

  config = dataclasses.replace(MODEL, **fields)
  factors = width_rule.factors(config, MUP, params_of(config))
  assert factors.initial == with_final_norm(initial)
  matrices = {name: 1 / 4 for name in GROWING_INPUTS}
  assert factors.rate == with_final_norm(rate) | matrices
  no_rule = dataclasses.replace(MUP, width_rule=None, base_width=None)
  assert width_rule.factors(config, no_rule, params_of(config)) == width_rule.WidthFactors({}, {})


@pytest.mark.parametrize(
  'algorithm, scale, kernel_rate',
  [('adam', None, 1 / 4), ('muon', 'moonlight', 1 / 4), ('muon', 'jordan', 1)],
)
def test_rates_of_a_step(algorithm, scale, kernel_rate):
  """Muon has its own factor of the width; weight decay is the same at all widths."""
  boxed = {
    'embedding': nn.LogicallyPartitioned(np.ones((3, 4), np.float32), ('vocab', 'embed')),
    'layer_0': {
      'in': {'kernel': nn.LogicallyPartitioned(np.eye(4, dtype=np.float32), ('embed', 'mlp'))}
    },
  }
  params = nn.unbox(boxed)
  muon_config = None if scale is None else optimizer_config.MuonConfig(scale=scale)
  config = dataclasses.replace(MUP, algorithm=algorithm, muon=muon_config)
  matrices = muon.find_matrices(boxed) if scale else None
  labels, mask = partition.labels(boxed), weight_decay.mask(config, boxed)

  def step(decay, factors):
    optimizer = partition.make(
      dataclasses.replace(config, weight_decay=decay), 5, labels, (), mask, matrices, factors
    )
    state = optimizer.init(params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return optimizer.update(params, state, params)[0], names

  plain, names = step(0.0, {})
  decayed, _ = step(0.5, {})
  factors = {'embedding': 1 / 2, 'layer_0/in/kernel': 1 / 4}
  scaled, scaled_names = step(0.5, factors)
  assert scaled_names == names  # in checkpoints
  np.testing.assert_allclose(scaled['embedding'], plain['embedding'] / 2, rtol=1e-6)
  kernels = [tree['layer_0']['in']['kernel'] for tree in (plain, decayed, scaled)]
  plain, decayed, scaled = kernels
  assert np.abs(decayed - plain).max() > 0.005
  np.testing.assert_allclose(scaled, kernel_rate * plain + (decayed - plain), atol=1e-6)


def test_weights_that_are_stored_minus_1():
  factors = width_rule.WidthFactors({'final_norm/scale': 0.25}, {})
  params = {'final_norm': {'scale': np.zeros(2)}, 'embedding': np.full(2, 3.0)}
  config = dataclasses.replace(MODEL, norm_kind='rms', norm_offset=True)
  scaled = width_rule.scale_initial(config, factors, params)
  np.testing.assert_array_equal(scaled['final_norm']['scale'], np.full(2, -0.75))
  np.testing.assert_array_equal(scaled['embedding'], params['embedding'])


@pytest.mark.full
@pytest.mark.parametrize(
  'fields',
  [{}, pytest.param({'tie_embeddings': False, 'scale_embeddings': False}, marks=pytest.mark.slow)],
)
def test_activations_do_not_grow_with_the_width(fields, one_device):
  def exponents(optimizer):
    values = [check.activations(width, optimizer, **fields) for width in check.WIDTHS]
    return check.exponents(np.array(values))

  assert exponents(check.RULE).max() < 0.15
  assert exponents(check.NO_RULE).min() > 0.3
