"""A table that several layers and memories read: one lookup, and the sum of their gradients."""

import functools

import flax
import jax
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import row_reader
from ngrammer_jax.layers.ngram import host_rows
from ngrammer_jax.models import transformer
from tests.checks import assert_close, mesh_of, random_variables, rest_is_full

LAYERS, V, T = 3, 13, 6
# The hash is the same in all layers.
TABLE = {'hash': 'polynomial', 'row_rule': 'exact', 'rows': (17,), 'boundary': 'none'}
SUM = TABLE | {'join': 'sum', 'orders': (2,), 'heads': 1, 'width': 8, 'factor': 0.1}
GATE = TABLE | {'join': 'gate', 'heads': 2, 'width': 3, 'convolution': 2}
pytestmark = pytest.mark.usefixtures('x64')
TOKENS = np.random.default_rng(0).integers(0, V, (2, T))


def model_of(*memories, **fields):
  """A model with these memories."""
  config = model_config.ModelConfig(
    layers=LAYERS,
    width=8,
    heads=2,
    feed_forward_width=8,
    dtype='float64',
    ngram_memories=tuple(NGramMemoryConfig(**memory) for memory in memories),
    **fields,
  )
  config.check()
  return transformer.TransformerLM(config, V)


def run(model, variables):
  """The hidden states, and the gradient of the sum of their cubes by name."""

  def loss(params):
    hidden, *_ = model.apply(
      variables | {'params': params}, TOKENS, model.empty_memory(len(TOKENS))
    )
    return (hidden**3).sum(), hidden

  gradient, hidden = jax.jit(jax.grad(loss, has_aux=True))(variables['params'])
  return hidden, flax.traverse_util.flatten_dict(gradient, sep='/')


@functools.cache
def run_shared(*memories):
  """Variables of a model with these memories, its hidden states and gradients."""
  model = model_of(*map(dict, memories))
  variables = random_variables(model, TOKENS, model.empty_memory(len(TOKENS)), dtype='float64')
  return variables, *run(model, variables)


@pytest.mark.parametrize(
  'memories, places',
  [
    ([SUM | {'every_block': True}], [(0, 0), (1, 0), (2, 0)]),
    pytest.param(
      [GATE | {'layers': (2, 0)}, GATE | {'layers': (1,)}],
      [(0, 0), (2, 0), (1, 1)],
      marks=pytest.mark.full,
    ),
  ],
)
def test_a_shared_table_is_like_equal_tables_of_all_layers(memories, places):
  shared = [tuple((memory | {'table': 'grams'}).items()) for memory in memories]
  variables, hidden, gradient = run_shared(*shared)
  own = []
  for memory in memories:
    layers = memory.get('layers', tuple(range(LAYERS)))
    own.append(
      {name: memory[name] for name in memory if name != 'every_block'} | {'layers': layers}
    )
  params = flax.traverse_util.flatten_dict(variables['params'], sep='/')
  table = params.pop('ngram_table_grams/table')
  tables = [f'layer_{layer}/ngram_memory_{number}/table' for layer, number in places]
  params |= {name: table for name in tables}
  params = flax.traverse_util.unflatten_dict(params, sep='/')
  own_hidden, own_gradient = run(model_of(*own), variables | {'params': params})
  assert_close(hidden, own_hidden, 1e-12)
  assert_close(
    gradient['ngram_table_grams/table'], sum(own_gradient[name] for name in tables), 1e-12
  )


@pytest.mark.parametrize('remat', rest_is_full(['none', 'full'], ['full']))
def test_blocks_that_read_one_table_are_scanned(remat):
  memory = SUM | {'every_block': True, 'table': 'grams'}
  variables, *expected = run_shared(tuple(memory.items()))
  scanned = model_of(memory, remat=remat, scan_layers=True)
  actual = [*run(scanned, variables)]
  jax.tree.map(lambda one, other: assert_close(one, other, 1e-12), actual, expected)

  def apply(variables):
    return scanned.apply(variables, TOKENS, scanned.empty_memory(len(TOKENS)))[0]

  assert f'length={LAYERS}' in str(jax.make_jaxpr(apply)(variables))


@pytest.mark.full
def test_each_layer_reads_its_slice():
  """Like the layers of a memory with a table of their own, whose rows stand side by side."""
  shared = model_of(GATE | {'layers': (2, 0), 'table': 'grams', 'sliced': True})
  variables = random_variables(shared, TOKENS, shared.empty_memory(len(TOKENS)), dtype='float64')
  hidden, _ = run(shared, variables)
  params = flax.traverse_util.flatten_dict(variables['params'], sep='/')
  table = params.pop('ngram_table_grams/table')
  params['layer_2/ngram_memory_0/table'] = table[:, :3]
  params['layer_0/ngram_memory_0/table'] = table[:, 3:]
  params = flax.traverse_util.unflatten_dict(params, sep='/')
  expected, _ = run(model_of(GATE | {'layers': (2, 0)}), variables | {'params': params})
  assert_close(hidden, expected, 1e-12)


@pytest.mark.full
def test_rows_of_a_shared_table_in_host_memory_are_looked_up_ahead():
  """Once for all layers that read them; the model then needs no table."""
  memory = SUM | {'every_block': True, 'table': 'grams', 'signs': 5}
  on_device = model_of(memory)
  on_host = model_of(memory | {'table_memory': 'host'})
  variables = random_variables(
    on_device, TOKENS, on_device.empty_memory(len(TOKENS)), dtype='float64'
  )
  expected, _ = run(on_device, variables)
  starts = np.zeros(TOKENS.shape, bool)
  segment = token_batch.Batch(TOKENS, None, starts, None)
  read = row_reader.RowReader(on_host, mesh_of(1), variables, len(TOKENS))
  with_rows = read(segment)
  assert with_rows[host_rows.VALUES].keys() == {'ngram_table_grams'}
  assert 'ngram_table_grams' not in with_rows['params']
  hidden, *_ = on_host.apply(with_rows, TOKENS, on_host.empty_memory(len(TOKENS)))
  assert_close(hidden, expected, 1e-12)
