"""No token hears of a later one, nor of another document: by gradient and by another token.

The full product of some switches; drawn ones are in test_segmentation.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import language_model, transformer
from tests.checks import random_variables

T = V = 8
PLAIN = model_config.ModelConfig(
  layers=2, width=16, heads=2, feed_forward_width=24, scan_layers=False, softmax_bias=False
)
NGRAM = model_config.NGramConfig(clusters=5, vocabulary_size=32, dim=3)
PRIMER = {'convolution': 3, 'activation': 'squared_relu', 'gated': False}
LAYERS = ('input', 'middle', 'end', 'attention')
TOKENS = np.random.default_rng(0).permutation(V)[None]  # every token once
DOCUMENTS = np.array([0, 0, 0, 1, 1, 1, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('primer', [False, True])
@pytest.mark.parametrize(
  'change',
  [
    *({'layer': layer, 'orders': orders} for layer in LAYERS for orders in [(2,), (2, 3)]),
    {'layer': 'attention', 'pairing': ('attended',)},
    {'layer': 'attention', 'pairing': ('previous', 'attended')},
  ],
  ids=str,
)
def test_a_token_hears_of_its_own_past_alone(change, primer, packed):
  ngram = dataclasses.replace(NGRAM, **change)
  config = dataclasses.replace(PLAIN, ngram=ngram, **(PRIMER if primer else {}))
  model = transformer.TransformerLM(config, V)
  memory = language_model.empty_memory(config, 1)
  variables = random_variables(model, TOKENS, memory)
  numbers = DOCUMENTS if packed else np.zeros(T, int)
  starts = np.diff(numbers, prepend=-1)[None] != 0
  past = np.array([[s <= t and numbers[s] == numbers[t] for s in range(T)] for t in range(T)])

  @jax.jit
  def run(embedding, tokens):
    params = variables['params'] | {'embedding': embedding}
    hidden, _, _ = model.apply(variables | {'params': params}, tokens, memory, starts_BxT=starts)
    return hidden[0]

  # By gradient: through everything that is continuous.
  weights = jnp.asarray(np.random.default_rng(1).normal(size=16), 'float32')
  jacobian = jax.jacrev(lambda embedding: run(embedding, TOKENS) @ weights)
  embedding = variables['params']['embedding']
  reached_TxV = jnp.abs(jacobian(embedding)).sum(axis=-1) > 0
  assert reached_TxV[:, TOKENS[0]].tolist() == past.tolist()
  # By another token: through the clusters and hashes too.
  plain = run(embedding, TOKENS)
  for place, other in itertools.product(range(T), (1, 5)):
    changed = TOKENS.copy()
    changed[0, place] = (changed[0, place] + other) % V
    differs = jnp.abs(run(embedding, changed) - plain).sum(axis=-1) > 0
    assert not (differs & ~past[:, place]).any()
    assert differs[place]
