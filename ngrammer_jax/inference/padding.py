"""Padding of texts to few shapes, so that few programs are compiled.

B batch, P tokens of a padded prompt, K choices, C tokens of a choice.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers import token_ids

MIN_PROMPT_LENGTH = 16  # prompts are padded to at least this many tokens
MIN_TEXT_LENGTH = 128  # texts are padded to segments of at least this many tokens, if allowed
READ_LENGTHS = (256, 32)  # incremental decoding reads tokens in pieces of at most these lengths
MIN_CHOICE_LENGTH = 32  # choices are padded to this, or to the longest choice if it is shorter


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
  """Yields parts with this many items; the last may have fewer."""
  return (items[first : first + size] for first in range(0, len(items), size))


def bucket(size: int, smallest: int = 1) -> int:
  """Returns the next power of two, at least `smallest`: few shapes compile few programs."""
  if not size:
    return smallest
  return max(smallest, 1 << (size - 1).bit_length())


def divide(ids: Sequence[int], context: int) -> Iterator[tuple[Sequence[int], int]]:
  """Yields pieces of token ids, each with its padded length.

  Uses a large piece if small ones would have as much padding.
  """
  large, small = (min(length, context) for length in READ_LENGTHS)
  first = 0
  while first < len(ids):
    rest = len(ids) - first
    if rest == 1:
      length = 1
    elif rest > large - small:
      length = large
    else:
      length = small
    yield ids[first : first + length], length
    first += length


def rank_shapes(
  prefixes: Sequence[np.ndarray], choices: Sequence[Sequence[np.ndarray]]
) -> list[tuple[int, int, int]]:
  """Returns the padded lengths P, K and C of each example."""
  has_same_count = len({len(example) for example in choices}) == 1
  lengths = [max(map(len, example), default=1) for example in choices]
  max_length = bucket(max(lengths, default=1), 2)
  shapes = []
  for prefix, example, length in zip(prefixes, choices, lengths, strict=True):
    P = bucket(len(prefix), MIN_PROMPT_LENGTH)
    # A number of choices shared by all examples is not padded.
    K = max(len(example), 1) if has_same_count else bucket(len(example))
    C = min(bucket(length, MIN_CHOICE_LENGTH), max_length)
    shapes.append((P, K, C))
  return shapes


def pad(
  sequences: Sequence[Sequence[int]], rows: int, length: int, vocabulary_size: int
) -> np.ndarray:
  """Returns padded token ids and their mask, int32 [2, rows, length]; the mask is 0 at padding.

  Raises BadInput for an id outside the vocabulary.
  """
  padded = np.zeros((2, rows, length), np.int32)
  for row, ids in enumerate(sequences):
    token_ids.check_range('token ids', ids, vocabulary_size)
    padded[0, row, : len(ids)] = ids
    padded[1, row, : len(ids)] = 1
  return padded


def pad_prompts(
  prompts: Sequence[Sequence[int]],
  rows: int,
  length: int,
  vocabulary_size: int,
  bidirectional: bool,
  is_start: bool = True,
) -> token_batch.Batch:
  """Returns the inputs of prompts, [B, P], without targets.

  Args:
    prompts: token ids of at most B prompts.
    rows, length: B and P.
    vocabulary_size: V.
    bidirectional: whether the tokens of a prompt attend to the whole prompt.
    is_start: whether prompts start documents; otherwise they continue a text.
  """
  tokens_BxP, valid_BxP = pad(prompts, rows, length, vocabulary_size)
  starts_BxP = (np.arange(length) == 0) & (valid_BxP > 0) & is_start
  prefix_BxP = valid_BxP > 0 if bidirectional else None
  return token_batch.Batch(tokens_BxP, None, starts_BxP, valid_BxP, prefix_BxT=prefix_BxP)
