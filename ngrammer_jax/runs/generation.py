"""Scores of texts by a run, and texts that it generates."""

from collections.abc import Callable, Iterator, Sequence
import logging

from ngrammer_jax.data.vocabularies import chat_template
from ngrammer_jax.inference import conversation, pairs, sampling, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.interop.huggingface import published_model
from ngrammer_jax.runs.opened_run import OpenedRun


def score(run: OpenedRun, texts: str | Sequence[str]) -> list[text.Score]:
  """Scores texts; see `Run.score`."""
  texts = [texts] if isinstance(texts, str) else list(texts)
  encoded = [text.encode(run.vocabulary, t, f'text {i + 1}') for i, t in enumerate(texts)]
  variables = run.variables
  length = run.config.evaluation_length()
  return text.score(run.engine, variables, run.vocabulary, encoded, length)


def score_pairs(
  run: OpenedRun, texts: Sequence[tuple[pairs.Encodable, pairs.Encodable]], rows: int
) -> list[pairs.PairScore]:
  """Scores continuations; see `Run.score_pairs`."""
  inference.check_can_continue(run.config.model)
  encoded = [pairs.encode(run.vocabulary, pair, f'pair {i + 1}') for i, pair in enumerate(texts)]
  variables = run.variables
  return pairs.score(run.engine, variables, encoded, run.config.evaluation_context(), rows)


def sampling_config(run: OpenedRun, arguments: dict[str, float | None]) -> sampling.SamplingConfig:
  """Returns the options of sampling; see `Run.sampling_config`."""
  values = {name: value for name, value in arguments.items() if value is not None}
  of_model = {name: value for name, value in run.recommended_sampling.items() if name not in values}
  if of_model:
    settings = ', '.join(f'{name}={value}' for name, value in of_model.items())
    logging.info('%s of the model sets %s', published_model.GENERATION, settings)
  return sampling.SamplingConfig(**of_model, **values)


def complete(
  run: OpenedRun,
  prompts: Sequence[str],
  config: text.CompletionConfig,
  on_text: Callable[[int, str], None] | None,
  chat: bool,
) -> Iterator[text.Completion]:
  """Yields the completions of prompts; see `Run.completions`."""
  config.check_values(run.config.evaluation_model(), len(prompts))
  encode = conversation.encode_prompt if chat else text.encode_prompt
  encoded = [
    encode(run.vocabulary, prompt, f'prompt {i + 1}', config) for i, prompt in enumerate(prompts)
  ]
  variables = run.variables
  yield from text.complete(run.engine, variables, run.vocabulary, encoded, config, on_text)


def converse(run: OpenedRun, config: text.CompletionConfig) -> conversation.Conversation:
  """Starts a conversation; see `Run.converse`."""
  config.check_values(run.config.evaluation_model(), num_prompts=1)
  chat_template.check_exists(run.vocabulary)
  return conversation.Conversation(run.engine, run.variables, run.vocabulary, config)


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
  return text.CompletionConfig(
    sampling_config,
    tokens,
    seed,
    context,
    tuple(stop),
    run.config.evaluation_model().longest_document,
  )
