"""An n-gram memory in an own model: docs/python_api.md to the letter, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import NGramMemoryConfig
from ngrammer_jax.layers import NGramMemory, context
from tests import documentation

PAGE = documentation.ROOT / 'docs' / 'python_api.md'
OPTIONS = NGramMemoryConfig(preset='engram', key='tokens', layers=1, rows=50, width=4)


def blocks_of_the_page():
  """The code of the part on a mesh, decoding and checkpoints."""
  texts = [block.text for block in documentation.blocks(PAGE) if block.language == 'python']
  (first,) = (i for i, text in enumerate(texts) if 'class ModelWithEngram' in text)
  return texts[first : first + 3]


def test_a_mesh_decoding_and_checkpoints_of_an_own_model(tmp_path):
  names = {'folder': tmp_path}
  for text in blocks_of_the_page():
    exec(text, names)
  table = names['variables']['params']['engram']['table']
  assert dict(names['mesh'].shape) == {'data': 2, 'model': 4}
  assert table.sharding.spec[0] == 'model'
  assert table.addressable_shards[0].data.shape == (len(table) // 4, 16)
  (accumulator,) = jax.tree.leaves(names['train_state']['optimizer'].inner_states['table'])
  assert accumulator.sharding == table.sharding and accumulator.shape == table.shape
  assert names['restored']['variables']['params']['engram']['table'].sharding == table.sharding
  np.testing.assert_allclose(names['decoded_logits'], names['logits'], rtol=1e-4, atol=1e-4)
  jax.tree.map(np.testing.assert_array_equal, names['restored'], names['saved'])


def test_rows_that_the_mesh_does_not_divide_are_an_error_of_jax(tmp_path):
  """As the page says: `row_multiple` is needed."""
  text = blocks_of_the_page()[0]
  assert 'row_multiple=SHARDS' in text
  with pytest.raises(ValueError, match='16826.*should evenly divide the shape') as caught:
    exec(text.replace(', row_multiple=SHARDS', ''), {})
  assert type(caught.value).__name__ == 'IndivisibleError'


def apply(*arguments, tokens=None, jit=False, **options):
  memory = NGramMemory(OPTIONS, vocabulary_size=9, width=8, block=1)
  x, tokens = jnp.ones((2, 3, 8)), jnp.zeros((2, 3), jnp.int32) if tokens is None else tokens
  in_context = context.Context(tokens_BxT=tokens)
  variables = memory.init(jax.random.key(0), x, context.Context(tokens_BxT=jnp.zeros((2, 3), int)))
  return memory.apply(variables, x, *(arguments or (in_context,)), **options)


def test_wrong_arguments_have_their_own_messages():
  with pytest.raises(TypeError, match=r'pass context.Context\(tokens_BxT=tokens\)'):
    apply(jnp.zeros((2, 3), jnp.int32))
  memory = NGramMemory(OPTIONS, vocabulary_size=9, width=8, block=1)
  with pytest.raises(ValueError, match=r'but the input has 2 rows: .* or empty_state\(2\)'):
    apply(context.Context(tokens_BxT=jnp.zeros((2, 3), jnp.int32)), memory.empty_state(3))
  with pytest.raises(ValueError, match='context.tokens_BxT contain 9, expected ids from 0 to 8'):
    apply(tokens=jnp.full((2, 3), 9))
