"""Language modeling metrics of a split: perplexity, bits per byte, top-1 accuracy.

B batch, T segment length.
"""

from collections.abc import Callable, Iterator
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import files, hosts
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.inference import engine


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Computes the metrics of a split; most protocols score every token exactly once.

  The split is divided into `streams` contiguous streams. The memory of a stream starts empty and is
  carried from segment to segment. The result depends on the streams, the segment length and the
  protocol only, not on `rows` or the devices.

  Attributes:
    engine: the engine of the model.
    streams: number of streams.
    segment_length: tokens in a segment.
    rows: batch size, in streams or windows.
    protocol: see `data.streams.EvaluationStreams`.
    line_end: the token that ends a line, to also report the perplexity of all other tokens. None:
      the vocabulary has no such token.
  """

  engine: engine.Engine
  streams: int
  segment_length: int
  rows: int
  protocol: str = 'streams'
  line_end: int | None = None

  @classmethod
  def from_config(
    cls, engine: engine.Engine, config: experiment.Config, line_end: int | None = None
  ) -> 'Evaluator':
    """Returns the evaluator that the `evaluation` section of a config describes."""
    e, rows = config.evaluation, config.training.batch_size
    return cls(engine, e.streams, config.evaluation_length(), rows, e.protocol, line_end)

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
      split, self.streams, self.segment_length, max_tokens or 0, self.protocol
    )
    variables = {'params': params, 'codebook': codebook}
    if self.engine.model.vocabulary_size < stream_segments.tokens:
      # Assigns each vocabulary entry to its cluster once, instead of each token of the split.
      variables = self.engine.prepare(params, codebook)
    nll, line_ends, correct, tokens = [], [], [], 0
    score = self._score_windows if self.protocol == 'sliding_window' else self._score_streams
    for nll_BxT, correct_BxT, is_counted_BxT, targets_BxT in score(variables, stream_segments):
      is_counted_BxT = is_counted_BxT.astype(bool)
      nll.append(nll_BxT[is_counted_BxT].sum(dtype=np.float64))
      if self.line_end is not None:
        is_end_BxT = is_counted_BxT & (targets_BxT == self.line_end)
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
        'name': self.protocol,
        'streams': stream_segments.streams,
        'segment_length': self.segment_length,
        **_memory_protocol(self.engine.model.config),
        'whole_split': is_whole_split,
      },
    }

  def _score_streams(self, variables, stream_segments) -> Iterator[tuple[Any, ...]]:
    """Yields, segment by segment, nats, correctness, which tokens count, and targets, [B, T]."""
    rows = self.engine.round_rows(min(self.rows, self.streams))
    for first_row in range(0, stream_segments.streams, rows):

      def make_segment(index, row_slice, first_row=first_row):
        return stream_segments.segment(
          index, first_row + row_slice.start, row_slice.stop - row_slice.start
        )

      segments = stream_segments.segments
      scores_by_segment = self.engine.score_segments(variables, rows, segments, make_segment)
      for index, scores in enumerate(scores_by_segment):
        targets_BxT = None
        if self.line_end is not None:  # also for rows that another host reads
          targets_BxT = stream_segments.segment(index, first_row, rows).targets_BxT
        yield *scores, targets_BxT

  def _score_windows(self, variables, stream_segments) -> Iterator[tuple[Any, ...]]:
    """Yields the same values for sliding windows, where only the last token counts."""
    rows = self.engine.round_rows(self.rows)
    for first in range(0, stream_segments.tokens, rows):
      targets_BxT = stream_segments.window(first, rows).targets_BxT

      def make_segment(_, row_slice, first=first):
        return stream_segments.window(first + row_slice.start, row_slice.stop - row_slice.start)

      (scores,) = self.engine.score_segments(variables, rows, 1, make_segment)
      nll_BxT, correct_BxT, valid_BxT = scores
      last_Bx1 = valid_BxT.sum(axis=1)[:, None] - 1
      is_last_BxT = np.arange(stream_segments.length) == last_Bx1
      yield nll_BxT, correct_BxT, valid_BxT & is_last_BxT, targets_BxT

  def _line_end_metrics(self, tokens, total, line_ends):
    """Returns the perplexity without line ends, which some papers report."""
    if self.line_end is None:
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
  if not hosts.first():
    return
  files.make(path.parent)
  files.write(path, json.dumps(result, indent=2) + '\n')
