"""Paired comparison of two runs on the same cloze questions."""

import json

import pytest

from ngrammer_jax import analyze
from ngrammer_jax.analysis import cloze
from tests.checks import bad_input


@pytest.mark.parametrize(
  'only_first, only_second, p',
  [
    (0, 0, 1.0),
    (1, 1, 1.0),
    (0, 5, 2 / 32),
    (2, 8, 2 * (1 + 10 + 45) / 1024),
    (10, 20, 0.09873714670538905),  # this value and the next: scipy.stats.binomtest
    (400, 500, 0.0009564441369189373),
  ],
)
def test_mcnemar(only_first, only_second, p):
  assert cloze.mcnemar(only_first, only_second) == pytest.approx(p, rel=1e-3)
  assert cloze.mcnemar(only_second, only_first) == pytest.approx(p, rel=1e-3)


def write_answers(folder, points):
  (folder / 'evaluation').mkdir(parents=True)
  lines = [
    json.dumps({'kind': kind, 'file': 'f', 'line': line, 'point': point})
    for kind, points_of_kind in points.items()
    for line, point in enumerate(points_of_kind)
  ]
  (folder / 'evaluation' / 'cloze_test.jsonl').write_text('\n'.join(lines) + '\n')
  return folder


def test_comparison_of_two_runs(tmp_path, capsys):
  first = write_answers(tmp_path / 'a', {'NE': [1, 1, 0, 0.5], 'V': [0, 0, 0]})
  second = write_answers(tmp_path / 'b', {'NE': [1, 0, 0.5, 1], 'V': [1, 1, 1]})
  assert cloze.compare([first, second], 'cloze_test') == {
    'NE': {
      'questions': 4,
      'first': 0.625,
      'second': 0.625,
      'first_strict': 0.5,
      'second_strict': 0.5,
      'only_first': 1,
      'only_second': 1,
      'p': 1.0,
    },
    'V': {
      'questions': 3,
      'first': 0,
      'second': 1,
      'first_strict': 0,
      'second_strict': 1,
      'only_first': 0,
      'only_second': 3,
      'p': 0.25,
    },
  }
  analyze.main(['cloze', f'--workdir={first}', f'--workdir={second}'])
  assert (
    f"1st {first}, 2nd {second}; p: McNemar's exact test of the strict accuracies"
    in capsys.readouterr().out
  )


def test_invalid_comparisons_raise_bad_input(tmp_path):
  first = write_answers(tmp_path / 'a', {'NE': [1, 1, 0]})
  second = write_answers(tmp_path / 'b', {'NE': [1, 1]})
  with bad_input(
    f'{first} and {second} answered different questions: 3 and 2, 2 in common; evaluate both with '
    'the same options'
  ):
    cloze.compare([first, second], 'cloze_test')
  with bad_input('cloze compares two runs: pass --workdir twice, not 1 times'):
    cloze.compare([first], 'cloze_test')
  with bad_input(
    f'--workdir={first} has no answers in evaluation/cloze_train.jsonl: run python -m '
    'ngrammer_jax.evaluate --cloze, or select another file with --results'
  ):
    cloze.compare([first, second], 'cloze_train')
  path = second / 'evaluation' / 'cloze_test.jsonl'
  path.write_text('{"kind": "NE"}\n')
  with bad_input(f"{path}, line 1 is damaged: no 'point'; run the evaluation again"):
    cloze.compare([first, second], 'cloze_test')
