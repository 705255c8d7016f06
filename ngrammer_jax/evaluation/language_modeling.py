"""Language modeling metrics of a split: perplexity, bits per byte, top-1 accuracy.

B batch, T segment length.
"""

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
  """Computes the metrics of a split; most protocols score every token exactly once.

  The split is divided into `streams` contiguous streams. The memory of a stream starts empty and is
  carried from segment to segment. The result depends on the streams, the segment length and the
  protocol only, not on `rows` or the devices.

  Args:
    model: the model.
    mesh: the device mesh.
    streams: number of streams.
    segment_length: tokens in a segment.
    rows: batch size, in streams or windows, rounded up to a multiple of the devices of the batch
      axes.
    protocol: see `data.streams.EvaluationStreams`.
    line_end: the token that ends a line, to also report the perplexity of all other tokens. None:
      the vocabulary has no such token.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    streams: int,
    segment_length: int,
    rows: int,
    protocol: str = 'streams',
    line_end: int | None = None,
  ):
    self._streams, self._segment_length, self._protocol = streams, segment_length, protocol
    self._line_end = line_end
    self._score = scoring.Scorer(
      model, mesh, rows if protocol == 'sliding_window' else min(rows, streams)
    )
    self._vocabulary_size, self._mesh = model.vocabulary_size, mesh
    self._memory_protocol = _memory_protocol(model.config)
    self._prepare_codebook = jax.jit(functools.partial(heads.for_serving, model.config))

  def __call__(
    self,
    params: Any,
    codebook: Any,
    split: token_cache.TokenSplit,
    max_tokens: int | None = None,
    report: Callable[[int], None] = lambda tokens: None,
  ) -> dict[str, Any]:
    """Computes the metrics of a split, as stored in `evaluation/<split>.json`.

    Args:
      params, codebook: variables of the model.
      split: tokens to score.
      max_tokens: maximum number of tokens to score, from the start of the split. None: all.
      report: called with the number of tokens scored since the previous call.
    """
    stream_segments = streams.EvaluationStreams(
      split, self._streams, self._segment_length, max_tokens or 0, self._protocol
    )
    if self._vocabulary_size < stream_segments.tokens:
      # Assigns each vocabulary entry to its cluster once, instead of each token of the split.
      with sharding.use(self._mesh):
        codebook = self._prepare_codebook(params, codebook)
    nll, line_ends, correct, tokens = [], [], [], 0
    score = self._score_windows if self._protocol == 'sliding_window' else self._score_streams
    batches = score(params, codebook, stream_segments)
    for nll_BxT, correct_BxT, is_counted_BxT, targets_BxT in batches:
      is_counted_BxT = is_counted_BxT.astype(bool)
      nll.append(nll_BxT[is_counted_BxT].sum(dtype=np.float64))
      if self._line_end is not None:
        is_end_BxT = is_counted_BxT & (targets_BxT == self._line_end)
        line_ends.append((is_end_BxT.sum(), nll_BxT[is_end_BxT].sum(dtype=np.float64)))
      correct.append(int(correct_BxT[is_counted_BxT].sum()))
      tokens += int(is_counted_BxT.sum())
      report(int(is_counted_BxT.sum()))
    total = math.fsum(nll)
    is_whole_split = tokens == len(split.tokens)
    return {
      'tokens': tokens,
      'nll_nats_per_token': total / tokens,
      'perplexity': math.exp(min(total / tokens, 700)),
      'bits_per_token': total / tokens / math.log(2),
      **self._line_end_metrics(tokens, total, line_ends),
      'bits_per_byte': (
        total / math.log(2) / split.text_bytes if is_whole_split and split.text_bytes else None
      ),
      'top1_accuracy': sum(correct) / tokens,
      'protocol': {
        'name': self._protocol,
        'streams': stream_segments.streams,
        'segment_length': self._segment_length,
        **self._memory_protocol,
        'whole_split': is_whole_split,
      },
    }

  def _score_streams(self, params, codebook, stream_segments):
    """Yields, segment by segment, nats, correctness, which tokens count, and targets, [B, T]."""
    rows = self._score.rows
    for first_row in range(0, stream_segments.streams, rows):

      def make_segment(index, row_slice, first_row=first_row):
        return stream_segments.segment(
          index, first_row + row_slice.start, row_slice.stop - row_slice.start
        )

      segments = self._score(params, codebook, stream_segments.segments, make_segment)
      for index, scores in enumerate(segments):
        targets_BxT = None
        if self._line_end is not None:  # also for rows that another host reads
          targets_BxT = stream_segments.segment(index, first_row, rows).targets_BxT
        yield *scores, targets_BxT

  def _score_windows(self, params, codebook, stream_segments):
    """Yields the same values for sliding windows, where only the last token counts."""
    for first in range(0, stream_segments.tokens, self._score.rows):
      targets_BxT = stream_segments.window(first, self._score.rows).targets_BxT

      def make_segment(_, row_slice, first=first):
        return stream_segments.window(first + row_slice.start, row_slice.stop - row_slice.start)

      ((nll_BxT, correct_BxT, valid_BxT),) = self._score(params, codebook, 1, make_segment)
      last_Bx1 = valid_BxT.sum(axis=1)[:, None] - 1
      is_last_BxT = np.arange(stream_segments.length) == last_Bx1
      yield nll_BxT, correct_BxT, valid_BxT & is_last_BxT, targets_BxT

  def _line_end_metrics(self, tokens, total, line_ends):
    """Returns the perplexity without line ends, which some papers report."""
    if self._line_end is None:
      return {}
    count, nll = int(sum(n for n, _ in line_ends)), math.fsum(nll for _, nll in line_ends)
    if count == tokens:
      return {}
    return {
      'line_ends': count,
      'perplexity_without_line_ends': math.exp(min((total - nll) / (tokens - count), 700)),
    }


def _memory_protocol(config):
  """Returns the memory options that affect the result."""
  if config.recurrent is not None:
    return {'carry_memory': config.recurrent.carry_memory}
  if config.memory is None:
    return {}
  return {
    'memory_length': config.memory.length,
    'same_length': config.memory.same_length,
    'clamp_length': config.positions().clamp_length,
  }


def format_table(results: dict[str, dict[str, Any]]) -> str:
  """Formats the metrics of splits as a table."""
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
  """Writes the metrics of a split as JSON; only the first process writes."""
  if not hosts.is_primary():
    return
  files.make_folder(path.parent)
  files.write(path, json.dumps(result, indent=2) + '\n')
