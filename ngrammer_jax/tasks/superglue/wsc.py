"""The Winograd schemas of SuperGLUE: repaired spans, and texts in which they are marked.

A span is given by its text and by the number of its first word. Both are sometimes wrong.
"""

from collections.abc import Mapping
import re
from typing import Any

from ngrammer_jax import errors

# Their words stand apart in the text: there is no such span.
APART = ('Kamenev and Zinoviev', 'Kamenev, Zinoviev, and Stalin')

# T5 writes this text with the comma apart and without its last space.
PONY = (
  'The boy continued to whip the pony , and eventually the pony threw him over. '
  'John laughed out quite loud. "Good for him," he said. '
)
PONY_MARKED = PONY.replace('him,"', '*him* ,"').rstrip()


def cleaned(example: Mapping[str, Any]) -> dict[str, Any]:
  """The example as `wsc.fixed` of TFDS has it: spans are parts of the text where they can be.

  Raises BadInput where one is not, and cannot be repaired.
  """
  fixed = dict(example)
  for span in ('span1', 'span2'):
    text, index = fixed[f'{span}_text'], fixed[f'{span}_index']
    if text in fixed['text'] or text in APART:
      continue
    words = fixed['text'].split()
    _check_index(fixed, span, words)
    if 'theyscold' in text:
      fixed['span2_index'] = 10  # TFDS leaves the text as it is
    first = text[0].lower() if words[index][0].islower() else text[0].upper()
    repaired = (first + text[1:]).rstrip('.').replace('\n', ' ')
    if repaired not in fixed['text']:
      raise _lost(fixed, span)
    fixed[f'{span}_text'] = repaired
  return fixed


def marked(example: Mapping[str, Any]) -> str:
  """The text with the pronoun in stars: 'Mark told Pete that *he* was late.'

  Raises BadInput where the pronoun is not in the text, or its index is out of range.
  """
  if example['text'] == PONY:
    return PONY_MARKED
  start, end = _place(example, 'span2')
  text = example['text']
  return f'{text[:start]}*{text[start:end]}*{text[end:]}'


def marked_both(example: Mapping[str, Any]) -> str:
  """The text with both spans marked: '* Mark * told Pete that # he # was late.'

  A first span whose words stand apart is left without marks, as in T5.

  Raises BadInput where a span is not in the text, or its index is out of range.
  """
  text = example['text']
  places = [(*_place(example, 'span2'), '#')]
  if example['span1_text'] not in APART or example['span1_text'] in text:
    places.append((*_place(example, 'span1'), '*'))
  places.sort(key=lambda place: place[1] - place[0])  # the inner one first, where there is one
  marks = []
  for i, (start, end, mark) in enumerate(places):
    marks += [(start, 1, -i, f'{mark} '), (end, 0, i, f' {mark}')]
  for at, _, _, mark in sorted(marks, reverse=True):
    text = f'{text[:at]}{mark}{text[at:]}'
  return text


def _place(example: Mapping[str, Any], span: str) -> tuple[int, int]:
  """Where a span is in the text: at its index, else at the nearest place that has its words."""
  text, wanted, index = example['text'], example[f'{span}_text'], example[f'{span}_index']
  words = text.split(' ')
  _check_index(example, span, words)
  if not wanted:
    raise _lost(example, span)
  size = len(wanted.split(' '))
  start = sum(len(word) + 1 for word in words[:index])
  if ' '.join(words[index : index + size]) == wanted:
    return start, start + len(wanted)
  whole = rf'(?<!\w){re.escape(wanted)}(?!\w)'  # 'it' is not in 'with'
  found = [match.start() for match in re.finditer(whole, text)]
  if not found and span == 'span1':  # the clean-up promises part of a text, not whole words
    found = [match.start() for match in re.finditer(re.escape(wanted), text)]
  if not found:
    raise _lost(example, span)
  number = lambda at: text.count(' ', 0, at)  # of the word that is there
  start = min(found, key=lambda at: abs(number(at) - index))
  return start, start + len(wanted)


def _check_index(example, span, words):
  index = example[f'{span}_index']
  if not 0 <= index < len(words):
    raise errors.BadInput(
      f'WSC example {example.get("idx")}: {span}_index={index} is not a word of its text, expected '
      f'0 to {len(words) - 1}; download WSC.zip again'
    )


def _lost(example, span):
  return errors.BadInput(
    f'WSC example {example.get("idx")}: {span}_text={example[f"{span}_text"]!r} is not in its text '
    f'{example["text"]!r}, expected a part of it; read the config wsc.fixed or download WSC.zip '
    f'again'
  )
