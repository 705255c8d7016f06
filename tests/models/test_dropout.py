"""What is dropped, where, and when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import dropout
from ngrammer_jax.layers.attention import relative
from ngrammer_jax.layers.context import Context, Keys, Positions
from ngrammer_jax.models import language_model
from tests.models.test_transformer import (
  SMALL,
  B,
  T,
  count,
  random_tokens,
  small_model,
  variables_of,
)

KINDS = ('dropout', 'attention_dropout', 'inner_dropout')


def draws(model, variables, train=True):
  """How many arrays of random bits a segment takes."""
  memory = language_model.empty_memory(model.config, B)

  def segment(variables):
    rngs = {'dropout': jax.random.key(0)}
    return model.apply(variables, random_tokens(), memory, train=train, rngs=rngs)[0]

  return count('random_bits', segment, variables)


@pytest.mark.full
def test_where_dropout_draws():
  """Behind the embeddings, every sub-layer, and a result without a norm; in training alone."""
  fields = {'ngram': None, 'scan_layers': False}
  layers, variables = SMALL['layers'], variables_of(small_model(**fields))
  for kind, places in zip(KINDS, (1 + 2 * layers, layers, layers), strict=True):
    model = small_model(**{kind: 0.5}, **fields)
    assert draws(model, variables) == places, kind
  model = small_model(**dict.fromkeys(KINDS, 0.5), final_norm=False, **fields)
  assert draws(model, variables) == 2 + 4 * layers
  assert draws(model, variables, train=False) == 0


@pytest.mark.full
def test_layers_drop_for_themselves_and_share_the_encodings_of_distances(monkeypatch):
  """They are encoded once for a model (Transformer-XL, pos_emb), and dropped once."""
  calls, drop = [], dropout.drop

  def spy(x, rate, key):
    y = drop(x, rate, key)
    if key is not None:  # the encodings themselves, and where other things are dropped
      calls.append(y if x.ndim == 2 else drop(jnp.ones_like(x), rate, key))
    return y

  monkeypatch.setattr(dropout, 'drop', spy)
  fields = {'position': 'relative', 'ngram': None, 'scan_layers': False}
  model = small_model(dropout=0.5, **fields)
  args = variables_of(model), random_tokens(), language_model.empty_memory(model.config, B)

  @jax.jit
  def dropped(key):
    model.apply(*args, train=True, rngs={'dropout': key})
    return list(calls)

  arrays = list(map(np.asarray, dropped(jax.random.key(0))))
  calls.clear()
  first, second = (array for array in arrays if array.ndim == 2)
  np.testing.assert_array_equal(first, second)
  encoded = np.asarray(relative.encodings(T, SMALL['width'], relative_to_zero=False))[::-1]
  assert 0.3 < (first == 0).mean() < 0.7
  nonzero = first != 0
  np.testing.assert_allclose(first[nonzero], 2 * encoded[nonzero], rtol=1e-5)
  other_masks = {array.tobytes() for array in arrays if array.shape == (B, T, SMALL['width'])}
  assert len(other_masks) == 1 + 2 * SMALL['layers']  # of the embeddings and every sub-layer


@pytest.mark.full
def test_what_is_dropped_of_a_distance_does_not_depend_on_the_others():
  layer = relative.RelativePosition(width=8, dropout=0.5)
  q = np.ones((1, 1, 1, 4), np.float32)
  params = {'position': {'kernel': np.random.default_rng(0).normal(size=(8, 1, 4))}}

  @functools.partial(jax.jit, static_argnums=0)
  def scores(S):
    context = Context(
      keys=Keys(key_documents_BxS=np.zeros((1, S))),
      positions=Positions(distance_key=jax.random.key(0)),
    )
    return relative.scores(
      relative.DistanceTerm(q, *layer.apply({'params': params}, context, 1, 4))
    )[0, 0, 0]

  few, many = scores(5), scores(9)
  np.testing.assert_allclose(few, many[-5:], rtol=1e-6)


@pytest.mark.full
def test_the_dropout_of_an_adaptive_softmax_is_that_of_embeddings_and_result():
  def model_of(model_dropout, own):
    adaptive = model_config.AdaptiveSoftmaxConfig(cutoffs=(5,), dropout=own)
    fields = {'ngram': None, 'norm': 'post_skip', 'final_norm': False, 'scan_layers': False}
    return small_model(adaptive_softmax=adaptive, dropout=model_dropout, layers=1, **fields)

  model = model_of(0.0, 0.5)
  variables = variables_of(model)
  assert draws(model, variables) == 2
  assert draws(model_of(0.5, 0.0), variables) == 2  # of the sub-layers
  assert draws(model_of(0.5, None), variables) == 2 + 2
  memory = language_model.empty_memory(model.config, B)
  apply = jax.jit(lambda variables, key: model.apply(
    variables, random_tokens(), memory, train=True, rngs={'dropout': key}
  )[0])  # fmt: skip
  assert 0.3 < (np.asarray(apply(variables, jax.random.key(0))) == 0).mean() < 0.7
