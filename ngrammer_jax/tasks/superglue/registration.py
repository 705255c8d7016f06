"""Registration of SuperGLUE as seqio tasks, for any vocabulary of this package.

  names = registration.register(source, vocabulary)
  dataset = seqio.get_mixture_or_task('ngrammer_superglue_rte').get_dataset(lengths, 'train')

This module imports seqio and TensorFlow, so it is imported only when a task is used.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.system import storage
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.superglue import formats, metrics, reader
from ngrammer_jax.tasks.vocabulary import TaskVocabulary

tf, seqio = tensorflow.load()

TASK_PREFIX = 'ngrammer_superglue_'
MIXTURE_NAME = 'ngrammer_superglue_mixture'


@dataclasses.dataclass(frozen=True)
class ExampleSource:
  """Location of the examples: original files, or datasets prepared by TFDS.

  Attributes:
    folder: folder with the original files, see `reader.read`. None: use TFDS.
    tfds_dir: data directory of TFDS with the prepared datasets. None: the default of TFDS.
    download: whether TFDS may download and prepare missing datasets.
  """

  folder: str | pathlib.Path | None = None
  tfds_dir: str | pathlib.Path | None = None
  download: bool = False

  def examples(self, config: str, split: str) -> list[dict[str, Any]]:
    """Returns the examples of a split. Raises BadInput if they do not exist."""
    if self.folder is not None:
      return reader.read(self.folder, config, split)
    reader.check_split(config, split)
    import tensorflow_datasets as tfds

    data_dir = self.tfds_dir and storage.user_path('finetune.tfds_dir', self.tfds_dir)
    builder = tfds.builder(f'super_glue/{config}:1.0.2', data_dir=data_dir)
    if not self.download and not pathlib.Path(builder.data_dir).is_dir():
      raise errors.BadInput(
        f'SuperGLUE was not found: set data.superglue_dir to the folder with its files (BoolQ.zip '
        f'or BoolQ/train.jsonl, ...), prepare {builder.data_dir} with TFDS, or download it with '
        f'finetune.download=True'
      )
    if self.download:
      builder.download_and_prepare()
    return [_to_plain_values(example) for example in tfds.as_numpy(builder.as_dataset(split=split))]


def register(
  source: ExampleSource,
  vocabulary: vocabularies.Vocabulary,
  wsc_spans: str = 'all',
  format: str = 't5',
) -> list[str]:
  """Registers the seqio tasks of `formats.TASKS`, and the mixture of `formats.SUPERGLUE_TASKS`.

  Already registered tasks are replaced. Returns the names of the tasks and the mixture.

  Args:
    source: location of the examples.
    vocabulary: the vocabulary of the model.
    wsc_spans: a key of `formats.WSC_SPANS`.
    format: value of finetune.format. A question has no end token.
  """
  task_vocabulary = TaskVocabulary(vocabulary)
  is_question = format == 'question'
  read = functools.cache(source.examples)

  def read_rows(name: str, split: str) -> list[formats.FormattedExample]:
    examples = read(formats.TASKS[name].config, split)
    return list(formats.format_rows(name, examples, split, wsc_spans, format))

  features = {
    'inputs': seqio.Feature(task_vocabulary, add_eos=not is_question, dtype=tf.int32),
    'targets': seqio.Feature(task_vocabulary, add_eos=True, dtype=tf.int32),
  }
  for name, task in formats.TASKS.items():
    preprocessors = [
      functools.partial(seqio.preprocessors.tokenize, with_eos=False),
      _count_inputs,
    ]
    if is_question or task.truncated_side == 'left':
      preprocessors.append(_truncate_left)
    preprocessors.append(seqio.preprocessors.append_eos_after_trim)
    seqio.TaskRegistry.remove(TASK_PREFIX + name)
    seqio.TaskRegistry.add(
      TASK_PREFIX + name,
      source=seqio.FunctionDataSource(
        functools.partial(_make_dataset, name, read_rows), splits=reader.CONFIGS[task.config].splits
      ),
      preprocessors=preprocessors,
      output_features=features,
      postprocess_fn=functools.partial(_postprocess, name),
      metric_fns=[functools.partial(_compute_metrics, name)],
    )
  seqio.MixtureRegistry.remove(MIXTURE_NAME)
  rates = []
  for name in formats.SUPERGLUE_TASKS:
    rates.append((TASK_PREFIX + name, functools.partial(_count_training_rows, name, read_rows)))
  seqio.MixtureRegistry.add(MIXTURE_NAME, rates)
  return [*(TASK_PREFIX + name for name in formats.TASKS), MIXTURE_NAME]


ReadRows = Callable[[str, str], list[formats.FormattedExample]]  # of a task and a split


def _count_training_rows(name: str, read_rows: ReadRows, task: seqio.Task) -> float:
  """Returns the rate of a task in the mixture: the number of its training rows."""
  del task
  return float(len(read_rows(name, 'train')))


def _make_dataset(
  name: str, read_rows: ReadRows, split: str, shuffle_files: bool, seed: int | None = None
) -> tf.data.Dataset:
  """Returns the rows of a split as a TensorFlow dataset."""
  del shuffle_files, seed  # all rows are read, and seqio shuffles them
  rows = read_rows(name, split)
  choices = [list(row.choices) for row in rows]
  answers = [list(row.answers) for row in rows]
  return tf.data.Dataset.from_tensor_slices(
    {
      'inputs': tf.constant([row.inputs for row in rows], tf.string),
      'targets': tf.constant([row.targets for row in rows], tf.string),
      'label': tf.constant([row.label for row in rows], tf.int32),
      'idx': tf.constant([row.key for row in rows], tf.int32),
      'choices': tf.ragged.constant(choices, dtype=tf.string),
      'answers': tf.ragged.constant(answers, dtype=tf.string),
    }
  )


@seqio.map_over_dataset
def _count_inputs(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
  """Adds the number of input tokens, with their end token, before they are truncated."""
  return example | {'inputs_length': tf.size(example['inputs']) + 1}


@seqio.map_over_dataset
def _truncate_left(
  example: dict[str, tf.Tensor], sequence_length: Mapping[str, int] | None
) -> dict[str, tf.Tensor]:
  """Keeps the end of the inputs, with room for their end token."""
  if sequence_length is not None:
    example['inputs'] = example['inputs'][-(sequence_length['inputs'] - 1) :]
  return example


def _postprocess(
  name: str, text: str, example: dict[str, Any] | None = None, is_target: bool = False
) -> Any:
  """Converts a target to (label, key, answers), and a predicted text to a class or a text."""
  task = formats.find_task(name)
  if is_target:
    answers = tuple(answer.decode() for answer in example['answers'].tolist())
    return int(example['label']), tuple(example['idx'].tolist()), answers
  if task.labels:
    return formats.find_class(text, [choice.decode() for choice in example['choices'].tolist()])
  return text


def _compute_metrics(
  name: str, targets: list[tuple[Any, ...]], predictions: list[Any]
) -> dict[str, float]:
  labels, keys, answers = zip(*targets, strict=True)
  return metrics.compute_metrics(name, labels, keys, answers, predictions)


def _to_plain_values(example: Any) -> Any:
  """Converts an example of TFDS to plain Python values."""
  if isinstance(example, dict):
    return {name: _to_plain_values(value) for name, value in example.items()}
  if isinstance(example, np.ndarray):
    return [_to_plain_values(value) for value in example.tolist()]
  if isinstance(example, bytes):
    return example.decode()
  return int(example)
