"""Blocks of queries, in windows and causal ones, give what all scores give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import Attention, context, document_masks, dropout
from ngrammer_jax.layers.attention import local, relative, span
from ngrammer_jax.layers.attention.attention import LayerInputs
from tests.checks import assert_close, full, random_variables

B, T, M, N, D = 2, 12, 6, 2, 8


def segment():
  """The context of a segment with a document start and padding, after a memory."""
  starts, valid = np.zeros((B, T), bool), np.ones((B, T), np.int32)
  starts[0, 7], valid[1, 9:] = True, 0
  memory_documents = np.zeros((B, M), np.int32)
  memory_documents[1, :2] = document_masks.NONE
  recent = context.RecentTokens(memory_documents, memory_documents, np.full(B, M, np.int32))
  inputs = context.Segment(document_masks.numbers(starts), starts, jnp.asarray(valid))
  return context.make(inputs, context.Visibility(M + 1, sees_itself=False), recent)[0], valid


@pytest.mark.parametrize('kind', [span.AdaptiveSpan, full(span.DynamicSpan)])
def test_blocks_of_queries_equal_one_block(x64, monkeypatch, kind):
  monkeypatch.setattr(local, 'BLOCK', 4)
  make_span = functools.partial(kind, limit=M, ramp=2, initial=0.4, dtype=jnp.float64)
  position = functools.partial(relative.ShawPosition, max_length=5)
  fields = {'dtype': jnp.float64, 'logit_cap': 0.6}
  layer = Attention(N, position=position, span=make_span, **fields)
  segment_context, valid = segment()
  rng = np.random.default_rng(0)
  x, rows = rng.normal(size=(B, T, D)), rng.normal(size=(B, M, D))
  params = random_variables(layer, x, segment_context, LayerInputs(rows), dtype='float64')['params']

  def run(params, x):
    pairs = []

    def keep_pairs(attended, pair):
      pairs.append(pair)
      return attended

    inputs = segment_context, LayerInputs(rows), keep_pairs, True
    y, projected = layer.apply({'params': params}, x, *inputs)
    return jnp.sin(y).sum(), (y, projected.spans, *pairs)

  results = []
  no_dropout = dropout.Dropout(0.0, None)
  # In windows; in causal blocks, of which the last is shorter; all scores at once.
  for count, causal_block in ((local.block_count(T, M), T), (1, 5), (1, T)):
    monkeypatch.setattr(local, 'block_count', lambda T, M, count=count: count)
    monkeypatch.setattr(local, 'CAUSAL_BLOCK', causal_block)
    is_causal = local.has_causal_blocks(segment_context.keys, None, no_dropout)
    assert is_causal == (causal_block < T)
    results.append(jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(params, x))
  assert local.applies(segment_context.keys)
  *in_blocks, (full, expected) = results
  for blocks, gradient in in_blocks:
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), blocks, full)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), gradient, expected)


@pytest.mark.parametrize('reason', ['prefix', 'slots', 'dropout', 'short'])
def test_no_causal_blocks_where_later_keys_or_one_mask_count(monkeypatch, reason):
  """Without causal order a prefix lacks keys; dropout has one mask for all scores of a head."""
  monkeypatch.setattr(local, 'CAUSAL_BLOCK', T if reason == 'short' else 4)
  keys = segment()[0].keys
  drop = dropout.Dropout(0.0, None)
  if reason == 'prefix':
    keys = keys.replace(has_prefix=True)
  if reason == 'slots':
    keys = keys.replace(distance_BxTxS=jnp.zeros((B, T, M + T), jnp.int32))
  if reason == 'dropout':
    drop = dropout.Dropout(0.5, jax.random.key(0))
  assert not local.has_causal_blocks(keys, None, drop)


def test_blocks_divide_segment_and_memory():
  assert [local.block_count(T, M) for T, M in ((512, 512), (128, 128), (7, 9))] == [4, 2, 1]
