"""Conversations as training text: their tokens, and a mask of what the assistant says."""

import numpy as np
import pytest

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import chat_template
from tests import tokenizer_files

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


def test_the_date_of_a_training_is_always_the_same(with_template):
  vocabulary = with_template("{{ strftime_now('%d %b %Y') }}")
  rendered = chat_template.render(vocabulary, [], for_training=True)
  assert rendered == '26 Jul 2024'
  assert chat_template.render(vocabulary, []) != rendered
