import functools

import jax
import numpy as np
import pytest

from ngrammer_jax.layers import document_masks

STARTS = np.array([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool)
numbers, positions = jax.jit(document_masks.numbers), jax.jit(document_masks.positions)
visible = jax.jit(document_masks.visible, static_argnames=('window', 'sees_itself'))


def test_numbers_go_on_from_the_memory():
  assert numbers(STARTS).tolist() == [[1, 1, 1, 2, 2], [0, 0, 1, 2, 2], [0] * 5]
  carried = numbers(STARTS, np.array([4, 0, 7]))
  assert carried.tolist() == [[5, 5, 5, 6, 6], [0, 0, 1, 2, 2], [7] * 5]
  assert carried.dtype == 'int32'


def test_numbers_and_positions_of_a_split_stream_equal_one_pass():
  results = {numbers: numbers(STARTS), positions: positions(STARTS)}
  for split in range(1, 5):
    rest = np.zeros_like(STARTS)
    rest[:, : 5 - split] = STARTS[:, split:]  # what follows the segment changes nothing
    for function, more in ((numbers, 0), (positions, 1)):
      full = np.asarray(results[function])
      second = function(rest, full[:, split - 1] + more)
      assert np.asarray(second)[:, : 5 - split].tolist() == full[:, split:].tolist()


def test_positions_restart_at_every_document():
  actual = positions(STARTS)
  assert actual.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
  assert actual.dtype == 'int32'


def test_padding_is_set_apart():
  document_numbers, valid = np.array([[0, 1, 1, 2]], 'int32'), np.array([[1, 1, 0, 0]])
  kinds = [valid.astype(dtype) for dtype in ('bool', 'int32', 'float32')]
  for actual in jax.jit(
    lambda kinds: [document_masks.with_padding(document_numbers, kind) for kind in kinds]
  )(kinds):
    assert actual.tolist() == [[0, 1, -2, -2]]
  assert document_masks.with_padding(document_numbers, None) is document_numbers


@pytest.mark.parametrize('with_prefix', [False, True])
def test_visible_equals_slow_loop(with_prefix):
  rng = np.random.default_rng(0)
  B, T, M = 8, 5, 3
  # NONE, PADDING and a few documents, on the memory side too.
  queries = rng.integers(-2, 2, (B, T))
  keys = np.concatenate([rng.integers(-2, 2, (B, M)), queries], axis=1)
  prefix = rng.integers(0, 2, (B, T)) if with_prefix else None
  see = functools.partial(visible, queries, keys, prefix)
  memory_distances = rng.permuted(np.tile(np.arange(M, 0, -1), (B, 1)), axis=1)  # slots in no order
  in_order = M + np.arange(T)[:, None] - np.arange(M + T)
  distance = np.tile(in_order, (B, 1, 1))
  distance[:, :, :M] = np.arange(T)[:, None] + memory_distances[:, None]
  same = queries[:, :, None] == keys[:, None]
  mask = np.tile(in_order >= 0, (B, 1, 1))
  if with_prefix:
    mask[:, :, M:] |= prefix[:, None] == 1
  mask &= same
  assert see().tolist() == mask.tolist()
  near = see(window=4, sees_itself=False)
  assert near.tolist() == (mask & (in_order < 4) & (in_order != 0)).tolist()
  near = see(window=4, distance_BxTxS=distance)
  assert near.tolist() == (mask & (distance < 4)).tolist()
  assert (near != (mask & (in_order < 4))).any()
