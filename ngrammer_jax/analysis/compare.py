"""Paired comparison of runs with their baselines: differences of losses at the same tokens.

A difference has two errors. That of the text says how much it may change on other text of the same
kind: the split is divided into blocks, and their differences vary. That of the seeds says how much
it may change in another training: it needs several pairs of runs. Two runs of one seed can differ
by more than the error of the text although neither model is better. Runs of other seeds share a
label, and each label has a mean and a standard error over its runs.
"""

from collections.abc import Sequence
import math
import os
import re
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import token_losses
from ngrammer_jax.system import text_tables
from ngrammer_jax.training import model_size

BLOCKS = 64  # consecutive parts of the text; neighboring tokens are not independent
MIN_BLOCK = 256  # tokens; the differences of shorter blocks are not independent either
CONFIDENCE = 0.95
SEEDS = 'seed', 'data.shuffle'  # keys


def analyze(
  all_runs: Sequence[runs.Run],
  baselines: Sequence[runs.Run],
  names: Sequence[str],
  split: str = 'validation',
  max_tokens: int = 2**16,
  labels: Sequence[str] | None = None,
) -> dict[str, Any]:
  """Compares each run with its baseline, as plain values.

  Keys: `split`; `tokens`, number of tokens scored; `pairs`, with for each `run`, `baseline`, their
  names; `label`; `steps`, `parameters`, `in_tables` (how many of them are in tables) and
  `flops_per_token` (of the forward pass in training), of both; `loss` and `baseline_loss`, in nats
  per token; `difference`, of the run minus its baseline; and `text_error`, its standard error over
  blocks of the text, None for a short text.

  `labels`, with for each label of runs or of baselines, in this order: `runs`, their number;
  `loss`, the mean; with several runs `loss_error`, its standard error; and for those that are
  compared `mean` of the differences, with several pairs `seed_error`, its standard error over
  pairs, and `interval`, its 95 % confidence interval (Student's t). If all pairs have one label,
  the last three are keys of the result too.

  Args:
    all_runs: one or more runs.
    baselines: the baseline of each run.
    names: names of the runs, then of the baselines.
    split: split of the corpus.
    max_tokens: number of tokens to score, from the beginning of the split.
    labels: labels of the runs, then of the baselines. None: their names without the number of a
      seed at the end, if the configs of such runs are equal but for SEEDS.

  Raises:
    BadInput: not one baseline for each run, a run in two pairs of a label, different texts or
      vocabularies, or a number below 1.
  """
  if len(all_runs) != len(baselines):
    raise errors.BadInput(
      f'--workdir is given {len(all_runs)} times, but --baseline {len(baselines)} times: set one '
      f'baseline for each run, in the same order, such as that with the same seed'
    )
  everything = [*all_runs, *baselines]
  if labels is None:
    labels = _default_labels(everything, names)
  _check_pairs(all_runs, baselines, labels)
  if max_tokens < 1:
    raise errors.BadInput(f'--max_tokens={max_tokens} must be at least 1')
  texts = [run.split(split) for run in everything]
  token_losses.check_same_text(everything, texts, 'compare')
  tokens = min(len(texts[0].tokens), max_tokens)
  losses: dict[tuple[str, int], np.ndarray] = {}  # a baseline of several labels is scored once
  for run in everything:
    checkpoint = _checkpoint(run)
    if checkpoint not in losses:
      losses[checkpoint] = token_losses.token_losses(run, texts[0], tokens)
  pairs = []
  for i, both in enumerate(zip(all_runs, baselines, strict=True)):
    loss_T, baseline_T = (losses[_checkpoint(run)] for run in both)
    sizes = [_size(run) for run in both]
    pairs.append(
      {
        'run': names[i],
        'baseline': names[len(all_runs) + i],
        'label': labels[i],
        'baseline_label': labels[len(all_runs) + i],
        'steps': [run.restored.step for run in both],
        'parameters': [size.parameters for size, _ in sizes],
        'in_tables': [size.in_tables for size, _ in sizes],
        'flops_per_token': [flops for _, flops in sizes],
        'loss': float(loss_T.mean()),
        'baseline_loss': float(baseline_T.mean()),
        'difference': float((loss_T - baseline_T).mean()),
        'text_error': _text_error(loss_T - baseline_T),
      }
    )
  by_label = _by_label(pairs)
  result = {'split': split, 'tokens': tokens, 'pairs': pairs, 'labels': by_label}
  if len(pairs) > 1 and len({pair['label'] for pair in pairs}) == 1:
    statistics = by_label[labels[0]]
    result |= {name: statistics[name] for name in ('mean', 'seed_error', 'interval')}
  return result


def _default_labels(all_runs: Sequence[runs.Run], names: Sequence[str]) -> list[str]:
  """Returns the names without seeds; whole names for runs that differ in more than SEEDS."""
  labels = [_without_seed(name) for name in names]
  first_run = {}
  differing = set()
  for label, run in zip(labels, all_runs, strict=True):
    first = first_run.setdefault(label, run)
    for key, *values in experiment.differences(first.config, run.config):
      are_seeds = key.path in SEEDS and None not in values  # None: the stored order
      if not are_seeds and key.path != 'init_from':
        differing.add(label)
  for number, name in enumerate(names):
    if labels[number] in differing:
      labels[number] = name
  return labels


def _without_seed(name: str) -> str:
  """Returns the name of a run without a number at its end, such as `engram` of `engram.0`."""
  return re.sub(r'[._-]*(seed)?[._-]*\d+$', '', name) or name


def _check_pairs(
  all_runs: Sequence[runs.Run], baselines: Sequence[runs.Run], labels: Sequence[str]
) -> None:
  """Raises BadInput for a run in two pairs of one label, which are not independent."""
  pairs_of: dict[tuple[str, str], int] = {}
  for run, baseline, label in zip(all_runs, baselines, labels, strict=False):
    for workdir in {_absolute_workdir(run), _absolute_workdir(baseline)}:
      pairs_of[label, workdir] = pairs_of.get((label, workdir), 0) + 1
  for run in (*all_runs, *baselines):
    for label in dict.fromkeys(labels):
      count = pairs_of.get((label, _absolute_workdir(run)), 0)
      if count > 1:
        raise errors.BadInput(
          f'{run.workdir} is in {count} pairs of --workdir and --baseline with the label '
          f'{label!r}: the pairs of a label must be different trainings, such as those of other '
          f'seeds; name other labels with --label'
        )


def _size(run: runs.Run) -> tuple[model_size.ModelSize, float]:
  """Returns the size of the model of a run, and its FLOPs for a token of training."""
  config = run.config
  t = config.training
  size = model_size.count(config.model, run.vocabulary_size)
  rows = t.batch_size // t.microbatches
  flops = model_size.count_flops(config.model, run.vocabulary_size, rows, t.segment_length)
  return size, float(flops.forward())


def _absolute_workdir(run: runs.Run) -> str:
  return os.path.normpath(os.path.abspath(run.workdir))


def _checkpoint(run: runs.Run) -> tuple[str, int]:
  """Returns the workdir and the step of the parameters of a run."""
  return _absolute_workdir(run), run.restored.step


def _text_error(difference_T: np.ndarray) -> float | None:
  """Returns the standard error of a mean over the blocks of a text."""
  if len(difference_T) < BLOCKS * MIN_BLOCK:
    return None
  return standard_error([block.mean() for block in np.array_split(difference_T, BLOCKS)])


def standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of the mean of two or more independent values."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _by_label(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """Returns the statistics of each label, those of the runs first, then those of baselines."""
  losses: dict[str, dict[str, float]] = {}  # by label and name
  for label, name, loss in (
    ('label', 'run', 'loss'),
    ('baseline_label', 'baseline', 'baseline_loss'),
  ):
    for pair in pairs:
      losses.setdefault(pair[label], {})[pair[name]] = pair[loss]
  statistics = {}
  for label, by_name in losses.items():
    values = list(by_name.values())
    statistics[label] = {'runs': len(values), 'loss': float(np.mean(values))}
    if len(values) > 1:
      statistics[label]['loss_error'] = standard_error(values)
    differences = [pair['difference'] for pair in pairs if pair['label'] == label]
    if differences:
      statistics[label] |= _over_pairs(differences)
  return statistics


def _over_pairs(differences: Sequence[float]) -> dict[str, Any]:
  """Returns the mean difference, with several pairs also its standard error and interval."""
  mean = float(np.mean(differences))
  if len(differences) < 2:
    return {'mean': mean}
  from scipy import stats  # a slow import that other analyses do not need

  error = standard_error(differences)
  width = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
  return {'mean': mean, 'seed_error': error, 'interval': [mean - width, mean + width]}


def format_table(result: dict[str, Any]) -> str:
  """Formats the models, the differences of the pairs, and the means of each label."""
  lines = [f'{result["tokens"]:,} tokens of {result["split"]}']
  lines += text_tables.align_columns(_rows_of_models(result), '<>')
  lines.append('')
  lines += text_tables.align_columns(_rows_of_pairs(result), '<<>')
  if any(pair['text_error'] is None for pair in result['pairs']):
    lines.append(f'no error of the text: it needs at least {BLOCKS * MIN_BLOCK:,} tokens')
  lines.append('')
  lines += text_tables.align_columns(_rows_of_labels(result), '<>><')
  if all('seed_error' not in each for each in result['labels'].values()):
    lines.append('one pair of each label: compare runs of other seeds too, which also differ')
  return '\n'.join(lines)


def _rows_of_models(result: dict[str, Any]) -> list[list[str]]:
  """Returns a row for each run and each baseline, the header first."""
  header = ['run', 'step', 'parameters', 'in tables', 'MFLOPs a token', 'nats/token']
  rows = {}
  for i, (name, loss) in enumerate((('run', 'loss'), ('baseline', 'baseline_loss'))):
    for pair in result['pairs']:
      rows[pair[name]] = [
        pair[name],
        f'{pair["steps"][i]:,}',
        f'{pair["parameters"][i]:,}',
        f'{pair["in_tables"][i]:,}',
        f'{pair["flops_per_token"][i] / 1e6:,.2f}',
        f'{pair[loss]:.4f}',
      ]
  return [header, *rows.values()]


def _rows_of_pairs(result: dict[str, Any]) -> list[list[str]]:
  """Returns a row for each pair, the header first."""
  rows = [['run', 'minus its baseline', 'difference', 'error of the text']]
  for pair in result['pairs']:
    error = '-' if pair['text_error'] is None else f'{pair["text_error"]:.4f}'
    rows.append([pair['run'], pair['baseline'], f'{pair["difference"]:+.4f}', error])
  return rows


def _rows_of_labels(result: dict[str, Any]) -> list[list[str]]:
  """Returns a row for each label, the header first; errors are standard errors over runs."""
  rows = [['label', 'runs', 'nats/token', 'minus baseline']]
  for label, statistics in result['labels'].items():
    loss = f'{statistics["loss"]:.4f}'
    if 'loss_error' in statistics:
      loss += f' ± {statistics["loss_error"]:.4f}'
    rows.append([label, f'{statistics["runs"]}', loss, _format_difference(statistics)])
  return rows


def _format_difference(statistics: dict[str, Any]) -> str:
  """Formats the mean difference of a label, with its error and its interval."""
  if 'mean' not in statistics:
    return '-'
  text = f'{statistics["mean"]:+.4f}'
  if 'interval' in statistics:
    low, high = statistics['interval']
    verdict = 'includes 0' if low <= 0 <= high else 'excludes 0'
    text += f' ± {statistics["seed_error"]:.4f}'
    text += f'; {CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f} {verdict}'
  return text
