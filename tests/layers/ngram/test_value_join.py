"""Rows in the values of attention equal the official codes, and loops written from the formulas."""

import dataclasses
import functools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.ngram.memory import VALUE_JOINS as JOINS
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.value_gate import ValueGateConfig
from ngrammer_jax.layers import context as contexts
from ngrammer_jax.layers.attention import position
from ngrammer_jax.layers.attention.attention import Attention
from ngrammer_jax.layers.attention.projection import Projections
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.ngram.value_join import ValueJoin
from tests.checks import assert_close, random_variables, reference_files, rest_is_full

FLOAT64 = jnp.dtype('float64')
TOLERANCE = 1e-12
TOKEN_ROWS = dict(
  point='values',
  layers=(0,),
  orders=(1,),
  heads=1,
  hash='id',
  row_rule='vocabulary',
  join='sum',
)


def value_and_gradients(function, cotangent, *arrays):
  """Results of a function (y, aux) of arrays, and the gradients of the sum of y R."""

  @jax.jit
  def run(arrays):
    def loss(arrays):
      y, aux = function(*arrays)
      return (y * cotangent).sum(), (y, aux)

    gradients, (y, aux) = jax.grad(loss, has_aux=True)(arrays)
    return y, aux, gradients

  return run(arrays)


def attend(f, c, options, params, x, rope_base, norm_scale):
  """Attention with a memory in its values: the output, and the values."""
  D, N, V = c['D'], c['heads'], c['vocabulary']
  C = c.get('kv_heads', N)
  H = D // N
  ids = jnp.asarray(f['ids'].reshape(-1, c['T']), jnp.int32)
  B, T = ids.shape
  layer = NGramMemory(options, V, C * H, dtype=FLOAT64, key_heads=C)
  projections = Projections(norm='head', norm_epsilon=c['eps'])
  attention = Attention(heads=N, key_heads=C, projections=projections, dtype=FLOAT64)
  starts = jnp.zeros((B, T), bool)
  segment = contexts.Segment(jnp.zeros((B, T), jnp.int32), starts, tokens_BxT=ids)
  window = c.get('window', -1)
  context, _ = contexts.make(segment, contexts.Visibility(None if window < 0 else window + 1))
  angles = position.rotation(jnp.arange(T), H, max_timescale=rope_base, dtype=FLOAT64)
  context = context.replace(positions=context.positions.replace(rotation=angles))
  heads = lambda w: w.T.reshape(D, -1, H)
  # Their angles are ours negated: the halves of a head change places.
  swapped = lambda w: jnp.roll(heads(w), H // 2, axis=-1)
  variables = {
    'query': {'kernel': swapped(params['c_q'])},
    'key': {'kernel': swapped(params['c_k'])},
    'value': {'kernel': heads(params['c_v'])},
    'out': {'kernel': params['c_proj'].T.reshape(N, H, D)},
    'query_norm': {'scale': jnp.full(H, norm_scale)},
    'key_norm': {'scale': jnp.full(H, norm_scale)},
  }

  def add_rows(v, inputs):
    of_memory = {'params': params['memory']}
    y, _ = layer.apply(of_memory, v.reshape(B, T, -1), context.replace(inputs_BxPxD=inputs))
    return y.reshape(v.shape)

  y, projected = attention.apply({'params': variables}, x, context, value_fn=add_rows)
  return y, projected.values_BxTxCxH


QUICK = ('vp_ve_nanochat_gqa',)
WEIGHTS = ('c_q', 'c_k', 'c_v', 'c_proj')


@pytest.mark.parametrize('name', rest_is_full(sorted(reference_files('vp_ve_nanochat*')), QUICK))
def test_equals_attention_of_nanochat(name, reference, x64):
  f = reference(name)
  c = json.loads(str(f['config']))
  options = NGramMemoryConfig(
    **TOKEN_ROWS,
    width=f['table'].shape[1],
    value_gate=ValueGateConfig(f['ve_gate'].shape[1], factor=3.0),
  )
  params = {key: f[key] for key in WEIGHTS}
  params['memory'] = {'table': f['table'], 'values': {'gate_weights': f['ve_gate'].T}}
  run = lambda params, x: attend(f, c, options, params, x, c['rotary_base'], 1.2)
  y, v, (d_params, d_x) = value_and_gradients(run, f['cotangent'], params, f['x'])
  assert_close(y, f['output'], TOLERANCE)
  assert_close(v, f['v'], TOLERANCE)  # what a KV cache holds
  assert_close(d_x, f['grad/x'], TOLERANCE)
  for key in WEIGHTS:
    assert_close(d_params[key], f[f'grad/{key}'], TOLERANCE)
  assert_close(d_params['memory']['table'], f['grad/table'], TOLERANCE)
  assert_close(d_params['memory']['values']['gate_weights'].T, f['grad/ve_gate'], TOLERANCE)


@pytest.mark.parametrize('name', sorted(reference_files('vp_ve_record14*')))
def test_equals_attention_of_record_14(name, reference, x64):
  f = reference(name)
  c = json.loads(str(f['config']))
  options = NGramMemoryConfig(**TOKEN_ROWS | {'join': 'interpolation'}, width=c['D'])
  columns = slice(c['layer'] * c['D'], (c['layer'] + 1) * c['D'])
  params = {key: f[key] for key in WEIGHTS}
  params['memory'] = {'table': f['table'][:, columns], 'values': {'mix': f['lamb'].reshape(1)}}
  run = lambda params, x: attend(f, c, options, params, x, c['rotary_base'], 1.0)
  y, _, (d_params, d_x) = value_and_gradients(run, f['cotangent'], params, f['x'])
  assert_close(y, f['output'], TOLERANCE)
  assert_close(d_x, f['grad/x'], TOLERANCE)
  for key in WEIGHTS:
    assert_close(d_params[key], f[f'grad/{key}'], TOLERANCE)
  assert_close(d_params['memory']['table'], f['grad/table'][:, columns], TOLERANCE)
  assert_close(d_params['memory']['values']['mix'][0], f['grad/lamb'], TOLERANCE)


@pytest.mark.parametrize('name', sorted(reference_files('vp_ve_gates*')))
@pytest.mark.parametrize('record, channels, row_channels', [('x12', 12, 0), ('x6_ve6', 6, 6)])
def test_equals_gates_of_records_55_and_70(name, reference, x64, record, channels, row_channels):
  f = reference(name)
  N = len(f['gate'])
  join = ValueJoin(heads=N, gate=ValueGateConfig(channels, row_channels), dtype=FLOAT64)

  def run(table, weights, x):
    e = table[f['ids']][None]
    return join.apply({'params': {'gate_weights': weights}}, jnp.zeros_like(e), x, e), None

  cotangent = f[f'{record}/cotangent'].reshape(f['x'].shape)
  y, _, gradients = value_and_gradients(run, cotangent, f['table'], f['gate'].T, f['x'])
  assert_close(y, f[f'{record}/aux_v'].reshape(y.shape), TOLERANCE)
  for gradient, key in zip(gradients, ('table', 'gate', 'x'), strict=True):
    gradient = gradient.T if key == 'gate' else gradient
    assert_close(gradient, f[f'{record}/grad/{key}'], TOLERANCE)


@pytest.mark.parametrize('name', sorted(reference_files('vp_host_ngrams*')))
def test_equals_host_tables_of_nanochat(name, reference, x64):
  f = reference(name)
  c = json.loads(str(f['config']))
  options = NGramMemoryConfig(
    point='values',
    layers=tuple(range(c['slices'])),
    orders=tuple(c['orders']),
    heads=c['weights'][0],
    hash='salted',
    row_rule='shared_prime',
    rows=(c['table_size'],),
    width=c['slice_width'],
    boundary='none',
    join='sum',
    table='host',
    sliced=True,
    projection=True,
    value_gate=ValueGateConfig(c['gate_channels'], factor=1.0, mean=True, per_head=False),
  )
  D, V = c['D'], c['vocabulary']
  make = functools.partial(NGramMemory, options, V, D, dtype=FLOAT64)
  table, layer = make(is_table=True), make(block=c['layer'], key_heads=2)
  context = Context(tokens_BxT=jnp.asarray(f['ids'], jnp.int32))
  zeros = jnp.zeros(f['x'].shape)

  def run(rows, gate, up, x):
    variables = {'params': {'table': rows}}
    (looked_up, _), seen = table.apply(variables, zeros, context, mutable=['intermediates'])
    in_values = context.replace(inputs_BxPxD=x, shared={'host': looked_up})
    variables = {'params': {'values': {'gate_weights': gate.T, 'projection': up.T}}}
    y, _ = layer.apply(variables, zeros, in_values)
    return y, seen['intermediates']['lookup'][0]['rows']

  arrays = f['table'], f['gate'], f['up'], f['x']
  y, rows, gradients = value_and_gradients(run, f['cotangent'], *arrays)
  np.testing.assert_array_equal(np.moveaxis(rows, -1, 0), f['buckets'])
  assert_close(y, f['output'], TOLERANCE)
  for gradient, key in zip(gradients, ('table', 'gate', 'up', 'x'), strict=True):
    assert_close(gradient, f[f'grad/{key}'], TOLERANCE)


def slow(o, x, v, e, p, heads):
  """The formulas of `value_join` in loops."""
  y = np.zeros_like(v)
  H = v.shape[-1] // heads
  for b, t in np.ndindex(v.shape[:2]):
    row = e[b, t]
    if 'projection' in p:
      row = row @ p['projection']
    for h in range(heads):
      of_head = slice(h * H, (h + 1) * H)
      of_row = row[of_head]
      if o.get('head') is not None:
        of_row = row if h == o['head'] else np.zeros(H)
      if o['gate'] is not None:
        g = o['gate']
        z = np.concatenate([x[b, t, : g.channels], e[b, t, : g.row_channels]])
        w = p['gate_weights'][:, h % p['gate_weights'].shape[1]]
        score = z @ w / (len(z) if g.mean else 1)
        if g.bias is not None:
          score += p['gate_bias'][h % len(p['gate_bias'])]
        of_row = g.factor / (1 + np.exp(-score)) * of_row
      value = v[b, t, of_head]
      match o['kind']:
        case 'sum':
          y[b, t, of_head] = value + of_row
        case 'interpolation':
          y[b, t, of_head] = (1 - p['mix'][0]) * value + p['mix'][0] * of_row
        case 'weighted_sum':
          y[b, t, of_head] = p['mix'][0] * value + p['mix'][1] * of_row
  return y


ONE_HEAD = ValueGateConfig(3, factor=1.0, bias=-3.0, initial=0.02, mean=True)
ONE_GATE = ValueGateConfig(4, 1, factor=3.0, bias=0.5, per_head=False)
CASES = {
  'no gate': (dict(kind='weighted_sum', gate=None), 6),
  'one head': (dict(kind='sum', head=1, gate=ONE_HEAD), 2),
  'projected': (dict(kind='interpolation', is_projected=True, gate=ValueGateConfig(2, 3)), 5),
  'one gate': (dict(kind='sum', gate=ONE_GATE), 6),
}


@pytest.mark.parametrize('name', rest_is_full(CASES, ('one head',)))
def test_equals_a_slow_loop(name, x64):
  o, M = CASES[name]
  rng = np.random.default_rng(0)
  v, x, e = (rng.normal(size=(2, 3, width)) for width in (6, 5, M))
  join = ValueJoin(heads=3, dtype=FLOAT64, **o)
  variables = random_variables(join, v, x, e, dtype='float64')
  p = jax.tree.map(np.asarray, variables['params'])
  assert_close(jax.jit(join.apply)(variables, v, x, e), slow(o, x, v, e, p, 3), TOLERANCE)


def test_a_neutral_memory_returns_the_values_and_learns():
  """Either the rows are 0, or their weight: then the other one has a gradient."""
  v, x = np.random.default_rng(0).normal(size=(2, 1, 5, 6)).astype('float32')
  context = Context(tokens_BxT=jnp.arange(5)[None], inputs_BxPxD=x)

  def run(join):
    options = NGramMemoryConfig(**TOKEN_ROWS | {'join': join}, width=6, start='neutral')
    layer = NGramMemory(options, 9, 6, key_heads=2)
    params = nn.unbox(layer.init(jax.random.key(0), v, context)['params'])
    loss = lambda params: layer.apply({'params': params}, v, context)[0].sum()
    return layer.apply({'params': params}, v, context)[0], jax.grad(loss)(params), params

  for join, (y, gradient, params) in jax.jit(lambda: {j: run(j) for j in JOINS})().items():
    np.testing.assert_array_equal(y, v)
    assert np.any(params['table']) == (join == 'interpolation')
    learns = gradient['values']['mix'] if join == 'interpolation' else gradient['table'][:5]
    assert np.all(learns != 0), join


def test_blocks_and_width_follow_from_the_model():
  for preset, layers, blocks in (
    ('value_embeddings', 5, (0, 2, 4)),
    ('nanochat_values', 4, (1, 3)),
    ('nanochat_values', 1, (0,)),
  ):
    memory = NGramMemoryConfig.from_preset(preset)
    model = ModelConfig(layers=layers, width=48, heads=6, key_value_heads=2)
    assert [place.block for place in memory.places(layers)] == [*blocks]
    assert memory.resolved(model).layers == blocks
    assert memory.resolved(model).width == 2 * 8
    assert dataclasses.replace(memory, one_head=True).resolved(model).width == 8


@pytest.mark.full
def test_a_uniform_table_has_the_deviation_of_the_projection():
  """That of the model width, as published, also where the rows are narrower."""
  options = NGramMemoryConfig(
    **TOKEN_ROWS,
    width=8,
    table_initial='uniform',
    deviation=None,
    value_gate=ValueGateConfig(channels=2),
  )
  layer = NGramMemory(options, 50, 8, key_heads=2, model_width=32)
  v, x = np.zeros((1, 1, 8), 'float32'), np.zeros((1, 1, 32), 'float32')
  context = Context(tokens_BxT=jnp.zeros((1, 1), jnp.int32), inputs_BxPxD=x)
  table = nn.unbox(layer.init(jax.random.key(0), v, context))['params']['table']
  assert 0.9 * 3**0.5 < 32**0.5 * np.abs(table).max() <= 3**0.5


def test_values_that_are_projected_again_have_their_rows():
  """The last tokens of a segment with padding, before the next one; those before the stream."""
  options = NGramMemoryConfig(
    **TOKEN_ROWS | dict(orders=(1, 2), heads=1, hash='polynomial', row_rule='exact'),
    **dict(rows=(9,), width=3, value_gate=ValueGateConfig(channels=2)),
  )
  layer = NGramMemory(options, 9, 6, key_heads=2)
  rng = np.random.default_rng(0)
  v, x = rng.normal(size=(2, 1, 7, 6)).astype('float32')
  tokens = rng.integers(0, 9, (1, 7), np.int32)
  context = Context(tokens_BxT=tokens, inputs_BxPxD=x)
  variables = random_variables(layer, v, context)
  apply = jax.jit(layer.apply)
  expected, _ = apply(variables, v, context)

  state = layer.empty_state(1, slots=3)
  places = np.array([0, 0, 0, 0, 1, 2, 3, 0])  # three before the stream, four tokens, padding
  padded = Context(
    tokens_BxT=tokens[:, places[3:]],
    inputs_BxPxD=x[:, places],
    valid_BxT=jnp.array([[1, 1, 1, 1, 0]]),
  )
  y, state = apply(variables, v[:, places], padded, state)
  assert_close(y[:, :3], v[:, [0, 0, 0]], 1e-6)
  assert_close(y[:, 3:7], expected[:, :4], 1e-6)
  second = Context(tokens_BxT=tokens[:, 4:], inputs_BxPxD=x[:, 1:])
  y, _ = apply(variables, v[:, 1:], second, state)
  assert_close(y, expected[:, 1:], 1e-6)
