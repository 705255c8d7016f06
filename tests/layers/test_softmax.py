import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import softmax
from tests import jaxprs
from tests.checks import assert_close

B, T, D, V = 2, 3, 4, 11

token_scores = jax.jit(softmax.token_scores, static_argnums=4)


def random_case(V=V):
  rng = np.random.default_rng(0)
  arrays = rng.normal(size=(B, T, D)), rng.normal(size=(V, D)), rng.normal(size=V)
  return arrays, rng.integers(0, V, (B, T)), rng.normal(size=(B, T))


def log_softmax(hidden, weight, bias):
  logits = hidden @ weight.T + bias
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def slow_gradients(hidden, weight, bias, targets, cotangent):
  """Of sum(nll * cotangent): softmax minus the one-hot target, carried back."""
  logit_BxTxV = np.exp(log_softmax(hidden, weight, bias)) - np.eye(V)[targets]
  logit_BxTxV *= cotangent[..., None]
  return (
    logit_BxTxV @ weight,
    np.einsum('btv,btd->vd', logit_BxTxV, hidden),
    logit_BxTxV.sum(axis=(0, 1)),
  )


@pytest.mark.parametrize('chunk', [None, 1, 3, 4, 10, V, 50])
def test_likelihood_and_gradients_equal_log_softmax(x64, chunk):
  arrays, targets, cotangent = random_case()
  best = log_softmax(*arrays).argmax(axis=-1)
  targets[0] = best[0]  # some right guesses, some wrong

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def gradients(arrays):
    scores = token_scores(*arrays, jnp.asarray(targets), chunk)
    return (scores.nll_BxT * cotangent).sum(), scores

  actual, scores = gradients(arrays)
  expected = -np.take_along_axis(log_softmax(*arrays), targets[..., None], axis=-1)[..., 0]
  assert_close(scores.nll_BxT, expected, 1e-12)
  assert scores.correct_BxT.tolist() == (best == targets).tolist()
  expected = slow_gradients(*arrays, targets, cotangent)
  jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, 1e-12), actual, expected)


@pytest.mark.parametrize('chunk', [None, 4])
def test_no_bias_is_a_bias_of_zero(x64, chunk):
  (hidden, weight, _), targets, _ = random_case()
  nll = token_scores(hidden, jnp.asarray(weight), None, targets, chunk).nll_BxT
  expected = -np.take_along_axis(log_softmax(hidden, weight, 0), targets[..., None], axis=-1)
  assert_close(nll, expected[..., 0], 1e-12)
  logits = softmax.full_logits(jnp.asarray(hidden), jnp.asarray(weight), None)
  assert_close(logits, hidden @ weight.T, 1e-12)


@pytest.mark.parametrize('chunk', [None, 1, 3, 4, 8])
def test_lowest_id_wins_a_tie(chunk):
  # The bias alone decides, and its maximum stands in every chunk.
  bias = jnp.asarray([0, 2, 5, 1, 5, 5, 0, 5, 5, 5, 5], 'float32')
  correct = token_scores(
    jnp.zeros((1, V, D)), jnp.zeros((V, D)), bias, jnp.arange(V)[None], chunk
  ).correct_BxT
  assert np.flatnonzero(correct[0]).tolist() == [2]


@pytest.mark.parametrize('chunk', [None, 4])
def test_uniform_model_has_the_entropy_of_the_vocabulary(chunk):
  targets = jnp.arange(V)[None]
  scores = token_scores(jnp.zeros((1, V, D)), jnp.ones((V, D)), None, targets, chunk)
  np.testing.assert_allclose(scores.nll_BxT, np.log(V), rtol=1e-6)


@pytest.mark.parametrize('chunk', [None, 4])
@pytest.mark.parametrize('shift', [-1e4, 1e4])
def test_large_logits_stay_finite(chunk, shift):
  bias = jnp.asarray([shift, shift + 3, *[shift - 1e4] * (V - 2)])
  targets = jnp.asarray([[0, 1, 2]])
  nll = lambda bias: token_scores(
    jnp.zeros((1, 3, D)), jnp.zeros((V, D)), bias, targets, chunk
  ).nll_BxT.sum()
  value, gradient = jax.jit(jax.value_and_grad(nll))(bias)
  # The two likely ids share the probability as 1 : e^3, the third is 1e4 below the first.
  np.testing.assert_allclose(value, 3 * np.log(1 + np.exp(3)) - 3 + 1e4, rtol=1e-5)
  assert jnp.isfinite(gradient).all()


def test_bfloat16_hidden_states_have_a_float32_likelihood():
  (hidden, weight, bias), targets, _ = random_case()
  hidden, weight = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, 'float32')
  nll = token_scores(hidden, weight, jnp.asarray(bias, 'float32'), targets, 4).nll_BxT
  assert nll.dtype == jnp.float32
  rounded = [np.asarray(a.astype(jnp.bfloat16), 'float64') for a in (hidden, weight)]
  expected = -np.take_along_axis(log_softmax(*rounded, bias), targets[..., None], axis=-1)
  assert_close(nll, expected[..., 0], 1e-5)


def test_logits_of_a_batch_exist_only_unchunked():
  (hidden, weight, bias), targets, _ = random_case(V=64)

  def largest(chunk):
    nll = lambda *arrays: softmax.token_scores(*arrays, targets, chunk).nll_BxT.sum()
    return jaxprs.largest_array(jax.value_and_grad(nll, argnums=(0, 1, 2)), hidden, weight, bias)

  assert largest(None) >= B * T * 64
  # The weights and their gradient are all of the vocabulary there is.
  assert largest(8) == 64 * D < B * T * 64
