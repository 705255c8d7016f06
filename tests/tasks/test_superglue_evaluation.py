"""SuperGLUE answers from fake scores and generated texts."""

import types

import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.data import vocabularies
from ngrammer_jax.tasks.superglue import evaluation, metrics
from tests.checks import bad_input

BYTES = vocabularies.ByteVocabulary()


def example(inputs, label=-1, choices=(), answers=(), key=(0,)):
  ids = np.append(BYTES.encode(inputs.encode()), BYTES.document_end).astype(np.int32)
  fields = {'label': label, 'choices': choices, 'answers': answers, 'key': key}
  return types.SimpleNamespace(inputs=ids, text=inputs, **fields)


class FakeEngine:
  """Engine with predefined scores or generated texts instead of a model.

  Args:
    scores: scores of the choices of each example.
    texts: generated token ids of each example.
  """

  def __init__(self, scores=(), texts=()):
    self._scores, self._texts, self.ranked_choices = scores, list(texts), []

  def prepare(self, variables):
    return 'prepared'

  def round_rows(self, rows):
    return rows

  def rank(self, variables, prompts, choices, rows, bidirectional):
    assert variables == 'prepared' and bidirectional
    decode = lambda ids: bytes(ids[:-1].astype(np.uint8)).decode()
    self.ranked_choices += [[decode(ids) for ids in group] for group in choices]
    assert all(ids[-1] == BYTES.document_end for group in choices for ids in group)
    for prompt in prompts:
      assert prompt[0] == BYTES.document_start and prompt[-1] == BYTES.document_end
    for i, scores in enumerate(self._scores):
      yield i, np.array(scores), None

  def generate(
    self, variables, prompts, seeds, options, context, bidirectional, document_start, rows
  ):
    assert len(prompts) <= rows <= 2
    assert variables == 'prepared' and bidirectional and len(prompts) <= 2
    assert options.temperature == 0 and context == 96
    group = [self._texts.pop(0) for _ in prompts]
    for column in range(100):
      yield np.array(
        [text[column] if column < len(text) else BYTES.document_end for text in group], np.int32
      )


def values(answers):
  return [answer.value for answer in answers]


def make_evaluator(engine, **options):
  finetune = {'targets_length': 20, 'prefix': 'bidirectional'} | options
  training = {'batch_size': 2, 'segment_length': 96}
  config = experiment.resolve({'training': training, 'finetune': finetune})
  return evaluation.TaskEvaluator(engine, BYTES, config)


def test_rank_selects_the_most_likely_label():
  examples = [example('a', label) for label in (0, 1, 1, 0)]
  engine = FakeEngine([[-1.0, -2.0], [-3.0, -2.5], [-1.0, -9.0], [-4.0, -1.0]])
  reports = []
  result, answers = make_evaluator(engine)(None, None, 'rte', examples, report=reports.append)
  assert values(answers) == [0, 1, 0, 1] and sum(reports) == 4
  assert answers[1] == evaluation.TaskAnswer(1, 'not_entailment', -2.5)
  assert engine.ranked_choices == 4 * [['entailment', 'not_entailment']]
  assert result == {
    'task': 'rte',
    'n': 4,
    'accuracy': 50,
    'error_percent': 50,
    'majority_percent': 50,
    'protocol': {
      'choosing': 'rank', 'format': 't5', 'prefix': 'bidirectional', 'length': 96,
          'targets_length': 20,
    },
  }  # fmt: skip
  three, _ = make_evaluator(FakeEngine([[0.0, -1.0]] * 4))(
    None, None, 'rte', [example('a', 0)] * 3 + examples[1:2]
  )
  assert (three['accuracy'], three['error_percent']) == (75, 25)
  hidden, answers = make_evaluator(FakeEngine([[0.0, -1.0]]))(None, None, 'rte', [example('a')])
  assert values(answers) == [0] and set(hidden) == {'task', 'n', 'protocol'}
  with bad_input(
    'finetune.targets_length=4 truncates different answers of copa to equal ones: '
    'choice1, choice2; raise it'
  ):
    make_evaluator(FakeEngine(), targets_length=4)(None, None, 'copa', examples)


def test_greedy_answer_is_the_text_before_the_end():
  ids = lambda text: BYTES.encode(text.encode()).tolist()
  texts = [ids('not_entailment'), ids(' entailment '), ids('entail'), []]
  examples = [example('a', label) for label in (1, 0, 0, 1)]
  evaluator = make_evaluator(FakeEngine(texts=texts), choosing='greedy')
  result, answers = evaluator(None, None, 'rte', examples)
  assert values(answers) == [1, 0, -1, -1]
  assert answers[2] == evaluation.TaskAnswer(-1, 'entail')  # not a label, but the text is kept
  assert result['accuracy'] == 50 and result['protocol']['choosing'] == 'greedy'
  examples = [
    example('a', answers=('Ada',), key=(1, 2)),
    example('a', answers=('Bob',), key=(1, 3)),
  ]
  result, answers = make_evaluator(FakeEngine(texts=[ids('Ada'), ids('x' * 30)]))(
    None, None, 'record', examples
  )
  assert values(answers) == ['Ada', 'x' * 20] and result['exact_match'] == 50
  examples = [example('a', choices=('Ada', 'Bob'), answers=('Bob',), key=(1, 2))]
  evaluator = make_evaluator(FakeEngine([[-2.0, -1.0]]), choosing='rank')
  result, answers = evaluator(None, None, 'record', examples)
  assert values(answers) == ['Bob'] and result['error_percent'] == 0


def test_answers_to_questions_are_words(monkeypatch):
  """They are ranked without the end of the document, and generated ones name their class."""
  ranked = []

  def rank(self, variables, prompts, choices, rows, bidirectional):
    ranked.extend([bytes(ids.astype(np.uint8)).decode() for ids in group] for group in choices)
    yield 0, np.array([-2.0, -1.0]), None

  monkeypatch.setattr(FakeEngine, 'rank', rank)
  question = example('a', 1, (' yes', ' no'))
  evaluator = make_evaluator(FakeEngine(), format='question')
  result, answers = evaluator(None, None, 'rte', [question])
  assert ranked == [[' yes', ' no']] and result['accuracy'] == 100
  assert answers == [evaluation.TaskAnswer(1, 'no', -1.0)]
  texts = [BYTES.encode(text).tolist() for text in (b' no', b'not_entailment')]
  evaluator = make_evaluator(FakeEngine(texts=texts), format='question', choosing='greedy')
  _, answers = evaluator(None, None, 'rte', [question] * 2)
  assert values(answers) == [1, -1]
  assert evaluation.describe_answer('rte', question, answers[0])['label'] == 'no'


def test_only_all_eight_tasks_have_an_average():
  results = {
    name: {metric: 60.0 for metric in names} | {'error_percent': 40.0}
    for name, names in metrics.METRICS_BY_TASK.items()
  }
  assert evaluation.combine_results(results)['average'] == pytest.approx(60)
  del results['cb']
  combined = evaluation.combine_results(results)
  assert combined['error_percent'] == pytest.approx(40) and 'average' not in combined
