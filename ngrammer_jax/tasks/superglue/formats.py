"""SuperGLUE in the text-to-text format of T5 (Raffel et al. 2020).

Examples have the TFDS schema (see `reader`). A formatted example is a `Row`: the input text, the
target text, and the answer choices.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import difflib
import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.tasks.superglue import metrics, reader, wsc

UNKNOWN = '<unk>'  # target text if the label is hidden


@dataclasses.dataclass(frozen=True)
class Task:
  """Text format of a task.

  Attributes:
    config: TFDS config of the examples, a key of `reader.CONFIGS`.
    prefix: first word of the input.
    fields: example field by its name in the input, in input order.
    truncated_side: side on which a long input is truncated: the one without the question.
    is_free_text: the answer is a text from the example, not a label.
  """

  config: str
  prefix: str
  fields: Mapping[str, str]
  truncated_side: str = 'right'
  is_free_text: bool = False

  @property
  def labels(self) -> tuple[str, ...]:
    """Label texts by class; empty for free text."""
    return () if self.is_free_text else reader.CONFIGS[self.config].labels


def _same_names(*names: str) -> dict[str, str]:
  return {name: name for name in names}


TASKS = {
  'boolq': Task('boolq', 'boolq', _same_names('passage', 'question'), truncated_side='left'),
  'cb': Task('cb', 'cb', _same_names('hypothesis', 'premise')),
  'copa': Task(
    'copa', 'copa', _same_names('choice1', 'choice2', 'premise', 'question'), truncated_side='left'
  ),
  'multirc': Task('multirc', 'multirc', _same_names('question', 'answer', 'paragraph')),
  'record': Task(
    'record', 'record', _same_names('query', 'entities', 'passage'), is_free_text=True
  ),
  'rte': Task('rte', 'rte', _same_names('hypothesis', 'premise')),
  'wic': Task('wic', 'wic', _same_names('sentence1', 'sentence2', 'word'), truncated_side='left'),
  'wsc': Task('wsc.fixed', 'wsc', _same_names('text')),
  # The T5 format of WSC: the referent is generated.
  'wsc_simple': Task('wsc.fixed', 'wsc:', {}, is_free_text=True),
  'axb': Task('axb', 'rte', {'hypothesis': 'sentence2', 'premise': 'sentence1'}),
  'axg': Task('axg', 'rte', _same_names('hypothesis', 'premise')),
}
# Values of finetune.wsc_spans: how the spans of `wsc` are marked.
WSC_SPANS = {'all': wsc.mark_both_spans, 't5': wsc.mark_spans_by_index}
# Tasks that have training data and count in the average.
SUPERGLUE_TASKS = tuple(metrics.METRICS_BY_TASK)


@dataclasses.dataclass(frozen=True)
class Row:
  """A formatted example.

  Attributes:
    inputs, targets: input text and target text.
    label: class, -1 if there is none.
    choices: answer choices: the labels, or the entities of `record`.
    answers: correct texts of `record`; referent of `wsc_simple`.
    key: indices of the example: (idx,), (paragraph, question, answer) or (passage, query).
  """

  inputs: str
  targets: str
  label: int
  choices: tuple[str, ...]
  answers: tuple[str, ...]
  key: tuple[int, ...]


def find_task(name: str) -> Task:
  """Returns the task with this name. Raises BadInput with the nearest name if there is none."""
  if name not in TASKS:
    nearest, *_ = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)
    raise errors.BadInput(
      f'no SuperGLUE task {name!r}: did you mean {nearest!r}? Available: {", ".join(TASKS)}'
    )
  return TASKS[name]


def format_rows(
  name: str, examples: Iterable[Mapping[str, Any]], split: str, wsc_spans: str = 'all'
) -> Iterator[Row]:
  """Formats the examples of a split.

  As in T5, a training example of `record` yields one row per answer, and `wsc_simple` is trained
  only on the examples with label 1. Every evaluation example yields one row.

  Args:
    name: task name, a key of TASKS.
    examples: examples in the TFDS schema.
    split: train, validation or test.
    wsc_spans: a key of WSC_SPANS.
  """
  for example in examples:
    if name == 'record':
      yield from _format_record(example, split)
    elif name == 'wsc_simple':
      if split != 'train' or example['label'] == 1:
        yield _format_referent(example)
    else:
      yield _format_classification(name, example, wsc_spans)


def _format_classification(name, example, wsc_spans):
  task = find_task(name)
  texts = {input_name: example[field] for input_name, field in task.fields.items()}
  if name == 'wsc':
    texts['text'] = WSC_SPANS[wsc_spans](example)
  text = _join_fields(task.prefix, texts)
  if name == 'multirc':
    text = re.sub('</?b>', '', re.sub('<br>', ' ', text))
  label = int(example['label'])
  target = task.labels[label] if label >= 0 else UNKNOWN
  return Row(text, target, label, task.labels, (), _key(example))


def _format_record(example, split):
  passage = re.sub(r'([.?!"\'])\n@highlight\n', r'\1 ', example['passage'])
  passage = re.sub(r'\n@highlight\n', '. ', passage)
  texts = {
    'query': example['query'],
    'entities': ', '.join(example['entities']),
    'passage': passage,
  }
  answers = tuple(example['answers'])
  inputs, choices, key = _join_fields('record', texts), tuple(example['entities']), _key(example)
  targets = answers if split == 'train' else answers[:1]
  for target in targets or (UNKNOWN,):
    yield Row(inputs, target, label=-1, choices=choices, answers=answers, key=key)


def _format_referent(example):
  text = f'wsc: {wsc.mark_pronoun(example)}'
  referent = example['span1_text']
  return Row(text, referent, int(example['label']), (), (referent,), _key(example))


def _join_fields(prefix, texts):
  return ' '.join([prefix, *(f'{name}: {text}' for name, text in texts.items())])


def _key(example):
  idx = example['idx']
  if isinstance(idx, Mapping):
    names = ('paragraph', 'question', 'answer') if 'paragraph' in idx else ('passage', 'query')
    return tuple(int(idx[name]) for name in names)
  return (int(idx),)
