"""The tables of studies/program.md: losses of the arms beside the baseline of their size.

Runs of one table need equal texts. Their hardware is named below the tables.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import math

from studies import intervals, kneser_ney, program, results, step_seconds
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
  'time of a step',
)
TOKENS_HEADER = (
  'tokens',
  'seeds',
  '`value_embeddings`',
  '`engram`',
  'difference',
  'data equivalent',
  'change of the data equivalent',
)
TRIES_HEADER = (
  'arm',
  'rates of its own',
  'rate of the matrices',
  'first rate',
  'second',
  'third',
  'fourth',
)
LARGER_COLUMNS = len(HEADER) - 2  # stages S and M have neither data equivalents nor times of steps


def arm_table(lines: Sequence[Result], arms: Iterable[str], baseline: str) -> list[Sequence[str]]:
  """Returns the header and a row for each arm that has runs: means with intervals of 95 %.

  Args:
    lines: lines of program.jsonl.
    arms: the arms of one size.
    baseline: the arm whose loss is subtracted, and whose curve gives the data equivalent.

  Raises:
    ValueError: test splits differ in their tokens, or an arm has two runs of a seed.
  """
  arms = list(arms)
  runs = collections.defaultdict(list)
  for line in lines:
    if line['table'] in ('runs', 'counts'):
      runs[line['model']].append(line)
  _check_texts([line for arm in (*arms, baseline) for line in runs[arm]])
  curve = token_curve(lines, baseline)
  rows: list[Sequence[str]] = [HEADER]
  for arm in arms:
    if runs[arm]:
      time = _format_time(lines, arm, baseline)
      rows.append((*_row(arm, runs[arm], runs[baseline], curve), time))
  return rows


def _check_texts(runs: Iterable[Result]) -> None:
  """Raises ValueError if runs have test splits of different numbers of tokens."""
  cells = {}
  for run in runs:
    if 'tokens' in run['test']:
      cells[run['test']['tokens']] = run['cell']
  if len(cells) > 1:
    counts = ', '.join(f'{count:,} in {cell}' for count, cell in sorted(cells.items()))
    raise ValueError(
      f'the runs of a table have different tokens of test: {counts}; expected one vocabulary. '
      'Train the missing runs with the vocabulary of the first ones'
    )


def token_curve(lines: Iterable[Result], arm: str) -> Mapping[int, list[float]]:
  """Returns the losses of an arm by the number of tokens that it was trained on."""
  losses = losses_by_tokens(lines, arm)
  return {tokens: list(of_seed.values()) for tokens, of_seed in losses.items()}


def losses_by_tokens(lines: Iterable[Result], arm: str) -> dict[int, dict[int, float]]:
  """Returns the losses of an arm: by the tokens that it was trained on, then by seed.

  Raises:
    ValueError: two runs have the same tokens and the same seed.
  """
  runs = collections.defaultdict(list)
  for line in lines:
    if line['table'] in ('runs', 'longer') and line['model'] == arm:
      runs[line['tokens']].append(line)
  losses = {}
  for tokens, of_tokens in runs.items():
    losses[tokens] = intervals.losses_by_seed(of_tokens, results.bits_per_byte)
  return losses


def _row(
  arm: str,
  own: Sequence[Result],
  of_baseline: Sequence[Result],
  curve: Mapping[int, Sequence[float]],
) -> Sequence[str]:
  first = own[0]
  losses = intervals.losses_by_seed(own, results.bits_per_byte)
  interval = intervals.mean_interval(list(losses.values()))
  difference = None
  if own is not of_baseline:
    difference = intervals.difference_of_runs(own, of_baseline)
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


def _format_time(lines: Iterable[Result], arm: str, baseline: str) -> str:
  """Formats the time of a step over the time of the baseline in the same round."""
  seconds: dict[str, dict[int, float]] = {arm: {}, baseline: {}}
  for line in lines:
    if line['table'] == step_seconds.TABLE and line['model'] in seconds:
      seconds[line['model']][line['seed']] = line['step_seconds']
  rounds = sorted(seconds[arm].keys() & seconds[baseline].keys())
  if arm == baseline or not rounds:
    return ''
  ratio = intervals.mean_interval([seconds[arm][n] / seconds[baseline][n] for n in rounds])
  if ratio.half_width is None:
    return f'{ratio.mean:.2f}'
  return f'{ratio.mean:.2f} ± {ratio.half_width:.2f}'


def tries_table(lines: Iterable[Result]) -> list[Sequence[str]]:
  """Returns the header and two rows for each arm with tries: losses by rate of the matrices."""
  losses = {}
  for line in lines:
    if line['table'] == 'tries':
      losses[line['cell']] = results.validation_nats(line)
  rows: list[Sequence[str]] = [TRIES_HEADER]
  for arm in program.ARMS:
    grid = program.OWN_RATES[program.own_key(arm)]
    own_rates = ', '.join(f'{rate:g}' for rate in grid)
    cells = {cell.rates: losses.get(cell.name) for cell in program.tries(arm)}
    if not any(cells.values()):
      continue
    for matrices in program.MATRIX_RATES:
      of_matrices = [cells[program.Tried(matrices, rate)] for rate in grid]
      formatted = ['' if loss is None else f'{loss:.4f}' for loss in of_matrices]
      rows.append((f'`{arm}`', own_rates, f'{matrices:g}', *formatted))
  return rows


def tokens_table(lines: Iterable[Result]) -> list[Sequence[str]]:
  """Returns the header and a row for each number of tokens of part A: part C of the claim.

  Each seed has a data equivalent of its own, from the losses of the baseline with this seed at all
  numbers of tokens. Its change is paired by seed, from the lowest number of tokens.
  """
  lines = list(lines)
  baseline, own = (losses_by_tokens(lines, arm) for arm in program.PART_A)
  rows: list[Sequence[str]] = [TOKENS_HEADER]
  first: dict[int, float] | None = None
  for tokens in sorted(baseline.keys() & own.keys()):
    difference = intervals.paired_difference(own[tokens], baseline[tokens])
    if difference is None:
      continue
    equivalents = _equivalents_by_seed(tokens, own[tokens], baseline)
    # Without the seeds beyond the curve, a mean would be too low or too high.
    is_known = equivalents.keys() == own[tokens].keys()
    change = None
    if first is None:
      first = equivalents if is_known else {}
    elif is_known:
      change = intervals.paired_difference(equivalents, first)
    rows.append(
      (
        f'{tokens:,}',
        str(len(own[tokens].keys() & baseline[tokens].keys())),
        str(intervals.mean_interval(list(baseline[tokens].values()))),
        str(intervals.mean_interval(list(own[tokens].values()))),
        str(difference),
        str(intervals.mean_interval(list(equivalents.values()))) if is_known else '',
        '' if change is None else str(change),
      )
    )
  return rows


def _equivalents_by_seed(
  tokens: int, losses: Mapping[int, float], baseline: Mapping[int, Mapping[int, float]]
) -> dict[int, float]:
  """Returns the data equivalent of each seed whose loss is between losses of the baseline."""
  equivalents = {}
  for seed, loss in losses.items():
    curve = {n: [of_seed[seed]] for n, of_seed in baseline.items() if seed in of_seed}
    if len(curve) < 2:
      continue
    equivalent = intervals.data_equivalent(loss, tokens, curve)
    if 0 < equivalent < math.inf:
      equivalents[seed] = equivalent
  return equivalents


def format_progress(lines: Sequence[Result]) -> str:
  """Returns the number of finished and of planned runs, and the hardware of the finished ones."""
  finished = collections.Counter(line['table'] for line in lines if line['model'] in program.ARMS)
  seeds = len(program.SEEDS)
  planned = {
    'tries': sum(len(list(program.tries(arm))) for arm in program.ARMS),
    'runs': seeds * len(program.ARMS),
    'longer': seeds * sum(len(factors) for factors in program.LONGER.values()),
  }
  counts = [f'{finished[table]} of {count} {table}' for table, count in planned.items()]
  tries, runs, longer = counts
  text = (
    f'Finished: {tries}, {runs}, and {longer} runs of two and four times the tokens. Arms without '
    f'a row have not run.'
  )
  diverged = [line['cell'] for line in lines if line['table'] == program.DIVERGED]
  if diverged:
    text += f' Not finite: {", ".join(f"`{cell}`" for cell in diverged)}.'
  hardware = collections.Counter(line['hardware'] for line in lines if 'hardware' in line)
  if hardware:
    names = ', '.join(f'{name} ({count} lines)' for name, count in hardware.most_common())
    text += f' Hardware: {names}.'
  return text


def larger_table(lines: Sequence[Result]) -> list[Sequence[str]]:
  """Returns the header and the rows of stages S and M, of each text and number of tokens."""
  rows: list[Sequence[str]] = [('text', 'tokens', *HEADER[:LARGER_COLUMNS])]
  for stage in program.STAGES.values():
    own = []
    for line in lines:
      if (line.get('text'), line.get('steps')) == (stage.text, stage.steps):
        own.append(line)
    arms = [f'{stage.size}_{arm}' for arm in stage.arms]
    _, *of_stage = arm_table(own, arms, f'{stage.size}_value_embeddings')
    for row in of_stage:
      tokens = f'{stage.steps * program.TOKENS_PER_STEP:,}'
      rows.append((stage.text, tokens, *row[:LARGER_COLUMNS]))
  return rows


def format_tables(lines: Sequence[Result]) -> dict[str, list[Sequence[str]]]:
  """Returns the rows of each table by its name."""
  one = [arm for arm in program.ARMS if program.BASELINES[arm] == program.CLAIM[0]]
  two = [arm for arm in program.ARMS if arm not in one]
  return {
    'program, one table': arm_table(lines, [*one, kneser_ney.MIXTURE], 'value_embeddings'),
    'program, two tables': arm_table(lines, two, 'two_value_embeddings'),
    'program, tries': tries_table(lines),
    'program, more tokens': tokens_table(lines),
    'program, larger models': larger_table(lines),
  }
