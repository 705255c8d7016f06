"""How well a model predicts a split: perplexity, bits per byte, top-1 accuracy."""

from collections.abc import Callable
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax import files, sharding
from ngrammer_jax.data import streams, token_cache
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
    self._model, self._mesh, self._streams, self._length = model, mesh, streams, length
    shards = sharding.batch_shards(mesh)
    self._rows = -(-min(rows, streams) // shards) * shards
    self._score = jax.jit(
      functools.partial(_score_segment, model),
      donate_argnums=2,
      out_shardings=(sharding.replicated(mesh), sharding.rows_sharding(mesh)),
    )

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
    nll, correct, tokens = [], [], 0
    with sharding.use(self._mesh):
      for first_row in range(0, parts.streams, self._rows):
        for row_sums in self._run(params, codebook, parts, first_row):
          nll_B, correct_B, tokens_B = jax.device_get(row_sums)
          nll.extend(nll_B.tolist())
          correct.extend(correct_B.tolist())
          tokens += int(tokens_B.sum())
          report(int(tokens_B.sum()))
    total = math.fsum(nll)
    covered = tokens == len(split.tokens)
    return {
      'tokens': tokens,
      'nll_nats_per_token': total / tokens,
      'perplexity': math.exp(min(total / tokens, 700)),
      'bits_per_byte': (
        total / math.log(2) / split.text_bytes if covered and split.text_bytes else None
      ),
      'top1_accuracy': math.fsum(correct) / tokens,
      'protocol': {
        'name': 'streams',
        'streams': parts.streams,
        'segment_length': self._length,
        'whole_split': covered,
      },
    }

  def _run(self, params, codebook, parts, first_row):
    """Sums by row of every segment, each fetched while the next one is computed."""
    place = sharding.rows_sharding(self._mesh)
    empty = transformer.empty_memory(self._model.config, self._rows)
    memory = jax.tree.map(lambda a: jax.device_put(a, place), empty)
    waiting = None
    for index in range(parts.segments):
      segment = sharding.global_rows(
        self._mesh,
        self._rows,
        lambda rows, i=index: parts.segment(i, first_row + rows.start, rows.stop - rows.start),
      )
      sums, memory = self._score(params, codebook, memory, segment)
      if waiting is not None:
        yield waiting
      waiting = sums
    yield waiting


def _score_segment(model, params, codebook, memory, segment: streams.Segment):
  """Sums over each row: negative log-likelihood, correct guesses, tokens."""
  variables = {'params': params, 'codebook': codebook}
  hidden, memory, _ = model.apply(
    variables,
    segment.tokens_BxT,
    memory,
    starts_BxT=segment.starts_BxT,
    valid_BxT=segment.valid_BxT,
  )
  scores = model.apply(variables, hidden, segment.targets_BxT, method='scores')
  valid_BxT = segment.valid_BxT
  nll_B = jnp.where(valid_BxT > 0, scores.nll_BxT, 0).sum(axis=1)
  correct_B = (scores.correct_BxT * valid_BxT).sum(axis=1)
  return (nll_B, correct_B, valid_BxT.sum(axis=1)), memory


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
