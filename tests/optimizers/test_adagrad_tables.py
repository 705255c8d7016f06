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


def train(model, optimizer, variables):
  """Returns the parameters after three steps."""

  def loss(params, codebook):
    variables = {'params': params, 'codebook': codebook}
    logits, updated = model.apply(variables, TOKENS[:, :-1], mutable=['codebook'])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
    return nll.mean(), updated.get('codebook', {})

  @jax.jit
  def step(params, codebook, state):
    gradient, codebook = jax.grad(loss, has_aux=True)(params, codebook)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), codebook, state

  params, codebook = variables['params'], variables.get('codebook', {})
  state = optimizer.init(params)
  for _ in range(3):
    params, codebook, state = step(params, codebook, state)
  return nn.unbox(params)


@pytest.mark.parametrize('memory', ['ngrammer', 'engram'])
def test_equals_the_optimizer_spelled_out(memory):
  model = Model(memory)
  variables = model.init(jax.random.key(0), TOKENS)
  optimizer = with_adagrad_tables(optax.adamw(1e-2), variables['params'])
  label = lambda path, _: 'table' if "['table']" in jax.tree_util.keystr(path) else 'dense'
  adagrad = optax.adagrad(0.01, initial_accumulator_value=0.0, eps=1e-20)
  spelled_out = optax.partition(
    {'dense': optax.adamw(1e-2), 'table': adagrad},
    lambda params: jax.tree_util.tree_map_with_path(label, params),
  )
  unboxed = nn.unbox(variables)
  expected = train(model, spelled_out, unboxed)
  jax.tree.map(np.testing.assert_array_equal, train(model, optimizer, unboxed), expected)
  jax.tree.map(np.testing.assert_array_equal, train(model, optimizer, variables), expected)


def test_parameters_without_names_are_refused():
  model = Model('ngrammer')
  params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS))['params']
  with pytest.raises(ValueError, match='no parameter has the logical axis ngram_vocab: pass the'):
    with_adagrad_tables(optax.adamw(1e-2), params)
