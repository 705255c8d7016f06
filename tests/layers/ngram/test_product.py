"""Token rows that multiply equal official codes: per-layer embeddings, STEM and DeepEmbed."""

import functools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.context import Context, EmbeddingLookup
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import block, memories
from tests.checks import assert_close, random_variables, reference_files
from tests.official_memories import FLOAT64, preset

TOLERANCE = 1e-9


class FeedForwardOfBlock(block.Block):
  """The feed-forward of a block, with the memories in it."""

  def empty_states(self, batch):
    return block.empty_memory(self.config, self.placed_memories, batch, 0)

  @nn.compact
  def __call__(self, x, context, states=None):
    if states is None:
      states = self.empty_states(len(x))
    return self._feed_forward(x, context, states, None)


def feed_forward(width, vocabulary, memory, **options):
  """The feed-forward of the only block of a model with a memory."""
  config = model_config.ModelConfig(
    layers=1, heads=1, width=width, ngram_memories=(memory,), dtype='float64', **options
  )
  config.check()
  config.check_vocabulary(vocabulary)
  (placed,) = memories.make(config, vocabulary).in_blocks
  return FeedForwardOfBlock(config, FLOAT64, placed)


def check_official(function, params_of, f, *names):
  """Output and gradients of parameters and of inputs are those of an array file.

  Args:
    function: from parameters and inputs to the output.
    params_of: parameters from the arrays of a prefix, `grad/` for their gradients.
    f: arrays by name.
    *names: names of the inputs.
  """

  def loss(*arrays):
    y = function(*arrays)
    return (y * f['cotangent']).sum(), y

  arrays = params_of(''), *(f[name] for name in names)
  gradient = jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))
  gradients, y = gradient(*arrays)
  expected = params_of('grad/'), *(f[f'grad/{name}'] for name in names)
  close = functools.partial(assert_close, tolerance=TOLERANCE)
  jax.tree.map(close, (y, gradients), (f['output'], expected))


def arrays_of(name):
  f = dict(np.load(reference_files(name)[name]))
  return f, json.loads(str(f['config']))


@pytest.mark.parametrize('name', reference_files('vp_ple*'))
def test_equals_the_per_layer_embeddings_of_gemma(x64, name):
  f, c = arrays_of(name)
  P, layer = c['width'], c['layer']
  own = slice(layer * P, (layer + 1) * P)  # of the projection of all layers
  options = preset(
    'gemma3n_ple',
    layers=tuple(range(c['layers'])),
    width=P,
    row_rule='exact',
    rows=(c['vocabulary'],),
    untrained_row=c['pad_id'],
    norm_epsilon=c['eps'],
  )
  V = int(f['ids'].max()) + 1
  memory = NGramMemory(options, V, c['D'], layer, dtype=FLOAT64)
  table = NGramMemory(options, V, c['D'], dtype=FLOAT64, is_table=True)

  def params_of(prefix):
    return {
      'table': f[f'{prefix}table'],
      'product': {
        'embedding': {'kernel': f[f'{prefix}model_projection'][own].T},
        'embedding_norm': {'scale': f[f'{prefix}projection_norm']},
        'gate': {'kernel': f[f'{prefix}gate'].T},
        'out': {'kernel': f[f'{prefix}projection'].T},
        'norm': {'scale': f[f'{prefix}post_norm']},
      },
    }

  def added(params, x, embeds):
    lookup = EmbeddingLookup(None, f['ids'], embeds)
    context = Context(tokens_BxT=f['ids'], vocabulary=lookup)
    rows, _ = table.apply({'params': {'table': params['table']}}, x, context)
    context = context.replace(shared={options.table: rows})
    y, _ = memory.apply({'params': {'product': params['product']}}, x, context)
    return y - x

  check_official(added, params_of, f, 'x', 'embeds')


def params_of_feed_forward(f, prefix, kernels):
  """The parameters of a feed-forward with these kernels and the table of an array file."""
  feed_forward = {name: {'kernel': kernel} for name, kernel in kernels.items()}
  return {'feed_forward': feed_forward, 'ngram_memory_0': {'table': f[f'{prefix}table']}}


@pytest.mark.parametrize('name', reference_files('vp_stem*'))
def test_equals_stem(x64, name):
  f, c = arrays_of(name)
  options = dict(feed_forward_width=c['hidden'], activation='silu', gated=True)
  layer = feed_forward(c['D'], c['vocabulary'], preset('stem', layers=(0,)), **options)
  context = Context(tokens_BxT=f['ids'])

  def params_of(prefix):
    kernels = {'gate': f[f'{prefix}w1'].T, 'out': f[f'{prefix}w2'].T}
    return params_of_feed_forward(f, prefix, kernels)

  shapes = jax.eval_shape(layer.init, jax.random.key(0), f['x'], context)
  expected = jax.tree.map(np.shape, params_of(''))
  assert jax.tree.map(jnp.shape, nn.unbox(shapes)['params']) == expected  # no up projection
  apply = lambda params, x: layer.apply({'params': params}, x, context)[0]
  check_official(apply, params_of, f, 'x')


@pytest.mark.parametrize('name', reference_files('vp_deepembed_v8*'))
def test_equals_deep_embed(x64, name):
  """The token shift before the feed-forward is not part of the memory."""
  f, c = arrays_of(name)
  options = dict(feed_forward_width=c['hidden'], activation='squared_relu', gated=False)
  layer = feed_forward(c['D'], c['vocabulary'], preset('deep_embed', layers=(0,)), **options)
  context = Context(tokens_BxT=f['ids'][None])

  def params_of(prefix):
    kernels = {'in': f[f'{prefix}key'], 'out': f[f'{prefix}value']}
    return params_of_feed_forward(f, prefix, kernels)

  def apply(params, x, x_k):
    before = jnp.concatenate([f['x_prev'][None], x[:-1]])
    shifted = x + (before - x) * x_k
    y, _ = layer.apply({'params': params}, shifted[None], context)
    return y[0]

  check_official(apply, params_of, f, 'x', 'x_k')


def rms(x, epsilon):
  return x / np.sqrt((x**2).mean() + epsilon)


@pytest.mark.parametrize('embedding_part', [False, True])
def test_a_product_equals_a_slow_loop(x64, embedding_part):
  """With rows of two orders and two hash heads beside each other, and another activation."""
  B, T, D, E, V = 2, 5, 6, 3, 11
  options = NGramMemoryConfig(
    join='product',
    point='after_block',
    layers=(0,),
    orders=(1, 2),
    heads=2,
    hash='polynomial',
    rows=(7,),
    row_rule='over_encoding',
    width=E,
    activation='relu',
    embedding_part=embedding_part,
    norm_epsilon=1e-2,
    norm_offset=True,
  )
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, (B, T))
  x, embedding = rng.normal(size=(2, B, T, D))
  memory = NGramMemory(options, V, D, dtype=FLOAT64)
  context = Context(tokens_BxT=tokens, vocabulary=EmbeddingLookup(None, tokens, embedding))
  variables = random_variables(memory, x, context, dtype='float64')
  actual, _ = jax.jit(memory.apply)(variables, x, context)
  params = jax.tree.map(np.asarray, variables['params'])
  p = params['product']
  for b in range(B):
    for t in range(T):
      previous = tokens[b, t - 1] if t else 0
      rows = [tokens[b, t] % 7, 7 + tokens[b, t] % 9]
      pair = tokens[b, t] + previous * V
      rows += [16 + pair % 7, 23 + pair % 9]
      u = (4 * E) ** 0.5 * params['table'][rows].ravel()
      if embedding_part:
        r = embedding[b, t] @ p['embedding']['kernel'] / D**0.5
        r = rms(r, 1e-2) * (1 + p['embedding_norm']['scale'])
        u = (r + u) / 2**0.5
      z = (np.maximum(x[b, t] @ p['gate']['kernel'], 0) * u) @ p['out']['kernel']
      y = x[b, t] + rms(z, 1e-2) * (1 + p['norm']['scale'])
      assert_close(actual[b, t], y, 1e-12)


@pytest.mark.parametrize('join', ['sum', 'multiply', 'replace'])
def test_rows_in_the_feed_forward_equal_a_slow_loop(x64, join):
  """Rows of 1- and 2-grams are joined to the up projection, in two segments with padding."""
  B, T, D, F, V = 2, 4, 4, 6, 9
  S = T - 1  # tokens of a segment
  memory = NGramMemoryConfig(
    join=join,
    point='feed_forward',
    layers=(0,),
    orders=(1, 2),
    heads=1,
    hash='polynomial',
    rows=(5,),
    row_rule='exact',
    width=None,
  )
  layer = feed_forward(D, V, memory, feed_forward_width=F, activation='relu')
  rng = np.random.default_rng(0)
  tokens, x = rng.integers(0, V, (B, T), np.int32), rng.normal(size=(B, T, D))
  valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])

  def segment(first, valid):
    own = slice(first, first + S)
    context = Context(
      tokens_BxT=tokens[:, own], documents_BxT=np.zeros((B, S), np.int32), valid_BxT=valid
    )
    return x[:, own], context

  first, second = segment(0, valid[:, :S] * [1, 0, 0]), segment(1, valid[:, 1:])
  variables = random_variables(layer, *first, dtype='float64')
  apply = jax.jit(layer.apply)
  y1, states = apply(variables, *first, layer.empty_states(B))
  y2, _ = apply(variables, *second, states)
  actual = np.concatenate([y1[:, :1], y2], axis=1)
  params = jax.tree.map(np.asarray, variables['params'])
  kernels = {name: leaf['kernel'] for name, leaf in params['feed_forward'].items()}
  assert ('in' in kernels) == (join != 'replace')
  for b in range(B):
    for t in range(T):
      previous = tokens[b, t - 1] if t else 0
      table = params['ngram_memory_0']['table']
      one, two = table[tokens[b, t] % 5], table[5 + (tokens[b, t] + previous * V) % 5]
      match join:
        case 'sum':
          up = x[b, t] @ kernels['in'] + one + two
        case 'multiply':
          up = x[b, t] @ kernels['in'] * one * two
        case 'replace':
          up = one + two
      y = (np.maximum(x[b, t] @ kernels['gate'], 0) * up) @ kernels['out']
      assert_close(actual[b, t], y * valid[b, t], 1e-12)
