"""SuperGLUE texts equal those of T5 exactly."""

from ngrammer_jax.tasks.superglue import formats
from tests.checks import bad_input
from tests.loops import each

MULTIRC = {
  'paragraph': '<b>Sent 1: </b>It rained.<br><b>Sent 2: </b>It stopped.',
  'question': 'Did it rain?',
  'answer': 'Yes',
  'idx': {'paragraph': 3, 'question': 5, 'answer': 7},
  'label': 1,
}
RECORD = {
  'passage': 'Ada left.\n@highlight\nBob stayed\n@highlight\nCy came',
  'query': '@placeholder left',
  'entities': ['Ada', 'Bob'],
  'answers': ['Ada', 'She'],
  'idx': {'passage': 1, 'query': 2},
}
WSC = {
  'text': 'Mark told Pete many lies about himself. He should have been more truthful.',
  'span1_text': 'Mark',
  'span2_text': 'He',
  'span1_index': 0,
  'span2_index': 7,
  'idx': 4,
  'label': 1,
}


@each(
  'name, example, inputs, targets',
  [
    (
      'boolq',
      {'question': 'is it so', 'passage': 'It is.', 'idx': 0, 'label': 1},
      'boolq passage: It is. question: is it so',
      'True',
    ),
    (
      'cb',
      {'premise': 'A man.', 'hypothesis': 'A cat.', 'idx': 0, 'label': 1},
      'cb hypothesis: A cat. premise: A man.',
      'contradiction',
    ),
    (
      'copa',
      {
        'premise': 'It rained.',
        'choice1': 'Wet.',
        'choice2': 'Dry.',
        'question': 'effect',
        'idx': 0,
        'label': 0,
      },
      'copa choice1: Wet. choice2: Dry. premise: It rained. question: effect',
      'choice1',
    ),
    (
      'multirc',
      MULTIRC,
      'multirc question: Did it rain? answer: Yes '
      'paragraph: Sent 1: It rained. Sent 2: It stopped.',
      'True',
    ),
    (
      'record',
      RECORD,
      'record query: @placeholder left entities: Ada, Bob passage: Ada left. Bob stayed. Cy came',
      'Ada',
    ),
    (
      'rte',
      {'premise': 'A man.', 'hypothesis': 'A cat.', 'idx': 0, 'label': 1},
      'rte hypothesis: A cat. premise: A man.',
      'not_entailment',
    ),
    (
      'wic',
      {'word': 'run', 'sentence1': 'I run.', 'sentence2': 'A run.', 'idx': 0, 'label': 0},
      'wic sentence1: I run. sentence2: A run. word: run',
      'False',
    ),
    (
      'wsc',
      WSC,
      'wsc text: * Mark * told Pete many lies about himself. # He # should have been more '
      'truthful.',
      'True',
    ),
    (
      'wsc_simple',
      WSC,
      'wsc: Mark told Pete many lies about himself. *He* should have been more truthful.',
      'Mark',
    ),
    (
      'axb',
      {'sentence1': 'A man.', 'sentence2': 'A cat.', 'idx': 0, 'label': 0},
      'rte hypothesis: A cat. premise: A man.',
      'entailment',
    ),
    (
      'axg',
      {'premise': 'A man.', 'hypothesis': 'A cat.', 'idx': 0, 'label': -1},
      'rte hypothesis: A cat. premise: A man.',
      '<unk>',
    ),
  ],
)
def test_texts(name, example, inputs, targets):
  (row,) = formats.format_rows(name, [example], 'validation')
  assert (row.inputs, row.targets, row.label) == (inputs, targets, example.get('label', -1))


COPA = {
  'premise': 'It rained.',
  'choice1': 'I got wet.',
  'choice2': 'The cat slept.',
  'question': 'cause',
  'idx': 0,
  'label': 1,
}


def test_questions_end_before_a_space_and_the_answer():
  ask = lambda name, example, split='validation': list(
    formats.format_rows(name, [example], split, format='question')
  )
  (row,) = ask('copa', COPA)
  assert (row.inputs, row.targets) == ('It rained because', ' the cat slept.')
  assert row.choices == (' I got wet.', ' the cat slept.') and row.label == 1
  (row,) = ask('wsc', WSC)
  assert row.inputs == f'{WSC["text"]}\nDoes "He" refer to "Mark"?\nAnswer:'
  assert (row.targets, row.choices) == (' yes', (' no', ' yes'))
  (row,) = ask('wsc_simple', WSC)
  assert '*He* should' in row.inputs and (row.targets, row.choices) == (' Mark', ())
  (row,) = ask('multirc', MULTIRC)
  assert row.inputs.startswith(' Sent 1:  It rained. ') and row.targets == ' yes'
  first, second = ask('record', RECORD, 'train')
  assert first.inputs == (
    'Ada left. Bob stayed Cy came\n@placeholder left\nWhat is @placeholder?\nAnswer:'
  )
  assert (first.targets, second.targets, first.choices) == (' Ada', ' She', (' Ada', ' Bob'))
  hidden = {'premise': 'A man.', 'hypothesis': 'A {cat}.', 'idx': 0, 'label': -1}
  (row,) = ask('cb', hidden)
  assert 'A {cat}.' in row.inputs and row.label == -1
  assert row.choices == (' yes', ' no', ' maybe')
  assert set(formats.QUESTIONS) == set(formats.TASKS)


def test_record_has_a_training_row_per_answer_and_one_evaluation_row():
  rows = list(formats.format_rows('record', [RECORD], 'train'))
  assert [row.targets for row in rows] == ['Ada', 'She']
  (row,) = formats.format_rows('record', [RECORD], 'validation')
  assert (row.choices, row.answers, row.key) == (('Ada', 'Bob'), ('Ada', 'She'), (1, 2))
  (row,) = formats.format_rows('record', [RECORD | {'answers': []}], 'test')
  assert row.targets == '<unk>'


def test_wsc_simple_trains_only_on_label_1():
  incorrect = WSC | {'label': 0}
  assert [r.label for r in formats.format_rows('wsc_simple', [WSC, incorrect], 'train')] == [1]
  assert [r.label for r in formats.format_rows('wsc_simple', [WSC, incorrect], 'validation')] == [
    1,
    0,
  ]
  assert [r.label for r in formats.format_rows('wsc', [WSC, incorrect], 'train')] == [1, 0]


def test_multirc_key_is_paragraph_question_answer():
  (row,) = formats.format_rows('multirc', [MULTIRC], 'validation')
  assert row.key == (3, 5, 7)


def test_unknown_task():
  with bad_input(
    "no SuperGLUE task 'boolqs': did you mean 'boolq'? Available: boolq, cb, copa, multirc, "
    'record, rte, wic, wsc, wsc_simple, axb, axg'
  ):
    formats.find_task('boolqs')
