"""Arrays from seqio tasks: evaluation examples and training rows.

B rows, T tokens per row.
"""

from collections.abc import Iterator
import dataclasses
import logging

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import streams
from ngrammer_jax.system import progress
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.superglue import registration
from ngrammer_jax.tasks.vocabulary import ID_OFFSET

tf, seqio = tensorflow.load()


@dataclasses.dataclass(frozen=True)
class Example:
  """A tokenised example.

  Attributes:
    inputs, targets: token ids; each ends with the document end.
    text: input text, not truncated.
    inputs_length: number of input tokens before truncation, with their end token.
    label, key, answers, choices: see `formats.Row`.
  """

  inputs: np.ndarray
  targets: np.ndarray
  text: str
  inputs_length: int
  label: int
  key: tuple[int, ...]
  answers: tuple[str, ...]
  choices: tuple[str, ...]


def read_examples(
  name: str, split: str, max_inputs: int, max_targets: int, truncate: bool
) -> Iterator[Example]:
  """Yields the examples of a task in file order, each exactly once.

  Args:
    name: task name, a key of `formats.TASKS`.
    split: train, validation or test.
    max_inputs, max_targets: maximum number of tokens of each, including the document end.
    truncate: truncate longer examples.

  Raises:
    BadInput: an example is longer and `truncate` is False.
  """
  task = seqio.get_mixture_or_task(registration.TASK_PREFIX + name)
  lengths = {'inputs': max_inputs, 'targets': max_targets}
  if not truncate:
    _check_lengths(task, name, split, lengths)
  decode = lambda values: tuple(value.decode() for value in values.tolist())
  for row in _read_rows(name, split, task.get_dataset(lengths, split, shuffle=False)):
    yield Example(
      row['inputs'] - ID_OFFSET,
      row['targets'] - ID_OFFSET,
      row['inputs_pretokenized'].decode(),
      int(row['inputs_length']),
      int(row['label']),
      tuple(row['idx'].tolist()),
      decode(row['answers']),
      decode(row['choices']),
    )


def read_training_rows(
  name: str, length: int, max_targets: int, packed: bool, truncate: bool
) -> tuple[streams.Segment, np.ndarray]:
  """Returns all training examples of a task as rows of `length` tokens, and their input lengths.

  The input lengths are before truncation, in any order. In a row, the targets follow the inputs,
  and only targets count in the loss.

  Args:
    name: task name, a key of `formats.TASKS`.
    length: T.
    max_targets: maximum number of target tokens, including the document end.
    packed: put as many examples into a row as fit. Each is a separate document, so examples do not
      affect each other.
    truncate: truncate longer examples.

  Raises:
    BadInput: there are no examples, or an example is longer and `truncate` is False.
  """
  task = seqio.get_mixture_or_task(registration.TASK_PREFIX + name)
  lengths = {'inputs': length - max_targets, 'targets': max_targets}
  if not truncate:
    _check_lengths(task, name, 'train', lengths)
  vocabulary = task.output_features['targets'].vocabulary
  converter = seqio.PrefixLMFeatureConverter(pack=packed, bos_id=vocabulary.bos_id)
  # Shuffle once, so that packed examples are not neighbours in the file.
  examples = list(
    _read_rows(name, 'train', task.get_dataset(lengths, 'train', shuffle=True, seed=0))
  )
  if not examples:
    raise errors.BadInput(f'SuperGLUE task {name} has no training examples')
  dataset = tf.data.Dataset.from_generator(
    lambda: ({feature: example[feature] for feature in lengths} for example in examples),
    output_signature=dict.fromkeys(lengths, tf.TensorSpec([None], tf.int32)),
  )
  rows = list(converter(dataset, lengths).as_numpy_iterator())
  segment = _to_segment({feature: np.stack([row[feature] for row in rows]) for feature in rows[0]})
  return segment, np.array([example['inputs_length'] for example in examples])


def _read_rows(name, split, dataset):
  """Yields the examples of a dataset as NumPy arrays, and shows the progress."""
  count = max(int(dataset.cardinality()), 0)
  with progress.Progress(f'tokenising {name}, {split}', count, 'examples') as bar:
    for row in dataset.as_numpy_iterator():
      bar.advance(1)
      yield row


def _to_segment(features):
  """Converts the features of the seqio converter into a segment with all rows."""
  targets_BxT = features['decoder_target_tokens']
  if 'decoder_segment_ids' in features:  # packed
    valid_BxT = features['decoder_segment_ids'] > 0
    starts_BxT = valid_BxT & (features['decoder_positions'] == 0)
  else:
    valid_BxT = targets_BxT > 0
    starts_BxT = np.zeros_like(valid_BxT)
    starts_BxT[:, 0] = True
  remove_offset = lambda ids: np.where(valid_BxT, ids - ID_OFFSET, 0).astype(np.int32)
  # The bidirectional prefix includes the input token of the first target.
  return streams.Segment(
    remove_offset(features['decoder_input_tokens']),
    remove_offset(targets_BxT),
    starts_BxT,
    valid_BxT.astype(np.float32),
    features['decoder_loss_weights'].astype(np.float32),
    (features['decoder_causal_attention'] > 0) & valid_BxT,
  )


def _check_lengths(task, name, split, lengths):
  """Raises BadInput if an example is longer than `lengths`."""
  remedies = {
    'inputs': ', lower finetune.targets_length',
    'targets': ' and finetune.targets_length',
  }
  for number, row in enumerate(task.get_dataset(None, split, shuffle=False).as_numpy_iterator()):
    for feature, max_tokens in lengths.items():
      if len(row[feature]) > max_tokens:
        raise errors.BadInput(
          f'SuperGLUE task {name}, {split}, example {number}: {feature} has {len(row[feature]):,} '
          f'tokens, but the maximum is {max_tokens:,}: raise training.segment_length'
          f'{remedies[feature]}, or set finetune.truncate=True'
        )
  logging.info('%s, %s: all examples fit', name, split)
