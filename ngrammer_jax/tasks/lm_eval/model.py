"""A run as a model of lm_eval, compatible with `hf`, the harness's own model.

The harness splits texts into contexts and continuations; the model uses exactly its ids.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

from lm_eval.api import instance, model, registry

from ngrammer_jax import command_line, errors, flags, runs
from ngrammer_jax.inference import encoding, padding
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.system import progress
from ngrammer_jax.tasks.lm_eval.answers import Answer, AnswerConfig

IGNORED_ARGS = {'device', 'max_batch_size'}  # of every model; without effect on this one


class _Prompt(NamedTuple):
  """The index of a request, and the token ids of its context."""

  index: int
  ids: list[int]


@registry.register_model('ngrammer_jax')
class HarnessModel(model.TemplateLM):
  """A run, or a published model.

  Args:
    workdir, pretrained, adapter, step: the model, as in the flags of `evaluate`.
    max_length: context length in tokens, including a segment memory. None: the positions of a
      published model, the context of the evaluation of a run.
    batch_size: number of texts in a batch; auto, or auto:N: `inference.MAX_ROWS`.
    add_bos_token: whether to add the begin token, if any, before a text. None: as the model.
    prefix_token_id: token before a continuation without context. None: the begin token, or the end
      token without one.

  Raises:
    BadInput: an unknown model, or one that cannot continue a text.
  """

  def __init__(
    self,
    workdir: str | None = None,
    pretrained: str | None = None,
    adapter: str | None = None,
    step: str | int = 'newest',
    max_length: int | None = None,
    batch_size: str | int = 'auto',
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    **others: Any,
  ):
    super().__init__()
    unknown = others.keys() - IGNORED_ARGS
    if unknown or (workdir is None) == (pretrained is None):
      raise errors.BadInput(
        f'--model_args {" ".join(unknown)}: expected workdir=DIR or pretrained=NAME, and possibly '
        f'adapter=FOLDER, step=N, max_length=N, add_bos_token=True or False, or prefix_token_id=N'
      )
    named = argparse.Namespace(
      workdir=workdir, pretrained=pretrained, adapter=adapter, step=str(step)
    )
    self.run = _open_run(named, max_length)
    self.max_length = self.run.config.evaluation_context()
    self.batch_size = _read_batch_size(batch_size)
    vocabulary = self.run.vocabulary
    self._adds_begin = vocabulary.adds_start
    if add_bos_token is not None:
      self._adds_begin = add_bos_token and getattr(vocabulary, 'has_begin_token', True)
    self._prefix = vocabulary.document_start
    if prefix_token_id is not None:
      encoding.check_ids([prefix_token_id], vocabulary.size, 'prefix_token_id')
      self._prefix = prefix_token_id
    self._end_tokens = _end_tokens(self.run)

  @property
  def eot_token_id(self) -> int:
    end = self.run.vocabulary.document_end
    if end is None:
      return self.prefix_token_id
    return end

  @property
  def prefix_token_id(self) -> int:
    """The token before a continuation without context."""
    return self._prefix

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Returns token ids. The text of a special token is read as the token.

    Args:
      string: a text.
      add_special_tokens: whether to add the begin token, if the model does so. None: yes, unless
        the text begins with the prefix token.
    """
    vocabulary = self.run.vocabulary
    ids = vocabulary.encode(encoding.to_bytes(string, 'a text of the task'), special=True).tolist()
    if add_special_tokens is None:
      prefix = self._spell(self.prefix_token_id)
      add_special_tokens = not prefix or not string.startswith(prefix)
    if add_special_tokens and self._adds_begin:
      return [vocabulary.document_start, *ids]
    return ids

  def _spell(self, token: int) -> str:
    """Returns the text of a special token; empty for a vocabulary without special tokens."""
    vocabulary = self.run.vocabulary
    if not vocabulary.special_tokens:
      return ''
    return vocabulary.decode([token], special=True).decode()

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    """Returns the log-likelihood of each continuation, and whether greedy decoding gives it."""
    pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
    return [tuple(score) for score in self.run.score_pairs(pairs, self.batch_size)]

  def loglikelihood_rolling(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log-likelihood of each text after the prefix token, in windows.

    As in `hf`, a begin token added by the model is a token of the text. The document start of a
    vocabulary without special tokens is not.
    """
    begins = bool(self.run.vocabulary.special_tokens)
    pairs = []
    for request in requests:
      ids = self.tok_encode(request.args[0], None if begins else False)
      pairs.append(([self.prefix_token_id], ids))
    return [score.log_likelihood for score in self.run.score_pairs(pairs, self.batch_size)]

  def generate_until(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns an answer to each context, up to a stop of its task.

    Contexts are cut at the start if the answer would not fit.

    Raises:
      BadInput: unsupported options of a request, or no room for its context.
    """
    end = self._spell(self.eot_token_id)
    groups: dict[AnswerConfig, list[_Prompt]] = {}
    for index, request in enumerate(requests):
      context, options = request.args
      config = AnswerConfig.from_options(options, end)
      prompt = _Prompt(index, self._encode_context(context, config.tokens))
      groups.setdefault(config, []).append(prompt)
    texts = [''] * len(requests)
    with progress.Progress('generating', len(requests), 'texts') as bar:
      for config, prompts in groups.items():
        prompts.sort(key=_length)  # texts of a batch have similar lengths
        for batch in padding.chunks(prompts, self.batch_size):
          for prompt, answer in zip(batch, self._answer(batch, config), strict=True):
            texts[prompt.index] = answer.text
            bar.advance(1)
    return texts

  def _encode_context(self, context: str, tokens: int) -> list[int]:
    """Returns the last ids of a context, with room for this number of new tokens."""
    room = self.max_length - tokens
    if room < 1:
      raise errors.BadInput(
        f'max_gen_toks={tokens:,} new tokens leave no room for a context in the '
        f'{self.max_length:,} tokens that the model reads: lower it with --gen_kwargs, or raise '
        f'max_length in --model_args'
      )
    ids = self.tok_encode(context) or [self.prefix_token_id]
    return ids[-room:]

  def _answer(self, prompts: Sequence[_Prompt], config: AnswerConfig) -> list[Answer]:
    """Returns the answers of a batch."""
    run = self.run
    answers = [Answer(run.vocabulary, self._end_tokens, config) for _ in prompts]
    context = self.max_length
    if run.config.model.recurrent is None:  # a short KV cache
      longest = max(map(_length, prompts))
      context = min(padding.bucket(longest + config.tokens + 1), self.max_length)
    generated = run.engine.generate(
      run.variables,
      [prompt.ids for prompt in prompts],
      [prompt.index for prompt in prompts],  # repeated requests are sampled with other seeds
      config.sampling,
      context,
      rows=min(self.batch_size, padding.bucket(len(prompts))),
    )
    while not all(answer.is_done for answer in answers):
      for answer, token in zip(answers, next(generated).tolist(), strict=True):
        answer.add(token)
    return answers


def _open_run(named: argparse.Namespace, max_length: int | None) -> runs.Run:
  """Opens a model, see `flags.add_run`, with a context of `max_length` tokens."""
  run = flags.load_run(named)
  # The rotation of some models depends on the length.
  if run.published is not None and run.config.model.num_positions is None:
    max_length = max_length or run.origin['positions']
  overrides = []
  if max_length:
    overrides.append(('evaluation.segment_length', str(_segment_length(run, max_length))))
  config = command_line.override(run.config, overrides, 'evaluation.*')
  inference.check_can_continue(config.model)
  return dataclasses.replace(run, config=config)


def _segment_length(run: runs.Run, max_length: int) -> int:
  """Returns the length of a segment that reads `max_length` tokens together with its memory."""
  config = run.config
  if config.model.recurrent is not None:
    return max_length
  memory = config.evaluation_context() - config.evaluation_length()
  if max_length <= memory:
    raise errors.BadInput(
      f'max_length={max_length:,} in --model_args leaves no token beside the segment memory of '
      f'{memory:,} tokens: use at least {memory + 1:,}'
    )
  return max_length - memory


def _read_batch_size(value: str | int) -> int:
  """Returns the batch size; `inference.MAX_ROWS` for auto and auto:N."""
  if str(value).startswith('auto'):
    return inference.MAX_ROWS
  if not str(value).isdecimal() or int(value) < 1:
    raise errors.BadInput(f'--batch_size={value}: expected a whole number from 1 on, or auto')
  return int(value)


def _end_tokens(run: runs.Run) -> tuple[int, ...]:
  """Returns the ids that end an answer; for a published model as in transformers."""
  if run.published is None:
    return run.vocabulary.end_tokens
  for source in (run.origin['generation'], run.origin['token_ids']):
    ends = source.get('eos_token_id')
    if ends is not None:
      return tuple(ends) if isinstance(ends, list) else (ends,)
  return ()  # the spelling of its end token is one of the stops


def _length(prompt: _Prompt) -> int:
  return len(prompt.ids)
