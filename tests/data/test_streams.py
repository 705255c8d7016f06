"""Training and evaluation streams: tokens of a step, every token evaluated once."""

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.data.rows import cached_rows, evaluation_streams, token_batch
from ngrammer_jax.data.tokens import token_split
from tests.data import document_files
from tests.loops import each

DOCUMENT_START = 60_000


def make_split(n, starts=(0,)):
  """Returns a split in which every token is its own index."""
  tokens = np.arange(n, dtype=np.uint16)
  return token_split.TokenSplit(tokens, np.array(starts), None, DOCUMENT_START)


def previous_tokens(targets):
  return np.where(targets == 0, DOCUMENT_START, targets - 1)


def train_segment(split, step, batch_size, length, rows=slice(None)):
  schedule = document_files.whole_batch(batch_size)
  reader = cached_rows.CachedRows(split, length, schedule)
  return token_batch.stack_rows(reader.rows(step, range(batch_size)[rows]).values())


SIZES = [(96, 4, 6), (100, 4, 6), (97, 8, 5), (10, 10, 3), (7, 3, 20), (5, 1, 2)]


def arrays(segment):
  """Returns the four arrays that are not None: no loss mask, no bidirectional prefix."""
  assert segment.counts_BxT is None and segment.prefix_BxT is None
  return segment[:4]


@each('n, batch_size, length', SIZES)
@each('hosts', [1, 2, 3, 5])
def test_rows_of_all_hosts_are_one_batch(n, batch_size, length, hosts):
  split = make_split(n, [0, 2])
  whole = train_segment(split, 5, batch_size, length)
  edges = sorted({round(i * batch_size / hosts) for i in range(hosts + 1)})
  parts = [
    train_segment(split, 5, batch_size, length, slice(first, last))
    for first, last in zip(edges, edges[1:], strict=False)
  ]
  joined = token_batch.map_batches(lambda *arrays: np.concatenate(arrays), *parts)
  for actual, expected in zip(arrays(joined), arrays(whole), strict=True):
    assert np.array_equal(actual, expected) and actual.dtype == expected.dtype


@each('n, batch_size, length', SIZES)
def test_a_row_continues_from_step_to_step(n, batch_size, length):
  split = make_split(n)
  rows = np.concatenate(
    [train_segment(split, step, batch_size, length).targets_BxT for step in range(40)], 1
  )
  first_targets = np.arange(batch_size) * (n // batch_size)
  assert np.array_equal(rows, (first_targets[:, None] + np.arange(40 * length)) % n)


def test_input_is_the_token_before_the_target():
  split = make_split(20)
  for step in range(12):
    segment = train_segment(split, step, 2, 5)
    assert np.array_equal(segment.tokens_BxT, previous_tokens(segment.targets_BxT))
    assert np.array_equal(segment.starts_BxT, segment.targets_BxT == 0)
    assert segment.valid_BxT.dtype == np.float32 and segment.valid_BxT.all()


@each('batch_size, length', [(1, 10), (4, 6), (8, 15), (120, 1)])
def test_an_epoch_contains_every_token_once(batch_size, length):
  split = make_split(120)
  steps = 120 // (batch_size * length)
  for epoch in range(3):
    targets = [
      train_segment(split, step, batch_size, length).targets_BxT
      for step in range(epoch * steps, (epoch + 1) * steps)
    ]
    assert sorted(np.concatenate(targets, axis=None)) == list(range(120))


def test_every_row_contains_every_document_start():
  split = make_split(30, [0, 4, 11])
  segments = [train_segment(split, step, 3, 6) for step in range(5)]
  starts = np.concatenate([segment.starts_BxT for segment in segments], 1)
  targets = np.concatenate([segment.targets_BxT for segment in segments], 1)
  assert [sorted(row[at]) for row, at in zip(targets, starts, strict=True)] == [[0, 4, 11]] * 3


def random_cases(count):
  """Yields (tokens, streams, segment length, rows at a time, max_tokens), with tiny splits."""
  rng = np.random.default_rng(0)
  for _ in range(count):
    n = int(rng.choice([1, 2, 3, 7, 16, 50, 97, 128]))
    yield (n, *(int(i) for i in rng.integers(1, 20, 3)), int(rng.choice([0, 1, n // 2, n, 2 * n])))


CASES = [
  (128, 4, 8, 4, 0),  # all numbers are divisible
  (1, 16, 128, 8, 0),
  (16, 16, 1, 16, 0),
  (17, 16, 3, 5, 0),  # 9 streams of 2
  *random_cases(40),
]


@each('n, num_streams, length, rows, max_tokens', CASES)
def test_evaluation_has_every_token_once(n, num_streams, length, rows, max_tokens):
  split = make_split(n, [0, n // 2])
  evaluation = evaluation_streams.EvaluationStreams(split, num_streams, length, max_tokens)
  tokens = min(max_tokens or n, n)
  assert 1 <= evaluation.streams <= min(num_streams, tokens)
  all_targets = []
  for first_row in range(0, evaluation.streams, rows):
    for index in range(evaluation.segments):
      segment = evaluation.segment(index, first_row, rows)
      assert all(array.shape == (rows, length) for array in arrays(segment))
      valid = segment.valid_BxT.astype(bool)
      targets = segment.targets_BxT[valid]
      all_targets += targets.tolist()
      assert np.array_equal(segment.tokens_BxT[valid], previous_tokens(targets))
      assert np.array_equal(segment.starts_BxT[valid], np.isin(targets, [0, n // 2]))
  assert sorted(all_targets) == list(range(tokens))


@each('n, num_streams, length, rows, max_tokens', CASES)
def test_a_stream_is_contiguous_and_then_padded(n, num_streams, length, rows, max_tokens):
  evaluation = evaluation_streams.EvaluationStreams(make_split(n), num_streams, length, max_tokens)
  tokens = min(max_tokens or n, n)
  longest = -(-tokens // num_streams)
  segments = [
    evaluation.segment(index, 0, evaluation.streams + 2) for index in range(evaluation.segments)
  ]
  targets = np.concatenate([segment.targets_BxT for segment in segments], 1)
  valid = np.concatenate([segment.valid_BxT for segment in segments], 1)
  assert valid.dtype == np.float32
  for row in range(evaluation.streams + 2):
    size = np.clip(tokens - row * longest, 0, longest)
    assert valid[row].tolist() == [1] * size + [0] * (valid.shape[1] - size)
    assert np.array_equal(targets[row][:size], row * longest + np.arange(size))
  assert valid[: evaluation.streams].sum(1).all() and not valid[evaluation.streams :].any()
  assert valid.shape[1] - length < longest


@each('n, num_streams, length, rows, max_tokens', CASES)
@each('protocol', ['transformer_xl', 'adaptive_span'])
def test_official_protocols_skip_the_first_token_of_each_stream(
  n, num_streams, length, rows, max_tokens, protocol
):
  tokens = min(max_tokens or n, n)
  count = min(num_streams, max(tokens // 2, 1))
  num_targets = tokens // count - 1
  if protocol == 'adaptive_span':
    num_targets -= num_targets % length
  args = make_split(n), num_streams, length, max_tokens, protocol
  if not num_targets:
    with pytest.raises(errors.BadInput, match='fill no segment'):
      evaluation_streams.EvaluationStreams(*args)
    return
  evaluation = evaluation_streams.EvaluationStreams(*args)
  assert (evaluation.streams, evaluation.tokens) == (count, count * num_targets)
  segments = [evaluation.segment(index, 0, count + 1) for index in range(evaluation.segments)]
  targets, valid, inputs = (
    np.concatenate([getattr(segment, name) for segment in segments], 1)
    for name in ('targets_BxT', 'valid_BxT', 'tokens_BxT')
  )
  for row in range(count):
    is_valid = valid[row].astype(bool)
    first = row * (tokens // count) + 1
    assert targets[row][is_valid].tolist() == list(range(first, first + num_targets))
    assert inputs[row][is_valid].tolist() == list(range(first - 1, first + num_targets - 1))
  assert not valid[count].any()
