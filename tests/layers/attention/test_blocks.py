"""Attention in blocks equals attention over full scores, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import document_masks, dropout
from ngrammer_jax.layers.attention import blocks, full, memory_source, relative, span
from ngrammer_jax.layers.attention.full import Heads, SpanMask
from ngrammer_jax.layers.context import Keys
from tests import checks
from tests.checks import rest_is_slow

B, T, M, N, H, D, RAMP = 2, 20, 22, 3, 4, 6, 5
S = M + T


def project(weights, rows, cache, head):
  """Keys and values of inputs [B, K, D]."""
  return rows @ weights[0], rows @ weights[1]


def reference(operands, rows, keys, drop, renormalize, logit_cap):
  """The formula, over all keys at once: values [B, T, N, H], log masses and pairs [B, N, T]."""
  heads, weights, z_BxTxN = operands
  key, value = (
    jnp.concatenate([jnp.einsum('bmd,ndh->bmnh', rows, weight), segment_rows], axis=1)
    for weight, segment_rows in zip(weights, heads[1:3], strict=True)
  )
  key, value = (jnp.repeat(array, N // array.shape[2], axis=2) for array in (key, value))
  scores = jnp.einsum('btnh,bsnh->bnts', heads.query_BxTxNxH, key)
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_scores = jnp.einsum('btnh,snh->bnts', query_BxTxNxH, encoding_SxNxH)
    if bias_SxN is not None:
      distance_scores += bias_SxN.T[:, None]
    scores += relative.shift(distance_scores)
  if logit_cap is not None:
    scores = logit_cap * jnp.tanh(scores / logit_cap)
  visible_Bx1xTxS = document_masks.visible(
    keys.query_documents_BxT, keys.key_documents_BxS, None, keys.window, None, keys.sees_itself
  )[:, None]
  scores = jnp.where(visible_Bx1xTxS, scores, -1e30)
  exps = jnp.where(visible_Bx1xTxS, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
  weights, mass, distance = exps, exps.sum(axis=-1), document_masks.distances(T, S)[:, None]
  pair_scores = scores
  if z_BxTxN is not None:
    z_BxNxTx1 = z_BxTxN.swapaxes(1, 2)[..., None]
    unclipped = span.unclipped_mask(z_BxNxTx1, distance - (not keys.sees_itself), RAMP)
    weights = exps * span.unit_clip(unclipped)
    pair_scores = scores + jnp.log(span.unit_clip(unclipped))
    if renormalize:
      mass = (weights + span.EPSILON * jnp.where(unclipped >= 0, exps, 0)).sum(axis=-1)
  mass, sees = jnp.where(mass > 0, mass, 1), mass > 0
  values_BxNxTxH = jnp.einsum('bnts,bsnh->bnth', drop(weights), value) / mass[..., None]
  log_mass_BxNxT = jnp.where(sees, jnp.log(mass) + scores.max(axis=-1), 0)
  pair_scores = jnp.where(visible_Bx1xTxS & (distance > 0), pair_scores, -jnp.inf)
  pair_BxNxT = jnp.where(pair_scores.max(axis=-1) > -jnp.inf, pair_scores.argmax(axis=-1), S)
  return values_BxNxTxH.swapaxes(1, 2), log_mass_BxNxT, pair_BxNxT


def random_operands(rng, distance, spans, C=N):
  """Queries, keys and values of C heads; weights of the memory; learned spans or None."""
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  term = None
  if distance:
    bias_SxN = normal(S, N) if distance == 'biased' else None
    term = relative.DistanceTerm(normal(B, T, N, H), normal(S, N, H), bias_SxN)
  heads = Heads(normal(B, T, N, H), normal(B, T, C, H), normal(B, T, C, H), term)
  z_BxTxN = None
  if spans == 'adaptive':
    z_BxTxN = jnp.array([[[0.0, 7.3, 30.0]]])
  elif spans == 'dynamic':
    z_BxTxN = jnp.asarray(rng.uniform(0, 20, (B, T, N)))
  return heads, (normal(C, D, H), normal(C, D, H)), z_BxTxN


CASES = {
  'plain': {},
  'relative': {'distance': 'plain'},
  'one_document': {'distance': 'plain', 'documents': 1},
  'shaw_same_length': {'distance': 'biased', 'window': 17},
  'adaptive': {'spans': 'adaptive', 'distance': 'plain', 'window': M + 1, 'sees_itself': False},
  'dynamic_dropout': {'spans': 'dynamic', 'dropout': 0.3},
  'not_renormalized': {'spans': 'adaptive', 'renormalize': False, 'window': 13},
  'pairs': {'spans': 'dynamic', 'return_pairs': True},
  'capped': {'spans': 'adaptive', 'distance': 'biased', 'logit_cap': 0.7},
  'one_block': {'distance': 'plain', 'block_size': 32},
  'grouped': {'spans': 'adaptive', 'distance': 'plain', 'key_heads': 1, 'dropout': 0.3},
}
QUICK = 'plain', 'relative', 'adaptive', 'dynamic_dropout', 'pairs', 'capped'


@pytest.mark.parametrize(
  'case',
  [*rest_is_slow([name for name in CASES if name != 'grouped'], QUICK), checks.full('grouped')],
)
def test_equals_whole_scores(x64, monkeypatch, case):
  options = dict(CASES[case])
  monkeypatch.setattr(blocks, 'BLOCK', options.get('block_size', 8))
  rng = np.random.default_rng(0)
  shape = options.get('distance'), options.get('spans'), options.get('key_heads', N)
  operands = random_operands(rng, *shape)
  rows, renormalize = jnp.asarray(rng.normal(size=(B, M, D))), options.get('renormalize', True)
  # Row 0 begins a document in the memory and one in the segment; row 1 has an empty memory
  # and padding at its end.
  document_BxS = np.zeros((B, S), np.int32)
  document_BxS[0, 10:] = 1
  document_BxS[0, M + 7 :] = 2
  document_BxS[1, :M] = document_masks.NONE
  if options.get('documents') == 1:
    document_BxS[:] = 0
  document_BxS[1, M + 15 :] = document_masks.PADDING
  keys = Keys(
    query_documents_BxT=jnp.asarray(document_BxS[:, M:]),
    key_documents_BxS=jnp.asarray(document_BxS),
    window=options.get('window'),
    sees_itself=options.get('sees_itself', True),
  )
  drop = dropout.Dropout(options.get('dropout', 0.0), jax.random.key(1))
  return_pairs, logit_cap = options.get('return_pairs', False), options.get('logit_cap')

  def in_blocks(heads, weights, z_BxTxN):
    spans = None if z_BxTxN is None else SpanMask(z_BxTxN, RAMP, renormalize)
    source = memory_source.MemorySource(project, weights, rows)
    heads = heads._replace(logit_cap=logit_cap)
    part = blocks.attend(heads, spans, keys, source, return_pairs, drop)
    return part.values_BxTxNxH, part.log_mass_BxNxT, part.pair_BxNxT

  mixed = jnp.asarray(rng.normal(size=(B, T, N, H)))

  def values_and_gradient(attend):
    def loss(operands):
      values, log_mass, pair = attend(operands)
      log_mass = jnp.where(log_mass > -1e30, log_mass, 0)
      mixed_mass = log_mass * mixed[..., 0].swapaxes(1, 2)
      return (values * mixed).sum() + mixed_mass.sum(), (values, log_mass, pair)

    (_, results), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
    return results, gradient

  results, gradient = values_and_gradient(lambda operands: in_blocks(*operands))
  expected, expected_gradient = values_and_gradient(
    lambda operands: reference(operands, rows, keys, drop, renormalize, logit_cap)
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
  jax.tree.map(close, results[:2], expected[:2])
  jax.tree.map(close, gradient, expected_gradient)
  if return_pairs:
    np.testing.assert_array_equal(results[2], expected[2])
    np.testing.assert_array_equal(pairs_of_full_scores(*operands, rows, keys), expected[2])


def pairs_of_full_scores(heads, weights, z_BxTxN, rows, keys):
  """The pairs of `full_attention`, with keys and values of the memory in order."""
  projected = (jnp.einsum('bmd,ndh->bmnh', rows, weight) for weight in weights)
  joined = (jnp.concatenate(pair, axis=1) for pair in zip(projected, heads[1:3], strict=True))
  heads = Heads(heads.query_BxTxNxH, *joined)
  see = functools.partial(document_masks.visible, keys.query_documents_BxT, keys.key_documents_BxS)
  keys = keys.replace(visible_BxTxS=see())
  spans, drop = SpanMask(z_BxTxN, RAMP, True), dropout.Dropout(0.0, None)
  attend = jax.jit(lambda heads: full.attend(heads, spans, keys, None, True, drop))
  return attend(heads).pair_BxNxT


def test_a_dropout_key_of_another_generator_is_an_error():
  heads, weights, _ = random_operands(np.random.default_rng(0), None, None)
  zeros = jnp.zeros((B, S), jnp.int32)
  keys = Keys(query_documents_BxT=zeros[:, M:], key_documents_BxS=zeros)
  source = memory_source.MemorySource(project, weights, jnp.zeros((B, M, D)))
  attend = lambda rate: blocks.attend(
    heads, None, keys, source, False, dropout.Dropout(rate, jax.random.key(0, impl='rbg'))
  )
  with pytest.raises(ValueError, match='needs a threefry2x32 key, not rbg: pass jax.random'):
    jax.eval_shape(lambda: attend(0.1))
  jax.eval_shape(lambda: attend(0.0))
