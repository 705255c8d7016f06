"""SuperGLUE as text to text, in the strings of T5 (Raffel et al. 2020).

An example has the schema of TFDS (see `reader`); a formatted one is a `Row`: what is read, what is
to be written, and what there is to choose from.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import difflib
import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.tasks.superglue import metrics, reader, wsc

UNKNOWN = '<unk>'  # what is to be written where the label is not known


@dataclasses.dataclass(frozen=True)
class Task:
  """How a task is read and written.

  Attributes:
    config: of TFDS, whose examples these are.
    prefix: the first word of the input.
    fields: of the example, by the names that the input gives them, in its order.
    cut: the side on which a long input is cut: the one that keeps the question.
    free: answers are texts of the example, and not one of some labels.
  """

  config: str
  prefix: str
  fields: Mapping[str, str]
  cut: str = 'right'
  free: bool = False

  @property
  def labels(self) -> tuple[str, ...]:
    """What can be written, by class; nothing where answers are free."""
    return () if self.free else reader.CONFIGS[self.config].labels


def _same(*names: str) -> dict[str, str]:
  return {name: name for name in names}


TASKS = {
  'boolq': Task('boolq', 'boolq', _same('passage', 'question'), cut='left'),
  'cb': Task('cb', 'cb', _same('hypothesis', 'premise')),
  'copa': Task('copa', 'copa', _same('choice1', 'choice2', 'premise', 'question'), cut='left'),
  'multirc': Task('multirc', 'multirc', _same('question', 'answer', 'paragraph')),
  'record': Task('record', 'record', _same('query', 'entities', 'passage'), free=True),
  'rte': Task('rte', 'rte', _same('hypothesis', 'premise')),
  'wic': Task('wic', 'wic', _same('sentence1', 'sentence2', 'word'), cut='left'),
  'wsc': Task('wsc.fixed', 'wsc', _same('text')),
  'wsc_simple': Task('wsc.fixed', 'wsc:', {}, free=True),  # T5's: the referent is written
  'axb': Task('axb', 'rte', {'hypothesis': 'sentence2', 'premise': 'sentence1'}),
  'axg': Task('axg', 'rte', _same('hypothesis', 'premise')),
}
# Those that can be trained on and make the average.
EIGHT = tuple(metrics.METRICS_BY_TASK)


@dataclasses.dataclass(frozen=True)
class Row:
  """A formatted example.

  Attributes:
    inputs, targets: the texts.
    label: its class, -1 where there is none.
    choices: the texts that the target is one of.
    answers: texts that are right, of `record`; the referent of `wsc_simple`.
    key: numbers of the example: (idx,), (paragraph, question, answer) or (passage, query).
  """

  inputs: str
  targets: str
  label: int
  choices: tuple[str, ...]
  answers: tuple[str, ...]
  key: tuple[int, ...]


def task(name: str) -> Task:
  """The task of a name. Raises BadInput, naming the nearest, where there is none."""
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)
    raise errors.BadInput(
      f'no SuperGLUE task {name!r}: did you mean {near[0]!r}? There are: {", ".join(TASKS)}'
    )
  return TASKS[name]


def rows(name: str, examples: Iterable[Mapping[str, Any]], split: str) -> Iterator[Row]:
  """The examples of a split, formatted.

  A training example of `record` is one row for each answer, and `wsc_simple` is trained on those
  where the referent is right, as in T5; every example that is evaluated is one row.
  """
  for example in examples:
    if name == 'record':
      yield from _record(example, split)
    elif name == 'wsc_simple':
      if split != 'train' or example['label'] == 1:
        yield _referent(example)
    else:
      yield _classified(name, example)


def _classified(name, example):
  of = task(name)
  texts = {shown: example[field] for shown, field in of.fields.items()}
  if name == 'wsc':
    texts['text'] = wsc.marked_both(example)
  text = _joined(of.prefix, texts)
  if name == 'multirc':
    text = re.sub('</?b>', '', re.sub('<br>', ' ', text))
  label = int(example['label'])
  target = of.labels[label] if label >= 0 else UNKNOWN
  return Row(text, target, label, of.labels, (), _key(example))


def _record(example, split):
  passage = re.sub(r'([.?!"\'])\n@highlight\n', r'\1 ', example['passage'])
  passage = re.sub(r'\n@highlight\n', '. ', passage)
  texts = {
    'query': example['query'],
    'entities': ', '.join(example['entities']),
    'passage': passage,
  }
  answers = tuple(example['answers'])
  known = dict(label=-1, choices=tuple(example['entities']), answers=answers, key=_key(example))
  written = answers if split == 'train' else answers[:1]
  for answer in written or (UNKNOWN,):
    yield Row(_joined('record', texts), answer, **known)


def _referent(example):
  text = f'wsc: {wsc.marked(example)}'
  referent = example['span1_text']
  return Row(text, referent, int(example['label']), (), (referent,), _key(example))


def _joined(prefix, texts):
  return ' '.join([prefix, *(f'{name}: {text}' for name, text in texts.items())])


def _key(example):
  idx = example['idx']
  if isinstance(idx, Mapping):
    names = ('paragraph', 'question', 'answer') if 'paragraph' in idx else ('passage', 'query')
    return tuple(int(idx[name]) for name in names)
  return (int(idx),)
