"""The table of studies/domain.md."""

from collections.abc import Iterable, Sequence
import statistics

from studies import domain, domain_scores, intervals
from studies.markdown import markdown
from studies.results import Result

COMMAND = 'python -m studies.domain --data=DIR'
HEADER = (
  'arm',
  'tokens',
  'trained parameters',
  'learning rate',
  'seeds',
  'C source',
  'minus `untrained`',
  'minus `all`',
  'enwik8',
  'minus `untrained`',
  'minus `all`',
  'base restored',
  'seconds',
)
UNTRAINED = 'untrained'
ALL = 'all'


def domain_table(lines: Iterable[Result]) -> list[Sequence[str]]:
  """Returns the header and a row for each arm and number of tokens: means with intervals of 95 %.

  Differences from `untrained` have one loss of it, as it has no seed. The others are paired by
  seed.
  """
  runs = [line for line in lines if line['table'] == 'runs']
  untrained = [line for line in runs if line['model'] == UNTRAINED]
  rows: list[Sequence[str]] = [HEADER]
  for model in domain.MODELS:
    for tokens in sorted({line['tokens'] for line in runs if line['model'] == model}):
      same_tokens = [line for line in runs if line['tokens'] == tokens]
      own = [line for line in same_tokens if line['model'] == model]
      of_all = [line for line in same_tokens if line['model'] == ALL]
      rows.append(_row(model, own, untrained, of_all))
  return rows


def format_table(lines: Sequence[Result]) -> str:
  """Formats the table of studies/domain.md; its command before the first run."""
  if not lines:
    return f'Not run: `{COMMAND}`'
  return markdown(domain_table(lines))


def _row(
  model: str, own: Sequence[Result], untrained: Sequence[Result], of_all: Sequence[Result]
) -> Sequence[str]:
  first = own[0]
  is_trained = model != UNTRAINED
  cells = [f'`{model}`']
  if is_trained:
    cells.append(f'{first["tokens"]:,}')
    cells.append(f'{first["trained_parameters"]:,}')
    cells.append(f'{first["learning_rate"]:g}')
  else:
    cells += ['0', '0', '']
  cells.append(str(len(own)))
  for text in (domain_scores.C_SOURCE, domain_scores.ENWIK8):
    losses = _losses(own, text)
    cells.append(str(intervals.mean_interval(list(losses.values()))))
    from_untrained = ''
    if is_trained and untrained:
      base = untrained[0][text]['bits_per_byte']
      from_untrained = str(intervals.mean_interval([loss - base for loss in losses.values()]))
    cells.append(from_untrained)
    difference = None
    if is_trained and model != ALL:
      difference = intervals.paired_difference(losses, _losses(of_all, text))
    cells.append('' if difference is None else str(difference))
  cells.append(_format_restored([line['base_restored'] for line in own]))
  cells.append(f'{statistics.fmean(line["training_seconds"] for line in own):.0f}')
  return cells


def _format_restored(restored: Sequence[bool | None]) -> str:
  if None in restored:  # there is no memory to remove
    return ''
  return 'yes' if all(restored) else '**no**'


def _losses(runs: Iterable[Result], text: str) -> dict[int, float]:
  return intervals.losses_by_seed(runs, lambda line: line[text]['bits_per_byte'])
