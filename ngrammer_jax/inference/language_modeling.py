"""Language modeling metrics of a split: perplexity, bits per byte or character, top-1 accuracy.

B batch, T segment length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import json
import math
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import programs
from ngrammer_jax.system import files, hosts, text_tables


def evaluate(
  engine: inference.Engine,
  variables: inference.Variables,
  split: token_cache.TokenSplit,
  config: experiment.Config,
  line_end: int | None = None,
  report: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
  """Computes the metrics of a split, as stored in `evaluation/<split>.json`.

  The split, or its first `config.evaluation.max_tokens` tokens, is divided into contiguous streams.
  The memory of a stream starts empty and is carried from segment to segment. The result depends on
  the options of the evaluation only (see `data.streams.EvaluationStreams`), not on the batch size
  or the devices. Most protocols score every token exactly once.

  Args:
    engine: the engine of the model.
    variables: parameters and codebook.
    split: tokens to score.
    config: options of the evaluation, and the batch size of the training.
    line_end: the token that ends a line, to also report the perplexity of all other tokens. None:
      the vocabulary has no such token.
    report: called with the number of tokens scored since the previous call.
  """
  e, length = config.evaluation, config.evaluation_length()
  text = streams.EvaluationStreams(split, e.streams, length, e.max_tokens or 0, e.protocol)
  if engine.model.vocabulary_size < text.tokens:
    # Assigns each vocabulary entry to its cluster once, instead of each token of the split.
    variables = engine.prepare(variables)
  nats, tokens, characters, correct, line_end_nats, line_ends = [], 0, 0, 0, [], 0
  for scores in _score_batches(engine, variables, text, config):
    num_counted = int(scores.counts_BxT.sum())
    tokens += num_counted
    if split.num_characters is not None:
      is_character_BxT = scores.targets_BxT < split.num_characters
      characters += int((scores.counts_BxT & is_character_BxT).sum())
    correct += int(scores.correct_BxT.sum())
    nats.append(scores.nll_BxT[scores.counts_BxT].sum(dtype=np.float64))
    if line_end is not None:
      is_end_BxT = scores.counts_BxT & (scores.targets_BxT == line_end)
      line_ends += int(is_end_BxT.sum())
      line_end_nats.append(scores.nll_BxT[is_end_BxT].sum(dtype=np.float64))
    report(num_counted)
  total, is_whole_split = math.fsum(nats), tokens == len(split.tokens)
  without_line_ends = {}
  if line_end is not None and line_ends < tokens:  # some papers report it
    nats_per_token = (total - math.fsum(line_end_nats)) / (tokens - line_ends)
    without_line_ends = {
      'line_ends': line_ends,
      'perplexity_without_line_ends': math.exp(min(nats_per_token, 700)),
    }
  return {
    'tokens': tokens,
    'nll_nats_per_token': total / tokens,
    'perplexity': math.exp(min(total / tokens, 700)),
    'bits_per_token': total / tokens / math.log(2),
    **without_line_ends,
    'bits_per_byte': (
      total / math.log(2) / split.text_bytes if is_whole_split and split.text_bytes else None
    ),
    **({'bits_per_character': total / math.log(2) / characters} if characters else {}),
    'top1_accuracy': correct / tokens,
    'protocol': {
      'name': e.protocol,
      'streams': text.streams,
      'segment_length': length,
      **_memory_protocol(engine.model.config),
      'whole_split': is_whole_split,
    },
  }


def combine(results: Mapping[str, dict[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
  """Returns the result of a mixture: the means of the results of its parts, by their weights."""

  def mean(key):
    return sum(w * r[key] for w, r in zip(weights, results.values(), strict=True))

  first, nats = next(iter(results.values())), mean('nll_nats_per_token')
  is_whole_split = all(result['protocol']['whole_split'] for result in results.values())
  return {
    'tokens': sum(result['tokens'] for result in results.values()),
    'nll_nats_per_token': nats,
    'perplexity': math.exp(min(nats, 700)),
    'bits_per_token': nats / math.log(2),
    'bits_per_byte': None,
    'top1_accuracy': mean('top1_accuracy'),
    'protocol': first['protocol'] | {'whole_split': is_whole_split},
  }


def _score_batches(engine, variables, text, config):
  """Yields the scores of batches of segments, or of sliding windows."""
  t = config.training
  if config.evaluation.protocol == 'sliding_window':
    # As many tokens as a step of the training has.
    rows = engine.round_rows(max(t.tokens_per_step // text.length, 1))

    def make_window(batch, row_slice):
      return text.window(batch * rows + row_slice.start, row_slice.stop - row_slice.start)

    yield from engine.score_windows(variables, rows, -(-text.tokens // rows), make_window)
    return
  for scores in score_streams(engine, variables, text, config):
    yield from scores


def score_streams(
  engine: inference.Engine,
  variables: inference.Variables,
  text: streams.EvaluationStreams,
  config: experiment.Config,
) -> Iterator[Iterator[programs.Scores]]:
  """Yields the scores of the segments, for each batch of streams."""
  rows = engine.round_rows(min(config.training.batch_size, config.evaluation.streams))
  for first in range(0, text.streams, rows):

    def make_segment(index, row_slice, first=first):
      return text.segment(index, first + row_slice.start, row_slice.stop - row_slice.start)

    yield engine.score_segments(variables, rows, text.segments, make_segment)


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
  """Formats the metrics of splits as a table; bits per character only if a split has them."""
  has_characters = any('bits_per_character' in result for result in results.values())
  bits = {'bits_per_byte': 'bits/byte'}
  bits |= {'bits_per_character': 'bits/character'} if has_characters else {}
  rows = [('split', 'tokens', 'nats/token', 'perplexity', 'bits/token', *bits.values(), 'top-1')]
  for split, r in results.items():
    losses = (
      f'{r["nll_nats_per_token"]:.4f}',
      f'{r["perplexity"]:.3f}',
      f'{r["bits_per_token"]:.4f}',
      *('-' if r.get(key) is None else f'{r[key]:.4f}' for key in bits),
    )
    rows.append((split, f'{r["tokens"]:,}', *losses, f'{r["top1_accuracy"]:.2%}'))
  return '\n'.join(text_tables.align_columns(rows, '<>'))


def format_protocol(result: dict[str, Any]) -> str:
  """Formats the step and the protocol of a result as a table of one row."""
  options = {'step': f'{result["step"]:,}', **result['protocol']}
  options['protocol'] = options.pop('name')
  columns = {key.replace('_', ' '): str(value) for key, value in options.items()}
  return '\n'.join(text_tables.align_columns([list(columns), list(columns.values())], '>'))


def save(
  result: dict[str, Any],
  path: pathlib.Path,
  answers: Iterable[dict[str, Any]] = (),
  answers_path: pathlib.Path | None = None,
) -> None:
  """Writes a result as JSON, and answers as JSON lines if they have a path.

  Only the first process writes. What cannot be written is printed. Files of another result keep
  another name, see `files.write_results`.

  Raises:
    BadInput: a file cannot be written.
  """
  if not hosts.is_primary():
    return
  contents = {path: json.dumps(result, indent=2) + '\n'}
  if answers_path is not None:
    lines = (json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)
    contents[answers_path] = ''.join(lines)
  try:
    files.write_results(contents)
  except errors.BadInput:
    print(*contents.values(), sep='', end='')
    raise
