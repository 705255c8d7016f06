"""SuperGLUE in the text-to-text format of T5 (Raffel et al. 2020), or as questions.

Examples have the TFDS schema (see `reader`). A `FormattedExample` has the input text, the
target text, and the answer choices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    fields: fields of the example, in the order of the input; `name=field` has another name there.
    prefix: first word of the input; '': the config.
    truncated_side: side on which a long input is truncated: the one without the question.
    is_free_text: the answer is a text from the example, although the examples have labels.
  """

  config: str
  fields: str
  prefix: str = ''
  truncated_side: str = 'right'
  is_free_text: bool = False

  @property
  def labels(self) -> tuple[str, ...]:
    """Label texts by class; empty for free text."""
    if self.is_free_text:
      return ()
    return reader.CONFIGS[self.config].labels


TASKS = {
  'boolq': Task('boolq', 'passage question', truncated_side='left'),
  'cb': Task('cb', 'hypothesis premise'),
  'copa': Task('copa', 'choice1 choice2 premise question', truncated_side='left'),
  'multirc': Task('multirc', 'question answer paragraph'),
  'record': Task('record', 'query entities passage'),
  'rte': Task('rte', 'hypothesis premise'),
  'wic': Task('wic', 'sentence1 sentence2 word', truncated_side='left'),
  'wsc': Task('wsc.fixed', 'text', 'wsc'),
  # The T5 format of WSC: the referent is generated.
  'wsc_simple': Task('wsc.fixed', '', 'wsc:', is_free_text=True),
  'axb': Task('axb', 'hypothesis=sentence2 premise=sentence1', 'rte'),
  'axg': Task('axg', 'hypothesis premise', 'rte'),
}
# Values of finetune.wsc_spans: how the spans of `wsc` are marked.
WSC_SPANS = {'all': wsc.mark_both_spans, 't5': wsc.mark_spans_by_index}
# finetune.format="question": the prompt of a pretrained model before a space and the answer.
FOLLOWS = 'Premise: {premise}\nHypothesis: {hypothesis}\nDoes the hypothesis follow'
QUESTIONS = {
  'boolq': '{passage}\nQuestion: {question}?\nAnswer:',
  'cb': f'{FOLLOWS}, yes, no or maybe?\nAnswer:',
  'copa': '{premise} {link}',
  'multirc': '{paragraph}\nQuestion: {question}\nIs it answered by "{answer}"?\nAnswer:',
  'record': '{passage}\n{query}\nWhat is @placeholder?\nAnswer:',
  'rte': f'{FOLLOWS}?\nAnswer:',
  'wic': '{sentence1}\n{sentence2}\nDoes "{word}" mean the same in both sentences?\nAnswer:',
  'wsc': '{text}\nDoes "{span2_text}" refer to "{span1_text}"?\nAnswer:',
  'wsc_simple': '{text}\nWhat does *{span2_text}* refer to?\nAnswer:',
  'axb': 'Premise: {sentence1}\nHypothesis: {sentence2}\nDoes the hypothesis follow?\nAnswer:',
  'axg': f'{FOLLOWS}?\nAnswer:',
}
ANSWERS = {'entailment': 'yes', 'contradiction': 'no', 'not_entailment': 'no', 'neutral': 'maybe'}
ANSWERS |= {'False': 'no', 'True': 'yes'}
LINKS = {'cause': 'because', 'effect': 'so'}
# Tasks with training data, which count in the average.
SUPERGLUE_TASKS = tuple(metrics.METRICS_BY_TASK)


@dataclasses.dataclass(frozen=True)
class FormattedExample:
  """An example as text.

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
  """Returns the task with this name. Raises BadInput with the nearest name for an unknown one."""
  if name not in TASKS:
    nearest, *_ = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)
    raise errors.BadInput(
      f'no SuperGLUE task {name!r}: did you mean {nearest!r}? Available: {", ".join(TASKS)}'
    )
  return TASKS[name]


def find_class(text: str, choices: Sequence[str]) -> int:
  """Returns the class of a stripped choice text; -1 for other texts."""
  names = [choice.strip() for choice in choices]
  if text not in names:
    return -1
  return names.index(text)


def format_rows(
  name: str,
  examples: Iterable[Mapping[str, Any]],
  split: str,
  wsc_spans: str = 'all',
  format: str = 't5',
) -> Iterator[FormattedExample]:
  """Formats the examples of a split.

  As in T5, a training example of `record` yields one row per answer, and `wsc_simple` is trained
  only on the examples with label 1. Every evaluation example yields one row.

  Args:
    name: task name, a key of TASKS.
    examples: examples in the TFDS schema.
    split: train, validation or test.
    wsc_spans: a key of WSC_SPANS.
    format: value of finetune.format.
  """
  for example in examples:
    for row in _format_example(name, example, split, wsc_spans):
      yield row if format == 't5' else _as_question(name, example, row)


def _format_example(
  name: str, example: Mapping[str, Any], split: str, wsc_spans: str
) -> Iterator[FormattedExample]:
  """Yields the rows of an example in the format of T5."""
  if name == 'record':
    yield from _format_record(example, split)
  elif name == 'wsc_simple':
    if split != 'train' or example['label'] == 1:
      yield _format_referent(example)
  else:
    yield _format_classification(name, example, wsc_spans)


def _as_question(name: str, example: Mapping[str, Any], row: FormattedExample) -> FormattedExample:
  """Returns a row with the input of QUESTIONS, and answers in words after a space."""
  fields = dict(example)
  choices = [ANSWERS.get(choice, choice) for choice in row.choices]
  if name == 'copa':
    fields |= {'premise': example['premise'].rstrip('. '), 'link': LINKS[example['question']]}
    choices = [_lower_first(example[choice]) for choice in row.choices]
  if name == 'wsc_simple':
    fields['text'] = wsc.mark_pronoun(example)
  text = QUESTIONS[name].format_map(fields)
  text = re.sub('\n@highlight\n|<br>|</?b>', ' ', text)
  target = row.targets
  if row.label >= 0 and choices:
    target = choices[row.label]
  choices = tuple(f' {choice}' for choice in choices)
  return dataclasses.replace(row, inputs=text, targets=f' {target}', choices=choices)


def _lower_first(text: str) -> str:
  """Returns a sentence as the second part of another one."""
  if text.startswith(('I ', "I'")):
    return text
  return text[:1].lower() + text[1:]


def _format_classification(
  name: str, example: Mapping[str, Any], wsc_spans: str
) -> FormattedExample:
  """Formats an example with one of the labels as answer."""
  if name == 'wsc':
    example = {**example, 'text': WSC_SPANS[wsc_spans](example)}
  text = _join_fields(name, example)
  if name == 'multirc':
    text = re.sub('</?b>', '', re.sub('<br>', ' ', text))
  labels = find_task(name).labels
  label = int(example['label'])
  target = labels[label] if label >= 0 else UNKNOWN
  return FormattedExample(text, target, label, labels, (), _key(example))


def _format_record(example: Mapping[str, Any], split: str) -> Iterator[FormattedExample]:
  """Formats an example of ReCoRD: one row for each correct answer in training, else one."""
  passage = re.sub(r'([.?!"\'])\n@highlight\n', r'\1 ', example['passage'])
  passage = re.sub(r'\n@highlight\n', '. ', passage)
  texts = {**example, 'entities': ', '.join(example['entities']), 'passage': passage}
  answers = tuple(example['answers'])
  targets = answers or (UNKNOWN,)
  if split != 'train':
    targets = targets[:1]
  for target in targets:
    yield FormattedExample(
      inputs=_join_fields('record', texts),
      targets=target,
      label=-1,
      choices=tuple(example['entities']),
      answers=answers,
      key=_key(example),
    )


def _format_referent(example: Mapping[str, Any]) -> FormattedExample:
  """Formats an example of WSC with a generated referent."""
  text = f'wsc: {wsc.mark_pronoun(example)}'
  referent = example['span1_text']
  return FormattedExample(text, referent, int(example['label']), (), (referent,), _key(example))


def _join_fields(name: str, example: Mapping[str, Any]) -> str:
  """Returns the prefix of a task, and the name and the text of each of its fields."""
  task = find_task(name)
  texts = [task.prefix or task.config]
  for field in task.fields.split():
    shown_name, _, own_name = field.partition('=')
    texts.append(f'{shown_name}: {example[own_name or shown_name]}')
  return ' '.join(texts)


def _key(example: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the indices of an example."""
  idx = example['idx']
  if not isinstance(idx, Mapping):
    return (int(idx),)
  if 'paragraph' in idx:
    return int(idx['paragraph']), int(idx['question']), int(idx['answer'])
  return int(idx['passage']), int(idx['query'])
