"""Scoring and generating texts with a run."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import chat_template
from ngrammer_jax.inference import conversation, encoding, pairs, sampling, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.interop.huggingface import published_model
from ngrammer_jax.runs import split_texts
from ngrammer_jax.runs.opened_run import OpenedRun


def score(run: OpenedRun, texts: str | Sequence[str], special: bool) -> list[text.Score]:
  """Scores texts; see `Run.score`."""
  texts = encoding.as_list(texts)
  encoding.check_special(run.vocabulary, texts, special)
  encoded = []
  counts = {}
  for i, item in enumerate(texts, start=1):
    encoding.to_bytes(item, f'text {i}')  # token ids have no bits per byte
    encoded.append(encoding.encode(run.vocabulary, item, f'text {i}', special))
    counts[f'text {i}'] = len(encoded[-1].ids)
  split_texts.log(run.config, counts)
  variables = run.variables
  length = run.config.evaluation_length()
  return text.score(run.engine, variables, run.vocabulary, encoded, length, special)


def score_pairs(
  run: OpenedRun,
  texts: Sequence[tuple[encoding.TextOrIds, encoding.TextOrIds]],
  rows: int,
  special: bool,
) -> list[pairs.PairScore]:
  """Scores continuations; see `Run.score_pairs`."""
  inference.check_can_continue(run.config.model)
  parts = [part for pair in texts for part in pair]
  vocabulary = run.vocabulary_of_ids
  if any(isinstance(part, str) for part in parts):
    vocabulary = run.vocabulary
    encoding.check_special(vocabulary, parts, special)
  encoded = []
  counts = {}
  for i, pair in enumerate(texts, start=1):
    encoded.append(pairs.encode(vocabulary, pair, f'pair {i}', special))
    counts[f'pair {i}'] = sum(map(len, encoded[-1]))
  split_texts.log(run.config, counts)
  variables = run.variables
  return pairs.score(run.engine, variables, encoded, run.config.evaluation_context(), rows)


def sampling_config(run: OpenedRun, arguments: dict[str, float | None]) -> sampling.SamplingConfig:
  """Returns the options of sampling; see `Run.sampling_config`.

  Raises:
    BadInput: an argument is no number.
  """
  values = {name: value for name, value in arguments.items() if value is not None}
  options = {name: value for name, value in run.recommended_sampling.items() if name not in values}
  if options:
    settings = ', '.join(f'{name}={value}' for name, value in options.items())
    logging.info('%s of the model sets %s', published_model.GENERATION, settings)
  keys = fields.keys(sampling.SamplingConfig)
  for name, value in values.items():
    if isinstance(value, np.generic):
      value = value.item()
    options[name] = keys[name].convert(value)
  return sampling.SamplingConfig(**options)


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """Options of reading prompts.

  Attributes:
    chat: whether prompts are chat messages for the model to answer.
    special: whether the text of a special token in a prompt is read as the token.
    system: a system message before each prompt, for `chat`; None: the template decides.
  """

  chat: bool
  special: bool
  system: str | None

  def check_values(self) -> None:
    """Raises BadInput for options that contradict each other."""
    if self.chat and self.special:
      raise errors.BadInput(
        'special=True (--special) reads special tokens in a prompt, but in a chat the text of a '
        'message is ordinary text, and special tokens come from the template: leave one of the two '
        'out'
      )
    if self.system is not None and not self.chat:
      raise errors.BadInput(
        'a system message (--system) comes before the messages of a chat, but the prompts are '
        'texts to continue: set chat=True (--chat), or leave it out'
      )

  def encode(
    self,
    vocabulary: vocabularies.Vocabulary,
    prompts: Sequence[conversation.Prompt],
    config: text.CompletionConfig,
  ) -> list[encoding.EncodedText]:
    """Encodes prompts. Raises BadInput for prompts of another type or beyond the context."""
    if not self.chat:
      encoding.check_special(vocabulary, prompts, self.special)
    encoded = []
    for i, prompt in enumerate(prompts, start=1):
      name = f'prompt {i}'
      if self.chat:
        one = conversation.encode_prompt(vocabulary, prompt, name, config, self.system)
      else:
        if conversation.is_messages(prompt):
          raise errors.BadInput(f'{name} is a list of messages: chat=True (--chat) answers them')
        one = text.encode_prompt(vocabulary, prompt, name, config, self.special)
      encoded.append(one)
    return encoded


def complete(
  run: OpenedRun,
  prompts: Sequence[conversation.Prompt],
  prompt_config: PromptConfig,
  config: text.CompletionConfig,
  on_text: Callable[[int, str], None] | None,
) -> Iterator[text.Completion]:
  """Yields the completions of prompts; see `Run.completions`."""
  config.check_values(run.config.evaluation_model(), len(prompts))
  prompt_config.check_values()
  vocabulary = run.vocabulary_of_ids
  if prompt_config.chat or config.stop or not all(map(encoding.is_ids, prompts)):
    vocabulary = run.vocabulary
  encoded = prompt_config.encode(vocabulary, prompts, config)
  if prompt_config.chat:
    config = conversation.end_at_turn(config, vocabulary)
  variables = run.variables
  yield from text.complete(run.engine, variables, vocabulary, encoded, config, on_text)


def converse(
  run: OpenedRun, config: text.CompletionConfig, system: str | None
) -> conversation.Conversation:
  """Starts a conversation; see `Run.converse`."""
  config.check_values(run.config.evaluation_model(), num_prompts=1)
  vocabulary = run.vocabulary
  chat_template.check_exists(vocabulary)
  conversation.check_system(vocabulary, system)
  chat = conversation.Conversation(run.engine, run.variables, vocabulary, config)
  chat.set_system(system)
  return chat


def completion_config(
  run: OpenedRun,
  sampling_config: sampling.SamplingConfig,
  tokens: int,
  seed: int,
  context: int | None,
  stop: str | Sequence[str],
) -> text.CompletionConfig:
  """Returns the options of completions, with the defaults of a run."""
  if context is None:
    context = run.config.evaluation_context()
  if isinstance(stop, str):
    stop = (stop,)
  if not isinstance(stop, Sequence) or not all(isinstance(one, str) for one in stop):
    raise errors.BadInput(f'stop={stop!r} must be a text, or a list of texts')
  return text.CompletionConfig(
    sampling_config,
    tokens,
    seed,
    context,
    tuple(stop),
    run.config.evaluation_model().longest_document,
  )
