"""Weight decay shrinks what `optimizer.weight_decay_on` selects, and nothing else."""

import dataclasses
import re

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers import dense, normalization
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.optimizers import partition, weight_decay
from tests.models import drawn, test_recurrent

# The kind of a parameter by its whole path, without numbers. Each path fits one kind.
PATHS = {
  'matrix': r"""
    layer/attention/(query|key|value|out)/kernel        layer/attention/query_kernel
    layer/attention/(query|key|value)_convolution/taps  layer/attention/relative/position/kernel
    layer/attention/persistent/persistent_(keys|values) layer/attention/span/span_kernel
    layer/feed_forward/(gate|in|out)/kernel             adaptive_softmax/(softmax_)?projection
    (layer/)?ngram_memory/gate/(key|value)/kernel       (layer/)?ngram_memory/gate/convolution/taps
    ngram_memory/sum/projection                         recurrence/(input|recurrent)_kernel
    readout/\w+/kernel      layer/ngram_memory/product/(gate|embedding|out)/kernel
    layer/product_memory/(query|swilu|value)/kernel     layer/product_memory/sub_keys
    layer/ngram_memory/values/projection                layer/token_shift_\w+/convolution/taps""",
  'embedding': r"""
    embedding              softmax_weight                                absolute_position
    distance_embedding     layer/attention/relative/distance_embedding   layer/position
    adaptive_softmax/embedding                    layer/attention/relative/distance_bias
    adaptive_softmax/cluster_weight               readout/((in|out)put_words|(output_)?temporal)""",
  'vector': r"""
    .*norm/(scale|bias)                        layer/attention/(query|key|value|out)/bias
    (layer/attention/)?(content|position)_bias layer/attention/per_dim_scale
    layer/attention/span/span_bias             layer/feed_forward/(gate|in|out)/bias
    (layer/)?ngram_memory/gate/(key|value)/bias (layer/)?ngram_memory/mix
    layer/attention/persistent/gate            softmax_bias         layer/ngram_memory/sum/factor
    adaptive_softmax/(cluster_)?bias           recurrence/bias
    readout/(\w+/bias|score)                  layer/product_memory/(\w+/bias|gate/kernel)
    layer/ngram_memory/values/(mix|gate_weights|gate_bias)
    copy_memory/bucket_(scale|vector)         copy_memory_(input|before_head)/gate""",
  'never': r"""layer/attention/span/span
    (layer/)?(ngrammer|ngram_memory|ngram_table_\w+|product_memory)/(input_)?table""",
}
DECAYING = {
  'matrices': {'matrix'},
  'matrices_and_embeddings': {'matrix', 'embedding'},
  'all': {'matrix', 'embedding', 'vector'},
}


def kind_by_path(path):
  """The kind of a parameter, by the table above."""
  path = re.sub(r'_\d+', '', path)
  kinds = [k for k, paths in PATHS.items() if any(re.fullmatch(p, path) for p in paths.split())]
  assert len(kinds) == 1, (path, kinds)
  return kinds[0]


def check_table(config):
  """The mask of a model follows the table, for each value of the key. Returns the paths."""
  params = model_variables.abstract(language_model.build(config, drawn.V))['params']
  paths = {}
  for on, kinds in DECAYING.items():
    optimizer = experiment.OptimizerConfig(weight_decay=0.1, weight_decay_on=on)
    mask = traverse_util.flatten_dict(weight_decay.mask(optimizer, params), sep='/')
    paths = {path: kind_by_path(path) for path in mask}
    assert mask == {path: kind in kinds for path, kind in paths.items()}, on
  return paths


def models():
  """Models that together have every parameter of the table."""
  seed = drawn.covering_seed(12, 0)
  for case in drawn.cases(12, seed):
    yield f'drawn {seed}', dataclasses.replace(drawn.config_of(case), dtype='float32')
  for name in test_recurrent.NAMES:
    yield name, test_recurrent.config_of(name, dtype='float32')
  plain = model_config.ModelConfig(width=16, layers=1, heads=2, feed_forward_width=12)
  learned = model_config.PositionalConfig(max_length=8)
  yield 'learned', dataclasses.replace(plain, position='learned', positional=learned)
  unshared = model_config.PositionalConfig(shared_biases=False)
  yield 'relative', dataclasses.replace(plain, position='relative', positional=unshared)
  gated = model_config.PersistentConfig(3, start='neutral', kind='single_head')
  yield 'persistent gate', dataclasses.replace(plain, persistent=gated)
  summed = NGramMemoryConfig.from_preset('over_encoding')
  summed = dataclasses.replace(summed, heads=2, rows=(11,), width=4, start='neutral')
  yield 'sum', dataclasses.replace(plain, ngram_memories=(summed,))


@pytest.mark.full
def test_every_parameter_decays_as_in_the_table():
  found = set()
  for _, config in models():
    found |= {re.sub(r'_\d+', '', path) for path in check_table(config)}
  for paths in PATHS.values():
    for pattern in paths.split():
      assert any(re.fullmatch(pattern, path) for path in found), f'no model has {pattern}'


WEIGHTS = {  # names and shapes of a matrix, an embedding, a norm, a bias of two axes and a table
  'kernel': (('embed', 'heads', 'kv'), (2, 3, 2)),
  'embedding': (('vocab', 'embed'), (5, 2)),
  'scale': (('norm',), (2,)),
  'bias': (('heads', 'kv'), (3, 2)),
  'span': (('heads',), (3,)),
  'table': (('ngram_vocab', 'ngram_embed'), (4, 2)),
}
DECAYING_WEIGHTS = {
  'matrices': {'kernel'},
  'matrices_and_embeddings': {'kernel', 'embedding'},
  'all': {'kernel', 'embedding', 'scale', 'bias'},
}


@pytest.mark.parametrize('on', DECAYING)
def test_updates_equal_adamw_by_hand(on):
  """Three steps of p <- p - rate (m / (sqrt(v) + epsilon) + decay p), the last term where it is."""
  rng = np.random.default_rng(0)
  boxed = {
    name: nn.LogicallyPartitioned(rng.uniform(0.2, 0.8, shape).astype(np.float32), axes)
    for name, (axes, shape) in WEIGHTS.items()
  }
  config = experiment.OptimizerConfig(
    schedule='constant', warmup_steps=0, clip_norm=None, weight_decay=3.0, weight_decay_on=on
  )
  mask = weight_decay.mask(config, boxed)
  optimizer = partition.make(config, 3, partition.labels(boxed), decay_mask=mask)
  params = nn.unbox(boxed)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  adam = experiment.AdamConfig()
  expected = {name: leaf.astype(np.float64) for name, leaf in params.items() if name != 'table'}
  m, v = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
  for step in range(1, 4):
    gradients = {name: rng.normal(size=leaf.shape) for name, leaf in params.items()}
    updates, state = update(gradients, state, params)
    params = jax.tree.map(np.add, params, updates)
    for name in expected:
      m[name] = adam.beta1 * m[name] + (1 - adam.beta1) * gradients[name]
      v[name] = adam.beta2 * v[name] + (1 - adam.beta2) * gradients[name] ** 2
      change = m[name] / (1 - adam.beta1**step)
      change = change / (np.sqrt(v[name] / (1 - adam.beta2**step)) + config.epsilon)
      if name in DECAYING_WEIGHTS[on]:
        change = change + config.weight_decay * expected[name]
      expected[name] = expected[name] - config.learning_rate * change
  for name, value in expected.items():
    np.testing.assert_allclose(params[name], value, rtol=2e-5, err_msg=name)


def test_nothing_decays_without_a_weight_decay():
  boxed = {'kernel': nn.LogicallyPartitioned(np.ones((2, 2)), ('embed', 'mlp'))}
  assert weight_decay.mask(experiment.OptimizerConfig(), boxed) == {'kernel': False}
  with_decay = experiment.OptimizerConfig(weight_decay=0.1)
  assert weight_decay.mask(with_decay, boxed) == {'kernel': True}


@pytest.mark.parametrize('layers', [3, 1])
def test_a_scan_over_layers_changes_no_kind(layers):
  plain = model_config.ModelConfig(width=16, layers=layers, heads=2, feed_forward_width=12)
  optimizer = experiment.OptimizerConfig(weight_decay=0.1)
  masks = []
  for scan_layers in (False, True):
    config = dataclasses.replace(plain, scan_layers=scan_layers)
    params = model_variables.abstract(language_model.build(config, drawn.V))['params']
    masks.append(weight_decay.mask(optimizer, params))
  assert masks[0] == masks[1]
  assert masks[0][f'layer_{layers - 1}']['feed_forward']['in'] == {'kernel': True}


class Layer(nn.Module):
  """A norm and a projection, in a model of somebody else."""

  @nn.compact
  def __call__(self, x_BxD, _):
    x_BxD = normalization.LayerNorm(name='norm')(x_BxD)
    options = {'use_bias': True, 'name': 'dense'}
    return dense.project(x_BxD, x_BxD.shape[-1], ('embed', 'mlp'), **options), None


def test_a_stack_of_norms_is_no_matrix():
  """In `nn.scan`, a norm of L layers is an array [L, D]."""
  scanned = nn.scan(
    Layer,
    variable_axes={'params': 0},
    split_rngs={'params': True},
    length=3,
    metadata_params={nn.PARTITION_NAME: 'layers'},
  )
  shapes = jax.eval_shape(scanned().init, jax.random.key(0), jnp.ones((2, 4)), None)
  mask = weight_decay.mask(experiment.OptimizerConfig(weight_decay=0.1), shapes['params'])
  vectors = {'scale': False, 'bias': False}
  assert mask == {'dense': {'kernel': True, 'bias': False}, 'norm': vectors}
