"""SuperGLUE metrics: reference values, slow reference implementations, published averages."""

import math

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.tasks.superglue import metrics
from tests.loops import each
from tests.tasks import superglue_scorer

# SuperGLUE table of the N-Grammer paper: cells of each row, then the average.
# COPA has 100 examples.
PAPER = {
  'Transformer': '65.23 54.03 67.86 55.0 59.47 13.64 30.34 29.32 53.43 54.55 61.54 52.13',
  'Transformer-L': '66.15 73.74 75.0 59.0 62.09 12.17 29.19 28.21 57.04 55.33 62.5 55.03',
  'Primer': '66.27 62.64 71.43 53.0 62.89 12.91 30.56 29.55 55.96 54.86 65.38 53.81',
  'Primer-L': '62.2 47.69 58.93 58.0 51.83 4.62 25.21 24.35 51.99 54.08 63.46 49.5',
  'N-Grammer': '64.98 59.69 67.86 60.0 61.95 11.33 29.9 28.91 59.21 56.11 68.27 54.8',
}
PAPER = {name: tuple(map(float, cells.split())) for name, cells in PAPER.items()}
FROM_COUNTS = (52.1340, 55.0271, 53.8071, 49.5046, 54.7991)

# Correct examples: BoolQ, CB, exact match of MultiRC and of ReCoRD, RTE, WiC, WSC.
SIZES = (3270, 56, 953, 10000, 277, 638, 104)
COUNTS = {
  'Transformer': (2133, 38, 130, 2932, 148, 348, 64),
  'Transformer-L': (2163, 42, 116, 2821, 158, 353, 65),
  'Primer': (2167, 40, 123, 2955, 155, 350, 68),
  'Primer-L': (2034, 33, 44, 2435, 144, 345, 66),
  'N-Grammer': (2125, 38, 108, 2891, 164, 358, 71),
}


def results_of(cells):
  values = iter(cells)
  return {
    task: {name: next(values) for name in names} for task, names in metrics.METRICS_BY_TASK.items()
  }


def random_classes(seed, classes, invalid=0.2):
  """Draws targets and predictions of 1 to 39 examples; some predictions are -1."""
  random = np.random.default_rng(seed)
  n = int(random.integers(1, 40))
  targets = random.integers(0, random.integers(1, classes + 1), n)
  predictions = np.where(random.random(n) < 0.5, targets, random.integers(0, classes, n))
  return random, targets, np.where(random.random(n) < invalid, -1, predictions)


def slow_f1(targets, predictions, label):
  return superglue_scorer.f1_of([*zip(targets, predictions, strict=True)], label)


def opposite(targets, predictions):
  return [1 - t if p not in (0, 1) else p for t, p in zip(targets, predictions, strict=True)]


@each('seed', range(60))
def test_class_metrics_match_slow_reference(seed):
  _, targets, predictions = random_classes(seed, 3)
  share = superglue_scorer.mean(t == p for t, p in zip(targets, predictions, strict=True))
  assert metrics.accuracy(targets, predictions) == {'accuracy': pytest.approx(share)}
  assert metrics.commitment_bank(targets.tolist(), predictions.tolist()) == {
    'f1': pytest.approx(sum(slow_f1(targets, predictions, label) for label in range(3)) / 3),
    'accuracy': pytest.approx(share),
  }
  majority = max(superglue_scorer.mean(targets == label) for label in range(3))
  assert metrics.majority_accuracy(targets) == pytest.approx(majority)


def test_invalid_predictions_are_wrong():
  assert metrics.accuracy([0, 1, 1], [0, -1, 7]) == {'accuracy': pytest.approx(100 / 3)}
  assert metrics.accuracy([True, False], [1, 1]) == {'accuracy': 50}
  assert metrics.commitment_bank([0, 1, 2], [-1, -1, -1]) == {'f1': 0, 'accuracy': 0}


@each('seed', range(60))
def test_multirc_matches_slow_reference(seed):
  random, targets, predictions = random_classes(seed, 2)
  keys = random.integers(0, max(len(targets) // 3, 1), len(targets))
  questions = [(0, int(key)) for key in keys]
  replaced = opposite(targets, predictions)
  exact = [
    all(p == t for p, t, q in zip(replaced, targets, questions, strict=True) if q == question)
    for question in set(questions)
  ]
  assert metrics.multirc(questions, targets, predictions) == {
    'f1': pytest.approx(slow_f1(targets, replaced, 1)),
    'exact_match': pytest.approx(superglue_scorer.mean(exact)),
  }


def test_multirc_invalid_counts_as_opposite():
  # As if the predictions were 1, 0, 1, 0: one false positive, no false negative, one hit.
  scores = metrics.multirc('aabb', [1, 0, 0, 0], [1, 0, -1, 0])
  assert scores == {'f1': pytest.approx(200 / 3), 'exact_match': 50}
  # As if the predictions were 0, 0: no hit.
  assert metrics.multirc('ab', [1, 0], [-1, 0]) == {'f1': 0, 'exact_match': 50}
  assert metrics.multirc('ab', [1, 0], [2, 0]) == {'f1': 0, 'exact_match': 50}


@each(
  'answers, prediction, f1, exact_match',
  [
    (['The White House'], 'white house!', 100, 100),
    (['The White House'], ' WHITE\n the house ', 100, 100),
    (['The White House'], 'House', 200 / 3, 0),
    (['U.S.'], 'US', 100, 100),
    (['Theatre'], 'atre', 0, 0),  # articles are whole words
    (['Anna', 'Bob Dylan'], 'Bob', 200 / 3, 0),
    (['Anna', 'Bob'], 'anna', 100, 100),
    (['new new york'], 'new york york', 200 / 3, 0),
    (['Anna'], '', 0, 0),
    (['!'], 'the', 0, 100),  # both are empty: equal, but without a common word
    # The best answer is selected for each metric separately.
    (['a b c', 'c b'], 'b c', 100, 100),
    (['a', 'b c'], 'c b', 100, 0),
  ],
)
def test_record_of_one_query(answers, prediction, f1, exact_match):
  scores = metrics.record(['q'], [answers], [prediction])
  assert scores == {'f1': pytest.approx(f1), 'exact_match': exact_match}


@each('seed', range(60))
def test_record_matches_slow_reference(seed):
  random = np.random.default_rng(seed)
  words = ['red', 'blue', 'sea', 'sky', 'sun']

  def text():
    return ' '.join(random.choice(words, int(random.integers(0, 4))))

  rows = [
    (int(random.integers(0, 6)), [text() for _ in range(random.integers(1, 4))], text())
    for _ in range(random.integers(1, 12))
  ]
  firsts = [row for i, row in enumerate(rows) if row[0] not in [q for q, _, _ in rows[:i]]]
  words_f1 = lambda answer, text: superglue_scorer.word_f1(answer.split(), text.split())
  f1 = [max(words_f1(a, predicted) for a in answers) for _, answers, predicted in firsts]
  is_equal = [any(a == predicted for a in answers) for _, answers, predicted in firsts]
  decorated = [
    (q, [f'The {a.upper()}.' for a in answers], f'a "{predicted}"')
    for q, answers, predicted in rows
  ]
  for variant in (rows, decorated):
    assert metrics.record(*zip(*variant, strict=True)) == {
      'f1': pytest.approx(100 * sum(f1) / len(f1)),
      'exact_match': pytest.approx(superglue_scorer.mean(is_equal)),
    }


@each(
  'reference, prediction, expected',
  [
    ('the fuzzy bunny', 'bunny', 1),
    ('bunny', 'the fuzzy bunny', 1),
    ("Bob's hat", 'Bob', 0),
    ('Bob', "Bob's hat", 0),
    ("Bob's hat", "bob's", 1),
    ('Bob', 'Bob went home', 1),
    ('The city councilmen', 'THEIR City  Councilmen\n', 1),
    ('the city councilmen', 'the demonstrators', 0),
    ('Anna', 'Ann', 0),
    ('fuzzy bunny', 'brown bunny', 0),
    ('Bob', '', -1),
    ('Bob', ' the ', -1),
    ('his', 'Bob', 0),
    ('his', 'his', -1),
  ],
)
def test_match_referent(reference, prediction, expected):
  assert metrics.match_referent(reference, prediction) == expected


@each('seed', range(60))
def test_matthews_matches_slow_reference(seed):
  _, targets, predictions = random_classes(seed, 2)
  pairs = list(zip(targets.tolist(), opposite(targets, predictions), strict=True))
  tp, tn, fp, fn = (pairs.count(pair) for pair in [(1, 1), (0, 0), (0, 1), (1, 0)])
  scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
  expected = 100 * (tp * tn - fp * fn) / scale if scale else 0
  assert metrics.matthews(targets, predictions)['matthews'] == pytest.approx(expected, abs=1e-9)


def test_matthews():
  assert metrics.matthews([0, 1, 1], [0, 1, 1])['matthews'] == pytest.approx(100)
  assert metrics.matthews([0, 1, 1], [1, 0, -1])['matthews'] == pytest.approx(-100)
  assert metrics.matthews([0, 1, 1], [1, 1, 1]) == {'matthews': 0}
  assert metrics.matthews([1, 1, 1], [1, 0, 1]) == {'matthews': 0}
  # The mean of equal values must be exact even if 1 / n is not.
  for n in range(1, 200):
    assert metrics.matthews([1] * n, [0, 1] * (n // 2) + [1] * (n % 2)) == {'matthews': 0}


@each('seed', range(60))
def test_gender_parity_matches_slow_reference(seed):
  random = np.random.default_rng(seed)
  n = int(random.integers(1, 12))
  pairs = random.permutation(np.repeat(np.arange(n), 2))
  targets, predictions = random.integers(0, 2, 2 * n), random.integers(-1, 2, 2 * n)
  by_pair = [predictions[pairs == pair].tolist() for pair in range(n)]
  assert metrics.gender_parity(pairs.tolist(), targets, predictions) == {
    'accuracy': pytest.approx(superglue_scorer.mean(targets == predictions)),
    'gender_parity': pytest.approx(superglue_scorer.mean(a == b != -1 for a, b in by_pair)),
  }


def test_standard_error():
  assert metrics.standard_error(50, 100) == pytest.approx(5)
  assert metrics.standard_error(100, 3) == metrics.standard_error(0, 3) == 0
  random = np.random.default_rng(0)
  shares = 100 * random.binomial(104, 0.6346, 50_000) / 104
  assert metrics.standard_error(63.46, 104) == pytest.approx(shares.std(), rel=0.02)


@pytest.mark.full
@each('model, recomputed', list(zip(PAPER, FROM_COUNTS, strict=True)))
def test_paper_average_from_counts(model, recomputed):
  *cells, average = PAPER[model]
  results = results_of(cells)
  boolq, cb, multirc, record, rte, wic, wsc = (
    ([1] * size, [1] * correct + [0] * (size - correct))
    for correct, size in zip(COUNTS[model], SIZES, strict=True)
  )
  copa = [1] * 100, [1] * int(results['copa']['accuracy'])
  copa[1].extend([0] * (100 - len(copa[1])))
  for task, columns in dict(boolq=boolq, copa=copa, rte=rte, wic=wic, wsc=wsc).items():
    results[task] = metrics.accuracy(*columns)
  results['cb']['accuracy'] = metrics.commitment_bank(*cb)['accuracy']
  results['multirc']['exact_match'] = metrics.multirc(range(953), *multirc)['exact_match']
  texts = [str(value) for value in record[1]]
  results['record']['exact_match'] = metrics.record(range(10000), [['1']] * 10000, texts)[
    'exact_match'
  ]
  for task, names in metrics.METRICS_BY_TASK.items():
    for name in names:
      published = results_of(cells)[task][name]
      assert results[task][name] == pytest.approx(published, abs=0.0051)
  computed = metrics.average(results)
  assert computed == pytest.approx(recomputed, abs=6e-5)
  assert round(computed, 2) == average


def test_average_requires_every_task_and_metric():
  *cells, _ = PAPER['N-Grammer']
  for task, names in metrics.METRICS_BY_TASK.items():
    results = results_of(cells)
    results['axb'] = {'matthews': 1.0}
    assert metrics.average(results) == pytest.approx(54.79875)
    del results[task][names[0]]
    assert metrics.average(results) is None


def test_format_table():
  *cells, _ = PAPER['N-Grammer']
  results = results_of(cells)
  sizes = dict(boolq=3270, cb=56, copa=100, multirc=4848, record=10000, rte=277, wic=638, wsc=104)
  results = {task: {'n': sizes[task], **scores} for task, scores in results.items()}
  expected = """\
task          n  percent
boolq     3,270  accuracy 64.98 ± 0.83
cb           56  accuracy 67.86 ± 6.24, f1 59.69
copa        100  accuracy 60.00 ± 4.90
multirc   4,848  f1 61.95, exact_match 11.33
record   10,000  f1 29.90, exact_match 28.91
rte         277  accuracy 59.21 ± 2.95
wic         638  accuracy 56.11 ± 1.96
wsc         104  accuracy 68.27 ± 4.56
average of 8 tasks: 54.80"""
  assert metrics.format_table(results) == expected
  del results['cb']  # some tasks have no average
  lines = [line for line in expected.splitlines()[:-1] if not line.startswith('cb ')]
  assert metrics.format_table(results).splitlines() == lines
  axb = {'axb': {'matthews': -3.5, 'n': 1104}}
  assert metrics.format_table(axb) == 'task      n  percent\naxb   1,104  matthews -3.50'


@each(
  'call, message',
  [
    (lambda: metrics.accuracy([-1, 0], [-1, 0]), 'target -1 is not a class'),
    (lambda: metrics.multirc('a', [-1], [0]), 'target -1 is not a class'),
  ],
)
def test_incomplete_data_cannot_be_scored(call, message):
  with pytest.raises(errors.BadInput, match=message):
    call()


@each(
  'call, error',
  [
    (lambda: metrics.accuracy([1, 0], [1]), ValueError),
    (lambda: metrics.accuracy([0.0, 1.0], [0, 1]), TypeError),
    (lambda: metrics.accuracy([0, 1], ['0', '1']), TypeError),
    (lambda: metrics.multirc('ab', [0], [0]), ValueError),
    (lambda: metrics.record([1], [['a'], ['b']], ['a']), ValueError),
    (lambda: metrics.gender_parity('a', [0, 1], [0, 1]), ValueError),
  ],
)
def test_columns_of_other_lengths_or_types_are_not_scored(call, error):
  with pytest.raises(error):
    call()
