"""Frequency and accuracy of copies by bucket.

T tokens of text, N buckets.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture
from ngrammer_jax.analysis.elements import Element, foldable_table
from ngrammer_jax.config.copy_memory import NAME, CopyMemoryConfig

MAX_TOKENS = 1_000_000  # tokens of the split that are read
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches
COLUMNS = 'longest match', 'matches', 'tokens', 'share of text', 'right'


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Counts the copies and correct copies of a split, as plain values for JSON.

  A copy is right if it is the next token of the text. Keys: `step`, `split`; `tokens`, number of
  tokens read from the start of the split; `copied` and `right`, numbers of tokens with a copy, and
  with a right copy; and `buckets`, with for each:

  `length`, `count`: of the longest match, and of such matches; the largest is `or_more`.
  `tokens`, `right`: number of tokens in this bucket, and of right copies among them.

  Raises:
    BadInput: the model has no copies.
  """
  check_applicable(run)
  options = run.config.model.copy_memory
  text = run.split(split)
  read = capture.captured_segments(run, text, MAX_TOKENS, _copies)
  token_T, bucket_T = np.concatenate([copies for _, copies in read], axis=1)
  _, targets_T, _ = text.window(0, len(token_T))
  is_right_T = (token_T == targets_T) & (bucket_T > 0)
  size = 1 + options.counts * len(options.lengths)
  tokens_N = np.bincount(bucket_T, minlength=size)
  right_N = np.bincount(bucket_T, is_right_T, minlength=size).astype(int)
  buckets = []
  for number in range(1, size):
    buckets.append(
      {
        **_bucket(options, number),
        'tokens': int(tokens_N[number]),
        'right': int(right_N[number]),
      }
    )
  return {
    'step': run.restored.step,
    'split': split,
    'tokens': len(token_T),
    'copied': int(tokens_N[1:].sum()),
    'right': int(is_right_T.sum()),
    'buckets': buckets,
  }


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no copies."""
  if run.config.model.copy_memory is None:
    raise errors.NotApplicable(f'--workdir={run.workdir} has no copies: it needs model.copy_memory')


def _copies(intermediates: dict[str, Any]) -> Any:
  """Returns the tokens and the buckets of the copies of one row, [2, T]."""
  ((token_1xT, bucket_1xT),) = intermediates[NAME]['copies']
  return jnp.concatenate([token_1xT, bucket_1xT])


def _bucket(options: CopyMemoryConfig, number: int) -> dict[str, Any]:
  """Returns length and count of the matches in a bucket."""
  level, count = divmod(number - 1, options.counts)
  return {
    'length': options.lengths[level],
    'count': count + 1,
    'or_more': count + 1 == options.counts,
  }


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the table of the buckets."""
  rows = [COLUMNS]
  for bucket in result['buckets']:
    more = ' or more' if bucket['or_more'] else ''
    right = '–'
    if bucket['tokens']:
      right = f'{bucket["right"] / bucket["tokens"]:.1%}'
    rows.append(
      (
        f'{bucket["length"]:,}',
        f'{bucket["count"]}{more}',
        f'{bucket["tokens"]:,}',
        f'{bucket["tokens"] / result["tokens"]:.1%}',
        right,
      )
    )
  copied = result['copied']
  title = f'{result["tokens"]:,} tokens; {copied / result["tokens"]:.1%} have a copy'
  if copied:
    title += f', {result["right"] / copied:.1%} of these are right'
  return [foldable_table(title, rows)]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the share of tokens and of right copies by length, for each count."""
  share_axes, right_axes = axes
  for count in sorted({bucket['count'] for bucket in result['buckets']}):
    buckets = [bucket for bucket in result['buckets'] if bucket['count'] == count]
    lengths = [f'{bucket["length"]}' for bucket in buckets]
    shares = [100 * bucket['tokens'] / result['tokens'] for bucket in buckets]
    right = [100 * bucket['right'] / max(1, bucket['tokens']) for bucket in buckets]
    label = f'{count} or more' if buckets[0]['or_more'] else f'{count}'
    share_axes.plot(lengths, shares, 'o-', linewidth=1, markersize=3, label=label)
    right_axes.plot(lengths, right, 'o-', linewidth=1, markersize=3, label=label)
  share_axes.set(xlabel='longest match (tokens)', ylabel='tokens (%)', ylim=(0, None))
  right_axes.set(xlabel='longest match (tokens)', ylabel='copies that are right (%)', ylim=(0, 100))
  share_axes.legend(title='matches', fontsize='x-small')
