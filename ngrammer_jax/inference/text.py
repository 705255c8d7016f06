"""Inference on texts: scores of texts, and completions of prompts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import logging
import math
import numbers
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import sampling

# Incomplete UTF-8 decodes to this character, as do bytes that are not UTF-8.
REPLACEMENT = '\N{REPLACEMENT CHARACTER}'


class EncodedText(NamedTuple):
  """A text and its token ids, int32."""

  text: str
  ids: np.ndarray


def encode(vocabulary: vocabularies.Vocabulary, text: str, name: str) -> EncodedText:
  """Encodes a text. Raises BadInput, with its name, if the vocabulary lacks a character."""
  data = to_bytes(text, name)
  with errors.named(name):
    return EncodedText(text, vocabulary.encode(data).astype(np.int32))


def to_bytes(text: str, name: str) -> bytes:
  """Returns a text as UTF-8. Raises BadInput, with its name, for anything else."""
  if not isinstance(text, str):
    raise errors.BadInput(f'{name} is of type {type(text).__name__}, expected a text')
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise errors.BadInput(f'{name} is not valid Unicode: {error.reason}') from error


@dataclasses.dataclass(frozen=True)
class Score:
  """The score of a text as a separate document.

  Attributes:
    text: the text.
    tokens: its token ids.
    nats: negative log-likelihood of each token, float64; of each but the first if the model reads
      no document start, because nothing predicts that one.
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
) -> list[Score]:
  """Scores texts, each as a separate document."""
  documents = [encoded.ids for encoded in texts]
  start = None
  if vocabulary.adds_start:
    start = vocabulary.document_start
  nats = engine.score_documents(variables, documents, start, segment_length)
  scores = []
  for (text, ids), text_nats in zip(texts, nats, strict=True):
    is_lossless = vocabulary.decode(ids) == text.encode()
    scores.append(Score(text, ids, text_nats, is_lossless))
  return scores


@dataclasses.dataclass(frozen=True)
class Completion:
  """A prompt and its continuation.

  Attributes:
    prompt: the prompt.
    text: its continuation.
    tokens: token ids of the continuation; after a stop string, with those of the stop string.
    ended: whether the model ended the document or a stop string came; if not, the maximum number of
      tokens was reached.
    seed: seed that gives the same continuation for this prompt alone.
  """

  prompt: str
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
    context: maximum number of tokens that a token is predicted from; `UNBOUNDED` for a recurrent
      model.
    stop: texts before which a continuation ends.
    longest_document: maximum number of tokens that the model can read; None: no limit.
  """

  sampling: sampling.SamplingConfig
  tokens: int
  seed: int
  context: int
  stop: tuple[str, ...] = ()
  longest_document: int | None = None

  def check_values(self, model: model_config.ModelConfig, num_prompts: int) -> None:
    """Raises BadInput for values out of range, or that the model does not support."""
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
      raise errors.BadInput(
        f'context={self.context} exceeds the {positions:,} positions of the model: lower it'
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
  vocabulary: vocabularies.Vocabulary, prompt: str, name: str, config: CompletionConfig
) -> EncodedText:
  """Encodes a prompt, after the document start if the model reads one.

  Raises BadInput, with its name, if it is too long.
  """
  ids = encode(vocabulary, prompt, name).ids
  with_start = vocabulary.add_start(ids)
  config.check_length(name, len(ids), len(with_start) - len(ids))
  return EncodedText(prompt, with_start)


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
  """Yields the completions in the order of the prompts, as soon as those of a batch are done.

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
      rows=min(rows, inference.bucket(len(group))),
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
) -> 'IncrementalDetokenizer':
  """Returns the text of a continuation before its first token."""
  if prompt_ids[0] == vocabulary.document_start:  # it is no text
    prompt_ids = prompt_ids[1:]
  return IncrementalDetokenizer(vocabulary, prompt_ids, config.tokens, config.stop)


class IncrementalDetokenizer:
  """Converts the tokens after a prompt to text, token by token; emitted text never changes.

  Attributes:
    text: the text so far.
    tokens: the tokens so far, without the end of the document.
    has_ended: whether the document ended, or a stop string came, which is not part of the text.
    is_done: whether it has ended or the token limit is reached.
  """

  def __init__(
    self,
    vocabulary: vocabularies.Vocabulary,
    prompt: Iterable[int],
    max_tokens: int,
    stop: tuple[str, ...] = (),
  ):
    self._vocabulary = vocabulary
    self._max_tokens = max_tokens
    self._stop = stop
    self._prompt = [int(i) for i in prompt]
    self._prompt_length = len(self._decode([]))
    self.text = ''
    self.tokens: list[int] = []
    self.has_ended = False
    self.is_done = False

  def add(self, token: int) -> str:
    """Adds a token and returns the new text, which may be empty."""
    self.has_ended = token in self._vocabulary.end_tokens
    if not self.has_ended:
      self.tokens.append(token)
    self.is_done = self.has_ended or len(self.tokens) >= self._max_tokens
    text = self._decode(self.tokens)[self._prompt_length :]
    if not self.is_done:  # an incomplete character waits for its other bytes
      text = text.rstrip(REPLACEMENT)
    matches = [text.index(stop) for stop in self._stop if stop in text]
    if matches:
      text = text[: min(matches)]
      self.has_ended = True
      self.is_done = True
    elif not self.is_done:
      text = text[: len(text) - self._stop_prefix_length(text)]
    new_text = text[len(self.text) :]
    self.text = text
    return new_text

  def _stop_prefix_length(self, text: str) -> int:
    """Returns the length of the longest end of a text that begins a stop string."""
    longest = max(map(len, self._stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
      if any(stop.startswith(text[-length:]) for stop in self._stop):
        return length
    return 0

  def _decode(self, tokens: list[int]) -> str:
    return self._vocabulary.decode([*self._prompt, *tokens]).decode('utf-8', 'replace')
