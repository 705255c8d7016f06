"""Which token ends an answer, by chat templates as models are published with."""

import pytest

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import chat_template
from tests import tokenizer_files
from tests.loops import each

EACH = '{% for m in messages %}'
CHATML = EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"


@pytest.fixture(scope='module')
def with_template():
  """A vocabulary with this template: </s> ends a text, and <|end|> is not marked as special."""

  def add(tokenizer):
    tokenizer.add_tokens(['<|end|>', '\n\n'])

  special = ('<s>', '</s>', '<|im_start|>', '<|im_end|>', '<|user|>', '<step>')
  content = tokenizer_files.byte_level(special=special, change=add)

  def make(template):
    return vocabularies.TokenizerVocabulary(
      content, document_start=0, end_tokens=[1], chat_template=template
    )

  return make


@each(
  'template, end',
  [
    (CHATML, '<|im_end|>'),
    (EACH + '{{ m.role + ":" + m.content + eos_token }}{% endfor %}', '</s>'),
    # White space before the end.
    (EACH + '{{ m.role + m.content + "\n\n <|im_end|>" }}{% endfor %}', '<|im_end|>'),
    # The end of a turn, then that of the text.
    (CHATML + '{% if not add_generation_prompt %}{{ eos_token }}{% endif %}', '<|im_end|>'),
    # A token that the tokenizer does not mark as special.
    (EACH + '{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}', '<|end|>'),
    # Only the next turn shows that this one has ended.
    (EACH + '{{ "<|user|>" if m.role == "user" else "" }}{{ m.content }}{% endfor %}', '<|user|>'),
    (EACH + '{{ m.content }}{% if not loop.last %}<step>{% endif %}{% endfor %}', '<step>'),
    # An empty thought, as Qwen 3 writes it before the last answer, and none before.
    (
      EACH + '{% if loop.last %}<think>\n\n</think>{% endif %}{{ m.content }}</s>{% endfor %}',
      '</s>',
    ),
    # Thoughts are removed from an answer.
    (EACH + '{{ m.content.split("</think>")[-1].strip() }}<|im_end|>{% endfor %}', '<|im_end|>'),
    # No token ends the answer, the template shows no answer, accepts none, or is damaged.
    (EACH + '{{ m.role + ": " + m.content + "\n" }}{% endfor %}', None),
    ('<s>{{ messages[0].content }}</s>', None),
    ('{% if messages | length > 1 %}{{ raise_exception("one") }}{% endif %}</s>', None),
    ('{% for %}', None),
    # Roles have to alternate, and the last one may not be the user.
    ('{% if messages | length > 2 %}{{ 1 / 0 }}{% endif %}' + CHATML, '<|im_end|>'),
    ('{% if messages[-1].role != "user" %}{{ 1 / 0 }}{% endif %}' + CHATML, '<|im_end|>'),
  ],
)
def test_the_end_of_a_turn(with_template, template, end):
  vocabulary = with_template(template)
  spelled = [vocabulary.token(i) for i in chat_template.end_of_turn(vocabulary)]
  assert spelled == ([] if end is None else [end])


def test_the_generation_prompt(with_template):
  vocabulary = with_template(CHATML + '{% if add_generation_prompt %}>{% endif %}')
  messages = [chat_template.QUESTION]
  text = '<|im_start|>user\nWhich animal?<|im_end|>\n'
  assert chat_template.render(vocabulary, messages) == text + '>'
  assert chat_template.render(vocabulary, messages, add_generation_prompt=False) == text
