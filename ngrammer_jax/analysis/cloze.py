"""Paired comparison of two runs on the same cloze questions.

With 2,500 questions, the confidence intervals of two accuracies overlap unless they differ by about
0.04. McNemar's exact test detects far smaller differences: it compares question by question and
uses only the questions that exactly one of the two runs answers correctly. If neither run is
better, these questions are equally likely to favor either run.
"""

import json
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, storage, text_tables


def read_points(workdir: pathlib.Path, name: str) -> dict[tuple[str, str, int], float]:
  """Reads the point of a run for each question, by kind, file and line.

  Args:
    workdir: run directory.
    name: name of the answers file, as in evaluation/<name>.jsonl.

  Raises:
    BadInput: the file does not exist or is corrupt.
  """
  storage.check_reachable(workdir)
  path = workdir / 'evaluation' / f'{name}.jsonl'
  if not path.is_file():
    raise errors.BadInput(
      f'--workdir={workdir} has no answers in evaluation/{name}.jsonl: run python -m '
      f'ngrammer_jax.evaluate --cloze, or select another file with --results'
    )
  points = {}
  for number, line in enumerate(path.read_bytes().split(b'\n'), 1):
    if not line:
      continue
    with file_errors.translate_damage(f'{path}, line {number}', 'run the evaluation again'):
      answer = json.loads(line)
      points[answer['kind'], answer['file'], int(answer['line'])] = float(answer['point'])
  return points


def compare(workdirs: list[pathlib.Path], name: str) -> dict[str, dict[str, Any]]:
  """Compares the accuracies of two runs for each kind of question.

  `only_first` and `only_second` count the questions that one run answers correctly and the other
  does not; `p` is the two-sided p-value of McNemar's exact test. A shared point does not count as
  correct there, so the test compares the strict accuracies.

  Raises:
    BadInput: not exactly two runs, or runs with different questions.
  """
  if len(workdirs) != 2:
    raise errors.BadInput(
      f'cloze compares two runs: pass --workdir twice, not {len(workdirs)} times'
    )
  first, second = (read_points(workdir, name) for workdir in workdirs)
  if first.keys() != second.keys() or not first:
    raise errors.BadInput(
      f'{workdirs[0]} and {workdirs[1]} answered different questions: {len(first):,} and '
      f'{len(second):,}, {len(first.keys() & second.keys()):,} in common; evaluate both with the '
      f'same options'
    )
  result = {}
  for kind in dict.fromkeys(key[0] for key in first):
    pairs = [(first[key], second[key]) for key in first if key[0] == kind]
    only_first = sum(a == 1 and b < 1 for a, b in pairs)
    only_second = sum(b == 1 and a < 1 for a, b in pairs)
    result[kind] = {
      'questions': len(pairs),
      'first': sum(a for a, _ in pairs) / len(pairs),
      'second': sum(b for _, b in pairs) / len(pairs),
      'first_strict': sum(a == 1 for a, _ in pairs) / len(pairs),
      'second_strict': sum(b == 1 for _, b in pairs) / len(pairs),
      'only_first': only_first,
      'only_second': only_second,
      'p': mcnemar(only_first, only_second),
    }
  return result


def mcnemar(only_first: int, only_second: int) -> float:
  """Returns the two-sided p-value of McNemar's exact test: a binomial test with probability 1/2."""
  from scipy import stats  # a slow import that other analyses do not need

  count = only_first + only_second
  if not count:
    return 1.0
  return float(stats.binomtest(only_first, count).pvalue)


def format_table(result: dict[str, dict[str, Any]]) -> str:
  """Formats the result of `compare` as a table."""
  header = ['kind', 'questions', 'accuracy 1st', 'accuracy 2nd', 'strict 1st', 'strict 2nd']
  rows = [[*header, 'only 1st', 'only 2nd', 'p']]
  for kind, numbers in result.items():
    cells = [kind, f'{numbers["questions"]:,}']
    for key in ('first', 'second', 'first_strict', 'second_strict'):
      cells.append(f'{numbers[key]:.4f}')
    cells += [f'{numbers["only_first"]:,}', f'{numbers["only_second"]:,}', f'{numbers["p"]:.2g}']
    rows.append(cells)
  return '\n'.join(text_tables.align_columns(rows, '<>'))
