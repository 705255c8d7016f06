"""The metrics of SuperGLUE, as T5 computes them, and their average. All in percent.

Classes are integers from 0; a prediction of any other value, -1 by custom, is one that names no
class, and is always wrong.
"""

import collections
from collections.abc import Hashable, Mapping, Sequence
import math
import re
import string
from typing import Any

import numpy as np

from ngrammer_jax import errors

Classes = Sequence[int] | np.ndarray

# The tasks of the average. The two metrics of a task are averaged first.
AVERAGED: Mapping[str, tuple[str, ...]] = {
  'boolq': ('accuracy',),
  'cb': ('f1', 'accuracy'),
  'copa': ('accuracy',),
  'multirc': ('f1', 'exact_match'),
  'record': ('f1', 'exact_match'),
  'rte': ('accuracy',),
  'wic': ('accuracy',),
  'wsc': ('accuracy',),
}

NAMES = ('accuracy', 'f1', 'exact_match', 'matthews', 'gender_parity')

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_DETERMINERS = frozenset(
  'a an few her his each every many much my our some that the their these this those which whose '
  'your'.split()
)


def accuracy(targets: Classes, predictions: Classes) -> dict[str, float]:
  """The share of examples that are right: BoolQ, COPA, RTE, WiC and WSC."""
  targets, predictions = _classes(targets, predictions)
  return {'accuracy': _percent(targets == predictions)}


def commitment_bank(targets: Classes, predictions: Classes) -> dict[str, float]:
  """Mean over the three classes of the F1 of one against the rest, and accuracy.

  A class that is neither a target nor predicted has F1 0.
  """
  targets, predictions = _classes(targets, predictions, 3)
  f1 = [_f1(targets == label, predictions == label) for label in range(3)]
  return {'f1': sum(f1) / 3, 'accuracy': _percent(targets == predictions)}


def multirc(
  questions: Sequence[Hashable], targets: Classes, predictions: Classes
) -> dict[str, float]:
  """F1 of class 1 over all answer options, and the share of questions with every option right.

  Args:
    questions: the question that each option belongs to, in any order.
    targets: 1 where an option answers its question, else 0.
    predictions: of the same; one that names no class counts as the opposite of its target.
  """
  targets, predictions = _classes(targets, predictions, 2)
  _check_lengths(questions=questions, targets=targets)
  predictions = _opposite_where_invalid(targets, predictions)
  right: dict[Hashable, bool] = {}
  for question, correct in zip(questions, targets == predictions, strict=True):
    right[question] = right.get(question, True) and bool(correct)
  return {'f1': _f1(targets == 1, predictions == 1), 'exact_match': _percent(list(right.values()))}


def record(
  queries: Sequence[Hashable], answers: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
  """F1 of the words and equality of the strings, with the best answer of each query.

  Case, punctuation, articles and spaces do not count.

  Args:
    queries: the query that each row belongs to. Of rows with the same query, which training data
      has for each answer, the first counts.
    answers: all right answers, for each row.
    predictions: a text for each row.
  """
  _check_lengths(queries=queries, answers=answers, predictions=predictions)
  f1, equal = [], []
  seen = set()
  for query, texts, prediction in zip(queries, answers, predictions, strict=True):
    if query in seen:
      continue
    seen.add(query)
    if not len(texts):
      raise errors.BadInput(f'query {query!r} has no answers, so it cannot be scored')
    said, right = _normalised(prediction), [_normalised(text) for text in texts]
    f1.append(max(_word_f1(text, said) for text in right))
    equal.append(said in right)
  return {'f1': 100 * sum(f1) / len(f1), 'exact_match': _percent(equal)}


def referent(reference: str, prediction: str) -> int:
  """Whether generated text names the referent of WSC: 1, 0, or -1 where it has no word.

  Case and determiners do not count, and either text may have words that the other lacks, but
  "Bob" is not "Bob's hat".

  Args:
    reference: the noun phrase that the pronoun is asked about.
    prediction: what the model says the pronoun refers to.
  """
  expected, said = (
    {word for word in text.lower().split() if word not in _DETERMINERS}
    for text in (reference, prediction)
  )
  if not said:
    return -1  # 0 would be right where the label is 0
  if not expected or any("'" in word for word in said) != any("'" in word for word in expected):
    return 0
  return int(said <= expected or expected <= said)


def matthews(targets: Classes, predictions: Classes) -> dict[str, float]:
  """The Matthews correlation of two classes, times 100: AX-b.

  0 where targets or predictions are all the same. A prediction that names no class counts as the
  opposite of its target.
  """
  targets, predictions = _classes(targets, predictions, 2)
  predictions = _opposite_where_invalid(targets, predictions)
  targets, predictions = targets - targets.mean(), predictions - predictions.mean()
  scale = math.sqrt((targets**2).sum() * (predictions**2).sum())
  return {'matthews': 100 * float((targets * predictions).sum()) / scale if scale else 0.0}


def gender_parity(
  pairs: Sequence[Hashable], targets: Classes, predictions: Classes
) -> dict[str, float]:
  """Accuracy, and the share of pairs whose two predictions are the same: AX-g.

  A pair with a prediction that names no class has no parity.

  Args:
    pairs: the pair that each example belongs to, in any order; two examples have the same.
    targets: classes.
    predictions: classes.
  """
  targets, predictions = _classes(targets, predictions, 2)
  _check_lengths(pairs=pairs, targets=targets)
  members = collections.defaultdict(list)
  for pair, prediction in zip(pairs, predictions.tolist(), strict=True):
    members[pair].append(prediction)
  for pair, said in members.items():
    if len(said) != 2:
      raise errors.BadInput(f'pair {pair!r} should have 2 examples, but has {len(said)}')
  same = [said in ([0, 0], [1, 1]) for said in members.values()]
  return {'accuracy': _percent(targets == predictions), 'gender_parity': _percent(same)}


def majority(targets: Classes) -> float:
  """The accuracy of always giving the most frequent class, which takes no skill."""
  targets, _ = _classes(targets, targets)
  return 100 * int(np.bincount(targets).max()) / len(targets)


def standard_error(percent: float, n: int) -> float:
  """Binomial standard error, in percentage points, of a share of n independent examples."""
  if n < 1 or not 0 <= percent <= 100:
    raise errors.BadInput(f'{percent} % of {n} examples is no share, so it has no standard error')
  return math.sqrt(percent * (100 - percent) / n)


def average(results: Mapping[str, Mapping[str, float]]) -> float | None:
  """Mean over the eight tasks, or None where one is missing.

  Args:
    results: by task, by metric. Tasks that are not in AVERAGED play no part.
  """
  if _missing(results):
    return None
  scores = []
  for task, metrics in AVERAGED.items():
    lacking = [metric for metric in metrics if metric not in results[task]]
    if lacking:
      raise errors.BadInput(f'the results of {task} lack {", ".join(lacking)}')
    scores.append(sum(results[task][metric] for metric in metrics) / len(metrics))
  return sum(scores) / len(scores)


def of_task(
  name: str,
  labels: Sequence[int],
  keys: Sequence[tuple[int, ...]],
  answers: Sequence[Sequence[str]],
  predictions: Sequence[Any],
) -> dict[str, float]:
  """The metrics of a task, by the names of `formats`.

  Args:
    name: of the task.
    labels, keys, answers: of its examples, see `formats.Row`.
    predictions: classes, or texts where the task has no labels.
  """
  if name == 'cb':
    return commitment_bank(labels, predictions)
  if name == 'multirc':
    return multirc([tuple(key[:2]) for key in keys], labels, predictions)
  if name == 'record':
    return record(keys, answers, predictions)
  if name == 'wsc_simple':
    both = zip(answers, predictions, strict=True)
    predictions = [referent(given[0], text) for given, text in both]
  if name == 'axb':
    return matthews(labels, predictions)
  if name == 'axg':  # the two of a pair stand one after the other
    return gender_parity([key[0] // 2 for key in keys], labels, predictions)
  return accuracy(labels, predictions)


def only(result: Mapping[str, Any]) -> dict[str, float]:
  """The metrics among what is known of an evaluation."""
  return {name: result[name] for name in NAMES if name in result}


def table(results: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]) -> str:
  """The results to read: a line a task, an accuracy with its standard error, and the average.

  One task alone has no line about the average.

  Args:
    results: by task, by metric.
    sizes: examples that were scored, by task.
  """
  rows = [('task', 'n', 'percent')]
  others = [task for task in results if task not in AVERAGED]
  for task in [task for task in AVERAGED if task in results] + others:
    if task not in sizes:
      raise errors.BadInput(f'{task} has results, but no number of examples')
    cells = []
    for metric, percent in results[task].items():
      cell = f'{metric} {percent:.2f}'
      if metric == 'accuracy':
        cell += f' ± {standard_error(percent, sizes[task]):.2f}'
      cells.append(cell)
    rows.append((task, f'{sizes[task]:,}', ', '.join(cells)))
  left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
  lines = [f'{task:{left}}  {n:>{right}}  {cells}' for task, n, cells in rows]
  mean = average(results)
  if len(results) == 1:
    return '\n'.join(lines)
  if mean is None:
    lines.append(f'no average of {len(AVERAGED)} tasks: missing {", ".join(_missing(results))}')
  else:
    lines.append(f'average of {len(AVERAGED)} tasks: {mean:.2f}')
  return '\n'.join(lines)


def _missing(results: Mapping[str, Mapping[str, float]]) -> list[str]:
  return [task for task in AVERAGED if task not in results]


def _check_lengths(**columns) -> None:
  lengths = {name: len(column) for name, column in columns.items()}
  if len(set(lengths.values())) > 1:
    counts = ', '.join(f'{n} {name}' for name, n in lengths.items())
    raise errors.BadInput(f'one of each is needed for every example, but there are {counts}')
  if not all(lengths.values()):
    raise errors.BadInput(f'there is nothing to score: no {" and no ".join(lengths)}')


def _classes(
  targets: Classes, predictions: Classes, classes: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Both as integers. Raises BadInput for a target that is not one of so many classes."""
  _check_lengths(targets=targets, predictions=predictions)
  arrays = []
  for name, values in (('targets', targets), ('predictions', predictions)):
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in 'iub':
      raise errors.BadInput(f'{name} should be one integer class for each example')
    arrays.append(array.astype(np.int64))
  # An invalid target could equal an invalid prediction.
  wrong = (arrays[0] < 0) | (arrays[0] >= (classes or np.inf))
  if wrong.any():
    expected = f'from 0 to {classes - 1}' if classes else 'from 0'
    raise errors.BadInput(
      f'target {arrays[0][wrong][0]} is no class ({expected}); a split without labels, where it '
      'is -1, cannot be scored'
    )
  return arrays[0], arrays[1]


def _opposite_where_invalid(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  return np.where((predictions == 0) | (predictions == 1), predictions, 1 - targets)


def _percent(right: np.ndarray | Sequence[bool]) -> float:
  return 100 * int(np.count_nonzero(right)) / len(right)


def _f1(targets: np.ndarray, predictions: np.ndarray) -> float:
  """F1 in percent of two boolean arrays, 0 where both are all false."""
  both = int((targets & predictions).sum())
  return 200 * both / max(int(targets.sum() + predictions.sum()), 1)


def _normalised(text: str) -> str:
  text = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def _word_f1(answer: str, prediction: str) -> float:
  """F1 from 0 to 1 of the words, each as often as it is there."""
  answer, prediction = (collections.Counter(text.split()) for text in (answer, prediction))
  both = (answer & prediction).total()
  return 2 * both / (answer.total() + prediction.total()) if both else 0.0
