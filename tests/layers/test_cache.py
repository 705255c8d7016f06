"""Slots of a cache against a list of all tokens of every row."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers import cache

B, T, N, H = 3, 5, 2, 2


@jax.jit
def advance(known, kept, keys, documents, positions, valid):
  slots = cache.slots(known, valid)
  written = cache.write(kept, slots, keys, keys[..., 0])
  return cache.advance(known, slots, documents, positions, valid), written


@pytest.mark.parametrize('M', [8, 3])
def test_slots_hold_the_last_tokens_whatever_the_padding(M):
  """Rows differ in their padding; with 3 slots a segment has more tokens than fit."""
  rng = np.random.default_rng(0)
  known = jax.device_get(cache.empty(B, M))
  kept = jax.device_get(cache.empty_layer(B, M, N, H, 'float32')['keys'])
  tokens = [[] for _ in range(B)]
  for segment in range(4):
    valid = (rng.random((B, T)) < 0.7).astype('float32')
    valid[segment % B] = segment % 2  # all are tokens, or none is
    documents, positions = rng.integers(0, 9, (2, B, T)).astype('int32')
    keys = rng.normal(size=(B, T, N, H)).astype('float32')
    known, kept = jax.device_get(advance(known, kept, keys, documents, positions, valid))
    for b, t in np.argwhere(valid > 0):
      tokens[b].append((documents[b, t], positions[b, t], keys[b, t]))
    assert known['count'].tolist() == [len(row) for row in tokens]
    for b, row in enumerate(tokens):
      assert known['position'][b] == (row[-1][1] + 1 if row else 0)
      for i in range(max(len(row) - M, 0), len(row)):
        assert known['documents'][b, i % M] == row[i][0]
        assert known['index'][b, i % M] == i
        np.testing.assert_array_equal(kept[b, :, i % M], row[i][2])
      for empty in range(len(row), M):
        assert known['documents'][b, empty] == -1
  newest = jax.jit(cache.order)(known)[:, -2:]
  assert newest.tolist() == [[(len(row) - 2) % M, (len(row) - 1) % M] for row in tokens]
