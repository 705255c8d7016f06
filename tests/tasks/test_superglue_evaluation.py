"""SuperGLUE answers from fake scores and generated texts."""

import types

import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks.superglue import evaluation
from tests.checks import bad_input

BYTES = vocabularies.ByteVocabulary()


def example(inputs, label=-1, choices=(), answers=(), key=(0,)):
  ids = np.append(BYTES.encode(inputs.encode()), BYTES.document_end).astype(np.int32)
  return types.SimpleNamespace(inputs=ids, label=label, choices=choices, answers=answers, key=key)


class FakeEvaluator(evaluation.Evaluator):
  """Evaluator with predefined scores or generated texts instead of a model.

  Args:
    scores: scores of the choices of each example.
    texts: generated token ids of each example.
    targets_length: maximum number of tokens of an answer.
  """

  def __init__(self, scores=(), texts=(), targets_length=20):
    self._vocabulary, self._mesh, self._length = BYTES, sharding.make_mesh(), 96
    self._targets_length, self._bidirectional, self.ranked_choices = targets_length, True, []
    self._prepare_codebook = lambda params, codebook: 'prepared'
    self._scores, self._texts = scores, list(texts)
    self._generator = self
    self.rows = 2

  def _ranker(self, params, codebook, prompts, choices):
    assert codebook == 'prepared'
    decode = lambda ids: bytes(ids[:-1].astype(np.uint8)).decode()
    self.ranked_choices += [[decode(ids) for ids in group] for group in choices]
    self._check_ends(choices)
    for prompt in prompts:
      assert prompt[0] == BYTES.document_start and prompt[-1] == BYTES.document_end
    yield from zip(range(len(prompts)), map(np.array, self._scores), strict=True)

  def _check_ends(self, choices):
    assert all(ids[-1] == BYTES.document_end for group in choices for ids in group)

  def __call__(self, *args, **kwargs):
    if len(args) == 5 and isinstance(args[2], list):  # called as the generator
      return self._generate_columns(args[2])
    return super().__call__(*args, **kwargs)

  def _generate_columns(self, prompts):
    group = [self._texts.pop(0) for _ in prompts]
    for column in range(100):
      yield np.array(
        [text[column] if column < len(text) else BYTES.document_end for text in group], np.int32
      )


def test_rank_selects_the_most_likely_label():
  examples = [example('a', label) for label in (0, 1, 1, 0)]
  model = FakeEvaluator([[-1.0, -2.0], [-3.0, -2.5], [-1.0, -9.0], [-4.0, -1.0]])
  reports = []
  result, answers = model(None, None, 'rte', examples, report=reports.append)
  assert answers == [0, 1, 0, 1] and sum(reports) == 4
  assert model.ranked_choices == 4 * [['entailment', 'not_entailment']]
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
  three, _ = FakeEvaluator([[0.0, -1.0]] * 4)(
    None, None, 'rte', [example('a', 0)] * 3 + examples[1:2]
  )
  assert (three['accuracy'], three['error_percent']) == (75, 25)
  hidden, answers = FakeEvaluator([[0.0, -1.0]])(None, None, 'rte', [example('a')])
  assert answers == [0] and set(hidden) == {'task', 'n', 'protocol'}
  with bad_input(
    'finetune.targets_length=4 truncates different answers of copa to equal ones: '
    'choice1, choice2; raise it'
  ):
    FakeEvaluator(targets_length=4)(None, None, 'copa', examples)


def test_greedy_answer_is_the_text_before_the_end():
  ids = lambda text: BYTES.encode(text.encode()).tolist()
  texts = [ids('not_entailment'), ids(' entailment '), ids('entail'), []]
  examples = [example('a', label) for label in (1, 0, 0, 1)]
  result, answers = FakeEvaluator(texts=texts)(None, None, 'rte', examples, 'greedy')
  assert answers == [1, 0, -1, -1]
  assert result['accuracy'] == 50 and result['protocol']['choosing'] == 'greedy'
  examples = [
    example('a', answers=('Ada',), key=(1, 2)),
    example('a', answers=('Bob',), key=(1, 3)),
  ]
  result, answers = FakeEvaluator(texts=[ids('Ada'), ids('x' * 30)])(None, None, 'record', examples)
  assert answers == ['Ada', 'x' * 20] and result['exact_match'] == 50
  examples = [example('a', choices=('Ada', 'Bob'), answers=('Bob',), key=(1, 2))]
  result, answers = FakeEvaluator([[-2.0, -1.0]])(None, None, 'record', examples, 'rank')
  assert answers == ['Bob'] and result['error_percent'] == 0
