"""The longest earlier match of the text before each token, and the token after that match.

For the lengths Λ = (n_0 < n_1 < ...) and a window of W tokens, with the class y of each token:

  J_n(t) = { j : t - W <= j < t, y_{j-i} = y_{t-i} for all i < n }     within the document of t
  n_k    = the longest length with a J_n that is not empty
  c_t    = x_{j+1}, with the last j of J_n;   bucket_t = C k + min(|J_n|, C),  0 without a match

This is the document copy of the modded-nanogpt speedrun (pull request 378, C = 3). Two searches
give equal results. `by_comparison` compares each token with the W before it. `by_ranks` numbers the
n-grams and sorts them, in O(T log T) for each length.

B batch, T segment length, L the longest length, R = W + L - 1 tokens before the segment, S = R + T,
Q = L - 1 + T tokens read by the matches of a segment, K distances at a time.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.state import State

COMPARED = 2**14  # entries of a row to compare at a time
SHORT = 128  # up to this segment length the comparison is faster (see docs/ngram_memories.md)


class Matches(NamedTuple):
  """The longest match of each token.

  Attributes:
    level_BxT: number k of its length in Λ; -1 without a match.
    distance_BxT: t - j of the last match; 0 without a match.
    count_BxT: min(|J_n|, C); 0 without a match.
  """

  level_BxT: jax.Array
  distance_BxT: jax.Array
  count_BxT: jax.Array


class Copies(NamedTuple):
  """The tokens after the longest matches.

  Attributes:
    token_BxT: c, the id of the token after the match; -1 without a match.
    bucket_BxT: 0 without a match, else 1 to C times the number of lengths.
  """

  token_BxT: jax.Array
  bucket_BxT: jax.Array


@dataclasses.dataclass(frozen=True)
class CopySearch:
  """Finds the longest matches in a stream of segments.

  The state holds the last R tokens: `ids` int32 [B, R], and `documents` int32 [B, R], NONE in empty
  slots. Any segmentation of a stream gives the same copies.

  Attributes:
    window: W.
    lengths: Λ, rising.
    counts: C, largest number of matches with a bucket of its own.
  """

  window: int
  lengths: tuple[int, ...]
  counts: int = 3

  @property
  def slots(self) -> int:
    """R, reach of the matches in tokens before a segment."""
    return self.window + self.lengths[-1] - 1

  @property
  def buckets(self) -> int:
    """Number of buckets, including bucket 0 (no match)."""
    return 1 + self.counts * len(self.lengths)

  def empty_state(self, batch: int) -> State:
    """Returns the state before the first segment."""
    return {
      'ids': jnp.zeros((batch, self.slots), jnp.int32),
      'documents': jnp.full((batch, self.slots), document_masks.NONE, jnp.int32),
    }

  def __call__(
    self,
    tokens_BxT: jax.Array,
    documents_BxT: jax.Array,
    state: State,
    *,
    valid_BxT: jax.Array | None = None,
    classes_V: jax.Array | None = None,
  ) -> tuple[Copies, State]:
    """Returns the copies of a segment, and the next state.

    Args:
      tokens_BxT: ids.
      documents_BxT: document number of each token, at least 0 (see `document_masks.numbers`).
      state: the state returned by the previous segment.
      valid_BxT: 0 at padding, only at the end of a row. The state skips padding.
      classes_V: class of each id. None: each id is its own class.
    """
    tokens_BxT = tokens_BxT.astype(jnp.int32)
    ids_BxS = jnp.concatenate([state['ids'], tokens_BxT], axis=1)
    documents_BxS = jnp.concatenate([state['documents'], documents_BxT], axis=1)
    classes_BxS = ids_BxS
    if classes_V is not None:
      classes_BxS = classes_V[ids_BxS]
    search = self.by_ranks
    if tokens_BxT.shape[1] <= SHORT:
      search = self.by_comparison
    matches = search(classes_BxS, documents_BxS)
    after_BxT = self.slots + jnp.arange(tokens_BxT.shape[1]) - matches.distance_BxT + 1
    has_match_BxT = matches.level_BxT >= 0
    after_BxT = jnp.where(has_match_BxT, after_BxT, 0)
    token_BxT = jnp.take_along_axis(ids_BxS, after_BxT, axis=1)
    bucket_BxT = self.counts * matches.level_BxT + matches.count_BxT
    copies = Copies(
      jnp.where(has_match_BxT, token_BxT, -1), jnp.where(has_match_BxT, bucket_BxT, 0)
    )
    next_state = {
      'ids': cache.keep_last(state['ids'], tokens_BxT, valid_BxT),
      'documents': cache.keep_last(state['documents'], documents_BxT, valid_BxT),
    }
    return copies, next_state

  def by_comparison(self, classes_BxS: jax.Array, documents_BxS: jax.Array) -> Matches:
    """Returns the matches of the last T of S tokens, from comparisons at each distance 1 to W."""
    B, S = classes_BxS.shape
    T = S - self.slots
    Q = self.lengths[-1] - 1 + T
    K = min(self.window, max(1, COMPARED // Q))
    steps = -(-self.window // K)
    # The last step compares at distances beyond W, for which tokens are missing.
    missing = steps * K - self.window
    pad = (0, 0), (missing, 0)
    classes = jnp.pad(classes_BxS, pad)
    documents = jnp.pad(documents_BxS, pad, constant_values=document_masks.NONE)

    def compare(matches: Matches, step: jax.Array) -> tuple[Matches, None]:
      # Row i of the earlier tokens is at the distance K (step + 1) - i.
      first = (steps - 1 - step) * K
      is_equal = classes[:, None, -Q:] == _shifted(classes, first, K, Q)
      is_equal &= documents[:, None, -Q:] == _shifted(documents, first, K, Q)
      level_BxKxT = self._levels(is_equal, T)
      distance_Kx1 = K * (step + 1) - jnp.arange(K, dtype=jnp.int32)[:, None]
      level_BxKxT = jnp.where(distance_Kx1 <= self.window, level_BxKxT, -1)
      return _longer(matches, level_BxKxT, distance_Kx1), None

    zeros_BxT = jnp.zeros((B, T), jnp.int32)
    matches = Matches(zeros_BxT - 1, zeros_BxT, zeros_BxT)
    if steps == 1:
      matches, _ = compare(matches, 0)
    else:
      matches, _ = jax.lax.scan(compare, matches, jnp.arange(steps, dtype=jnp.int32))
    return matches._replace(count_BxT=jnp.minimum(matches.count_BxT, self.counts))

  def _levels(self, is_equal_BxKxQ: jax.Array, T: int) -> jax.Array:
    """Returns the level of the longest length with all tokens equal, [B, K, T], or -1.

    Args:
      is_equal_BxKxQ: whether each token equals the one at each of K distances before it.
      T: possible last tokens of a match, the last of Q.
    """
    level_BxKxT = jnp.full((*is_equal_BxKxQ.shape[:2], T), -1, jnp.int32)
    run = is_equal_BxKxQ  # whether the last `length` tokens are equal, at the last of them
    length = 1
    for n in self.lengths:
      while length < n:
        step = min(length, n - length)
        run = run[..., step:] & run[..., :-step]
        length += step
      level_BxKxT += run[..., -T:]
    return level_BxKxT

  def by_ranks(self, classes_BxS: jax.Array, documents_BxS: jax.Array) -> Matches:
    """Returns the matches of the last T of S tokens, from one sort for each length.

    Equal n-grams have equal ranks. The rank of p + q tokens, q <= p, follows from the ranks of p
    tokens at a token and q tokens before it. Each token includes its document number, so no n-gram
    across a document start occurs twice.
    """
    B, S = classes_BxS.shape
    T = S - self.slots
    # Documents are in order: their number in the row is the number of earlier starts.
    is_start_BxS = documents_BxS != _later(documents_BxS, 1, document_masks.NONE)
    document_BxS = jnp.cumsum(is_start_BxS, axis=1, dtype=jnp.int32)
    steps, levels = self._stages()
    longest = max([1, *steps])

    def lengthen(carry, stage):
      ranks_BxS, matches = carry
      step, level = stage
      padded = jnp.pad(ranks_BxS, ((0, 0), (longest, 0)))
      before_BxS = jax.lax.dynamic_slice_in_dim(padded, longest - step, S, axis=1)
      ranks_BxS, candidates = self._rank(ranks_BxS, before_BxS, S)
      return (ranks_BxS, _with_longer(matches, candidates, level)), None

    zeros_BxT = jnp.zeros((B, T), jnp.int32)
    matches = Matches(zeros_BxT - 1, zeros_BxT, zeros_BxT)
    ranks_BxS, candidates = self._rank(document_BxS, classes_BxS, None)
    level_of_1 = -1
    if 1 in self.lengths:
      level_of_1 = self.lengths.index(1)
    matches = _with_longer(matches, candidates, level_of_1)
    stages = jnp.array(steps, jnp.int32), jnp.array(levels, jnp.int32)
    (_, matches), _ = jax.lax.scan(lengthen, (ranks_BxS, matches), stages)
    return matches

  def _stages(self) -> tuple[list[int], list[int]]:
    """Returns the stages from n-grams of one token to all lengths.

    The first list has the tokens added by each stage, at most doubling the length. The second has
    the index in Λ of the resulting length, or -1.
    """
    steps = []
    levels = []
    length = 1
    for level, n in enumerate(self.lengths):
      while length < n:
        step = min(length, n - length)
        length += step
        steps.append(step)
        if length == n:
          levels.append(level)
        else:
          levels.append(-1)
    return steps, levels

  def _rank(
    self, first_BxS: jax.Array, second_BxS: jax.Array, largest: int | None
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the rank of each pair of numbers, and the distance and count of earlier equal pairs.

    The ranks are from 1 to S. The distance is to the last equal pair in the window, the count at
    most C.

    Args:
      first_BxS: integers from 0 to S.
      second_BxS: integers of at least 0.
      largest: bound of `second_BxS`, if known.
    """
    place_BxS = _stable_order(second_BxS, largest)
    order_BxS = _stable_order(_take(first_BxS, place_BxS), first_BxS.shape[1])
    place_BxS = _take(place_BxS, order_BxS)
    is_new_BxS = False
    for number_BxS in (first_BxS, second_BxS):
      sorted_BxS = _take(number_BxS, place_BxS)
      is_new_BxS |= sorted_BxS != _later(sorted_BxS, 1, -1)
    rank_BxS = jnp.cumsum(is_new_BxS, axis=1, dtype=jnp.int32)
    count_BxS = jnp.zeros_like(rank_BxS)
    for i in range(1, self.counts + 1):
      is_equal_BxS = rank_BxS == _later(rank_BxS, i, 0)
      is_near_BxS = place_BxS - _later(place_BxS, i, 0) <= self.window
      count_BxS += is_equal_BxS & is_near_BxS
    distance_BxS = place_BxS - _later(place_BxS, 1, 0)
    put_back = functools.partial(_put, place_BxS)
    return put_back(rank_BxS), (put_back(distance_BxS), put_back(count_BxS))


def _with_longer(
  matches: Matches, candidates: tuple[jax.Array, jax.Array], level: jax.Array | int
) -> Matches:
  """Returns matches updated by longer ones, the last T of S; none for level -1."""
  T = matches.level_BxT.shape[1]
  distance_BxT, count_BxT = (array_BxS[:, -T:] for array_BxS in candidates)
  is_longer_BxT = (count_BxT > 0) & (level >= 0)
  return Matches(
    jnp.where(is_longer_BxT, level, matches.level_BxT),
    jnp.where(is_longer_BxT, distance_BxT, matches.distance_BxT),
    jnp.where(is_longer_BxT, count_BxT, matches.count_BxT),
  )


def _stable_order(number_BxS: jax.Array, largest: int | None) -> jax.Array:
  """Returns the indices of a stable sort of the numbers.

  Args:
    number_BxS: integers of at least 0.
    largest: their bound. With a bound, number and index may fit in one integer, faster to sort.
  """
  S = number_BxS.shape[1]
  place_BxS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), number_BxS.shape)
  if largest is not None and (largest + 1) * S <= 2**31:
    return jnp.sort(number_BxS * S + place_BxS, axis=1) % S
  return jax.lax.sort((number_BxS, place_BxS), num_keys=2, is_stable=False)[1]


def _take(array_BxS: jax.Array, place_BxS: jax.Array) -> jax.Array:
  """Returns the entries at these indices of each row."""
  return jnp.take_along_axis(array_BxS, place_BxS, axis=1)


def _put(place_BxS: jax.Array, array_BxS: jax.Array) -> jax.Array:
  """Returns an array with its entries moved to these indices of each row, a permutation."""
  row_Bx1 = jnp.arange(len(array_BxS))[:, None]
  return jnp.zeros_like(array_BxS).at[row_Bx1, place_BxS].set(array_BxS, unique_indices=True)


def _later(array_BxS: jax.Array, steps: int, fill: int) -> jax.Array:
  """Returns an array with its entries moved to later indices; the first ones are new."""
  S = array_BxS.shape[1]
  return jnp.pad(array_BxS, ((0, 0), (steps, 0)), constant_values=fill)[:, :S]


def _shifted(array_BxS: jax.Array, first: jax.Array | int, K: int, Q: int) -> jax.Array:
  """Returns Q entries from `first` on, from `first` + 1 on, ... in K rows, [B, K, Q]."""
  B = len(array_BxS)
  N = K + Q  # one more than the required entries, in rows of a period of N - 1
  part_BxN = jax.lax.dynamic_slice_in_dim(array_BxS, first, N - 1, axis=1)
  repeated = jnp.broadcast_to(part_BxN[:, None], (B, K + 2, N - 1)).reshape(B, -1)
  return repeated[:, : K * N].reshape(B, K, N)[..., :Q]


def _longer(matches: Matches, level_BxKxT: jax.Array, distance_Kx1: jax.Array) -> Matches:
  """Returns the longer of the present matches and the matches at K larger distances."""
  level_BxT = level_BxKxT.max(axis=1)
  is_longest = level_BxKxT == level_BxT[:, None]
  distance_BxT = jnp.where(is_longest, distance_Kx1, jnp.iinfo(jnp.int32).max).min(axis=1)
  count_BxT = is_longest.sum(axis=1, dtype=jnp.int32)
  is_longer = level_BxT > matches.level_BxT
  is_as_long = (level_BxT == matches.level_BxT) & (level_BxT >= 0)
  return Matches(
    jnp.maximum(matches.level_BxT, level_BxT),
    jnp.where(is_longer, distance_BxT, matches.distance_BxT),
    jnp.where(is_longer, count_BxT, matches.count_BxT + jnp.where(is_as_long, count_BxT, 0)),
  )
