"""How well a model predicts a split: perplexity, bits per byte, top-1 accuracy."""

from collections.abc import Callable
import functools
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import files, sharding
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.evaluation import scoring
from ngrammer_jax.models import transformer


class Evaluator:
  """Scores every token of a split exactly once.

  The split is cut into `streams` contiguous parts; the memory of each starts empty and is
  carried through it. That alone defines the result: `rows`, how many streams are run at a
  time, and the devices do not.

  Args:
    model: the model.
    mesh: where it lies.
    streams: parts of the split.
    length: tokens of a segment.
    rows: streams at a time, rounded up to a multiple of the devices of the batch.
  """

  def __init__(
    self,
    model: transformer.TransformerLM,
    mesh: jax.sharding.Mesh,
    streams: int,
    length: int,
    rows: int,
  ):
    self._streams, self._length = streams, length
    self._score = scoring.Scorer(model, mesh, min(rows, streams))
    self._vocabulary, self._mesh = model.vocabulary_size, mesh
    memory = model.config.memory
    self._memory = (
      {}
      if memory is None
      else {
        'memory_length': memory.length,
        'same_length': memory.same_length,
        'clamp_length': model.config.positions().clamp_length,
      }
    )
    self._serve = jax.jit(functools.partial(transformer.for_serving, model))

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
    parts = streams.EvaluationStreams(split, self._streams, self._length, max_tokens or 0)
    if self._vocabulary < parts.tokens:  # clustered once, and not at every token
      with sharding.use(self._mesh):
        codebook = self._serve(params, codebook)
    nll, correct, tokens = [], [], 0
    for first_row in range(0, parts.streams, self._score.rows):

      def make(index, rows, first_row=first_row):
        return parts.segment(index, first_row + rows.start, rows.stop - rows.start)

      for nll_BxT, correct_BxT, valid_BxT in self._score(params, codebook, parts.segments, make):
        nll.append(nll_BxT.sum(dtype=np.float64))
        correct.append(int(correct_BxT.sum()))
        tokens += int(valid_BxT.sum())
        report(int(valid_BxT.sum()))
    total = math.fsum(nll)
    covered = tokens == len(split.tokens)
    return {
      'tokens': tokens,
      'nll_nats_per_token': total / tokens,
      'perplexity': math.exp(min(total / tokens, 700)),
      'bits_per_byte': (
        total / math.log(2) / split.text_bytes if covered and split.text_bytes else None
      ),
      'top1_accuracy': sum(correct) / tokens,
      'protocol': {
        'name': 'streams',
        'streams': parts.streams,
        'segment_length': self._length,
        **self._memory,
        'whole_split': covered,
      },
    }


def table(results: dict[str, dict[str, Any]]) -> str:
  """The metrics of some splits, to read."""
  lines = [
    f'{"split":<12}{"tokens":>12}{"nats/token":>12}{"perplexity":>12}{"bits/byte":>11}{"top-1":>8}'
  ]
  for split, r in results.items():
    bits = '-' if r['bits_per_byte'] is None else f'{r["bits_per_byte"]:.4f}'
    lines.append(
      f'{split:<12}{r["tokens"]:>12,}{r["nll_nats_per_token"]:>12.4f}{r["perplexity"]:>12.3f}'
      f'{bits:>11}{r["top1_accuracy"]:>8.2%}'
    )
  return '\n'.join(lines)


def save(result: dict[str, Any], path: pathlib.Path) -> None:
  """Writes the metrics of a split as JSON."""
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write(path, json.dumps(result, indent=2) + '\n')
