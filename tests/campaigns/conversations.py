"""Draws conversations and damaged records, and checks their tokens and their errors.

  python -m tests.campaigns.conversations --inputs=300 --seed=0

A conversation is written by one of four templates, with any roles and contents, which may spell
special tokens. The tokens that count must be the text of the assistant, found by a second way: in
the text of the template, with marks of the test around each answer. A damaged record has a value of
another type somewhere; it must be read, or refused in one sentence that names the line. Each
failure prints its seed. The exit status is 1 if there is any.
"""

import json
import random
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.formats import ReadOptions, lines
from ngrammer_jax.data.tokens import document_encoder
from tests import tokenizer_files
from tests.campaigns import drawn_inputs

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
END_OF_TURN = '<|im_end|>'
CHATML = """{% for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# The same text, with the tag `generation` around the answer and the end of its turn.
TAGGED = """{% for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}
{%- generation %}{{- m['content'] + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}{{- m['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
BEGINS = '<|endoftext|>' + CHATML
STRICT = (
  "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
  "{{ raise_exception('no role ' + m['role']) }}{% endif %}{% endfor %}" + CHATML
)
TEMPLATES = (CHATML, TAGGED, BEGINS, STRICT)
WORDS = ('a few', ' lines', '\n', '', 'é', '日本', '\N{SNOWMAN}', *SPECIAL, '<|im_', '{{ x }}', ' ')
VALUES = (None, True, 3, 2.5, '', 'text', [], {}, [1], ['a'], {'a': 1}, [[]], '\ud83d')


def draw_conversation(rng: random.Random) -> list[dict[str, str]]:
  """Returns messages in any order, of the roles that people use."""
  messages = []
  for _ in range(rng.randint(1, 6)):
    role = rng.choice(('user', 'assistant', 'user', 'assistant', 'system', 'tool'))
    content = ''.join(rng.choice(WORDS) for _ in range(rng.randint(0, 5)))
    messages.append({'role': role, 'content': content})
  return messages


def expected_answers(messages: list[dict[str, str]]) -> str:
  """Returns all text that counts, as it is spelled."""
  answers = [m['content'] for m in messages if m['role'] == 'assistant']
  return ''.join(f'{answer}{END_OF_TURN}\n' for answer in answers)


def check_tokens(rng: random.Random) -> bool:
  """Compares the tokens of a conversation, and those that count, with its text.

  Returns whether its template shows all of its roles; otherwise the error names the role.
  """
  template = rng.choice(TEMPLATES)
  content = tokenizer_files.byte_level(special=SPECIAL)
  vocabulary = vocabularies.TokenizerVocabulary(content, chat_template=template)
  messages = draw_conversation(rng)
  encoder = document_encoder.make(vocabulary, is_chat=True, loss_on='assistant')
  try:
    prepared = encoder.prepare(json.dumps(messages).encode())
  except errors.BadInput as error:
    assert template == STRICT and 'no role' in str(error), (messages, error)
    return False
  (document,) = encoder.encode_all([prepared])
  everything = ''
  for message in messages:
    everything += f'<|im_start|>{message["role"]}\n{message["content"]}{END_OF_TURN}\n'
  assert vocabulary.decode(document.ids, special=True).decode() == everything, messages
  counted = document.ids[document.counts]
  assert vocabulary.decode(counted, special=True).decode() == expected_answers(messages), messages
  # One special token for each that the template writes, whatever the messages spell.
  start, end = (vocabulary.encode(s.encode(), special=True)[0] for s in SPECIAL[1:])
  assert (document.ids == start).sum() == (document.ids == end).sum() == len(messages), messages
  for loss_on_all in document_encoder.make(vocabulary, True, 'all').encode_all([prepared]):
    assert loss_on_all.ids.tolist() == document.ids.tolist() and loss_on_all.counts is None
  return True


def damage(rng: random.Random, value: Any) -> Any:
  """Returns a JSON value with another one somewhere inside."""
  if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
    return rng.choice(VALUES)
  if isinstance(value, list):
    i = rng.randrange(len(value))
    return [*value[:i], damage(rng, value[i]), *value[i + 1 :]]
  name = rng.choice(sorted(value))
  if rng.random() < 0.2:
    return {other: part for other, part in value.items() if other != name}
  return value | {name: damage(rng, value[name])}


def check_record(rng: random.Random) -> bool:
  """Reads a record with a value of another type: as a document, or with an error of one line.

  Returns whether it is a document.
  """
  is_chat = rng.random() < 0.5
  field = 'messages' if is_chat else 'text'
  record: Any = {'id': 1, field: draw_conversation(rng) if is_chat else 'a text'}
  record = damage(rng, record)
  options = ReadOptions((field,), is_chat=is_chat)
  line = json.dumps(record).encode()
  if rng.random() < 0.1:
    line = line[: rng.randint(0, len(line))]
  try:
    document = lines.parse(line, 'corpus.jsonl, line 7', options)
  except errors.BadInput as error:
    assert str(error).startswith('corpus.jsonl, line 7'), (line, error)
    assert '\n' not in str(error), (line, error)
    return False
  assert isinstance(document.text, bytes), line
  document.text.decode()  # whole characters
  if is_chat and document.text:
    for message in json.loads(document.text):
      assert isinstance(message['role'], str), line
      assert isinstance(message.get('content', ''), str), line
  return True


def check(seed: int) -> tuple[bool, bool]:
  """Draws one conversation and one record, checks them, and returns whether both are accepted."""
  return check_tokens(random.Random(seed)), check_record(random.Random(seed))


if __name__ == '__main__':
  drawn_inputs.run(__doc__, check, inputs=300)
