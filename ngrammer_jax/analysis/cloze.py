"""Two runs on the same questions: is one better, or is it chance?

Accuracies of two models on 2,500 questions have to differ by about 0.04 before their intervals come
apart. Compared question by question, far smaller differences tell: McNemar's exact test looks at
the questions that only one of the two answers right, which fall to either side alike if neither is
better.
"""

import json
import pathlib
from typing import Any

from ngrammer_jax import errors, files


def read(workdir: pathlib.Path, name: str) -> dict[tuple[str, str, int], float]:
  """The point that a run has for each question, by kind, file and line.

  Args:
    workdir: of the run.
    name: of its answers, as in evaluation/<name>.jsonl.

  Raises:
    BadInput: they are not there, or damaged.
  """
  files.reach(workdir)
  path = workdir / 'evaluation' / f'{name}.jsonl'
  if not path.exists():
    raise errors.BadInput(
      f'--workdir={workdir} has no answers evaluation/{name}.jsonl: python -m '
      f'ngrammer_jax.evaluate --cloze writes them, or --results names others'
    )
  points = {}
  for number, line in enumerate(path.read_text(encoding='utf-8').split('\n'), 1):
    if not line:
      continue
    try:
      answer = json.loads(line)
      points[answer['kind'], answer['file'], int(answer['line'])] = float(answer['point'])
    except (ValueError, KeyError, TypeError) as error:
      raise errors.BadInput(
        f'{path}, line {number} is no answer ({type(error).__name__}: {error}): evaluate again'
      ) from error
  return points


def compare(workdirs: list[pathlib.Path], name: str) -> dict[str, dict[str, Any]]:
  """For every kind of question, the accuracies of two runs and how likely chance is.

  `only_first` and `only_second` count questions that one run answers right and the other does not,
  and `p` is of McNemar's exact test, two-sided. A shared point is not right there, so the test is
  of the strict accuracies.

  Raises:
    BadInput: not two runs, or not of the same questions.
  """
  if len(workdirs) != 2:
    raise errors.BadInput(f'two runs are compared: give --workdir twice, not {len(workdirs)} times')
  first, second = (read(workdir, name) for workdir in workdirs)
  if first.keys() != second.keys() or not first:
    raise errors.BadInput(
      f'{workdirs[0]} and {workdirs[1]} have not answered the same questions: {len(first):,} and '
      f'{len(second):,}, {len(first.keys() & second.keys()):,} in common; evaluate both alike'
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


def mcnemar(one: int, other: int) -> float:
  """How likely counts at least as unequal are where either side is as likely, exactly."""
  count, term, total = one + other, 1, 0
  for k in range(min(one, other) + 1):
    total += term
    term = term * (count - k) // (k + 1)
  return min(1.0, 2 * total / 2**count)


def table(result: dict[str, dict[str, Any]]) -> str:
  """The result of `compare`, to read."""
  lines = [
    f'{"":<20}{"":>10}{"accuracy":>18}{"strict":>18}{"right alone":>18}',
    f'{"kind":<20}{"questions":>10}' + f'{"first":>9}{"second":>9}' * 3 + f'{"p":>10}',
  ]
  for kind, r in result.items():
    shares = (r[key] for key in ('first', 'second', 'first_strict', 'second_strict'))
    lines.append(
      f'{kind:<20}{r["questions"]:>10,}'
      + ''.join(f'{share:>9.4f}' for share in shares)
      + f'{r["only_first"]:>9,}{r["only_second"]:>9,}{r["p"]:>10.2g}'
    )
  return '\n'.join(lines)
