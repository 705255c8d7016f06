"""The first table of docs/results.md: answers follow from the intervals of differences."""

import re

from studies import answers, report
from studies.intervals import Interval


def line(model, seed, bits):
  return {'cell': f'{model}.{seed}', 'model': model, 'seed': seed, 'test': {'bits_per_byte': bits}}


def test_an_answer_needs_the_whole_interval_on_one_side():
  assert answers.answer(Interval(-0.5, 0.4)) == '**yes**'
  assert answers.answer(Interval(0.5, 0.4)) == '**no**, it rises'
  assert answers.answer(Interval(-0.5, 0.6)) == 'not decided'
  assert answers.answer(Interval(0.5, 0.6)) == 'not decided'
  assert answers.answer(Interval(-0.5, None)) == 'one seed'


def test_a_question_compares_runs_with_equal_seeds():
  runs = {name: [] for name in answers.runs_by_name([], [], [])}
  runs['main'] = [line('untied', seed, 2.0) for seed in (0, 1, 2)]
  runs['main'] += [line('engram', seed, 1.9 - 0.01 * seed) for seed in (1, 2, 3)]
  header, *rows = answers.table(runs)
  by_models = {row[1]: row for row in rows}
  row = by_models['[`engram` - `untied`](#main-table)']
  assert row[2:] == ('-0.1150 ± 0.0635', 'bits per byte', '2', '**yes**')  # 12.706 x 0.005
  missing = by_models['[`over_encoding` - `untied`](#main-table)']
  assert missing[2:] == ('', 'bits per byte', '0', 'not run')
  assert {len(row) for row in rows} == {len(header)}


def test_every_question_names_a_section_and_a_unit():
  page = report.PAGE.read_text(encoding='utf-8')
  headings = re.findall(r'(?m)^## (.*)$', page)
  anchors = {heading.lower().replace(' ', '-') for heading in headings}
  assert {question.section for question in answers.QUESTIONS} <= anchors
  assert {question.unit for question in answers.QUESTIONS} <= set(answers.LOSSES)
