"""Scores of continuations, each after its context: what ranking and evaluation harnesses ask for.

A tokenizer may join the end of a context and the start of its continuation to one token. Then the
continuation starts with that token, and its score is of what the two texts do not share.
"""

from collections.abc import Iterator, Sequence
import os
from typing import Any, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import text
from ngrammer_jax.system import progress

MAX_CHOICES = 8  # continuations of the same context that are scored together

Encodable = str | Sequence[int] | np.ndarray  # a text, or its token ids


class EncodedPair(NamedTuple):
  """The token ids of a context and of its continuation, int32."""

  context: np.ndarray
  continuation: np.ndarray


class PairScore(NamedTuple):
  """The score of a continuation.

  Attributes:
    log_likelihood: log p(continuation | context) in nats.
    is_greedy: whether greedy decoding after the context gives the continuation.
  """

  log_likelihood: float
  is_greedy: bool


def count_shared(*token_ids: np.ndarray) -> int:
  """Returns how many first tokens are equal in all arrays of token ids."""
  return len(os.path.commonprefix([ids.tolist() for ids in token_ids]))


def encode(
  vocabulary: vocabularies.Vocabulary, pair: tuple[Encodable, Encodable], name: str
) -> EncodedPair:
  """Encodes a pair.

  Args:
    vocabulary: vocabulary of the model.
    pair: context and continuation, two texts or the token ids of both. Texts are read after the
      document start if the model reads one, and after an empty context in any case.
    name: name of the pair in errors.

  Raises:
    BadInput: it is no pair, or the vocabulary lacks a character or an id.
  """
  if isinstance(pair, str) or len(pair) != 2:
    raise errors.BadInput(f'{name} is {pair!r}, expected a context and its continuation')
  if isinstance(pair[0], str) and isinstance(pair[1], str):
    context, joined = (text.encode(vocabulary, t, name).ids for t in (pair[0], ''.join(pair)))
    shared = count_shared(context, joined)
    return EncodedPair(vocabulary.add_start(joined[:shared]), joined[shared:])
  context, continuation = (_check_ids(ids, vocabulary.size, name) for ids in pair)
  return EncodedPair(context if len(context) else vocabulary.add_start(context), continuation)


def _check_ids(ids: Any, size: int, name: str) -> np.ndarray:
  array = np.asarray(ids)
  is_valid = array.ndim == 1 and (not array.size or array.dtype.kind in 'iu')
  if not is_valid or array.size and not 0 <= array.min() <= array.max() < size:
    raise errors.BadInput(
      f'{name}: context and continuation must be two texts, or two lists of token ids from 0 to '
      f'{size - 1:,}'
    )
  return array.astype(np.int32)


def windows(pair: EncodedPair, limit: int) -> Iterator[EncodedPair]:
  """Yields the parts of a continuation of at most `limit` tokens, each with its context.

  A token is predicted from at most `limit` tokens: long contexts lose their first ones.
  """
  ids = np.concatenate(pair).astype(np.int32)
  for first in range(len(pair.context), len(ids), limit):
    last = min(first + limit, len(ids))
    # The last token of a part is predicted, but not read.
    yield EncodedPair(ids[max(last - 1 - limit, 0) : first], ids[first:last])


def score(
  engine: inference.Engine,
  variables: inference.Variables,
  pairs: Sequence[EncodedPair],
  limit: int,
  rows: int,
) -> list[PairScore]:
  """Scores pairs, those of the same context together and those of similar length in a batch.

  Args:
    engine, variables: the engine and its variables.
    pairs: see `encode`.
    limit: maximum number of tokens that a token is predicted from.
    rows: maximum batch size in contexts.
  """
  parts = [(i, window) for i, pair in enumerate(pairs) for window in windows(pair, limit)]
  # Continuations of a batch are padded to one length.
  groups: dict[Any, list[Any]] = {}
  for i, (context, continuation) in parts:
    length = inference.bucket(len(continuation), inference.MIN_CHOICE_LENGTH)
    groups.setdefault((context.tobytes(), length), []).append((i, context, continuation))
  batches = [
    list(zip(*part, strict=True))
    for group in groups.values()
    for part in inference.chunks(group, MAX_CHOICES)
  ]
  contexts, choices = [contexts[0] for _, contexts, _ in batches], [batch[2] for batch in batches]
  rows = min(rows, inference.bucket(len(batches)))
  scores = [PairScore(0.0, True)] * len(pairs)
  with progress.Progress('scoring', len(parts), 'continuations') as bar:
    for index, *results in engine.rank(variables, contexts, choices, rows):
      for i, log_prob, is_greedy in zip(batches[index][0], *results, strict=True):
        total = scores[i].log_likelihood + float(log_prob)
        scores[i] = PairScore(total, scores[i].is_greedy and bool(is_greedy))
        bar.advance(1)
  return scores
