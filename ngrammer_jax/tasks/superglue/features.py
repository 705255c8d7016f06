"""Tasks of seqio as arrays: examples to evaluate, and rows to train on.

B rows, T tokens of a row.
"""

from collections.abc import Iterator
import dataclasses
import logging

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import streams
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.superglue import registration
from ngrammer_jax.tasks.vocabulary import SHIFT

tf, seqio = tensorflow.load()


@dataclasses.dataclass(frozen=True)
class Example:
  """A tokenised example.

  Attributes:
    inputs, targets: ids, each with its end.
    label, key, answers, choices: see `formats.Row`.
  """

  inputs: np.ndarray
  targets: np.ndarray
  label: int
  key: tuple[int, ...]
  answers: tuple[str, ...]
  choices: tuple[str, ...]


def examples(name: str, split: str, inputs: int, targets: int, truncate: bool) -> Iterator[Example]:
  """The examples of a task, in the order of its files, each exactly once.

  Args:
    name: of the task, as in `formats.TASKS`.
    split: train, validation or test.
    inputs, targets: tokens of each at most, with their ends.
    truncate: cut what is longer.

  Raises:
    BadInput: something is longer, and not to be cut.
  """
  task = seqio.get_mixture_or_task(registration.PREFIX + name)
  if not truncate:
    _check_lengths(task, name, split, {'inputs': inputs, 'targets': targets})
  lengths = {'inputs': inputs, 'targets': targets}
  text = lambda values: tuple(value.decode() for value in values.tolist())
  for row in task.get_dataset(lengths, split, shuffle=False).as_numpy_iterator():
    yield Example(
      row['inputs'] - SHIFT,
      row['targets'] - SHIFT,
      int(row['label']),
      tuple(row['idx'].tolist()),
      text(row['answers']),
      text(row['choices']),
    )


def training_rows(name: str, length: int, targets: int, packed: bool, truncate: bool):
  """All training examples of a task as rows of `length` tokens, in a `streams.Segment`.

  The converter of seqio puts inputs and targets one after the other; the targets alone count.
  Packed, a row has as many examples as fit, and each starts a document: nothing of a model looks
  from one into the other.
  """
  task = seqio.get_mixture_or_task(registration.PREFIX + name)
  lengths = {'inputs': length - targets, 'targets': targets}
  if not truncate:
    _check_lengths(task, name, 'train', lengths)
  vocabulary = task.output_features['targets'].vocabulary
  converter = seqio.PrefixLMFeatureConverter(pack=packed, bos_id=vocabulary.bos_id)
  # Shuffled once, so that examples packed together are of anywhere.
  dataset = task.get_dataset(lengths, 'train', shuffle=True, seed=0)
  keep = ('inputs', 'targets')
  dataset = dataset.map(lambda example: {name: example[name] for name in keep})
  columns: dict[str, list[np.ndarray]] = {}
  for row in converter(dataset, lengths).as_numpy_iterator():
    for feature, values in row.items():
      columns.setdefault(feature, []).append(values)
  if not columns:
    raise errors.BadInput(f'SuperGLUE task {name} has no training examples')
  return _segment({feature: np.stack(rows) for feature, rows in columns.items()}, packed)


def _segment(of, packed):
  """What the converter gives, as a segment of all rows."""
  targets_BxT = of['decoder_target_tokens']
  if packed:
    valid_BxT = of['decoder_segment_ids'] > 0
    starts_BxT = valid_BxT & (of['decoder_positions'] == 0)
  else:
    valid_BxT = targets_BxT > 0
    starts_BxT = np.zeros_like(valid_BxT)
    starts_BxT[:, 0] = True
  ours = lambda ids: np.where(valid_BxT, ids - SHIFT, 0).astype(np.int32)
  # The converter counts the first target's input among the prefix.
  return streams.Segment(
    ours(of['decoder_input_tokens']),
    ours(targets_BxT),
    starts_BxT,
    valid_BxT.astype(np.float32),
    of['decoder_loss_weights'].astype(np.float32),
    (of['decoder_causal_attention'] > 0) & valid_BxT,
  )


def _check_lengths(task, name, split, lengths):
  for number, row in enumerate(task.get_dataset(None, split, shuffle=False).as_numpy_iterator()):
    for feature, most in lengths.items():
      if len(row[feature]) > most:
        raise errors.BadInput(
          f'SuperGLUE task {name}, {split}, example {number}: {feature} of {len(row[feature]):,} '
          f'tokens, and there is room for {most:,}: raise training.segment_length'
          + (
            ', lower finetune.targets_length'
            if feature == 'inputs'
            else ' and finetune.targets_length'
          )
          + ', or set finetune.truncate=True'
        )
  logging.info('%s, %s: all examples fit', name, split)
