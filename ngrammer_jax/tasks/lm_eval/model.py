"""A run as a model of lm_eval. The harness itself splits texts into contexts and continuations."""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import json
from typing import Any

from lm_eval.api import instance, model, registry
from lm_eval.models import utils
import numpy as np

from ngrammer_jax import command_line, errors, flags
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import sampling
from ngrammer_jax.system import progress

IGNORED_ARGS = {'device', 'max_batch_size'}  # of every model; without effect on this one


@registry.register_model('ngrammer_jax')
class HarnessModel(model.TemplateLM):
  """A run, or a published model.

  Args:
    workdir, pretrained, step: the model, as the flags of `evaluate` name it.
    max_length: maximum number of tokens that a token is predicted from. None: the positions of a
      published model, the context of the evaluation of a run.
    batch_size: number of texts in a batch; auto, or auto:N: `inference.MAX_ROWS`.

  Raises:
    BadInput: there is no such model, or it cannot continue a text.
  """

  def __init__(
    self,
    workdir: str | None = None,
    pretrained: str | None = None,
    step: str | int = 'newest',
    max_length: int | None = None,
    batch_size: str | int = 'auto',
    **others: Any,
  ):
    super().__init__()
    unknown = others.keys() - IGNORED_ARGS
    if unknown or (workdir is None) == (pretrained is None):
      raise errors.BadInput(
        f'--model_args {" ".join(unknown)}: expected workdir=DIR or pretrained=NAME, and possibly '
        f'step=N or max_length=N'
      )
    options = argparse.Namespace(workdir=workdir, pretrained=pretrained, step=str(step))
    run = flags.load_run(options)
    # The rotation of some models depends on the length.
    if run.published is not None and run.config.model.num_positions is None:
      max_length = max_length or run.origin['positions']
    overrides = []
    if max_length:
      overrides.append(('evaluation.segment_length', str(max_length)))
    config = command_line.override(run.config, overrides, 'evaluation.*')
    inference.check_can_continue(config.model)
    self.run = dataclasses.replace(run, config=config)
    self.max_length = config.evaluation_context()
    if str(batch_size).startswith('auto'):
      self.batch_size = inference.MAX_ROWS
    else:
      self.batch_size = int(batch_size)

  @property
  def eot_token_id(self) -> int:
    end = self.run.vocabulary.document_end
    if end is None:
      return self.prefix_token_id
    return end

  @property
  def prefix_token_id(self) -> int:
    """What is read before a continuation without context."""
    return self.run.vocabulary.document_start

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Returns token ids, with the document start if the model reads one before a text.

    As in the models of the harness, the spelling of a special token is that token.
    """
    vocabulary = self.run.vocabulary
    ids = vocabulary.encode(string.encode(), special=True).astype(np.int32)
    has_start = ids[:1].tolist() == [vocabulary.document_start]
    if add_special_tokens is not False and not has_start:
      ids = vocabulary.add_start(ids)
    return ids.tolist()

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    """Returns the log-likelihood of each continuation, and whether greedy decoding gives it."""
    pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
    return [tuple(score) for score in self.run.score_pairs(pairs, self.batch_size)]

  def loglikelihood_rolling(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log-likelihood of each text, in windows like those of the harness."""
    pairs = []
    for request in requests:
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      pairs.append(([self.prefix_token_id], ids))
    return [score.log_likelihood for score in self.run.score_pairs(pairs, self.batch_size)]

  def generate_until(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns a continuation of each context, up to a stop text of its task."""
    ids = [self.tok_encode(request.args[0]) for request in requests]
    options = [json.dumps(request.args[1], sort_keys=True) for request in requests]
    # Texts of a batch have the same options and similar lengths.
    order = sorted(range(len(requests)), key=lambda i: (options[i], len(ids[i])))
    texts = [''] * len(requests)
    with progress.Progress('generating', len(requests), 'texts') as bar:
      for key, group in itertools.groupby(order, options.__getitem__):
        for batch in inference.chunks(list(group), self.batch_size):
          contexts = [(requests[i].args[0], ids[i]) for i in batch]
          for i, text in zip(batch, self._complete(contexts, json.loads(key)), strict=True):
            texts[i] = text
            bar.advance(1)
    return texts

  def _complete(
    self, contexts: Sequence[tuple[str, list[int]]], options: dict[str, Any]
  ) -> Iterator[str]:
    """Yields the continuations of a batch; long contexts lose their first tokens.

    Args:
      contexts: text and token ids of each context.
      options: options of the generation, as a task of the harness gives them.
    """
    options = utils.normalize_gen_kwargs(options)
    tokens = options['max_gen_toks']
    room = max(self.max_length - tokens, 1)
    prompts = []
    for text, ids in contexts:
      if len(ids) > room:
        text = self.run.vocabulary.decode(ids[-room:]).decode(errors='replace')
      prompts.append(text)
    context = self.max_length
    if self.run.config.model.recurrent is None:  # a short KV cache
      longest = min(max(len(ids) for _, ids in contexts), room)
      context = min(inference.bucket(longest + tokens + 1), self.max_length)
    temperature = options.get('temperature', 1.0) if options['do_sample'] else 0.0
    sampler = sampling.SamplingConfig(temperature, options.get('top_k'), options.get('top_p'))
    stop = [text for text in utils.handle_stop_sequences(options.get('until'), None) if text]
    for completion in self.run.completions(prompts, sampler, tokens, context=context, stop=stop):
      yield completion.text
