"""Conversations as training text: their tokens, and a mask of what the assistant says."""

import numpy as np
import pytest

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import base, chat_template
from tests import tokenizer_files
from tests.checks import bad_input
from tests.loops import each

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
TEMPLATE = """{% for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}
{%- generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}"""
MESSAGES = [
  {'role': 'system', 'content': 'a few lines'},
  {'role': 'user', 'content': 'some text \U0001f642'},
  {'role': 'assistant', 'content': '  more\n of it \U0001f642'},
  {'role': 'user', 'content': ''},
  {'role': 'assistant', 'content': ''},
]
# apply_chat_template(tokenize=True, return_assistant_tokens_mask=True) of transformers 5.24.
IDS = [
  *(1, 85, 91, 85, 86, 71, 79, 201, 67, 276, 278, 262, 2, 201, 1, 87, 85, 71, 84, 201, 273, 223),
  *(274, 86, 223, 175, 256, 250, 227, 2, 201, 1, 67, 85, 85, 75, 85, 86, 261, 86, 201, 223, 279),
  *(272, 201, 260, 277, 223, 175, 256, 250, 227, 2, 201, 1, 87, 85, 71, 84, 201, 2, 201, 1, 67, 85),
  *(85, 75, 85, 86, 261, 86, 201, 2, 201),
]
LEARNED = [*range(41, 53), 72]


@pytest.fixture(scope='module')
def content():
  return tokenizer_files.byte_level(special=SPECIAL)


@pytest.fixture
def with_template(content):
  def make(template):
    return vocabularies.TokenizerVocabulary(content, chat_template=template)

  return make


def encode(vocabulary, messages):
  rendered = chat_template.render(vocabulary, messages, False, for_training=True)
  ((ids, is_learned),) = chat_template.encode_with_mask(vocabulary, [rendered])
  return ids, is_learned


def test_tokens_and_mask_are_those_of_transformers(with_template):
  vocabulary = with_template(TEMPLATE)
  assert chat_template.has_generation_tag(vocabulary)
  ids, is_learned = encode(vocabulary, MESSAGES)
  assert ids.tolist() == IDS
  assert np.flatnonzero(is_learned).tolist() == LEARNED
  text = vocabulary.decode(ids[is_learned], special=True).decode()
  assert text == '  more\n of it \U0001f642<|im_end|><|im_end|>'
  # Without marks, to generate.
  rendered = chat_template.render(vocabulary, MESSAGES, add_generation_prompt=False)
  assert chat_template.encode(vocabulary, rendered).tolist() == IDS


def test_a_token_with_one_character_of_the_answer_is_learned(with_template):
  """The beginning of an answer may be in one token with the text before it."""
  vocabulary = with_template('a{% generation %}{{ messages[0].content }}{% endgeneration %}ore')
  ids, is_learned = encode(vocabulary, [{'role': 'assistant', 'content': 'nd m'}])
  tokens = [vocabulary.decode([i]).decode() for i in ids]
  assert tokens == ['an', 'd', ' mo', 're']
  assert is_learned.tolist() == [True, True, True, False]


def test_special_tokens_in_any_text_of_a_message_are_ordinary_text(with_template):
  template = TEMPLATE.replace(
    "m['content']", "m['content'] + m.get('name', '') + m.get('calls', [''])[0]"
  )
  vocabulary = with_template(template)
  message = {
    'role': 'assistant',
    'content': 'a<|im_end|>b\ufdd3',
    'name': '<|im_start|>',
    'calls': ['<|im_end|>'],
  }
  ids, is_learned = encode(vocabulary, [message])
  assert np.flatnonzero(np.isin(ids, (0, 1, 2))).tolist() == [0, len(ids) - 2]
  text = vocabulary.decode(ids[is_learned], special=True).decode()
  assert text == 'a<|im_end|>b<|im_start|><|im_end|><|im_end|>'


def test_a_generation_tag_is_a_tag(with_template):
  comment = '{# {% generation %} #}{{ messages[0].content }}'
  quoted = "{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}"
  for template, has_tag in ((comment, False), (quoted, False), (TEMPLATE, True)):
    assert chat_template.has_generation_tag(with_template(template)) is has_tag


def special_ids(vocabulary, content):
  """The special tokens of an answer in a conversation, and its text."""
  ids, _ = encode(vocabulary, [{'role': 'assistant', 'content': content}])
  is_special = np.isin(ids, (0, 1, 2))
  return ids[is_special].tolist(), vocabulary.decode(ids, special=True).decode()


@each(
  'template, content, special, shown',
  [
    # The template takes out the token of the message, and writes its own: 1 and 2 are special.
    (
      "{% set c = m.split('<|im_end|>') %}{{ c[0] + '<|im_end|>' + c[1] }}",
      'a<|im_end|>b',
      [2],
      'a<|im_end|>b',
    ),
    (
      "{% set c = m.partition('<|im_end|>') %}<|im_start|>{{ c[2].lstrip('c') + c[0] }}",
      'ab<|im_end|>cd',
      [1],
      '<|im_start|>dab',
    ),
    (
      "{{ m[:m.find('<|im_end|>')] }}\n<|im_end|>\n{{ m[m.find('<|im_end|>') + 10:] }}",
      'a<|im_end|>b',
      [2],
      'a\n<|im_end|>\nb',
    ),
    (
      "{% set i = m.find('<|im_end|>') %}{{ m[:i] + '<|im_end|>' + m[i + 10:] }}",
      'a<|im_end|>b',
      [2],
      'a<|im_end|>b',
    ),
    # It takes out one of two.
    (
      "{{ m.split('<|im_start|>')[-1] + '<|im_end|>' }}",
      'a<|im_start|>b<|im_end|>c',
      [2],
      'b<|im_end|>c<|im_end|>',
    ),
    # It compares and counts characters.
    ("{{ 'yes' if m.startswith('<|im_end|>a') else 'no' }}{{ m }}", '<|im_end|>a', [], None),
    ("{{ 'yes' if m == '<|im_end|>' else 'no' }}{{ m }}", '<|im_end|>', [], None),
    ("{{ '' if m != '<|im_end|>' else '<|im_start|>' }}", '<|im_end|>', [1], '<|im_start|>'),
    ("{{ {'<|im_end|>': '<|im_start|>'}[m.strip()] }}", '<|im_end|>', [1], '<|im_start|>'),
    ("{{ 'yes' if m | length == 10 else 'no' }}{{ m }}", '<|im_end|>', [], None),
  ],
)
def test_what_a_template_does_with_a_special_token_in_a_message(
  with_template, template, content, special, shown
):
  vocabulary = with_template('{% set m = messages[0].content %}' + template)
  if shown is None:
    shown = f'yes{content}'
  assert special_ids(vocabulary, content) == (special, shown)


def test_a_template_that_writes_other_tokens_because_of_marks(with_template):
  template = "{% set m = messages[0].content %}{{ '<|im_start|>' if m | length == 10 }}{{ m }}"
  with bad_input(
    'the chat template of the model writes other special tokens where a message spells one of '
    'them: change the spelling of <|im_start|>, <|im_end|> in the messages'
  ):
    encode(with_template(template), [{'role': 'user', 'content': '<|im_end|>'}])


def test_without_special_tokens_no_text_is_marked():
  pattern = base.spelling_pattern(())
  assert pattern.split('') == [''] and pattern.split('a') == ['a']


def test_the_date_of_a_training_is_always_the_same(with_template):
  vocabulary = with_template("{{ strftime_now('%d %b %Y') }}")
  rendered = chat_template.render(vocabulary, [], for_training=True)
  assert rendered == '26 Jul 2024'
  assert chat_template.render(vocabulary, []) != rendered
