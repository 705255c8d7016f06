"""What is answered, of scores and of texts that are made up, and how it is written."""

import json
import types

import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks.superglue import evaluation, formats
from tests.checks import bad_input
from tests.loops import each

BYTES = vocabularies.ByteVocabulary()


def example(inputs, label=-1, choices=(), answers=(), key=(0,)):
  ids = np.append(BYTES.encode(inputs.encode()), BYTES.document_end).astype(np.int32)
  return types.SimpleNamespace(inputs=ids, label=label, choices=choices, answers=answers, key=key)


class Fake(evaluation.Evaluator):
  """A model that has scored all choices, or written all texts, before it is asked.

  Args:
    scores: of the choices of each example.
    texts: of each example.
    targets: tokens of an answer at most.
  """

  def __init__(self, scores=(), texts=(), targets=20):
    self._vocabulary, self._mesh, self._length = BYTES, sharding.make_mesh(), 96
    self._targets, self._bidirectional, self.asked = targets, True, []
    self._serve = lambda params, codebook: 'served'
    self._scores, self._texts = scores, list(texts)
    self._generate = self
    self.rows = 2

  def _rank(self, params, codebook, prefixes, choices):
    assert codebook == 'served'
    self.asked += [[bytes(ids[:-1].astype(np.uint8)).decode() for ids in some] for some in choices]
    self._check_ends(choices)
    for prefix in prefixes:
      assert prefix[0] == BYTES.document_start and prefix[-1] == BYTES.document_end
    yield from zip(range(len(prefixes)), map(np.array, self._scores), strict=True)

  def _check_ends(self, choices):
    assert all(ids[-1] == BYTES.document_end for some in choices for ids in some)

  def __call__(self, *given, **more):
    if len(given) == 5 and isinstance(given[2], list):  # as a generator
      return self._written_by(given[2])
    return super().__call__(*given, **more)

  def _written_by(self, prompts):
    group = [self._texts.pop(0) for _ in prompts]
    for column in range(100):
      yield np.array(
        [text[column] if column < len(text) else BYTES.document_end for text in group], np.int32
      )


def test_the_most_likely_label_is_the_answer():
  known = [example('a', label) for label in (0, 1, 1, 0)]
  model = Fake([[-1.0, -2.0], [-3.0, -2.5], [-1.0, -9.0], [-4.0, -1.0]])
  reports = []
  result, answers = model(None, None, 'rte', known, report=reports.append)
  assert answers == [0, 1, 0, 1] and sum(reports) == 4
  assert model.asked == 4 * [['entailment', 'not_entailment']]
  assert result == {
    'task': 'rte',
    'n': 4,
    'accuracy': 50,
    'error_percent': 50,
    'majority_percent': 50,
    'protocol': {
      'choosing': 'rank', 'prefix': 'bidirectional', 'length': 96, 'targets_length': 20,
    },
  }  # fmt: skip
  three, _ = Fake([[0.0, -1.0]] * 4)(None, None, 'rte', [example('a', 0)] * 3 + known[1:2])
  assert (three['accuracy'], three['error_percent']) == (75, 25)
  hidden, answers = Fake([[0.0, -1.0]])(None, None, 'rte', [example('a')])
  assert answers == [0] and set(hidden) == {'task', 'n', 'protocol'}
  with bad_input(
    'finetune.targets_length=4 cuts the answers of copa so that they are no longer different: '
    'choice1, choice2; raise it'
  ):
    Fake(targets=4)(None, None, 'copa', known)


def test_what_is_written_is_the_answer_up_to_its_end():
  ids = lambda text: BYTES.encode(text.encode()).tolist()
  texts = [ids('not_entailment'), ids(' entailment '), ids('entail'), []]
  known = [example('a', label) for label in (1, 0, 0, 1)]
  result, answers = Fake(texts=texts)(None, None, 'rte', known, 'greedy')
  assert answers == [1, 0, -1, -1]
  assert result['accuracy'] == 50 and result['protocol']['choosing'] == 'greedy'
  known = [example('a', answers=('Ada',), key=(1, 2)), example('a', answers=('Bob',), key=(1, 3))]
  result, answers = Fake(texts=[ids('Ada'), ids('x' * 30)])(None, None, 'record', known)
  assert answers == ['Ada', 'x' * 20] and result['exact_match'] == 50
  known = [example('a', choices=('Ada', 'Bob'), answers=('Bob',), key=(1, 2))]
  result, answers = Fake([[-2.0, -1.0]])(None, None, 'record', known, 'rank')
  assert answers == ['Bob'] and result['error_percent'] == 0


@each('name', formats.TASKS)
def test_answers_are_written_as_the_benchmark_takes_them(tmp_path, name):
  labels = formats.find_task(name).labels
  keys = {'multirc': [(7, 3, 0), (7, 3, 1)], 'record': [(5, 8), (5, 9)]}.get(name, [(0,), (1,)])
  examples = [types.SimpleNamespace(key=key, answers=('the cat',)) for key in keys]
  answers = [-1, 1] if labels else ['dogs', 'a cat']
  path = evaluation.submission(name, examples, answers, tmp_path)
  found = [json.loads(line) for line in path.open()]
  if name == 'multirc':
    options = [{'idx': 0, 'label': 0}, {'idx': 1, 'label': 1}]
    assert found == [{'idx': 7, 'passage': {'questions': [{'idx': 3, 'answers': options}]}}]
    return
  expected = {
    'cb': ['entailment', 'contradiction'],
    'copa': [0, 1],
    'record': ['dogs', 'a cat'],
    **dict.fromkeys(('boolq', 'wic', 'wsc', 'wsc_simple'), ['false', 'true']),
    **dict.fromkeys(('rte', 'axb', 'axg'), ['entailment', 'not_entailment']),
  }[name]
  assert found == [{'idx': key[-1], 'label': e} for key, e in zip(keys, expected, strict=True)]
