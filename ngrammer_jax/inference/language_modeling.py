"""Language modeling metrics of a split: perplexity, bits per byte or character, top-1 accuracy.

B batch, T segment length.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import json
import math
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import evaluation_streams, token_batch
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import padding, programs
from ngrammer_jax.system import hosts, progress, result_files, text_tables


def evaluate(
  engine: inference.Engine,
  variables: inference.Variables,
  split: token_split.TokenSplit,
  config: experiment.Config,
  line_end: int | None = None,
  report: Callable[[int], None] = progress.ignore,
) -> dict[str, Any]:
  """Computes the metrics of a split, as stored in `evaluation/<split>.json`.

  The split, or its first `config.evaluation.max_tokens` tokens, is divided into contiguous streams.
  The memory of a stream starts empty and is carried from segment to segment. The result depends on
  the options of the evaluation only (see `evaluation_streams`), not on the batch size or the
  devices. Most protocols score every token exactly once. Tokens excluded from the loss are read but
  not scored.

  Args:
    engine: the engine of the model.
    variables: parameters and codebook.
    split: tokens to score.
    config: options of the evaluation, and the batch size of the training.
    line_end: the token that ends a line, to also report the perplexity of all other tokens. None:
      the vocabulary has no such token.
    report: called with the number of tokens scored since the previous call.
  """
  options = config.evaluation
  length = config.evaluation_length()
  max_tokens = options.max_tokens or 0
  text = evaluation_streams.EvaluationStreams(
    split, options.streams, length, max_tokens, options.protocol
  )
  count = min(max_tokens or len(split.tokens), len(split.tokens))
  check_counted(split, max_tokens)
  if length > padding.bucket(count, padding.MIN_TEXT_LENGTH):
    hosts.warn_once(
      f'a segment of {length:,} tokens is longer than the text of {count:,}: lower '
      f'evaluation.segment_length'
    )
  if engine.model.vocabulary_size < text.tokens:
    # Assigns each vocabulary entry to its cluster once, instead of each token of the split.
    variables = engine.prepare(variables)
  totals = _Totals(split.num_characters, line_end)
  for batch in score_streams(engine, variables, text, config):
    for scores in batch:
      report(totals.add(scores))
  is_whole_split = text.tokens == len(split.tokens)
  protocol = {
    'name': options.protocol,
    'streams': text.streams,
    'segment_length': length,
    **_memory_protocol(engine.model.config),
    'whole_split': is_whole_split,
  }
  text_bytes = split.text_bytes if is_whole_split else None
  return totals.metrics(protocol, text_bytes)


def check_counted(split: token_split.TokenSplit, max_tokens: int) -> None:
  """Raises BadInput if the loss excludes all of the first tokens of a split (0: all tokens)."""
  if split.num_counted(max_tokens):
    return
  first = ''
  if max_tokens:
    first = f' of the first {max_tokens:,}, which is evaluation.max_tokens,'
  raise errors.BadInput(
    f'no token{first} of the split to evaluate counts in the loss: with data.loss_on=assistant it '
    f'needs messages of the assistant'
  )


class _Totals:
  """Counts and negative log-likelihoods of the scored tokens.

  Args:
    num_characters: ids below this are characters; None: no characters.
    line_end: the token that ends a line; None: no such token.

  Attributes:
    counts: numbers of `tokens`, `correct` ones, `characters` and `line_ends`.
  """

  def __init__(self, num_characters: int | None, line_end: int | None):
    self._num_characters = num_characters
    self._line_end = line_end
    self._nats: list[np.float64] = []  # of each segment
    self._line_end_nats: list[np.float64] = []
    self.counts: collections.Counter[str] = collections.Counter()

  def add(self, scores: programs.Scores) -> int:
    """Adds the scores of a segment, and returns its number of tokens."""
    is_counted_BxT = scores.counts_BxT
    masks = {'tokens': is_counted_BxT, 'correct': scores.correct_BxT}
    if self._num_characters is not None:
      masks['characters'] = is_counted_BxT & (scores.targets_BxT < self._num_characters)
    masks['line_ends'] = is_counted_BxT & (scores.targets_BxT == self._line_end)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    self.counts.update(counts)
    self._nats.append(scores.nll_BxT[is_counted_BxT].sum(dtype=np.float64))
    self._line_end_nats.append(scores.nll_BxT[masks['line_ends']].sum(dtype=np.float64))
    return counts['tokens']

  def metrics(self, protocol: dict[str, Any], text_bytes: int | None) -> dict[str, Any]:
    """Returns the metrics.

    Args:
      protocol: the protocol of scoring.
      text_bytes: size of the text; None: unknown, or only a part was scored.
    """
    total = math.fsum(self._nats)
    bits = total / math.log(2)
    tokens = self.counts['tokens']
    line_ends = self.counts['line_ends']
    result = _metrics(tokens, total / tokens, self.counts['correct'] / tokens, protocol)
    if text_bytes:
      result['bits_per_byte'] = bits / text_bytes
    if self.counts['characters']:
      result['bits_per_character'] = bits / self.counts['characters']
    if self._line_end is not None and line_ends < tokens:  # some papers report it
      word_nats = total - math.fsum(self._line_end_nats)
      result['line_ends'] = line_ends
      result['perplexity_without_line_ends'] = _perplexity(word_nats / (tokens - line_ends))
    return result


def combine(results: Mapping[str, dict[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
  """Returns the result of a mixture: the means of the results of its parts, by their weights."""
  parts = [*results.values()]

  def mean(key: str) -> float:
    return sum(w * result[key] for w, result in zip(weights, parts, strict=True))

  tokens = sum(result['tokens'] for result in parts)
  is_whole_split = all(result['protocol']['whole_split'] for result in parts)
  protocol = parts[0]['protocol'] | {'whole_split': is_whole_split}
  return _metrics(tokens, mean('nll_nats_per_token'), mean('top1_accuracy'), protocol)


def _metrics(
  tokens: int, nats_per_token: float, accuracy: float, protocol: dict[str, Any]
) -> dict[str, Any]:
  """Returns the metrics common to all results."""
  return {
    'tokens': tokens,
    'nll_nats_per_token': nats_per_token,
    'perplexity': _perplexity(nats_per_token),
    'bits_per_token': nats_per_token / math.log(2),
    'bits_per_byte': None,
    'top1_accuracy': accuracy,
    'protocol': protocol,
  }


def _perplexity(nats: float) -> float:
  return math.exp(min(nats, 700))


def score_streams(
  engine: inference.Engine,
  variables: inference.Variables,
  text: evaluation_streams.EvaluationStreams,
  config: experiment.Config,
) -> Iterator[Iterator[programs.Scores]]:
  """Yields the scores of the segments, for each batch of streams or of sliding windows."""
  training = config.training
  are_windows = text.protocol == 'sliding_window'
  if are_windows:  # as many tokens as a step of the training has
    count = text.tokens
    rows = max(training.tokens_per_step // text.length, 1)
    num_segments = 1
  else:
    count = text.streams
    rows = min(training.batch_size, config.evaluation.streams)
    num_segments = text.segments
  rows = engine.round_rows(rows)
  for first in range(0, count, rows):

    def make_segment(index: int, row_slice: slice, first: int = first) -> token_batch.Batch:
      row = first + row_slice.start
      num_rows = row_slice.stop - row_slice.start
      if are_windows:
        return text.window(row, num_rows)
      return text.segment(index, row, num_rows)

    yield engine.score_segments(variables, rows, num_segments, make_segment, are_windows)


def _memory_protocol(config: model_config.ModelConfig) -> dict[str, Any]:
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
  header = ['split', 'tokens', 'nats/token', 'perplexity', 'bits/token', 'bits/byte']
  if has_characters:
    header.append('bits/character')
  header.append('top-1')
  rows = [header]
  for split, r in results.items():
    row = [
      split,
      f'{r["tokens"]:,}',
      f'{r["nll_nats_per_token"]:.4f}',
      f'{r["perplexity"]:.3f}',
      f'{r["bits_per_token"]:.4f}',
      _format_bits(r['bits_per_byte']),
    ]
    if has_characters:
      row.append(_format_bits(r.get('bits_per_character')))
    row.append(f'{r["top1_accuracy"]:.2%}')
    rows.append(row)
  return '\n'.join(text_tables.align_columns(rows, '<>'))


def _format_bits(bits: float | None) -> str:
  """Formats bits; '-' if unknown."""
  if bits is None:
    return '-'
  return f'{bits:.4f}'


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
  others: Mapping[pathlib.Path, str] | None = None,
) -> None:
  """Writes a result as JSON, and answers as JSON lines if they have a path.

  Only the first process writes. Results that cannot be written are printed. Files of another result
  are renamed, see `result_files.write_results`.

  Args:
    result: the result.
    path: its file.
    answers: answers to the questions of the result.
    answers_path: their file.
    others: contents of other files of the result.

  Raises:
    BadInput: a file cannot be written.
  """
  if not hosts.is_primary():
    return
  contents = {path: json.dumps(result, indent=2) + '\n'}
  if answers_path is not None:
    lines = (json.dumps(answer, ensure_ascii=False) + '\n' for answer in answers)
    contents[answers_path] = ''.join(lines)
  result_files.write_results(contents | dict(others or {}))
