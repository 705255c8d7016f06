"""The context of segments of a stream, against a list of all of its tokens."""

import jax
import numpy as np
import pytest

from ngrammer_jax.layers import context, document_masks

# Row 0 begins inside a document; both begin one in the middle of a segment.
STARTS = np.array([[0, 0, 0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 1, 0]], bool)
T, M = 3, 4


@jax.jit
def make(tokens, documents_BxT, starts_BxT):
  made, after = context.make(
    context.Segment(documents_BxT, starts_BxT), context.Visibility(), tokens
  )
  return made.keys.visible_BxTxS, made.positions.position_BxP, after


def test_segments_with_a_memory_equal_one_list_of_tokens():
  numbers, tokens = np.cumsum(STARTS, axis=1), context.empty_tokens(2, M)
  positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
  assert document_masks.positions(STARTS).tolist() == positions.tolist()
  for first in range(0, STARTS.shape[1], T):
    segment = slice(first, first + T)
    visible, position, tokens = make(tokens, numbers[:, segment], STARTS[:, segment])
    assert position[:, M:].tolist() == positions[:, segment].tolist()
    for b, t, s in np.ndindex(2, T, M + T):
      key = first - M + s  # negative in slots that are still empty
      sees = 0 <= key <= first + t and numbers[b, key] == numbers[b, first + t]
      assert visible[b, t, s] == sees, (first, b, t, s)
      assert s >= M or key < 0 or position[b, s] == positions[b, key]


@pytest.mark.parametrize('own', [None, 2])
def test_a_window_counts_the_token_itself(own):
  """The narrower of two windows holds."""
  segment = context.Segment(np.zeros((1, T), int), np.zeros((1, T), bool))
  visibility = context.Visibility(window=own)
  made, _ = context.make(segment, visibility, context.empty_tokens(1, M))
  keys = context.with_window(made, 3, None).keys
  window = 3 if own is None else own
  assert keys.window == window and not keys.is_plain_causal  # after earlier tokens
  expected = [[M + t - window < s <= M + t and s >= M for s in range(M + T)] for t in range(T)]
  assert np.asarray(keys.visible_BxTxS)[0].tolist() == expected
