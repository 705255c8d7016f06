"""Paired comparison of runs with their baselines: differences of losses at the same tokens.

A difference has two errors. That of the text says how much it may change on other text of the same
kind: the split is divided into blocks, and their differences vary. That of the seeds says how much
it may change in another training: it needs several pairs of runs. Two runs of one seed can differ
by more than the error of the text although neither model is better.
"""

from collections.abc import Sequence
import math
import os
from typing import Any

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import token_losses
from ngrammer_jax.models import model_variables
from ngrammer_jax.system import text_tables

BLOCKS = 64  # consecutive parts of the text; neighboring tokens are not independent
MIN_BLOCK = 256  # tokens; the differences of shorter blocks are not independent either
CONFIDENCE = 0.95


def analyze(
  all_runs: Sequence[runs.Run],
  baselines: Sequence[runs.Run],
  names: Sequence[str],
  split: str = 'validation',
  max_tokens: int = 2**18,
) -> dict[str, Any]:
  """Compares each run with its baseline, as plain values.

  Keys: `split`; `tokens`, number of tokens scored; `pairs`, with for each `run`, `baseline`, their
  names; `steps` and `parameters`, of both; `loss` and `baseline_loss`, in nats per token;
  `difference`, of the run minus its baseline; and `text_error`, its standard error over blocks of
  the text, None for a short text.
  With several pairs also `mean` of the differences; `seed_error`, its standard error over pairs;
  and `interval`, its 95 % confidence interval (Student's t).

  Args:
    all_runs: one or more runs.
    baselines: the baseline of each run.
    names: names of the runs, then of the baselines.
    split: split of the corpus.
    max_tokens: number of tokens to score, from the beginning of the split.

  Raises:
    BadInput: not one baseline for each run, a run in two pairs, different texts or vocabularies, or
      a number below 1.
  """
  if len(all_runs) != len(baselines):
    raise errors.BadInput(
      f'--workdir is given {len(all_runs)} times, but --baseline {len(baselines)} times: set one '
      f'baseline for each run, in the same order, such as that with the same seed'
    )
  everything = [*all_runs, *baselines]
  workdirs_of_pairs = [
    {_absolute_workdir(run), _absolute_workdir(baseline)}
    for run, baseline in zip(all_runs, baselines, strict=True)
  ]
  for run in everything:
    count = sum(_absolute_workdir(run) in workdirs for workdirs in workdirs_of_pairs)
    if count > 1:
      raise errors.BadInput(
        f'{run.workdir} is in {count} pairs of --workdir and --baseline: pairs must be different '
        f'trainings, such as those of other seeds'
      )
  if max_tokens < 1:
    raise errors.BadInput(f'--max_tokens={max_tokens} must be at least 1')
  texts = [run.split(split) for run in everything]
  token_losses.check_same_text(everything, texts, 'compare')
  tokens = min(len(texts[0].tokens), max_tokens)
  pairs = []
  for i, both in enumerate(zip(all_runs, baselines, strict=True)):
    run, baseline = both
    loss_T = token_losses.token_losses(run, texts[0], tokens)
    baseline_T = token_losses.token_losses(baseline, texts[0], tokens)
    pairs.append(
      {
        'run': names[i],
        'baseline': names[len(all_runs) + i],
        'steps': [run.restored.step for run in both],
        'parameters': [model_variables.count_elements(run.restored.params) for run in both],
        'loss': float(loss_T.mean()),
        'baseline_loss': float(baseline_T.mean()),
        'difference': float((loss_T - baseline_T).mean()),
        'text_error': _text_error(loss_T - baseline_T),
      }
    )
  return {'split': split, 'tokens': tokens, 'pairs': pairs} | _over_pairs(pairs)


def _absolute_workdir(run: runs.Run) -> str:
  return os.path.normpath(os.path.abspath(run.workdir))


def _text_error(difference_T: np.ndarray) -> float | None:
  """Returns the standard error of a mean over the blocks of a text."""
  if len(difference_T) < BLOCKS * MIN_BLOCK:
    return None
  return _standard_error([block.mean() for block in np.array_split(difference_T, BLOCKS)])


def _standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of the mean of independent values."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _over_pairs(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the mean difference of several pairs, its standard error and confidence interval."""
  if len(pairs) < 2:
    return {}
  from scipy import stats  # a slow import that other analyses do not need

  differences = [pair['difference'] for pair in pairs]
  mean = float(np.mean(differences))
  error = _standard_error(differences)
  width = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1))
  return {'mean': mean, 'seed_error': error, 'interval': [mean - width, mean + width]}


def format_table(result: dict[str, Any]) -> str:
  """Formats the pairs, and what they say together."""
  columns = ['step', 'parameters', 'nats/token']
  rows = [['run', *columns, 'baseline', *columns, 'difference', 'error of the text']]
  for pair in result['pairs']:
    cells = []
    for i, (name, loss) in enumerate((('run', 'loss'), ('baseline', 'baseline_loss'))):
      cells += [pair[name], f'{pair["steps"][i]:,}', f'{pair["parameters"][i]:,}']
      cells.append(f'{pair[loss]:.4f}')
    cells.append(f'{pair["difference"]:+.4f}')
    cells.append('-' if pair['text_error'] is None else f'{pair["text_error"]:.4f}')
    rows.append(cells)
  lines = [f'{result["tokens"]:,} tokens of {result["split"]}; negative: lower than the baseline']
  lines += text_tables.align_columns(rows, '<>>><>')
  if any(pair['text_error'] is None for pair in result['pairs']):
    lines.append(f'no error of the text: it needs at least {BLOCKS * MIN_BLOCK:,} tokens')
  if 'mean' not in result:
    lines.append('one pair: compare runs of other seeds too, which also differ')
    return '\n'.join(lines)
  low, high = result['interval']
  verdict = 'includes 0' if low <= 0 <= high else 'excludes 0'
  lines.append(
    f'mean of {len(result["pairs"])} pairs: {result["mean"]:+.4f} ± {result["seed_error"]:.4f} '
    f'(standard error over pairs); {CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}, which '
    f'{verdict}'
  )
  return '\n'.join(lines)
