"""Inference on texts: scores and completions."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging
import math
import numbers
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import encoding, padding, sampling
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference.detokenizer import IncrementalDetokenizer
from ngrammer_jax.inference.encoding import EncodedText


@dataclasses.dataclass(frozen=True)
class Score:
  """The score of a text as a separate document.

  Attributes:
    text: the text.
    tokens: its token ids.
    nats: negative log-likelihood of each token, float64; without a document start, of each token
      but the first.
    lossless: whether the tokens decode to the text.
  """

  text: str
  tokens: np.ndarray
  nats: np.ndarray
  lossless: bool

  @property
  def perplexity(self) -> float:
    """exp of the mean over tokens; nan for an empty text."""
    if not self.nats.size:
      return math.nan
    return math.exp(min(self.nats.mean(), 700))

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte of UTF-8; nan without nats, or if the tokens do not decode to the text.

    The bytes of a first token without nats count too.
    """
    if not self.lossless or not self.nats.size:
      return math.nan
    size = len(self.text.encode())
    if size == 0:
      return math.nan
    return float(self.nats.sum()) / math.log(2) / size


def score(
  engine: inference.Engine,
  variables: inference.Variables,
  vocabulary: vocabularies.Vocabulary,
  texts: Sequence[EncodedText],
  segment_length: int,
  special: bool = False,
) -> list[Score]:
  """Scores texts, each as a separate document.

  Args:
    engine, variables: the engine and its variables.
    vocabulary: vocabulary of the model.
    texts: see `encoding.encode`.
    segment_length: maximum length of a segment, T.
    special: how the texts were encoded.
  """
  start = None
  if vocabulary.adds_start:
    start = vocabulary.document_start
  documents = []
  for encoded in texts:
    ids = encoded.ids
    if start is not None and vocabulary.begins_with_start(ids):
      ids = ids[1:]  # the engine reads it first
    documents.append(ids)
  nats = engine.score_documents(variables, documents, start, segment_length)
  scores = []
  for (text, ids), text_nats in zip(texts, nats, strict=True):
    is_lossless = vocabulary.decode(ids, special) == text.encode()
    scores.append(Score(text, ids, text_nats, is_lossless))
  return scores


@dataclasses.dataclass(frozen=True)
class Completion:
  """A prompt and its continuation.

  Attributes:
    prompt: the prompt: a text, token ids or messages.
    text: its continuation; empty without a tokenizer.
    tokens: token ids of the continuation, including a stop string.
    ended: whether the document ended or a stop string came; otherwise the token limit was reached.
    seed: seed to reproduce the continuation for this prompt alone.
  """

  prompt: str | list[int] | list[dict[str, Any]]
  text: str
  tokens: list[int]
  ended: bool
  seed: int


@dataclasses.dataclass(frozen=True)
class CompletionConfig:
  """Options of completions.

  Attributes:
    sampling: options of sampling.
    tokens: maximum number of new tokens.
    seed: random seed of the first prompt; prompt number i, from 0, uses seed + i.
    context: context length in tokens; `UNBOUNDED` for a recurrent model.
    stop: stop strings; a continuation ends before them.
    longest_document: maximum length of a document in tokens; None: no limit.
    end_tokens: end tokens in addition to the vocabulary's.
  """

  sampling: sampling.SamplingConfig
  tokens: int
  seed: int
  context: int
  stop: tuple[str, ...] = ()
  longest_document: int | None = None
  end_tokens: tuple[int, ...] = ()

  def check_values(self, model: model_config.ModelConfig, num_prompts: int) -> None:
    """Raises BadInput for values out of range or unsupported by the model."""
    self.sampling.check_values()
    inference.check_can_continue(model)
    if model.recurrent is not None and self.context != recurrent_config.UNBOUNDED:
      raise errors.BadInput(
        f'context={self.context} has no meaning for model.recurrent, whose state holds all it has '
        f'read: leave it out'
      )
    for name, least in (('tokens', 1), ('context', 1), ('seed', 0)):
      value = getattr(self, name)
      if not isinstance(value, numbers.Integral) or value < least:
        raise errors.BadInput(f'{name}={value} must be a whole number from {least} on')
    positions = model.num_positions
    if positions is not None and self.context > positions:
      remedy = 'lower it'
      if model.position == 'rope':  # the model has long factors, too
        remedy = f'use evaluation.segment_length={self.context}, or lower it'
      raise errors.BadInput(
        f'context={self.context} exceeds the {positions:,} positions of the model: {remedy}'
      )
    if '' in self.stop:
      raise errors.BadInput("stop='' is in every text; expected at least one character")
    if self.seed + num_prompts > 2**32:
      raise errors.BadInput(f'seed={self.seed} and one more for each prompt exceed 2^32 - 1')

  def check_length(self, name: str, tokens: int, starts: int = 0) -> None:
    """Raises BadInput if a text exceeds the context, or with its continuation the positions.

    Args:
      name: name of the text, for the error message.
      tokens: number of its tokens.
      starts: 1 if the document start is read before them.
    """
    read = tokens + starts
    if read > self.context:
      room = f'{self.context - starts:,}'
      if starts:
        room += ' and the document start'
      raise errors.BadInput(
        f'{name} is too long: {tokens:,} tokens, but {room} fill the context of '
        f'{self.context:,}; shorten it, or raise the context'
      )
    last = read + self.tokens - 1  # the last token is not read
    if self.longest_document is not None and last > self.longest_document:
      raise errors.BadInput(
        f'{name} has {read:,} tokens, which with tokens={self.tokens:,} new ones exceed the '
        f'{self.longest_document:,} positions of the model: shorten it, or lower tokens'
      )


def encode_prompt(
  vocabulary: vocabularies.Vocabulary,
  prompt: encoding.TextOrIds,
  name: str,
  config: CompletionConfig,
  special: bool,
) -> EncodedText:
  """Encodes a prompt, a text after the document start if the model reads one.

  Token ids are used unchanged. Raises BadInput with the name of a prompt that is too long.
  """
  encoded = encoding.encode(vocabulary, prompt, name, special)
  ids = encoded.ids
  if isinstance(prompt, str) or not len(ids):
    ids = vocabulary.add_start(ids)
  config.check_length(name, len(encoded.ids), len(ids) - len(encoded.ids))
  return encoded._replace(ids=ids)


def complete(
  engine: inference.Engine,
  variables: inference.Variables,
  vocabulary: vocabularies.Vocabulary,
  prompts: Sequence[EncodedText],
  config: CompletionConfig,
  on_text: Callable[[int, str], None] | None = None,
  rows: int = inference.MAX_ROWS,
  is_prefix_bidirectional: bool = False,
) -> Iterator[Completion]:
  """Yields the completions in the order of the prompts, as each batch finishes.

  Args:
    engine, variables: the engine and its variables.
    vocabulary: vocabulary of the model.
    prompts: see `encode_prompt`.
    config: options.
    on_text: called with the index of a prompt and its new text, for each token.
    rows: maximum batch size.
    is_prefix_bidirectional: whether the tokens of a prompt attend to the whole prompt.
  """
  longest = max((len(prompt.ids) for prompt in prompts), default=0)
  if longest + config.tokens - 1 > config.context:
    logging.info('a token is predicted from the last %s tokens, the context', f'{config.context:,}')
  for first in range(0, len(prompts), rows):
    group = prompts[first : first + rows]
    ids = [prompt.ids for prompt in group]
    seeds = [config.seed + first + row for row in range(len(group))]
    texts = [_start_text(vocabulary, prompt_ids, config) for prompt_ids in ids]
    generated = engine.generate(
      variables,
      ids,
      seeds,
      config.sampling,
      config.context,
      is_prefix_bidirectional,
      rows=min(rows, padding.bucket(len(group))),
      document_start=vocabulary.document_start,
    )
    for token_B in generated:
      for row, (text, token) in enumerate(zip(texts, token_B.tolist(), strict=True)):
        if not text.is_done:
          new_text = text.add(token)
          if on_text is not None:
            on_text(first + row, new_text)
      if all(text.is_done for text in texts):
        break
    for prompt, text, seed in zip(group, texts, seeds, strict=True):
      yield Completion(prompt.text, text.text, text.tokens, text.has_ended, seed)


def _start_text(
  vocabulary: vocabularies.Vocabulary, prompt_ids: np.ndarray, config: CompletionConfig
) -> IncrementalDetokenizer:
  """Returns the text of a continuation before its first token."""
  if prompt_ids[0] == vocabulary.document_start:  # it is no text
    prompt_ids = prompt_ids[1:]
  return IncrementalDetokenizer(
    vocabulary, prompt_ids, config.tokens, config.stop, config.end_tokens
  )
