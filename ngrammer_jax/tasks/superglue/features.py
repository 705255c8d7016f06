"""Arrays from seqio tasks: evaluation examples and training rows.

B rows, T tokens per row.
"""

import dataclasses
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.system import progress
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.superglue import registration, truncation
from ngrammer_jax.tasks.vocabulary import ID_OFFSET

tf, seqio = tensorflow.load()


@dataclasses.dataclass(frozen=True)
class Example:
  """A tokenised example.

  Attributes:
    inputs, targets: token ids; each ends with the document end.
    text: input text, not truncated.
    label, key, answers, choices: see `formats.FormattedExample`.
  """

  inputs: np.ndarray
  targets: np.ndarray
  text: str
  label: int
  key: tuple[int, ...]
  answers: tuple[str, ...]
  choices: tuple[str, ...]


def read_examples(
  name: str, split: str, length: int, max_targets: int, truncate: bool
) -> list[Example]:
  """Returns the examples of a task in file order, each exactly once.

  Args:
    name: task name, a key of `formats.TASKS`.
    split: train, validation or test.
    length: maximum number of tokens of inputs and targets.
    max_targets: maximum number of these for the targets, including the document end.
    truncate: truncate longer examples.

  Raises:
    BadInput: an example is longer and `truncate` is False.
  """
  rows = _read_rows(name, split, length, max_targets, truncate, shuffle=False)
  return [_to_example(row) for row in rows]


def _to_example(row: dict[str, Any]) -> Example:
  """Converts a row of the seqio task."""
  return Example(
    inputs=row['inputs'] - ID_OFFSET,
    targets=row['targets'] - ID_OFFSET,
    text=row['inputs_pretokenized'].decode(),
    label=int(row['label']),
    key=tuple(row['idx'].tolist()),
    answers=_decode_texts(row['answers']),
    choices=_decode_texts(row['choices']),
  )


def _decode_texts(values: np.ndarray) -> tuple[str, ...]:
  return tuple(value.decode() for value in values.tolist())


def read_training_rows(
  name: str, length: int, max_targets: int, packed: bool, truncate: bool
) -> token_batch.Batch:
  """Returns all training examples of a task as rows of `length` tokens.

  In a row, the targets follow the inputs, and only targets count in the loss.

  Args:
    name: task name, a key of `formats.TASKS`.
    length: T.
    max_targets: maximum number of target tokens, including the document end.
    packed: put as many examples into a row as fit. Each is a separate document, so examples do not
      affect each other.
    truncate: truncate longer examples.

  Raises:
    BadInput: an example is longer and `truncate` is False.
  """
  # Shuffle once, so that packed examples are not neighbours in the file.
  examples = _read_rows(name, 'train', length, max_targets, truncate, shuffle=True, seed=0)
  vocabulary = _task(name).output_features['targets'].vocabulary
  converter = seqio.PrefixLMFeatureConverter(pack=packed, bos_id=vocabulary.bos_id)
  lengths = {'inputs': length - max_targets, 'targets': max_targets}

  def read_features():
    for example in examples:
      yield {feature: example[feature] for feature in lengths}

  dataset = tf.data.Dataset.from_generator(
    read_features,
    output_signature=dict.fromkeys(lengths, tf.TensorSpec([None], tf.int32)),
  )
  rows = list(converter(dataset, lengths).as_numpy_iterator())
  arrays = {feature: np.stack([row[feature] for row in rows]) for feature in rows[0]}
  return _to_batch(arrays, vocabulary.vocabulary.adds_start)


def _task(name: str) -> seqio.Task:
  return seqio.get_mixture_or_task(registration.TASK_PREFIX + name)


def _read_rows(
  name: str, split: str, length: int, max_targets: int, truncate: bool, **shuffling: Any
) -> list[dict[str, Any]]:
  """Returns the examples of a task as NumPy arrays; logs how many inputs are truncated."""
  lengths = {'inputs': length - max_targets, 'targets': max_targets}
  truncated_lengths = None
  if truncate:
    truncated_lengths = lengths
  dataset = _task(name).get_dataset(truncated_lengths, split, **shuffling)
  rows = []
  count = max(int(dataset.cardinality()), 0)
  with progress.Progress(f'tokenising {name}, {split}', count, 'examples') as bar:
    for row in dataset.as_numpy_iterator():
      bar.advance(1)
      for feature, max_tokens in lengths.items():
        if len(row[feature]) > max_tokens:
          raise errors.BadInput(
            f'SuperGLUE task {name}, {split}, idx {row["idx"].tolist()}: {feature} has '
            f'{len(row[feature]):,} tokens, but the maximum is {max_tokens:,}: change '
            f'training.segment_length or finetune.targets_length, or set finetune.truncate=True'
          )
      rows.append(row)
  input_lengths = [row['inputs_length'] for row in rows]
  truncation.log_lengths(name, split, input_lengths, lengths['inputs'], max_targets)
  return rows


def _to_batch(features: dict[str, np.ndarray], adds_start: bool) -> token_batch.Batch:
  """Converts the features of the seqio converter into a batch with all rows.

  Without `adds_start`, the document start that the converter puts before an input is padding.
  """
  targets_BxT = features['decoder_target_tokens']
  if 'decoder_segment_ids' in features:  # packed
    valid_BxT = features['decoder_segment_ids'] > 0
    starts_BxT = valid_BxT & (features['decoder_positions'] == 0)
  else:
    valid_BxT = targets_BxT > 0
    starts_BxT = np.zeros_like(valid_BxT)
    starts_BxT[:, 0] = True
  if not adds_start:
    valid_BxT = valid_BxT & ~starts_BxT
    starts_BxT = np.roll(starts_BxT, 1, axis=1)
  inputs_BxT = features['decoder_input_tokens']
  # The bidirectional prefix includes the input token of the first target.
  return token_batch.Batch(
    tokens_BxT=np.where(valid_BxT, inputs_BxT - ID_OFFSET, 0).astype(np.int32),
    targets_BxT=np.where(valid_BxT, targets_BxT - ID_OFFSET, 0).astype(np.int32),
    starts_BxT=starts_BxT,
    valid_BxT=valid_BxT.astype(np.float32),
    counts_BxT=features['decoder_loss_weights'].astype(np.float32),
    prefix_BxT=(features['decoder_causal_attention'] > 0) & valid_BxT,
  )
