"""Slots of a cache against a list of all tokens of every row."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers import cache

B, T, N, H = 3, 5, 2, 2


@jax.jit
def advance(slots_state, layer_keys, keys, documents, positions, valid):
  slots = cache.slots(slots_state, valid)
  written = cache.write(layer_keys, slots, keys, keys[..., 0])
  return cache.advance(slots_state, slots, documents, positions, valid), written


@pytest.mark.parametrize('M', [8, 3])
def test_slots_hold_the_last_tokens_whatever_the_padding(M):
  """Rows differ in their padding; with 3 slots a segment has more tokens than fit."""
  rng = np.random.default_rng(0)
  slots_state = jax.device_get(cache.empty(B, M))
  layer_keys = jax.device_get(cache.empty_layer(B, M, N, H, 'float32')['keys'])
  tokens = [[] for _ in range(B)]
  for segment in range(4):
    valid = (rng.random((B, T)) < 0.7).astype('float32')
    valid[segment % B] = segment % 2  # all are tokens, or none is
    documents, positions = rng.integers(0, 9, (2, B, T)).astype('int32')
    keys = rng.normal(size=(B, T, N, H)).astype('float32')
    slots_state, layer_keys = jax.device_get(
      advance(slots_state, layer_keys, keys, documents, positions, valid)
    )
    for b, t in np.argwhere(valid > 0):
      tokens[b].append((documents[b, t], positions[b, t], keys[b, t]))
    assert slots_state['count'].tolist() == [len(row) for row in tokens]
    for b, row in enumerate(tokens):
      assert slots_state['position'][b] == (row[-1][1] + 1 if row else 0)
      for i in range(max(len(row) - M, 0), len(row)):
        assert slots_state['documents'][b, i % M] == row[i][0]
        assert slots_state['index'][b, i % M] == i
        np.testing.assert_array_equal(layer_keys[b, :, i % M], row[i][2])
      for empty in range(len(row), M):
        assert slots_state['documents'][b, empty] == -1
  last_slots = jax.jit(cache.order)(slots_state)[:, -2:]
  assert last_slots.tolist() == [[(len(row) - 2) % M, (len(row) - 1) % M] for row in tokens]
