import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import softmax
from tests import jaxprs
from tests.checks import assert_close

B, T, D, V = 2, 11, 4, 11
# All at once, a word at a time, chunks that leave a rest; and more words than there are.
CHUNKS = [None, 1, 4]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
ALL_CHUNKS = [*CHUNKS, *map(slow, (3, 8, 10, V, 50))]


def random_case(V=V):
  rng = np.random.default_rng(0)
  arrays = rng.normal(size=(B, T, D)), rng.normal(size=(V, D)), rng.normal(size=V)
  return arrays, rng.integers(0, V, (B, T)), rng.normal(size=(B, T))


@functools.partial(jax.jit, static_argnums=3)
def gradients(arrays, targets, cotangent, chunk):
  """Of the weighted likelihood, and the scores."""

  def weighted(arrays):
    scores = softmax.token_scores(*arrays, targets, chunk)
    return (scores.nll_BxT * cotangent).sum(), scores

  return jax.grad(weighted, has_aux=True)(arrays)


def log_softmax(hidden, weight, bias):
  logits = hidden @ weight.T + bias
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def take_targets(log_probs, targets):
  return np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def slow_gradients(hidden, weight, bias, targets, cotangent):
  """Of sum(nll * cotangent): softmax minus the one-hot target, carried back."""
  logit_BxTxV = np.exp(log_softmax(hidden, weight, bias)) - np.eye(V)[targets]
  logit_BxTxV *= cotangent[..., None]
  return (
    logit_BxTxV @ weight,
    np.einsum('btv,btd->vd', logit_BxTxV, hidden),
    logit_BxTxV.sum(axis=(0, 1)),
  )


def assert_equals_log_softmax(arrays, targets, cotangent, chunk):
  """Likelihoods, right guesses and gradients."""
  best = log_softmax(*arrays).argmax(axis=-1)
  targets[0] = best[0]  # some right guesses, some wrong
  actual, scores = gradients(arrays, targets, cotangent, chunk)
  assert_close(scores.nll_BxT, -take_targets(log_softmax(*arrays), targets), 1e-12)
  assert scores.correct_BxT.tolist() == (best == targets).tolist()
  expected = slow_gradients(*arrays, targets, cotangent)
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), actual, expected)


@pytest.mark.full
@pytest.mark.parametrize('chunk', ALL_CHUNKS)
def test_likelihood_and_gradients_equal_log_softmax(x64, chunk):
  assert_equals_log_softmax(*random_case(), chunk)


def test_blocks_of_tokens_equal_log_softmax(x64, monkeypatch):
  """The scores and gradients in a loop, for the longest blocks that divide the segment."""
  monkeypatch.setattr(softmax, 'MIN_BLOCK', 2 * V)
  hidden, weight, bias = random_case()[0]
  rng = np.random.default_rng(1)
  arrays = rng.normal(size=(B, 12, 1)), weight[:, :1], bias
  targets, cotangent = rng.integers(0, V, (B, 12)), rng.normal(size=(B, 12))
  assert_equals_log_softmax(arrays, targets, cotangent, None)
  score = lambda *arrays: softmax.token_scores(*arrays, targets)
  assert jaxprs.largest_array(score, *arrays) < B * 12 * V


EVERY_WORD = np.tile(np.arange(V), (B, 1))


@pytest.mark.parametrize('chunk', ALL_CHUNKS)
def test_lowest_id_wins_a_tie(x64, chunk):
  # The bias alone decides, and its maximum stands in every chunk.
  bias = np.array([0, 2, 5, 1, 5, 5, 0, 5, 5, 5, 5.0])
  args = np.zeros((B, T, D)), np.zeros((V, D)), bias
  _, scores = gradients(args, EVERY_WORD, np.ones((B, T)), chunk)
  assert np.flatnonzero(scores.correct_BxT[0]).tolist() == [2]


@pytest.mark.parametrize('chunk', CHUNKS)
def test_uniform_model_has_the_entropy_of_the_vocabulary(x64, chunk):
  args = np.zeros((B, T, D)), np.ones((V, D)), np.zeros(V)
  _, scores = gradients(args, EVERY_WORD, np.ones((B, T)), chunk)
  assert_close(scores.nll_BxT, np.full((B, T), np.log(V)), 1e-12)


@pytest.mark.parametrize('chunk', CHUNKS)
@pytest.mark.parametrize('shift', [-1e4, 1e4])
def test_large_logits_stay_finite(x64, chunk, shift):
  args = np.zeros((B, T, D)), np.zeros((V, D)), np.full(V, shift - 1e4)
  args[2][:2] = shift, shift + 3
  gradient, scores = gradients(args, EVERY_WORD, np.ones((B, T)), chunk)
  # The two likely ids share the probability as 1 : e^3, the third is 1e4 below the first.
  value = scores.nll_BxT[0, :3].sum()
  np.testing.assert_allclose(value, 3 * np.log(1 + np.exp(3)) - 3 + 1e4, rtol=1e-12)
  assert all(np.isfinite(leaf).all() for leaf in gradient)


def test_no_bias_is_a_bias_of_zero(x64):
  (hidden, weight, _), targets, _ = random_case()

  @jax.jit
  def without(hidden, weight):
    nlls = [softmax.token_scores(hidden, weight, None, targets, chunk).nll_BxT for chunk in CHUNKS]
    return nlls, softmax.full_logits(hidden, weight, None)

  nlls, logits = without(hidden, weight)
  for nll in nlls:
    assert_close(nll, -take_targets(log_softmax(hidden, weight, 0), targets), 1e-12)
  assert_close(logits, hidden @ weight.T, 1e-12)


def test_bfloat16_hidden_states_have_a_float32_likelihood():
  (hidden, weight, bias), targets, _ = random_case()
  narrow = jnp.dtype(jnp.bfloat16)
  score = jax.jit(lambda *arrays: softmax.token_scores(*arrays, targets, 4).nll_BxT)
  nll = score(hidden.astype(narrow), weight.astype('float32'), bias.astype('float32'))
  assert nll.dtype == jnp.float32
  rounded = [a.astype('float32').astype(narrow).astype('float64') for a in (hidden, weight)]
  assert_close(nll, -take_targets(log_softmax(*rounded, bias), targets), 1e-5)


@pytest.mark.parametrize('chunk', [None, 4])
def test_logits_may_be_stored_in_bfloat16(chunk):
  """The likelihood is that of the rounded products, in float32."""
  (hidden, weight, bias), targets, _ = random_case()
  score = lambda *arrays: softmax.token_scores(*arrays, targets, chunk, None, 'bfloat16').nll_BxT
  narrow = [array.astype(jnp.bfloat16) for array in (hidden, weight)]
  nll = jax.jit(score)(*narrow, bias.astype('float32'))
  product = narrow[0].astype('float32') @ narrow[1].astype('float32').T
  logits = product.astype(jnp.bfloat16).astype('float64') + bias
  expected = -take_targets(log_softmax(logits, np.eye(V), 0), targets)
  assert nll.dtype == jnp.float32
  assert_close(nll, expected, 1e-5)


def test_all_logits_may_be_stored_in_bfloat16():
  (hidden, weight, bias), *_ = random_case()
  narrow = [array.astype(jnp.bfloat16) for array in (hidden, weight)]
  product = narrow[0].astype('float32') @ narrow[1].astype('float32').T
  for stored, rounded in ((None, product), ('bfloat16', product.astype(jnp.bfloat16))):
    logits = softmax.full_logits(*narrow, bias.astype('float32'), stored=stored)
    assert logits.dtype == jnp.float32
    assert_close(logits, rounded.astype('float64') + bias, 1e-5)
  assert not np.array_equal(product, product.astype(jnp.bfloat16))


def test_gradients_in_bfloat16_are_exact_to_the_rounding_of_their_operands():
  """Hidden states, weights, and the gradient of the logits: at most three times 2^-9 of each."""
  arrays, targets, cotangent = random_case()
  narrow = [*(array.astype(jnp.bfloat16) for array in arrays[:2]), arrays[2].astype('float32')]
  rounded = [np.asarray(array, 'float64') for array in narrow]
  expected = slow_gradients(*rounded, targets, cotangent)
  for chunk in CHUNKS:
    actual, _ = gradients(narrow, targets, cotangent.astype('float32'), chunk)
    for ours, exact in zip(actual, expected, strict=True):
      assert_close(np.asarray(ours, 'float64'), exact, 2**-8)


@pytest.mark.parametrize('chunk', [None, 4])
def test_products_of_a_bfloat16_gradient_have_bfloat16_operands(chunk):
  """Logits, and the gradients of hidden states and weights; chunks compute the logits again."""
  hidden, weight, bias = random_case()[0]
  narrow = hidden.astype(jnp.bfloat16), weight.astype('float32'), bias.astype('float32')
  _, targets, cotangent = random_case()
  program = functools.partial(gradients, chunk=chunk)
  products = jaxprs.operand_dtypes(program, narrow, targets, cotangent.astype('float32'))
  assert products == [{'bfloat16'}] * (3 if chunk is None else 4)


@pytest.fixture
def gradients_on_a_tpu(monkeypatch):
  """`gradients` with the operations of a TPU, traced anew."""
  monkeypatch.setattr(softmax.mesh_axes, 'device', lambda: ('tpu', 'TPU v5'))
  return jax.jit(gradients.__wrapped__, static_argnums=3)


@pytest.mark.parametrize('chunk', CHUNKS)
def test_a_tpu_sums_the_gradient_of_the_bias_in_the_product_of_the_weight(
  x64, gradients_on_a_tpu, chunk
):
  """Equal to the slow gradients; there is no other sum over tokens."""
  arrays, targets, cotangent = random_case()
  actual, _ = gradients_on_a_tpu(arrays, targets, cotangent, chunk)
  expected = slow_gradients(*arrays, targets, cotangent)
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), actual, expected)
  program = functools.partial(gradients_on_a_tpu, chunk=chunk)
  jaxpr = jax.make_jaxpr(program)(arrays, targets, cotangent).jaxpr
  over_tokens = []
  for equation in jaxprs.equations(jaxpr):
    if equation.primitive.name == 'reduce_sum' and equation.invars[0].aval.ndim == 3:
      over_tokens.append(equation.params['axes'] != (2,))
  assert over_tokens and not any(over_tokens)


def test_the_gradient_of_the_bias_on_a_tpu_is_exact_to_bfloat16(gradients_on_a_tpu):
  arrays, targets, cotangent = random_case()
  rounded = [np.asarray(jnp.asarray(each, jnp.bfloat16), 'float64') for each in arrays[:2]]
  narrow = *(each.astype(jnp.bfloat16) for each in rounded), arrays[2].astype('float32')
  actual, _ = gradients_on_a_tpu(narrow, targets, cotangent.astype('float32'), None)
  expected = slow_gradients(*rounded, narrow[2].astype('float64'), targets, cotangent)
  for ours, exact in zip(actual, expected, strict=True):
    assert_close(np.asarray(ours, 'float64'), exact, 2**-7)
  assert actual[2].dtype == 'float32'


def test_the_gradient_keeps_one_array_of_the_size_of_the_logits():
  """The products; and nothing of their size with chunks."""
  arrays, targets, _ = random_case(V=64)

  def kept(chunk):
    score = lambda *arrays: softmax.token_scores(*arrays, targets, chunk, 30.0).nll_BxT
    pull_back = jax.eval_shape(lambda *arrays: jax.vjp(score, *arrays)[1], *arrays)
    return sum(leaf.size == B * T * 64 for leaf in jax.tree.leaves(pull_back))

  assert kept(None) == 1
  assert kept(8) == 0


def test_logits_of_a_batch_exist_only_unchunked():
  (hidden, weight, bias), targets, _ = random_case(V=64)

  def largest(chunk):
    nll = lambda *arrays: softmax.token_scores(*arrays, targets, chunk).nll_BxT.sum()
    return jaxprs.largest_array(jax.value_and_grad(nll, argnums=(0, 1, 2)), hidden, weight, bias)

  assert largest(None) >= B * T * 64
  # The weights and their gradient are all of the vocabulary there is.
  assert largest(8) == 64 * D < B * T * 64


@pytest.mark.parametrize('chunk', [None, 4])
def test_capped_logits_in_chunks_equal_slow_softmax(x64, chunk):
  """The last chunk has a word that does not exist, which no cap brings back."""
  (hidden, weight, bias), targets, _ = random_case()
  capped = 0.7 * np.tanh((hidden @ weight.T + bias) / 0.7)
  expected = np.log(np.exp(capped).sum(axis=-1)) - take_targets(capped, targets)
  score = jax.jit(lambda *arrays: softmax.token_scores(*arrays, targets, chunk, 0.7).nll_BxT)
  assert_close(score(hidden, weight, bias), expected, 1e-12)
  logits = softmax.full_logits(hidden, weight, bias, 0.7)
  assert_close(np.asarray(logits), capped, 1e-12)
