"""SuperGLUE metrics as T5 computes them, and their average. All values are percentages.

Classes are integers from 0. A prediction with any other value, usually -1, is invalid: it names no
class and is always wrong.
"""

import collections
from collections.abc import Hashable, Mapping, Sequence
import math
import re
import string
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import text_tables

Classes = Sequence[int] | np.ndarray

# Tasks in the SuperGLUE average. If a task has two metrics, their mean is its score.
METRICS_BY_TASK: Mapping[str, tuple[str, ...]] = {
  'boolq': ('accuracy',),
  'cb': ('f1', 'accuracy'),
  'copa': ('accuracy',),
  'multirc': ('f1', 'exact_match'),
  'record': ('f1', 'exact_match'),
  'rte': ('accuracy',),
  'wic': ('accuracy',),
  'wsc': ('accuracy',),
}

METRIC_NAMES = ('accuracy', 'f1', 'exact_match', 'matthews', 'gender_parity')

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_DETERMINERS = frozenset(
  'a an few her his each every many much my our some that the their these this those which whose '
  'your'.split()
)


def accuracy(targets: Classes, predictions: Classes) -> dict[str, float]:
  """Computes the accuracy, the metric of BoolQ, COPA, RTE, WiC and WSC."""
  targets, predictions = _as_arrays(targets, predictions)
  return {'accuracy': _percent(targets == predictions)}


def commitment_bank(targets: Classes, predictions: Classes) -> dict[str, float]:
  """Computes macro-averaged F1 over the three classes, and accuracy: the metrics of CB.

  A class without targets and predictions has F1 0.
  """
  targets, predictions = _as_arrays(targets, predictions)
  f1 = [_f1(targets == label, predictions == label) for label in range(3)]
  return {'f1': sum(f1) / 3, 'accuracy': _percent(targets == predictions)}


def multirc(
  questions: Sequence[Hashable], targets: Classes, predictions: Classes
) -> dict[str, float]:
  """Computes F1 of class 1 over all answer options, and exact match over the questions.

  A question is an exact match if all its options are predicted correctly.

  Args:
    questions: question of each option, in any order.
    targets: class of each option: 1 if it answers its question, else 0.
    predictions: predicted class of each option. An invalid one counts as the opposite of its
      target.
  """
  targets, predictions = _as_arrays(targets, predictions)
  predictions = _opposite_where_invalid(targets, predictions)
  is_exact: dict[Hashable, bool] = {}
  for question, is_correct in zip(questions, targets == predictions, strict=True):
    is_exact[question] = is_exact.get(question, True) and bool(is_correct)
  f1 = _f1(targets == 1, predictions == 1)
  return {'f1': f1, 'exact_match': _percent(list(is_exact.values()))}


def record(
  queries: Sequence[Hashable], answers: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
  """Computes word-level F1 and exact match, each against the best answer of a query.

  Case, punctuation, articles and whitespace are ignored.

  Args:
    queries: query of each row. If several rows have the same query, as in training data with one
      row per answer, only the first is scored.
    answers: all correct answers of each row.
    predictions: predicted text of each row.
  """
  first_rows: dict[Hashable, tuple[Sequence[str], str]] = {}
  for query, texts, prediction in zip(queries, answers, predictions, strict=True):
    first_rows.setdefault(query, (texts, prediction))
  f1 = []
  is_equal = []
  for texts, prediction in first_rows.values():
    predicted_text = _normalize(prediction)
    correct_texts = [_normalize(text) for text in texts]
    f1.append(max(_word_f1(text, predicted_text) for text in correct_texts))
    is_equal.append(predicted_text in correct_texts)
  return {'f1': 100 * sum(f1) / len(f1), 'exact_match': _percent(is_equal)}


def match_referent(reference: str, prediction: str) -> int:
  """Returns 1 if generated text names the referent of WSC, 0 if not, -1 if it has no words.

  Case and determiners are ignored. The words of one text must be a subset of the words of the
  other, but "Bob" does not match "Bob's hat".

  Args:
    reference: candidate noun phrase for the pronoun.
    prediction: generated referent of the pronoun.
  """
  expected = _words_without_determiners(reference)
  predicted = _words_without_determiners(prediction)
  if not predicted:
    return -1  # 0 would be correct if the label is 0
  if not expected or _has_apostrophe(predicted) != _has_apostrophe(expected):
    return 0
  return int(predicted <= expected or expected <= predicted)


def _words_without_determiners(text: str) -> set[str]:
  return {word for word in text.lower().split() if word not in _DETERMINERS}


def _has_apostrophe(words: set[str]) -> bool:
  return any("'" in word for word in words)


def matthews(targets: Classes, predictions: Classes) -> dict[str, float]:
  """Computes the Matthews correlation of two classes, times 100: the metric of AX-b.

  It is 0 if all targets or all predictions are equal. An invalid prediction counts as the opposite
  of its target.
  """
  targets, predictions = _as_arrays(targets, predictions)
  predictions = _opposite_where_invalid(targets, predictions)
  targets = targets - targets.mean()
  predictions = predictions - predictions.mean()
  scale = math.sqrt((targets**2).sum() * (predictions**2).sum())
  if not scale:
    return {'matthews': 0.0}
  return {'matthews': 100 * float((targets * predictions).sum()) / scale}


def gender_parity(
  pairs: Sequence[Hashable], targets: Classes, predictions: Classes
) -> dict[str, float]:
  """Computes accuracy, and the share of pairs with two equal predictions: the metrics of AX-g.

  A pair with an invalid prediction does not count as equal.

  Args:
    pairs: pair of each example, in any order. Each pair has two examples.
    targets: class of each example.
    predictions: predicted class of each example.
  """
  targets, predictions = _as_arrays(targets, predictions)
  members = collections.defaultdict(list)
  for pair, prediction in zip(pairs, predictions.tolist(), strict=True):
    members[pair].append(prediction)
  is_equal = [values in ([0, 0], [1, 1]) for values in members.values()]
  return {'accuracy': _percent(targets == predictions), 'gender_parity': _percent(is_equal)}


def majority_accuracy(targets: Classes) -> float:
  """Returns the accuracy of always predicting the most frequent class."""
  return 100 * int(np.bincount(targets).max()) / len(targets)


def standard_error(percent: float, n: int) -> float:
  """Returns the binomial standard error of a percentage of n examples, in percentage points."""
  return math.sqrt(percent * (100 - percent) / n)


def average(results: Mapping[str, Mapping[str, Any]]) -> float | None:
  """Returns the mean score of the eight tasks in METRICS_BY_TASK; None unless all have theirs.

  Args:
    results: values by task and metric.
  """
  if any(set(names) - results.get(task, {}).keys() for task, names in METRICS_BY_TASK.items()):
    return None
  scores = [
    sum(results[task][metric] for metric in metrics) / len(metrics)
    for task, metrics in METRICS_BY_TASK.items()
  ]
  return sum(scores) / len(scores)


def compute_metrics(
  name: str,
  labels: Sequence[int],
  keys: Sequence[tuple[int, ...]],
  answers: Sequence[Sequence[str]],
  predictions: Sequence[Any],
) -> dict[str, float]:
  """Computes the metrics of a task.

  Args:
    name: task name, a key of `formats.TASKS`.
    labels, keys, answers: these fields of the examples, see `formats.FormattedExample`.
    predictions: classes, or texts if the task has no labels.
  """
  if name == 'cb':
    return commitment_bank(labels, predictions)
  if name == 'multirc':
    return multirc([tuple(key[:2]) for key in keys], labels, predictions)
  if name == 'record':
    return record(keys, answers, predictions)
  if name == 'wsc_simple':
    references = [texts[0] for texts in answers]
    predictions = list(map(match_referent, references, predictions))
  if name == 'axb':
    return matthews(labels, predictions)
  if name == 'axg':  # the two examples of a pair are adjacent
    return gender_parity([key[0] // 2 for key in keys], labels, predictions)
  return accuracy(labels, predictions)


def select_metrics(result: Mapping[str, Any]) -> dict[str, float]:
  """Returns the metrics in an evaluation result, without its other values."""
  return {name: result[name] for name in METRIC_NAMES if name in result}


def format_table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """Formats the results of tasks as a table, with the average if there are all eight.

  An accuracy is shown with its standard error. A split may have no labels.

  Args:
    results: by task, the metrics and the number `n` of examples.
  """
  rows = [('task', 'n', 'percent')]
  for task, result in results.items():
    cells = []
    for metric, percent in select_metrics(result).items():
      cell = f'{metric} {percent:.2f}'
      if metric == 'accuracy':
        cell += f' ± {standard_error(percent, result["n"]):.2f}'
      cells.append(cell)
    rows.append((task, f'{result["n"]:,}', ', '.join(cells) or 'without labels'))
  lines = text_tables.align_columns(rows, '<><')
  if (mean := average(results)) is not None:
    lines.append(f'average of {len(METRICS_BY_TASK)} tasks: {mean:.2f}')
  return '\n'.join(lines)


def _as_arrays(targets: Classes, predictions: Classes) -> tuple[np.ndarray, np.ndarray]:
  """Converts both to int64 arrays. Raises BadInput if a target is not a class."""
  targets, predictions = np.stack([targets, predictions]).astype(np.int64, casting='same_kind')
  if (targets < 0).any():  # it could equal an invalid prediction
    raise errors.BadInput(
      f'target {targets.min()} is not a class; a split without labels, where it is -1, cannot be '
      f'scored'
    )
  return targets, predictions


def _opposite_where_invalid(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  return np.where((predictions == 0) | (predictions == 1), predictions, 1 - targets)


def _percent(is_correct: np.ndarray | Sequence[bool]) -> float:
  return 100 * int(np.count_nonzero(is_correct)) / len(is_correct)


def _f1(targets: np.ndarray, predictions: np.ndarray) -> float:
  """Returns the F1 of two boolean arrays in percent, 0 if both are all false."""
  hits = int((targets & predictions).sum())
  return 200 * hits / max(int(targets.sum() + predictions.sum()), 1)


def _normalize(text: str) -> str:
  text = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def _word_f1(answer: str, prediction: str) -> float:
  """Returns the F1 of the words, from 0 to 1. Repeated words count as often as they occur."""
  expected = collections.Counter(answer.split())
  predicted = collections.Counter(prediction.split())
  hits = (expected & predicted).total()
  if not hits:
    return 0.0
  return 2 * hits / (expected.total() + predicted.total())
