"""The tables of studies/program.md: losses of the arms beside the baseline of their size."""

import collections
from collections.abc import Iterable, Mapping, Sequence
import math

from studies import intervals, kneser_ney, program, results
from studies.results import Result

HEADER = (
  'arm',
  'parameters',
  'tables, MB',
  'MFLOPs a token',
  'rates: matrices, own',
  'seeds',
  'test',
  'minus baseline',
  'data equivalent',
)


def arm_table(lines: Sequence[Result], arms: Iterable[str], baseline: str) -> list[Sequence[str]]:
  """Returns the header and a row for each arm that has runs: means with intervals of 95 %.

  Args:
    lines: lines of program.jsonl.
    arms: the arms of one size.
    baseline: the arm whose loss is subtracted, and whose curve gives the data equivalent.
  """
  runs = collections.defaultdict(list)
  for line in lines:
    if line['table'] in ('runs', 'counts'):
      runs[line['model']].append(line)
  curve = token_curve(lines, baseline)
  rows: list[Sequence[str]] = [HEADER]
  for arm in arms:
    if arm in runs:
      rows.append(_row(arm, runs[arm], runs[baseline], curve))
  return rows


def token_curve(lines: Iterable[Result], arm: str) -> Mapping[int, list[float]]:
  """Returns the losses of an arm by the number of tokens that it was trained on."""
  curve = collections.defaultdict(list)
  for line in lines:
    if line['table'] in ('runs', 'longer') and line['model'] == arm:
      curve[line['tokens']].append(results.bits_per_byte(line))
  return curve


def _row(
  arm: str,
  own: Sequence[Result],
  of_baseline: Sequence[Result],
  curve: Mapping[int, Sequence[float]],
) -> Sequence[str]:
  first = own[0]
  losses = {line['seed']: results.bits_per_byte(line) for line in own}
  interval = intervals.mean_interval(list(losses.values()))
  difference = None
  if own is not of_baseline:
    baseline_losses = {line['seed']: results.bits_per_byte(line) for line in of_baseline}
    difference = intervals.paired_difference(losses, baseline_losses)
  rates = ''
  if 'own_learning_rate' in first:
    rates = f'{first["matrix_learning_rate"]:g}, {_own_rate(arm, first["own_learning_rate"])}'
  return (
    f'`{arm}`',
    f'{first["parameters"]:,}',
    f'{first.get("table_bytes", 0) / 1e6:.1f}',
    f'{first["flops_per_token"] / 1e6:.2f}',
    rates,
    str(len(own)),
    str(interval),
    '' if difference is None else str(difference),
    _format_equivalent(interval.mean, first['tokens'], curve),
  )


def _own_rate(arm: str, rate: float) -> str:
  """Formats a rate; a star says that it is at an end of its grid."""
  grid = program.OWN_RATES[program.own_key(arm)]
  star = '*' if rate in (grid[0], grid[-1]) else ''
  return f'{rate:g}{star}'


def _format_equivalent(loss: float, tokens: int, curve: Mapping[int, Sequence[float]]) -> str:
  if len(curve) < 2:
    return ''
  equivalent = intervals.data_equivalent(loss, tokens, curve)
  if equivalent == math.inf:
    return f'more than {max(curve) / tokens:g}'
  if equivalent == 0:
    return 'less than 1'
  return f'{equivalent:.2f}'


def format_progress(lines: Sequence[Result]) -> str:
  """Returns a sentence with the number of finished and of planned runs."""
  finished = collections.Counter(line['table'] for line in lines if line['model'] in program.ARMS)
  seeds = len(program.SEEDS)
  planned = {
    'tries': sum(len(list(program.tries(arm))) for arm in program.ARMS),
    'runs': seeds * len(program.ARMS),
    'longer': seeds * sum(len(factors) for factors in program.LONGER.values()),
  }
  counts = [f'{finished[table]} of {count} {table}' for table, count in planned.items()]
  tries, runs, longer = counts
  return (
    f'Finished: {tries}, {runs}, and {longer} runs of two and four times the tokens. Arms without '
    f'a row have not run.'
  )


def larger_table(lines: Sequence[Result]) -> list[Sequence[str]]:
  """Returns the header and the rows of stages S and M, of each text and number of tokens."""
  rows: list[Sequence[str]] = [('text', 'tokens', *HEADER)]
  for stage in program.STAGES.values():
    own = []
    for line in lines:
      if (line.get('text'), line.get('steps')) == (stage.text, stage.steps):
        own.append(line)
    arms = [f'{stage.size}_{arm}' for arm in stage.arms]
    _, *of_stage = arm_table(own, arms, f'{stage.size}_value_embeddings')
    for row in of_stage:
      rows.append((stage.text, f'{stage.steps * program.TOKENS_PER_STEP:,}', *row))
  return rows


def format_tables(lines: Sequence[Result]) -> dict[str, list[Sequence[str]]]:
  """Returns the rows of each table by its name."""
  one = [arm for arm in program.ARMS if program.BASELINES[arm] == program.CLAIM[0]]
  two = [arm for arm in program.ARMS if arm not in one]
  return {
    'program, one table': arm_table(lines, [*one, kneser_ney.MIXTURE], 'value_embeddings'),
    'program, two tables': arm_table(lines, two, 'two_value_embeddings'),
    'program, larger models': larger_table(lines),
  }
