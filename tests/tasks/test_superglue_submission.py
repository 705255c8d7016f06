"""Submission files of SuperGLUE."""

import json
import types

from ngrammer_jax.tasks.superglue import formats, submission
from tests.loops import each


@each('name', formats.TASKS)
def test_submission_has_the_format_of_the_benchmark(name):
  labels = formats.find_task(name).labels
  keys = {'multirc': [(7, 3, 0), (7, 3, 1)], 'record': [(5, 8), (5, 9)]}.get(name, [(0,), (1,)])
  examples = [types.SimpleNamespace(key=key, answers=('the cat',)) for key in keys]
  answers = [-1, 1] if labels else ['dogs', 'a cat']
  text = submission.format_answers(name, examples, answers)
  lines = [json.loads(line) for line in text.splitlines()]
  if name == 'multirc':
    options = [{'idx': 0, 'label': 0}, {'idx': 1, 'label': 1}]
    assert lines == [{'idx': 7, 'passage': {'questions': [{'idx': 3, 'answers': options}]}}]
    return
  expected = {
    'cb': ['entailment', 'contradiction'],
    'copa': [0, 1],
    'record': ['dogs', 'a cat'],
    **dict.fromkeys(('boolq', 'wic', 'wsc', 'wsc_simple'), ['false', 'true']),
    **dict.fromkeys(('rte', 'axb', 'axg'), ['entailment', 'not_entailment']),
  }[name]
  assert lines == [{'idx': key[-1], 'label': e} for key, e in zip(keys, expected, strict=True)]
