"""Slots of a cache against a list of all tokens of every row."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers.attention import cache

B, T, N, H = 3, 5, 2, 2


@jax.jit
def advance(slots, cached, keys, documents, positions, valid):
  updated = cache.write(cached, slots.token_slots(documents, positions, valid), keys, keys[..., 0])
  return slots.advance(documents, positions, valid), updated


@pytest.mark.parametrize('M', [8, 3])
def test_slots_hold_the_last_tokens_whatever_the_padding(M):
  """Rows differ in their padding; with 3 slots a segment has more tokens than fit."""
  rng = np.random.default_rng(0)
  slots = cache.empty_slots(B, M)
  cached = cache.empty_layer((B, N, M, H), 'float32', {}).keys
  tokens = [[] for _ in range(B)]
  for segment in range(4):
    valid = (rng.random((B, T)) < 0.7).astype('float32')
    valid[segment % B] = segment % 2  # all are tokens, or none is
    documents, positions = rng.integers(0, 9, (2, B, T)).astype('int32')
    keys = rng.normal(size=(B, T, N, H)).astype('float32')
    slots, cached = jax.device_get(advance(slots, cached, keys, documents, positions, valid))
    for b, t in np.argwhere(valid > 0):
      tokens[b].append((documents[b, t], positions[b, t], keys[b, t]))
    assert slots.count.tolist() == [len(row) for row in tokens]
    for b, row in enumerate(tokens):
      assert slots.position[b] == (row[-1][1] + 1 if row else 0)
      for i in range(max(len(row) - M, 0), len(row)):
        assert slots.documents[b, i % M] == row[i][0]
        assert slots.index[b, i % M] == i
        np.testing.assert_array_equal(cached[b, :, i % M], row[i][2])
      for empty in range(len(row), M):
        assert slots.documents[b, empty] == -1
  last_slots = slots.order()[:, -2:]
  assert last_slots.tolist() == [[(len(row) - 2) % M, (len(row) - 1) % M] for row in tokens]
