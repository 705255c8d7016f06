"""SuperGLUE as tasks of seqio, over any vocabulary of ours.

  names = registration.register(source, vocabulary)
  dataset = seqio.get_mixture_or_task('ngrammer_superglue_rte').get_dataset(lengths, 'train')

This file imports seqio and TensorFlow, and is itself imported only where a task is used.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.superglue import formats, metrics, reader
from ngrammer_jax.tasks.vocabulary import TaskVocabulary

tf, seqio = tensorflow.load()

PREFIX, MIXTURE = 'ngrammer_superglue_', 'ngrammer_superglue_mixture'
Examples = Callable[[str, str], list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the examples are: the files of the benchmark, or what TFDS has prepared.

  Attributes:
    folder: with the original files, see `reader.read`. None: not there.
    tfds_dir: a data directory of TFDS with prepared tasks, which is only read. None: its own.
    download: whether TFDS may fetch what is missing from the network.
  """

  folder: pathlib.Path | None = None
  tfds_dir: pathlib.Path | None = None
  download: bool = False

  def examples(self, config: str, split: str) -> list[dict[str, Any]]:
    """The examples of a split. Raises BadInput where they are not found."""
    if self.folder is not None:
      return reader.read(self.folder, config, split)
    import tensorflow_datasets as tfds

    directory = None if self.tfds_dir is None else str(self.tfds_dir)
    builder = tfds.builder(f'super_glue/{config}:1.0.2', data_dir=directory)
    if not self.download and not pathlib.Path(builder.data_dir).is_dir():
      raise errors.BadInput(
        f'SuperGLUE is not here: set data.superglue_dir to the folder with its files (BoolQ.zip or '
        f'BoolQ/train.jsonl, ...), prepare {builder.data_dir} with TFDS, or let it be fetched with '
        f'finetune.download=True'
      )
    if self.download:
      builder.download_and_prepare()
    return [_plain(example) for example in tfds.as_numpy(builder.as_dataset(split=split))]


def register(source: Source, vocabulary: vocabularies.Vocabulary) -> list[str]:
  """Registers a task for each of `formats.TASKS`, and the mixture of those to train on.

  Again is no error: what was registered before is replaced. Returns the names.
  """
  known = TaskVocabulary(vocabulary)
  read = functools.lru_cache(maxsize=None)(source.examples)
  features = {
    name: seqio.Feature(known, add_eos=True, dtype=tf.int32) for name in ('inputs', 'targets')
  }
  for name, task in formats.TASKS.items():
    seqio.TaskRegistry.remove(PREFIX + name)
    seqio.TaskRegistry.add(
      PREFIX + name,
      source=seqio.FunctionDataSource(
        functools.partial(_dataset, name, read), splits=reader.CONFIGS[task.config].splits
      ),
      preprocessors=[
        functools.partial(seqio.preprocessors.tokenize, with_eos=False),
        functools.partial(_cut, side=task.truncated_side),
        seqio.preprocessors.append_eos,
      ],
      output_features=features,
      postprocess_fn=functools.partial(_postprocessed, name),
      metric_fns=[functools.partial(_scored, name)],
    )
  seqio.MixtureRegistry.remove(MIXTURE)
  mixed = [
    (PREFIX + name, functools.partial(_count, name, read)) for name in formats.SUPERGLUE_TASKS
  ]
  seqio.MixtureRegistry.add(MIXTURE, mixed)
  return [*(PREFIX + name for name in formats.TASKS), MIXTURE]


def _dataset(name, read, split, shuffle_files, seed=None):
  """The rows of a split as seqio takes them."""
  del shuffle_files, seed  # read whole; seqio shuffles rows
  task = formats.find_task(name)
  rows = list(formats.format_rows(name, read(task.config, split), split))
  texts = lambda of: tf.constant([of(row) for row in rows], tf.string)
  ragged = lambda of: tf.ragged.constant([list(of(row)) for row in rows], dtype=tf.string)
  return tf.data.Dataset.from_tensor_slices(
    {
      'inputs': texts(lambda row: row.inputs),
      'targets': texts(lambda row: row.targets),
      'label': tf.constant([row.label for row in rows], tf.int32),
      'idx': tf.constant([row.key for row in rows], tf.int32),
      'choices': ragged(lambda row: row.choices),
      'answers': ragged(lambda row: row.answers),
    }
  )


def _count(name, read, task):
  """The rate of a task in the mixture: its training rows."""
  del task
  return float(
    sum(
      1 for _ in formats.format_rows(name, read(formats.find_task(name).config, 'train'), 'train')
    )
  )


def _cut(dataset, sequence_length, side):
  """Cuts texts that are too long, with room for their end."""
  if sequence_length is None:
    return dataset

  def cut(example):
    for name in ('inputs', 'targets'):
      kept = sequence_length[name] - 1
      left = name == 'inputs' and side == 'left'
      ids = example[name]
      example[name] = ids[tf.maximum(tf.size(ids) - kept, 0) :] if left else ids[:kept]
    return example

  return dataset.map(cut)


def _postprocessed(name, text, example=None, is_target=False):
  """What a metric compares: a class, or the text with what it is compared with."""
  task = formats.find_task(name)
  if is_target:
    text_of = lambda value: value.decode() if isinstance(value, bytes) else str(value)
    answers = tuple(text_of(answer) for answer in np.asarray(example['answers']).tolist())
    return int(example['label']), tuple(int(i) for i in np.atleast_1d(example['idx'])), answers
  if task.labels:
    return task.labels.index(text) if text in task.labels else -1
  return text


def _scored(name, targets, predictions):
  labels, keys, answers = zip(*targets, strict=True)
  return metrics.compute_metrics(name, labels, keys, answers, predictions)


def _plain(example):
  """An example of TFDS in plain values."""
  if isinstance(example, dict):
    return {name: _plain(value) for name, value in example.items()}
  if isinstance(example, np.ndarray):
    return [_plain(value) for value in example.tolist()]
  if isinstance(example, bytes):
    return example.decode()
  return int(example)
