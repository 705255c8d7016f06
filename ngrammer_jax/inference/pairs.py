"""Scores of continuations after their contexts, for ranking and evaluation harnesses.

A tokenizer may join the end of a context and the start of its continuation to one token. The
continuation then starts with this token, and its score covers the tokens not shared by the two
texts.
"""

from collections.abc import Iterable, Iterator, Sequence
import os
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import encoding, padding
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.system import progress

MAX_CHOICES = 8  # continuations of the same context to score together


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
  """Returns the length of the common prefix of arrays of token ids."""
  return len(os.path.commonprefix([ids.tolist() for ids in token_ids]))


def encode(
  vocabulary: vocabularies.Vocabulary,
  pair: tuple[encoding.TextOrIds, encoding.TextOrIds],
  name: str,
  special: bool,
) -> EncodedPair:
  """Encodes a pair.

  Args:
    vocabulary: vocabulary of the model.
    pair: context and continuation, two texts or the token ids of both. Texts are read after the
      document start if the model reads one, and after an empty context in any case.
    name: name of the pair in errors.
    special: whether the text of a special token is read as the token.

  Raises:
    BadInput: no pair, or a character or id outside the vocabulary.
  """
  if isinstance(pair, str) or len(pair) != 2:
    raise errors.BadInput(f'{name} is {pair!r}, expected a context and its continuation')
  context, continuation = pair
  if isinstance(context, str) and isinstance(continuation, str):
    return _encode_texts(vocabulary, context, continuation, name, special)
  if isinstance(context, str) or isinstance(continuation, str):
    raise errors.BadInput(
      f'{name}: context and continuation must be two texts, or two lists of token ids'
    )
  context_ids = encoding.check_ids(context, vocabulary.size, name)
  continuation_ids = encoding.check_ids(continuation, vocabulary.size, name)
  if not len(context_ids):
    context_ids = vocabulary.add_start(context_ids)
  return EncodedPair(context_ids, continuation_ids)


def _encode_texts(
  vocabulary: vocabularies.Vocabulary, context: str, continuation: str, name: str, special: bool
) -> EncodedPair:
  """Encodes two texts that may share a token."""
  context_ids = encoding.encode(vocabulary, context, name, special).ids
  joined_ids = encoding.encode(vocabulary, context + continuation, name, special).ids
  shared = count_shared(context_ids, joined_ids)
  return EncodedPair(vocabulary.add_start(joined_ids[:shared]), joined_ids[shared:])


def windows(pair: EncodedPair, limit: int) -> Iterator[EncodedPair]:
  """Yields the parts of a continuation of at most `limit` tokens, each with its context.

  A token is predicted from at most `limit` tokens: long contexts are cut at the start.
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
  """Scores pairs, grouped by context and batched by length.

  Args:
    engine, variables: the engine and its variables.
    pairs: see `encode`.
    limit: context length in tokens.
    rows: maximum batch size in contexts.
  """
  parts = [
    _Part(index, *window) for index, pair in enumerate(pairs) for window in windows(pair, limit)
  ]
  batches = _batches(parts)
  contexts = [batch[0].context for batch in batches]
  choices = [[part.continuation for part in batch] for batch in batches]
  rows = min(rows, padding.bucket(len(batches)))
  scores = [PairScore(0.0, True)] * len(pairs)
  with progress.Progress('scoring', len(parts), 'continuations') as bar:
    for index, log_probs, are_greedy in engine.rank(variables, contexts, choices, rows):
      for part, log_prob, is_greedy in zip(batches[index], log_probs, are_greedy, strict=True):
        i = part.pair
        total = scores[i].log_likelihood + float(log_prob)
        scores[i] = PairScore(total, scores[i].is_greedy and bool(is_greedy))
        bar.advance(1)
  return scores


class _Part(NamedTuple):
  """A part of a continuation with its context, see `windows`, and the index of its pair."""

  pair: int
  context: np.ndarray
  continuation: np.ndarray


def _batches(parts: Iterable[_Part]) -> list[list[_Part]]:
  """Returns groups of parts of the same context, at most `MAX_CHOICES`, of similar length.

  Continuations of a group are padded to one length.
  """
  groups: dict[tuple[bytes, int], list[_Part]] = {}
  for part in parts:
    length = padding.bucket(len(part.continuation), padding.MIN_CHOICE_LENGTH)
    groups.setdefault((part.context.tobytes(), length), []).append(part)
  batches = []
  for group in groups.values():
    batches.extend(padding.chunks(group, MAX_CHOICES))
  return batches
