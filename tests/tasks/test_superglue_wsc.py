"""WSC: repair of spans, and texts with marked spans."""

import re

from ngrammer_jax.tasks.superglue import reader, wsc
from tests.checks import bad_input, data_root
from tests.loops import each
from tests.tasks.superglue_examples import SCHEMA, jsonl


def schema(text, span1, index1, span2, index2):
  return {
    'text': text,
    'span1_text': span1,
    'span1_index': index1,
    'span2_text': span2,
    'span2_index': index2,
    'idx': 7,
    'label': 1,
  }


@each(
  'span_text, index, text, repaired',
  [
    ('the table', 2, 'It hit The table because', 'The table'),  # case of the word at the index
    ('The table', 2, 'It hit the table because', 'the table'),
    ('the table.', 2, 'It hit the table', 'the table'),
    ('the\ntable', 2, 'It hit the table', 'the table'),
    ('The\ntable..', 2, 'It hit the table', 'the table'),
    ('table', 2, 'It hit the tables', 'table'),  # a substring of the text is not changed
    ('Kamenev and Zinoviev', 0, 'Kamenev fled and Zinoviev too', 'Kamenev and Zinoviev'),
    ('Kamenev, Zinoviev, and Stalin', 0, 'Kamenev fled', 'Kamenev, Zinoviev, and Stalin'),
  ],
)
@each('is_first', [True, False])
def test_spans_are_repaired(span_text, index, text, repaired, is_first):
  other = (text.split()[0], 0)
  spans = lambda span: (span, index, *other) if is_first else (*other, span, index)
  example = schema(text, *spans(span_text))
  before = dict(example)
  assert wsc.repair_spans(example) == schema(text, *spans(repaired))
  assert example == before


def test_index_of_theyscold_is_repaired():
  text = 'a b c d e f g h i but theyscold them'
  example = schema(text, 'a', 0, 'theyscold.', 11)
  assert wsc.repair_spans(example) == schema(text, 'a', 0, 'theyscold', 10)


def test_unrepairable_span_is_an_error(tmp_path):
  message = (
    "WSC example 7: span1_text='Anna' is not in its text 'He ran .', expected a substring; read "
    'the config wsc.fixed or download WSC.zip again'
  )
  with bad_input(message):
    wsc.repair_spans(schema('He ran .', 'Anna', 0, 'He', 0))
  file = tmp_path / 'WSC' / 'train.jsonl'
  file.parent.mkdir()
  target = {'span1_text': 'Anna', 'span1_index': 0, 'span2_text': 'He', 'span2_index': 0}
  file.write_text(jsonl([{'text': 'He ran .', 'target': target, 'idx': 7, 'label': True}]))
  with bad_input(message):
    reader.read(tmp_path, 'wsc.fixed', 'train')
  assert len(reader.read(tmp_path, 'wsc', 'train')) == 1


PONY = (
  'The boy continued to whip the pony , and eventually the pony threw him over. '
  'John laughed out quite loud. "Good for him," he said. '
)
PEBBLE = (
  'When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the magic '
  'pebble in an iron safe . Some day they might want to use it , but really for now, what more '
  'could they wish for?'
)


@each(
  'example, pronoun_marked, both_marked',
  [
    (
      schema(SCHEMA, 'Mark', 0, 'He', 5),
      'Mark told Pete many lies. *He* should have been more truthful.',
      '* Mark * told Pete many lies. # He # should have been more truthful.',
    ),
    (  # the example of T5
      schema('This is a test sentence .', 'test', 3, 'This', 0),
      '*This* is a test sentence .',
      '# This # is a * test * sentence .',
    ),
    (  # several words, and the pronoun at the end
      schema('The path to the lake was blocked, so we left it', 'The path', 0, 'it', 10),
      'The path to the lake was blocked, so we left *it*',
      '* The path * to the lake was blocked, so we left # it #',
    ),
    (schema('He is  Al .  ', 'Al', 3, 'He', 0), '*He* is  Al .  ', '# He # is  * Al * .  '),
    (  # the pronoun is inside the other span
      schema('He sold his old hat .', 'his old hat', 2, 'his', 2),
      'He sold *his* old hat .',
      'He sold * # his # old hat * .',
    ),
    (
      schema('He sold all of it .', 'all of it', 2, 'it', 4),
      'He sold all of *it* .',
      'He sold * all of # it # * .',
    ),
    (schema('He ran .', 'He', 0, 'He', 0), '*He* ran .', '* # He # * ran .'),
    (  # the nearest whole word, not part of another word
      schema('it is with Ann, or it, or it ?', 'Ann', 3, 'it', 4),
      'it is with Ann, or *it*, or it ?',
      'it is with * Ann *, or # it #, or it ?',
    ),
    (
      schema(
        'Kamenev , and later Zinoviev , left ; they ran', 'Kamenev and Zinoviev', 0, 'they', 8
      ),
      'Kamenev , and later Zinoviev , left ; *they* ran',
      'Kamenev , and later Zinoviev , left ; # they # ran',
    ),
    (
      schema(PONY, 'The boy', 0, 'him', 23),
      PONY[:-1].replace('him,"', '*him* ,"'),
      PONY.replace('The boy', '* The boy *').replace('"Good for him', '"Good for # him #'),
    ),
    (
      schema(PEBBLE, 'safe', 22, 'it', 30),
      PEBBLE.replace(' it ', ' *it* '),
      PEBBLE.replace(' it ', ' # it # ').replace('safe', '* safe *'),
    ),
  ],
)
def test_spans_are_marked(example, pronoun_marked, both_marked):
  before = dict(example)
  assert wsc.mark_pronoun(example) == pronoun_marked
  assert wsc.mark_both_spans(example) == both_marked
  assert example == before


def t5_regular_expressions(example):
  """The two replacements of T5's preprocessor, with Python's regular expressions."""

  def mark(text, span, index, mark):
    pattern = r'^((?:\S+\s){N})(W)'.replace('N', str(index)).replace('W', span)
    return re.sub(pattern, rf'\1{mark} \2 {mark}', text, flags=re.ASCII)

  first, second = example['span1_index'], example['span2_index']
  text = mark(example['text'], example['span1_text'], first, '*')
  return mark(text, example['span2_text'], second + 2 * (first < second), '#')


@each(
  'example, marked',
  [
    (  # as with all spans marked
      schema(SCHEMA, 'Mark', 0, 'He', 5),
      '* Mark * told Pete many lies. # He # should have been more truthful.',
    ),
    (
      schema('This is a test sentence .', 'test', 3, 'This', 0),
      '# This # is a * test * sentence .',
    ),
    (schema(PEBBLE, 'safe', 22, 'it', 30), PEBBLE.replace('safe', '* safe *')),  # index 31
    (  # the pronoun at the same index as the other span
      schema('Then his old hat fell .', 'his old hat', 1, 'his', 1),
      'Then * his old hat * fell .',
    ),
    (schema('Al  met Bo .', 'Bo', 3, 'Al', 0), '# Al #  met Bo .'),  # two spaces
    (schema('He met Bo. ', 'Bo', 2, 'He', 0), '# He # met * Bo *. '),
  ],
)
def test_spans_are_marked_by_index_as_in_t5(example, marked):
  assert wsc.mark_spans_by_index(example) == marked == t5_regular_expressions(example)


def test_five_official_examples_differ_from_t5():
  root, differences = data_root('data/superglue'), []
  for split in reader.SPLITS:
    for example in reader.read(root, 'wsc.fixed', split):
      by_index = wsc.mark_spans_by_index(example)
      assert by_index == t5_regular_expressions(example)
      if by_index != wsc.mark_both_spans(example):
        differences.append((split, example['idx']))
  assert differences == [
    ('validation', 42),
    ('validation', 95),
    ('test', 80),
    ('test', 81),
    ('test', 82),
  ]


def test_missing_pronoun_is_an_error():
  example = schema('She ran with Al .', 'Al', 3, 'it', 2)
  for mark in (wsc.mark_pronoun, wsc.mark_both_spans):
    with bad_input(
      "WSC example 7: span2_text='it' is not in its text 'She ran with Al .', expected a "
      'substring; read the config wsc.fixed or download WSC.zip again'
    ):
      mark(example)


def test_missing_referent_is_an_error():
  with bad_input(
    "WSC example 7: span1_text='Ann' is not in its text 'She ran with Al .', expected a "
    'substring; read the config wsc.fixed or download WSC.zip again'
  ):
    wsc.mark_both_spans(schema('She ran with Al .', 'Ann', 3, 'She', 0))
