"""A run as a model of lm_eval. The harness itself splits texts into contexts and continuations."""

import argparse
from collections.abc import Sequence
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

PASSED = {'device', 'max_batch_size'}  # arguments of every model, without effect on this one


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
    self, workdir=None, pretrained=None, step='newest', max_length=None, batch_size='auto', **others
  ):
    super().__init__()
    unknown = others.keys() - PASSED
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
    changes = [('evaluation.segment_length', str(max_length))] if max_length else []
    config = command_line.override(run.config, changes, 'evaluation.*')
    inference.check_model(config.model)
    self.run, self.max_length = dataclasses.replace(run, config=config), config.evaluation_context()
    is_auto = str(batch_size).startswith('auto')
    self.batch_size = inference.MAX_ROWS if is_auto else int(batch_size)

  @property
  def eot_token_id(self) -> int:
    end = self.run.vocabulary.document_end
    return self.prefix_token_id if end is None else end

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
    v = self.run.vocabulary
    is_tokenizer = hasattr(v, 'encode_special')
    ids = v.encode_special(string) if is_tokenizer else v.encode(string.encode()).astype(np.int32)
    has_start = add_special_tokens is False or ids[:1].tolist() == [v.document_start]
    return (ids if has_start else v.add_start(ids)).tolist()

  def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any):
    scores = self.run.score_pairs([tuple(pair) for _, *pair in requests], self.batch_size)
    return list(map(tuple, scores))

  def loglikelihood_rolling(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log-likelihood of each text, in windows like those of the harness."""
    encode = lambda text: self.tok_encode(text, add_special_tokens=False)
    pairs = [([self.prefix_token_id], encode(request.args[0])) for request in requests]
    return [score.log_likelihood for score in self.run.score_pairs(pairs, self.batch_size)]

  def generate_until(
    self, requests: Sequence[instance.Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns a continuation of each context, up to a stop text of its task."""
    ids = [self.tok_encode(request.args[0]) for request in requests]
    options = [json.dumps(request.args[1], sort_keys=True) for request in requests]
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

  def _complete(self, contexts, options):
    """Yields the continuations of a batch; long contexts lose their first tokens."""
    options = utils.normalize_gen_kwargs(options)
    tokens = options['max_gen_toks']
    room = max(self.max_length - tokens, 1)
    decode = lambda ids: self.run.vocabulary.decode(ids[-room:]).decode(errors='replace')
    prompts = [text if len(ids) <= room else decode(ids) for text, ids in contexts]
    longest = min(max(len(ids) for _, ids in contexts), room)
    # A short KV cache, unless there is none.
    is_recurrent = self.run.config.model.recurrent is not None
    context = self.max_length if is_recurrent else inference.bucket(longest + tokens + 1)
    temperature = options.get('temperature', 1.0) if options['do_sample'] else 0.0
    sampler = sampling.SamplingConfig(temperature, options.get('top_k'), options.get('top_p'))
    stop = utils.handle_stop_sequences(options.get('until'), None)
    completions = self.run.completions(
      prompts, sampler, tokens, context=min(context, self.max_length), stop=list(filter(None, stop))
    )
    return (completion.text for completion in completions)
