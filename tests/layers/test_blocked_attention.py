"""Attention in blocks equals attention over whole scores, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import blocked_attention, documents, dropout, relative, span

B, T, M, N, H, D, RAMP = 2, 20, 24, 3, 4, 6, 5
SIZES = (4, 8)  # queries and keys of a block


def project(weights, shared, memory, cache, head, first, count):
  """Keys and values of inputs [B, M, D]."""
  rows = jax.lax.dynamic_slice_in_dim(memory, first, count, 1) * shared
  return rows @ weights[0], rows @ weights[1]


def whole(blocks, operands, keys):
  """The formula, over all keys at once."""
  rows = keys.memory * operands.shared
  of_memory = lambda weights: jnp.einsum('bmd,ndh->nbmh', rows, weights)
  key = jnp.concatenate([of_memory(operands.weights[0]), operands.key_NxBxTxH], axis=2)
  value = jnp.concatenate([of_memory(operands.weights[1]), operands.value_NxBxTxH], axis=2)
  scores = jnp.einsum('nbth,nbsh->nbts', operands.query_NxBxTxH, key)
  S = M + T
  distance = documents.distances(T, S)
  if operands.distance_NxSxH is not None:
    of_distance = jnp.einsum(
      'nbth,nsh->nbts', operands.distance_query_NxBxTxH, operands.distance_NxSxH
    )
    if operands.distance_bias_NxS is not None:
      of_distance += operands.distance_bias_NxS[:, None, None]
    scores += relative.shift(of_distance)
  visible = documents.visible(
    keys.query_documents_BxT, keys.documents_BxS, None, blocks.window, None, blocks.sees_itself
  )
  scores = jnp.where(visible, scores, -1e30)
  exps = jnp.where(visible, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
  weights, mass = exps, exps.sum(axis=-1)
  pair_scores = scores
  if operands.span_NxBxT is not None:
    inside = span.inside(operands.span_NxBxT[..., None], distance - blocks.nearest, blocks.ramp)
    weights = exps * span.unit_clip(inside)
    pair_scores = scores + jnp.log(span.unit_clip(inside))
    if blocks.renormalize:
      mass = (weights + span.EPSILON * jnp.where(inside >= 0, exps, 0)).sum(axis=-1)
  sees = mass > 0
  mass = jnp.where(sees, mass, 1)
  if keys.dropout_key is not None:
    ones = jnp.ones((B, N, T, S))
    weights *= dropout.drop(ones, blocks.dropout, keys.dropout_key).swapaxes(0, 1)
  context = jnp.einsum('nbts,nbsh->nbth', weights, value) / mass[..., None]
  log_mass = jnp.where(sees, jnp.log(mass) + scores.max(axis=-1), 0)
  earlier = visible & (distance > 0)
  pair_scores = jnp.where(earlier, pair_scores, -jnp.inf)
  pair = jnp.where(pair_scores.max(axis=-1) > -jnp.inf, pair_scores.argmax(axis=-1), S)
  return context, log_mass, pair


def operands_of(rng, distance, spans):
  """Random operands."""
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  of_query = normal(N, B, T, H), normal(N, B, T, H), normal(N, B, T, H)
  more = {}
  if distance:
    more['distance_query_NxBxTxH'] = normal(N, B, T, H)
    more['distance_NxSxH'] = normal(N, M + T, H)
    if distance == 'biased':
      more['distance_bias_NxS'] = normal(N, M + T)
  if spans == 'adaptive':
    more['span_NxBxT'] = jnp.array([0.0, 7.3, 30.0])[:, None, None]
  elif spans == 'dynamic':
    more['span_NxBxT'] = jnp.asarray(rng.uniform(0, 20, (N, B, T)))
  weights = normal(N, D, H), normal(N, D, H)
  return blocked_attention.Operands(*of_query, **more, weights=weights, shared=normal(D))


CASES = {
  'plain': {},
  'relative': {'distance': 'plain'},
  'shaw_same_length': {'distance': 'biased', 'window': 17},
  'adaptive': {'spans': 'adaptive', 'distance': 'plain', 'window': M + 1, 'sees_itself': False},
  'dynamic_dropout': {'spans': 'dynamic', 'dropout': 0.3},
  'not_renormalized': {'spans': 'adaptive', 'renormalize': False, 'window': 13},
  'pairs': {'spans': 'dynamic', 'finds_pairs': True},
  'one_block': {'distance': 'plain', 'sizes': (32, 8)},
}


@pytest.mark.parametrize('case', CASES)
def test_equals_whole_scores(x64, case):
  options = dict(CASES[case])
  rng = np.random.default_rng(0)
  operands = operands_of(rng, options.pop('distance', None), options.pop('spans', None))
  queries, count = options.pop('sizes', SIZES)
  # Row 0 begins a document in the memory and one in the segment; row 1 has an empty memory
  # and padding at its end.
  document_BxS = np.zeros((B, M + T), np.int32)
  document_BxS[0, 10:] = 1
  document_BxS[0, M + 7 :] = 2
  document_BxS[1, :M] = documents.NONE
  document_BxS[1, M + 15 :] = documents.PADDING
  rate = options.get('dropout', 0)
  keys = blocked_attention.Keys(
    query_documents_BxT=jnp.asarray(document_BxS[:, M:]),
    documents_BxS=jnp.asarray(document_BxS),
    memory=jnp.asarray(rng.normal(size=(B, M, D))),
    cache=None,
    rows_B=jnp.arange(B),
    heads_N=jnp.arange(N),
    dropout_key=jax.random.key(1) if rate else None,
  )
  blocks = blocked_attention.Blocks(
    project, M, heads=N, ramp=RAMP, queries=queries, keys=count, dtype=jnp.float64, **options
  )
  mixed = jnp.asarray(rng.normal(size=(N, B, T, H)))

  def of(attend):
    def loss(operands):
      context, log_mass, pair = attend(operands)
      log_mass = jnp.where(log_mass > -1e30, log_mass, 0)
      return (context * mixed).sum() + (log_mass * mixed[..., 0]).sum(), (context, log_mass, pair)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)

  (_, found), gradient = of(lambda operands: blocks(operands, keys))
  (_, expected), expected_gradient = of(lambda operands: whole(blocks, operands, keys))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
  jax.tree.map(close, found[:2], expected[:2])
  jax.tree.map(close, gradient, expected_gradient)
  if blocks.finds_pairs:
    np.testing.assert_array_equal(found[2], expected[2])
