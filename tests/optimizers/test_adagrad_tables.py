"""The optimizer for models of one's own, which the README shows."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ngrammer_jax.config import NGramMemoryConfig
from ngrammer_jax.layers import NGramMemory, NGrammer, context
from ngrammer_jax.optimizers import with_adagrad_tables
from tests.checks import full

V, WIDTH = 50, 16
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 9)))
OPTIONS = NGramMemoryConfig(
  key='tokens', join='gate', layers=(1,), orders=(2, 3), rows=(60,), heads=2, width=4, convolution=2
)


class Model(nn.Module):
  """An embedding, a memory and an output layer."""

  memory: str

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(V, WIDTH)(tokens)
    if self.memory == 'ngrammer':
      x = NGrammer(heads=2, clusters=4, vocabulary_size=64, dim=4, return_memory=False)(x)
    else:
      memory = NGramMemory(OPTIONS, vocabulary_size=V, width=WIDTH, block=1)
      x, _ = memory(x, context.Context(tokens_BxT=tokens))
    return nn.Dense(V)(x)


def random_like(tree, seed):
  """Random numbers of the shapes of a tree; half of the rows of tables are 0, as not looked up."""
  rng = np.random.default_rng(seed)

  def draw(leaf):
    values = rng.normal(size=leaf.shape) * rng.integers(0, 2, (len(leaf), *[1] * (leaf.ndim - 1)))
    return jnp.asarray(values, jnp.float32)

  return jax.tree.map(draw, tree)


def after_three_steps(optimizer, params):
  """The parameters after three steps with random gradients."""
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  for step in range(3):
    updates, state = update(random_like(params, step), state, params)
    params = optax.apply_updates(params, updates)
  return nn.unbox(params)


@pytest.mark.parametrize('memory', ['ngrammer', full('engram')])
def test_equals_the_optimizer_spelled_out(memory):
  shapes = jax.eval_shape(Model(memory).init, jax.random.key(0), TOKENS)['params']
  params = random_like(shapes, 9)
  optimizer = with_adagrad_tables(optax.adamw(1e-2), shapes)
  label = lambda path, _: 'table' if "['table']" in jax.tree_util.keystr(path) else 'dense'
  adagrad = optax.adagrad(0.01, initial_accumulator_value=0.0, eps=1e-20)
  spelled_out = optax.partition(
    {'dense': optax.adamw(1e-2), 'table': adagrad},
    lambda params: jax.tree_util.tree_map_with_path(label, params),
  )
  expected = after_three_steps(spelled_out, nn.unbox(params))
  with_names = after_three_steps(optimizer, params)
  jax.tree.map(np.testing.assert_array_equal, with_names, expected)
  without_names = after_three_steps(optimizer, nn.unbox(params))
  jax.tree.map(np.testing.assert_array_equal, without_names, expected)


def test_the_state_has_the_axis_names_of_the_parameters():
  """So it is sharded like them: the specs have the structure of the unboxed state."""
  shapes = jax.eval_shape(Model('ngrammer').init, jax.random.key(0), TOKENS)['params']
  optimizer = with_adagrad_tables(optax.adamw(1e-2), shapes)
  state = jax.eval_shape(optimizer.init, shapes)
  specs = nn.get_partition_spec(state)
  without_names = jax.eval_shape(lambda: optimizer.init(nn.unbox(random_like(shapes, 9))))
  assert jax.tree.structure(specs) == jax.tree.structure(without_names)
  table_specs = []
  for path, spec in jax.tree_util.tree_leaves_with_path(specs):
    if "['table']" in jax.tree_util.keystr(path[-1:]):
      table_specs.append(spec)
  assert table_specs == [jax.P('ngram_vocab', 'ngram_embed')]


def test_parameters_without_names_are_refused():
  model = Model('ngrammer')
  params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS))['params']
  with pytest.raises(ValueError, match='no parameter has the logical axis ngram_vocab: pass the'):
    with_adagrad_tables(optax.adamw(1e-2), params)
