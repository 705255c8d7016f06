"""Tables of Markdown, and means and differences with intervals of 95 % in their cells."""

from collections.abc import Iterable, Mapping, Sequence
import re

from studies import intervals
from studies.results import Loss, Result, bits_per_byte


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Formats a table of Markdown, the header first; a sentence if it has no other row."""
  if len(rows) == 1:
    return 'No run has finished yet.'
  header, *others = (f'| {" | ".join(row)} |' for row in rows)
  return '\n'.join([header, '|---' * len(rows[0]) + '|', *others])


def format_mean(values: Sequence[float]) -> str:
  """Formats the mean of values over seeds, with half of its interval of 95 %."""
  return str(intervals.mean_interval(values))


def format_difference(
  runs: Iterable[Result], baseline: Iterable[Result], loss: Loss = bits_per_byte
) -> str:
  """Formats the difference of runs from a baseline, paired by seed; '' without a common seed."""
  difference = intervals.difference_of_runs(runs, baseline, loss)
  if difference is None:
    return ''
  return str(difference)


def replace_tables(page: str, tables: Mapping[str, str]) -> str:
  """Returns a page with new tables. Raises ValueError if there is no place for one."""
  for name, table in tables.items():
    pattern = rf'(<!-- {name} -->\n).*?(<!-- end -->)'

    def replace(match: re.Match[str], table: str = table) -> str:
      return f'{match[1]}{table}\n{match[2]}'

    page, count = re.subn(pattern, replace, page, flags=re.DOTALL)
    if count != 1:
      raise ValueError(f'the page has {count} places for {name}, expected one')
  return page
