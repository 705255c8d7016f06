"""What is dropped, where, and when."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers import dropout, relative
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import assert_close
from tests.models.test_transformer import (
  SMALL,
  B,
  T,
  count,
  loss_and_gradient,
  random_tokens,
  run,
  small_model,
  variables_of,
)


def test_a_result_without_a_norm_is_dropped_too():
  share = {}
  for final_norm in (True, False):
    model = small_model(final_norm=final_norm, norm='post_skip', dropout=0.5, ngram=None)
    memory, rngs = transformer.empty_memory(model.config, B), {'dropout': jax.random.key(0)}
    given = variables_of(model), random_tokens(), memory
    hidden, _, _ = model.apply(*given, train=True, rngs=rngs)
    share[final_norm] = float((hidden == 0).mean())
  assert share[True] == 0 and 0.3 < share[False] < 0.7


@pytest.mark.parametrize('position', ['rope', 'relative'])
def test_scanned_unrolled_and_recomputed_layers_agree_under_dropout(position):
  variables = variables_of(small_model(ngram=None, position=position))

  def result(**fields):
    model = small_model(ngram=None, position=position, dropout=0.3, **fields)
    return jax.jit(loss_and_gradient(model, variables))(variables['params'])

  expected = result(scan_layers=False)
  for fields in ({}, {'remat': 'full'}, {'scan_layers': False, 'remat': 'minimal'}):
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), result(**fields), expected)


def test_dropout_draws_per_key_and_only_in_training():
  model = small_model(ngram=None, dropout=0.5)
  variables, tokens = variables_of(small_model(ngram=None)), random_tokens()
  memory = transformer.empty_memory(model.config, B)

  @jax.jit
  def train(seed):
    rngs = {'dropout': jax.random.key(seed)}
    return model.apply(variables, tokens, memory, train=True, rngs=rngs)[0]

  first, again, second = train(0), train(0), train(1)
  np.testing.assert_array_equal(first, again)
  assert (first != second).any(axis=-1).all()
  # In evaluation no key is needed.
  evaluated, _ = run(model, variables, tokens)
  np.testing.assert_array_equal(evaluated, run(small_model(ngram=None), variables, tokens)[0])


def test_dropout_stands_behind_the_embeddings_and_every_sublayer():
  model = small_model(dropout=0.5, scan_layers=False)
  variables = variables_of(model)
  draws = count('random_bits', loss_and_gradient(model, variables), variables['params'])
  assert draws == 1 + 2 * SMALL['layers']


@pytest.mark.parametrize('kind', ['dropout', 'attention_dropout', 'inner_dropout'])
@pytest.mark.parametrize('scan', [False, True])
def test_every_dropout_drops_in_training_alone(kind, scan):
  model = small_model(**{kind: 0.5}, scan_layers=scan)
  variables = variables_of(model)
  plain, _ = run(small_model(scan_layers=scan), variables, random_tokens())
  np.testing.assert_array_equal(run(model, variables, random_tokens())[0], plain)
  draws = [
    run(model, variables, random_tokens(), train=True, rngs={'dropout': jax.random.key(seed)})[0]
    for seed in (0, 0, 1)
  ]
  np.testing.assert_array_equal(draws[0], draws[1])
  assert (draws[0] != draws[2]).any() and (draws[0] != plain).any()


def test_layers_share_what_is_dropped_of_the_encodings_of_distances(monkeypatch):
  """They are encoded once for a model (Transformer-XL, pos_emb), and dropped once."""
  seen, drop = [], dropout.drop

  def spy(x, rate, key):
    seen.extend([drop(x, rate, key)] * (x.ndim == 2 and key is not None))
    return drop(x, rate, key)

  monkeypatch.setattr(dropout, 'drop', spy)
  fields = {'position': 'relative', 'ngram': None, 'scan_layers': False}
  model = small_model(dropout=0.5, **fields)
  given = variables_of(model), random_tokens(), transformer.empty_memory(model.config, B)
  model.apply(*given, train=True, rngs={'dropout': jax.random.key(0)})
  first, second = seen
  np.testing.assert_array_equal(first, second)
  encoded = relative.encodings(T, SMALL['width'], less_first=False)[::-1]
  assert 0.3 < (first == 0).mean() < 0.7
  kept = np.asarray(first != 0)
  np.testing.assert_allclose(np.asarray(first)[kept], 2 * np.asarray(encoded)[kept], rtol=1e-5)


def test_what_is_dropped_of_a_distance_does_not_depend_on_the_others():
  layer, key = relative.RelativePosition(1, dropout=0.5), jax.random.key(0)
  q = np.ones((1, 1, 1, 4), np.float32)
  params = {'position': {'kernel': np.random.default_rng(0).normal(size=(8, 1, 4))}}
  few, many = (layer.apply({'params': params}, q, 8, S, dropout_key=key)[0, 0, 0] for S in (5, 9))
  np.testing.assert_allclose(few, many[-5:], rtol=1e-6)


def test_the_dropout_of_an_adaptive_softmax_is_that_of_embeddings_and_result():
  def zeros(of_model, own):
    adaptive = model_config.AdaptiveSoftmaxConfig(cutoffs=(5,), dropout=own)
    fields = {'ngram': None, 'norm': 'post_skip', 'final_norm': False}
    model = small_model(adaptive_softmax=adaptive, dropout=of_model, **fields)
    memory, rngs = transformer.empty_memory(model.config, B), {'dropout': jax.random.key(0)}
    hidden, _, _ = model.apply(variables_of(model), random_tokens(), memory, train=True, rngs=rngs)
    return float((hidden == 0).mean())

  assert zeros(0.5, None) > 0.3 and zeros(0.0, 0.5) > 0.3
  assert zeros(0.5, 0.0) == zeros(0.0, None) == 0
