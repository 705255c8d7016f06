"""Winograd schemas (WSC) of SuperGLUE: repair of spans, and texts with marked spans.

A span is a text and the index of its first word. Both are sometimes wrong in the data.
"""

from collections.abc import Mapping
import re
from typing import Any

from ngrammer_jax import errors

# The words of these referents are not adjacent in the text, so they are not spans of it.
SPLIT_REFERENTS = ('Kamenev and Zinoviev', 'Kamenev, Zinoviev, and Stalin')

# T5 formats this text with a space before the comma and without the trailing space.
PONY_TEXT = (
  'The boy continued to whip the pony , and eventually the pony threw him over. '
  'John laughed out quite loud. "Good for him," he said. '
)
PONY_MARKED = PONY_TEXT.replace('him,"', '*him* ,"').rstrip()


def repair_spans(example: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the example with repaired spans, as in the TFDS config `wsc.fixed`.

  The spans are then substrings of the text, except for SPLIT_REFERENTS.

  Raises:
    BadInput: a span is not in the text and cannot be repaired.
  """
  fixed = dict(example)
  for span in ('span1', 'span2'):
    text = fixed[f'{span}_text']
    index = fixed[f'{span}_index']
    if text in fixed['text'] or text in SPLIT_REFERENTS:
      continue
    words = fixed['text'].split()
    if 'theyscold' in text:
      fixed['span2_index'] = 10  # TFDS does not change the span text
    if words[index][0].islower():
      first = text[0].lower()
    else:
      first = text[0].upper()
    repaired = (first + text[1:]).rstrip('.').replace('\n', ' ')
    if repaired not in fixed['text']:
      raise _missing_span_error(fixed, span)
    fixed[f'{span}_text'] = repaired
  return fixed


def mark_pronoun(example: Mapping[str, Any]) -> str:
  """Returns the text with the pronoun in stars: 'Mark told Pete that *he* was late.'

  Raises BadInput if the pronoun is not in the text.
  """
  if example['text'] == PONY_TEXT:
    return PONY_MARKED
  start, end = _locate_span(example, 'span2')
  text = example['text']
  return f'{text[:start]}*{text[start:end]}*{text[end:]}'


def _span_length(span: tuple[int, int, str]) -> int:
  start, end, _ = span
  return end - start


def mark_both_spans(example: Mapping[str, Any]) -> str:
  """Returns the text with both spans marked: '* Mark * told Pete that # he # was late.'

  A first span in SPLIT_REFERENTS is not marked. Five of the 804 examples of WSC differ from T5, see
  `mark_spans_by_index`.

  Raises BadInput if a span is not in the text.
  """
  text = example['text']
  spans = [(*_locate_span(example, 'span2'), '#')]
  if example['span1_text'] not in SPLIT_REFERENTS or example['span1_text'] in text:
    spans.append((*_locate_span(example, 'span1'), '*'))
  spans.sort(key=_span_length)  # a nested span precedes the outer one
  marks = []
  for i, (start, end, mark) in enumerate(spans):
    marks += [(start, 1, -i, f'{mark} '), (end, 0, i, f' {mark}')]
  for position, _, _, mark in sorted(marks, reverse=True):
    text = f'{text[:position]}{mark}{text[position:]}'
  return text


def mark_spans_by_index(example: Mapping[str, Any]) -> str:
  """Returns the text with both spans marked as in T5; its regular expression misses some.

  A span is marked only if its text is at its word index: after that many words, each followed by
  one ASCII space, and with the marks of the first span counted as words.
  """
  index1 = example['span1_index']
  index2 = example['span2_index']
  text = _mark_at_index(example['text'], example['span1_text'], index1, '*')
  return _mark_at_index(text, example['span2_text'], index2 + 2 * (index1 < index2), '#')


def _mark_at_index(text: str, span_text: str, index: int, mark: str) -> str:
  """Returns the text with a span marked, or unchanged if the span is not at this word index."""
  match = re.match(rf'(?:\S+\s){{{index}}}', text, re.ASCII)
  if match is None or not text.startswith(span_text, match.end()):
    return text
  start = match.end()
  end = start + len(span_text)
  return f'{text[:start]}{mark} {span_text} {mark}{text[end:]}'


def _locate_span(example: Mapping[str, Any], span: str) -> tuple[int, int]:
  """Returns start and end of a span in the text: at its index, else at the nearest occurrence."""
  text = example['text']
  span_text = example[f'{span}_text']
  index = example[f'{span}_index']
  words = text.split(' ')
  size = len(span_text.split(' '))
  start = sum(len(word) + 1 for word in words[:index])
  if ' '.join(words[index : index + size]) == span_text:
    return start, start + len(span_text)
  whole_words = rf'(?<!\w){re.escape(span_text)}(?!\w)'  # 'it' does not match inside 'with'
  starts = [match.start() for match in re.finditer(whole_words, text)]
  if not starts and span == 'span1':  # `repair_spans` ensures a substring, not whole words
    starts = [match.start() for match in re.finditer(re.escape(span_text), text)]
  if not starts:
    raise _missing_span_error(example, span)

  def distance_in_words(position: int) -> int:
    return abs(text.count(' ', 0, position) - index)

  start = min(starts, key=distance_in_words)
  return start, start + len(span_text)


def _missing_span_error(example: Mapping[str, Any], span: str) -> errors.BadInput:
  return errors.BadInput(
    f'WSC example {example.get("idx")}: {span}_text={example[f"{span}_text"]!r} is not in its text '
    f'{example["text"]!r}, expected a substring; read the config wsc.fixed or download '
    f'WSC.zip again'
  )
