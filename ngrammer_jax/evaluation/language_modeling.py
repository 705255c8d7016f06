"""How well a model predicts a split: perplexity, bits per byte, top-1 accuracy."""

from collections.abc import Callable
import functools
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import files, hosts, sharding
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.evaluation import scoring
from ngrammer_jax.models import heads, language_model


class Evaluator:
  """Scores the tokens of a split, every one exactly once unless the protocol says otherwise.

  The split is cut into `streams` contiguous parts; the memory of each starts empty and is
  carried through it. That, the length and the protocol alone define the result: `rows`, how many
  streams are run at a time, and the devices do not.

  Args:
    model: the model.
    mesh: where it lies.
    streams: parts of the split.
    length: tokens of a segment.
    rows: streams at a time, rounded up to a multiple of the devices of the batch.
    protocol: see `data.streams.EvaluationStreams`.
    line_end: the token that ends a line, to report what there is without it; None: there is none.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    streams: int,
    length: int,
    rows: int,
    protocol: str = 'streams',
    line_end: int | None = None,
  ):
    self._streams, self._length, self._protocol = streams, length, protocol
    self._line_end = line_end
    windows = protocol == 'sliding_window'
    self._score = scoring.Scorer(model, mesh, rows if windows else min(rows, streams))
    self._vocabulary, self._mesh = model.vocabulary_size, mesh
    self._memory = _memory_of(model.config)
    self._serve = jax.jit(functools.partial(heads.for_serving, model.config))

  def __call__(
    self,
    params: Any,
    codebook: Any,
    split: token_cache.TokenSplit,
    max_tokens: int | None = None,
    report: Callable[[int], None] = lambda tokens: None,
  ) -> dict[str, Any]:
    """The metrics of a split, as `evaluation/<split>.json` holds them.

    Args:
      params, codebook: of the model.
      split: what to predict.
      max_tokens: score only so many from the start of the split. None: all.
      report: called with the number of tokens scored since the last call.
    """
    how = (self._streams, self._length, max_tokens or 0, self._protocol)
    parts = streams.EvaluationStreams(split, *how)
    if self._vocabulary < parts.tokens:  # clustered once, and not at every token
      with sharding.use(self._mesh):
        codebook = self._serve(params, codebook)
    nll, line_ends, correct, tokens = [], [], [], 0
    read = self._windows if self._protocol == 'sliding_window' else self._segments
    for nll_BxT, correct_BxT, counted_BxT, targets_BxT in read(params, codebook, parts):
      counted_BxT = counted_BxT.astype(bool)
      nll.append(nll_BxT[counted_BxT].sum(dtype=np.float64))
      if self._line_end is not None:
        ends_BxT = counted_BxT & (targets_BxT == self._line_end)
        line_ends.append((ends_BxT.sum(), nll_BxT[ends_BxT].sum(dtype=np.float64)))
      correct.append(int(correct_BxT[counted_BxT].sum()))
      tokens += int(counted_BxT.sum())
      report(int(counted_BxT.sum()))
    total = math.fsum(nll)
    covered = tokens == len(split.tokens)
    return {
      'tokens': tokens,
      'nll_nats_per_token': total / tokens,
      'perplexity': math.exp(min(total / tokens, 700)),
      'bits_per_token': total / tokens / math.log(2),
      **self._without_line_ends(tokens, total, line_ends),
      'bits_per_byte': (
        total / math.log(2) / split.text_bytes if covered and split.text_bytes else None
      ),
      'top1_accuracy': sum(correct) / tokens,
      'protocol': {
        'name': self._protocol,
        'streams': parts.streams,
        'segment_length': self._length,
        **self._memory,
        'whole_split': covered,
      },
    }

  def _segments(self, params, codebook, parts):
    """The scores of all streams, segment by segment, what counts of them, and the targets."""
    rows = self._score.rows
    for first_row in range(0, parts.streams, rows):

      def make(index, wanted, first_row=first_row):
        return parts.segment(index, first_row + wanted.start, wanted.stop - wanted.start)

      for index, scores in enumerate(self._score(params, codebook, parts.segments, make)):
        # Of all rows, also those that another host has made.
        known = self._line_end is not None
        targets = parts.segment(index, first_row, rows).targets_BxT if known else None
        yield *scores, targets

  def _windows(self, params, codebook, parts):
    """The same for windows, of which the last token counts."""
    for first in range(0, parts.tokens, self._score.rows):
      targets = parts.window(first, self._score.rows).targets_BxT

      def make(_, rows, first=first):
        return parts.window(first + rows.start, rows.stop - rows.start)

      ((nll_BxT, correct_BxT, valid_BxT),) = self._score(params, codebook, 1, make)
      last_B = valid_BxT.sum(axis=1)[:, None] - 1
      yield nll_BxT, correct_BxT, valid_BxT & (np.arange(parts.length) == last_B), targets

  def _without_line_ends(self, tokens, total, line_ends):
    """The perplexity of what is not the end of a line, as some papers count it."""
    if self._line_end is None:
      return {}
    count, nll = int(sum(n for n, _ in line_ends)), math.fsum(nll for _, nll in line_ends)
    if count == tokens:
      return {}
    return {
      'line_ends': count,
      'perplexity_without_line_ends': math.exp(min((total - nll) / (tokens - count), 700)),
    }


def _memory_of(config):
  """What of the memory belongs to the protocol."""
  if config.recurrent is not None:
    return {'carry_memory': config.recurrent.carry_memory}
  if config.memory is None:
    return {}
  return {
    'memory_length': config.memory.length,
    'same_length': config.memory.same_length,
    'clamp_length': config.positions().clamp_length,
  }


def table(results: dict[str, dict[str, Any]]) -> str:
  """The metrics of some splits, to read."""
  lines = [
    f'{"split":<12}{"tokens":>12}{"nats/token":>12}{"perplexity":>12}{"bits/token":>12}'
    f'{"bits/byte":>11}{"top-1":>8}'
  ]
  for split, r in results.items():
    bits = '-' if r['bits_per_byte'] is None else f'{r["bits_per_byte"]:.4f}'
    lines.append(
      f'{split:<12}{r["tokens"]:>12,}{r["nll_nats_per_token"]:>12.4f}{r["perplexity"]:>12.3f}'
      f'{r["bits_per_token"]:>12.4f}{bits:>11}{r["top1_accuracy"]:>8.2%}'
    )
  return '\n'.join(lines)


def save(result: dict[str, Any], path: pathlib.Path) -> None:
  """Writes the metrics of a split as JSON, in the first of several processes."""
  if not hosts.first():
    return
  files.make(path.parent)
  files.write(path, json.dumps(result, indent=2) + '\n')
