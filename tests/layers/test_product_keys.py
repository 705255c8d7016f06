"""Product keys against a loop over all sums of scores, and against the official arrays."""

import functools
import itertools
import json
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.product_keys import memory, weighted_rows
from ngrammer_jax.training import flops
from tests import checks
from tests.layers import programs

D, E, TOKENS = 6, 5, (2, 3)
SMALL = {'sub_keys': 5, 'heads': 2, 'top': 4, 'key_width': 4}
CASES = {
  'plain': {},
  'query norm, gate': {'norm': 'query', 'gated': True, 'value_width': E},
  'both norms, swilu': {'norm': 'query_key', 'swilu': True, 'value_width': E},
  'experts, more than a half has': {'top': 7, 'experts': True},
}


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def rms(x, scale):
  return x / np.sqrt((x**2).mean() + 1e-6) * scale


def read_token(options, params, tables, x):
  """The output for one token, from all n^2 sums."""
  o = options
  values, inputs = tables
  y = np.zeros(values.shape[1])
  for head in range(o.heads):
    scores = np.zeros((2, o.sub_keys))
    for half, features in enumerate(np.split(np.arange(o.key_width), 2)):
      q = x @ params['query']['kernel'][:, head, features] + params['query']['bias'][head, features]
      if o.norm == 'query':
        q = q / np.sqrt((q**2).sum())
      if o.norm == 'query_key':
        q = rms(q, params['query_norm']['scale'])
      for number, key in enumerate(params['sub_keys'][head, half]):
        if o.norm == 'query_key':
          key = rms(key, params['sub_key_norm']['scale'])
        scores[half, number] = q @ key
    sums = {}
    for i, j in itertools.product(range(o.sub_keys), repeat=2):
      sums[i * o.sub_keys + j] = scores[0, i] + scores[1, j]
    best = sorted(sums, key=sums.get)[-o.top :]
    total = sum(np.exp(sums[row]) for row in best)
    for row in best:
      factor = 1.0
      if o.experts:
        p = x @ inputs[row]
        factor = p * (1 + math.erf(p / math.sqrt(2))) / 2
      y += np.exp(sums[row]) / total * factor * values[row]
  linear = lambda name, x: x @ params[name]['kernel'] + params[name]['bias']
  if o.swilu:
    s = linear('swilu', x)
    y = y * s * sigmoid(s)
  if o.has_projection:
    y = linear('value', y)
  if o.gated:
    y = y * sigmoid(linear('gate', x))
  return y


@pytest.mark.parametrize('name', CASES)
def test_all_sums_of_scores(name, monkeypatch):
  """The memory equals a loop over all n^2 sums; padding is 0."""
  monkeypatch.setattr(weighted_rows, 'MAX_VALUES', 64)  # several chunks, the last one shorter
  options = ProductMemoryConfig(**SMALL | CASES[name])
  rng = np.random.default_rng(1)
  x = rng.normal(size=(*TOKENS, D))
  values = rng.normal(size=(options.rows, options.value_width or D))
  inputs = rng.normal(size=(options.rows, D)) if options.experts else None
  with jax.enable_x64():
    layer = memory.ProductMemory(options, jnp.float64)
    valid = np.array([[1, 1, 1], [1, 0, 0]])
    tables = memory.Tables(values, inputs)
    context = Context(valid_BxT=valid, shared={memory.TABLES: tables})
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x, context)['params']
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), nn.unbox(shapes))
    y, state = programs.apply(layer, {'params': params}, x, context)
  assert state is None
  expected = np.zeros((*TOKENS, D))
  for place in zip(*np.nonzero(valid), strict=True):
    expected[place] = read_token(options, params, (values, inputs), x[place])
  checks.assert_close(y, expected, 1e-12)


def test_a_query_of_zeros_has_a_finite_gradient():
  options = ProductMemoryConfig(**SMALL, norm='query')
  layer = memory.ProductMemory(options)
  x = np.zeros((*TOKENS, D), np.float32)
  context = Context(shared={memory.TABLES: memory.Tables(np.ones((25, D), np.float32), None)})
  params = checks.random_variables(layer, x, context)['params']
  params['query'] = jax.tree.map(np.zeros_like, params['query'])
  loss = lambda p: layer.apply({'params': p}, x, context)[0].sum()
  gradient = jax.jit(jax.grad(loss))(params)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def official_params(arrays, prefix, options):
  """The parameters of a layer of an array file."""
  H, k = options.heads, options.key_width
  linear = lambda name: {
    'kernel': arrays[f'{prefix}{name}_weight'].T,
    'bias': arrays[f'{prefix}{name}_bias'],
  }
  query = linear('query')
  params = {
    'query': {'kernel': query['kernel'].reshape(-1, H, k), 'bias': query['bias'].reshape(H, k)},
    'sub_keys': arrays[f'{prefix}keys'].reshape(H, 2, options.sub_keys, k // 2),
  }
  if options.has_projection:
    params['value'] = linear('value_proj')
  if options.swilu:
    params['swilu'] = linear('swilu_projection')
  if options.gated:
    params['gate'] = linear('gating')
  return params


FILES = checks.reference_files('vp_pk*')


@pytest.mark.parametrize('name', FILES)
def test_official_arrays(name):
  """Outputs, look-ups and gradients, of one layer or of a second one on the same values."""
  arrays = dict(np.load(FILES[name]))
  config = json.loads(str(arrays.pop('config')))
  if config['peer']:
    pytest.skip('PEER has two tables')
  value_width = None if config['v_dim'] < 0 else config['v_dim']
  options = ProductMemoryConfig(
    sub_keys=config['sub_keys'],
    heads=config['heads'],
    top=config['knn'],
    key_width=config['k_dim'],
    value_width=value_width,
    swilu=config['swilu'],
    gated=config['gated'],
  )
  prefixes = ('', 'second/') if config['shared'] else ('',)
  with jax.enable_x64():
    layer = memory.ProductMemory(options, jnp.float64)
    params = [official_params(arrays, prefix, options) for prefix in prefixes]

    def apply(first, values, x):
      lookups = []
      for layer_params in (first, *params[1:]):
        variables = {'params': layer_params}
        tables = memory.Tables(values)
        x, recorded = layer.apply(variables, x, tables, method='read', mutable='intermediates')
        lookups += recorded['intermediates']['lookup']
      return (x * arrays['cotangent']).sum(), (x, lookups)

    differentiate = jax.jit(jax.grad(apply, argnums=(0, 1, 2), has_aux=True))
    gradient, (y, lookups) = differentiate(params[0], arrays['values_weight'], arrays['x'])
  checks.assert_close(y, arrays[f'{prefixes[-1]}output'], 1e-12)
  order = np.argsort(lookups[0]['rows'], axis=-1)
  expected_order = np.argsort(arrays['indices'], axis=-1)
  take = np.take_along_axis
  rows = take(np.asarray(lookups[0]['rows']), order, -1)
  np.testing.assert_array_equal(rows, take(arrays['indices'], expected_order, -1))
  weights = take(np.asarray(lookups[0]['weights']), order, -1)
  checks.assert_close(weights, take(arrays['weights'], expected_order, -1), 1e-12)
  gradients = {name.removeprefix('grad/'): arrays[name] for name in arrays if 'grad/' in name}
  checks.assert_close(gradient[1], gradients['values_weight'], 1e-12)
  checks.assert_close(gradient[2], gradients['x'], 1e-12)
  expected = official_params(gradients, '', options)
  jax.tree.map(functools.partial(checks.assert_close, tolerance=1e-12), gradient[0], expected)


def test_memory_of_the_gradient_does_not_hold_the_rows_of_all_tokens():
  """16,384 tokens with 128 rows of 2,048 values; products alone count as FLOPs."""
  options = ProductMemoryConfig(sub_keys=64, heads=4, top=32, key_width=512)
  layer = memory.ProductMemory(options)
  D, tokens = 2048, 16_384
  shape = jax.ShapeDtypeStruct
  x, values = shape((8, tokens // 8, D), 'float32'), shape((options.rows, D), 'float32')
  key = jax.eval_shape(lambda: jax.random.key(0))
  read = functools.partial(layer.apply, method='read')
  init = functools.partial(layer.init, method='read')
  variables = nn.unbox(jax.eval_shape(init, key, x, memory.Tables(values)))

  def loss(variables, values, x):
    return (read(variables, x, memory.Tables(values)) ** 2).sum()

  gradient = jax.jit(jax.grad(loss, (0, 1, 2))).lower(variables, values, x).compile()
  all_rows = tokens * 4 * 32 * D * 4
  assert gradient.memory_analysis().temp_size_in_bytes < 0.12 * all_rows
  counted = flops.matrix_flops(jax.make_jaxpr(read)(variables, x, memory.Tables(values)))
  assert counted == 2 * tokens * (D * 4 * 512 + 4 * 512 * 64 + 4 * 32 * D)


V, WIDE, B = 64, 4, 16
MESHES = [(2, 2, 2), (1, 8, 1)] + [checks.full(shape) for shape in ((8, 1, 1), (1, 2, 4))]


@functools.cache
def sums_example():
  """A table, rows, weights, vectors of tokens, and both functions of them with their gradients."""
  rng = np.random.default_rng(0)
  table_VxE = rng.normal(size=(V, WIDE)).astype(np.float32)
  rows = rng.integers(0, V, (B, 5, 3)).astype(np.int32)
  w = rng.normal(size=(B, 5, 3)).astype(np.float32)
  x = rng.normal(size=(B, 5, WIDE)).astype(np.float32)
  taken = table_VxE[rows]
  d_table = np.zeros((V, WIDE))
  for place in np.ndindex(rows.shape):
    d_table[rows[place]] += w[place] * x[place[:2]]
  sums = np.einsum('btj,btje->bte', w, taken)
  products = np.einsum('bte,btje->btj', x, taken)
  return (table_VxE, rows, w, x), (sums, products, d_table)


@pytest.mark.parametrize('shape', MESHES)
def test_sums_on_any_mesh(shape, monkeypatch):
  """In chunks, on eight devices: sums, products, and the gradients of both."""
  monkeypatch.setattr(weighted_rows, 'MAX_VALUES', 2 * 3 * WIDE * 2)
  arrays, expected = sums_example()

  @jax.jit
  def compute(table_VxE, rows, w, x):
    sums, of_sums = jax.vjp(lambda t, w: weighted_rows.weighted_sums(t, rows, w), table_VxE, w)
    products, of_products = jax.vjp(lambda t, x: weighted_rows.products(t, rows, x), table_VxE, x)
    return (sums, products), of_sums(x), of_products(w)

  with sharding.use(sharding.make_mesh(*shape)):
    (sums, products), (d_table, d_w), (d_table_of_products, d_x) = compute(*arrays)
  actual = (sums, products, d_table, d_table_of_products)
  for one, other in zip(actual, (*expected, expected[2]), strict=True):
    checks.assert_close(one, other, 2e-6)
  checks.assert_close(d_w, expected[1], 2e-6)
  checks.assert_close(d_x, expected[0], 2e-6)
