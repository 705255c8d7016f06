"""The figure of studies/program.md: what Engram gains beside value embeddings.

Error bars are intervals of 95 % over seeds. A panel needs two points to be drawn.
"""

from collections.abc import Sequence
import statistics
from typing import Any

from matplotlib import figure

from studies import intervals, program, program_tables, step_seconds
from studies.results import Result

LABELS = {'value_embeddings': 'value embeddings', 'engram': 'Engram'}


def has_data(lines: Sequence[Result]) -> bool:
  """Returns whether a panel has two points: both arms at a second number of tokens, or size."""
  panels = figure.Figure().subplots(1, 3)
  draw(lines, panels)
  return any(panel.has_data() for panel in panels)


def draw(lines: Sequence[Result], axes: Sequence[Any]) -> None:
  """Draws the difference by tokens and by size, and the losses by minutes of training."""
  by_tokens, by_size, by_minutes = axes
  draw_difference_by_tokens(lines, by_tokens)
  draw_difference_by_size(lines, by_size)
  draw_losses_by_minutes(lines, by_minutes)


def draw_difference_by_tokens(lines: Sequence[Result], axis: Any) -> None:
  """Draws the loss of Engram minus the loss of value embeddings, by tokens of training."""
  baseline, own = (program_tables.losses_by_tokens(lines, arm) for arm in program.PART_A)
  points = []
  for tokens in sorted(baseline.keys() & own.keys()):
    difference = intervals.paired_difference(own[tokens], baseline[tokens])
    if difference is not None:
      points.append((tokens / 1e6, difference))
  _draw_differences(points, '2.70M parameters, enwik8', axis)
  axis.set_xlabel('tokens of training, millions')


def draw_difference_by_size(lines: Sequence[Result], axis: Any) -> None:
  """Draws the loss of Engram minus the loss of value embeddings, by parameters and text.

  The sizes have different numbers of tokens: those of their stage.
  """
  for text in program.PATHS:
    points = []
    for size in ('', 's_', 'm_'):
      baseline, own = (_runs(lines, f'{size}{arm}', text) for arm in program.PART_A)
      difference = intervals.difference_of_runs(own, baseline)
      if difference is not None:
        points.append((own[0]['parameters'] / 1e6, difference))
    _draw_differences(points, text, axis)
  axis.set_xlabel('parameters, millions')


def draw_losses_by_minutes(lines: Sequence[Result], axis: Any) -> None:
  """Draws the mean losses of both arms by the minutes of training: steps by their time."""
  for arm in program.PART_A:
    seconds = []
    for line in lines:
      if line['table'] == step_seconds.TABLE and line['model'] == arm:
        seconds.append(line['step_seconds'])
    losses = program_tables.losses_by_tokens(lines, arm)
    if not seconds or len(losses) < 2:
      continue
    minutes, means = [], []
    for tokens in sorted(losses):
      steps = tokens / program.TOKENS_PER_STEP
      minutes.append(steps * statistics.fmean(seconds) / 60)
      means.append(intervals.mean_interval(list(losses[tokens].values())))
    errors = [interval.half_width or 0 for interval in means]
    losses_only = [interval.mean for interval in means]
    axis.errorbar(minutes, losses_only, yerr=errors, marker='o', capsize=3, label=LABELS[arm])
    axis.legend(frameon=False)
  axis.set_xscale('log', base=2)
  axis.xaxis.set_major_formatter('{x:g}')
  axis.set_xlabel('training, minutes on one core')
  axis.set_ylabel('test, bits per byte (lower is better)')
  axis.grid(alpha=0.3)


def _runs(lines: Sequence[Result], arm: str, text: str) -> list[Result]:
  """Returns the runs of an arm on a text, those with the most tokens."""
  own = []
  for line in lines:
    if line['table'] != 'runs' or line['model'] != arm:
      continue
    if line.get('text', program.ENWIK8) == text:  # the first lines were written without a text
      own.append(line)
  most = max((line['tokens'] for line in own), default=0)
  return [line for line in own if line['tokens'] == most]


def _draw_differences(
  points: Sequence[tuple[float, intervals.Interval]], label: str, axis: Any
) -> None:
  """Draws differences with their intervals, if there are two."""
  if len(points) < 2:
    return
  x = [place for place, _ in points]
  means = [difference.mean for _, difference in points]
  errors = [difference.half_width or 0 for _, difference in points]
  axis.errorbar(x, means, yerr=errors, marker='o', capsize=3, label=label)
  axis.axhline(0, color='black', linewidth=0.8)
  axis.set_xscale('log', base=2)
  axis.xaxis.set_major_formatter('{x:g}')
  axis.set_ylabel('Engram - value embeddings, bits per byte')
  axis.grid(alpha=0.3)
  axis.legend(frameon=False)
