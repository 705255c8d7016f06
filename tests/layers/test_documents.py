import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import documents

STARTS = jnp.asarray([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool)


def test_numbers_go_on_from_the_memory():
  assert documents.numbers(STARTS).tolist() == [[1, 1, 1, 2, 2], [0, 0, 1, 2, 2], [0] * 5]
  carried = documents.numbers(STARTS, jnp.asarray([4, 0, 7]))
  assert carried.tolist() == [[5, 5, 5, 6, 6], [0, 0, 1, 2, 2], [7] * 5]
  assert carried.dtype == jnp.int32


def test_numbers_of_a_split_stream_equal_one_pass():
  for split in range(1, 5):
    first = documents.numbers(STARTS[:, :split])
    second = documents.numbers(STARTS[:, split:], first[:, -1])
    both = jnp.concatenate([first, second], axis=1)
    assert both.tolist() == documents.numbers(STARTS).tolist()


def test_positions_restart_at_every_document():
  positions = documents.positions(STARTS)
  assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
  assert positions.dtype == jnp.int32


@pytest.mark.parametrize('dtype', ['bool', 'int32', 'float32'])
def test_padding_is_set_apart(dtype):
  numbers = jnp.asarray([[0, 1, 1, 2]])
  valid = jnp.asarray([[1, 1, 0, 0]], dtype)
  assert documents.with_padding(numbers, valid).tolist() == [[0, 1, -2, -2]]
  assert documents.with_padding(numbers, None).tolist() == numbers.tolist()


@pytest.mark.parametrize('with_prefix', [False, True])
def test_visible_equals_slow_loop(with_prefix):
  rng = np.random.default_rng(0)
  B, T, M = 8, 5, 3
  # NONE, PADDING and a few documents, on the memory side too.
  queries = rng.integers(-2, 2, (B, T))
  keys = np.concatenate([rng.integers(-2, 2, (B, M)), queries], axis=1)
  prefix = rng.integers(0, 2, (B, T)) if with_prefix else None
  expected = np.zeros((B, T, M + T), bool)
  for b, t, s in np.ndindex(B, T, M + T):
    not_later = s <= M + t
    in_prefix = with_prefix and s >= M and prefix[b, s - M] == 1
    expected[b, t, s] = (not_later or in_prefix) and queries[b, t] == keys[b, s]
  given = jnp.asarray(prefix) if with_prefix else None
  visible = documents.visible(jnp.asarray(queries), jnp.asarray(keys), given)
  assert visible.tolist() == expected.tolist()
