"""C4 prepared by TFDS: as a seqio task, and as shards for training.

  name = c4.register(vocabulary, data_dir='/path/to/tensorflow_datasets')
  dataset = seqio.get_mixture_or_task(name).get_dataset({'targets': 512}, 'train')

This module imports seqio and TensorFlow, so it is imported only when C4 is used.
"""

from collections.abc import Iterator
import dataclasses
import functools
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.formats.interface import START, DocumentText, FilePosition
from ngrammer_jax.system import storage
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.vocabulary import TaskVocabulary

tf, seqio = tensorflow.load()

TASK_PREFIX = 'ngrammer_'
SPLITS = ('train', 'validation')
READ_BATCH = 16  # texts per read; batches have less overhead in TensorFlow


def open_corpus(config: data_config.DataConfig) -> corpora.Corpus:
  """Opens the TFDS corpus `data.corpus`, prepared before.

  `data.path` is the TFDS data directory; None selects the default one. Nothing is downloaded.

  Raises:
    BadInput: the corpus is not prepared.
  """
  source = _open_source(config.corpus, config.path)
  shards = {split: TfdsShards(source, split) for split in SPLITS}
  return corpora.from_shards(config.corpus, shards)


def register(
  vocabulary: vocabularies.Vocabulary, name: str = 'c4/en', data_dir: str | None = None
) -> str:
  """Registers a seqio task with the texts of C4 as targets, and returns the task name.

  An already registered task is replaced. Token ids are larger by 1 than in the vocabulary, see
  `TaskVocabulary`.

  Args:
    vocabulary: tokenises the texts.
    name: TFDS dataset.
    data_dir: TFDS data directory. None: the default one.
  """
  task = TASK_PREFIX + name.replace('/', '_').replace('.', '_')
  seqio.TaskRegistry.remove(task)
  seqio.TaskRegistry.add(
    task,
    source=_open_source(name, data_dir),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={'targets': 'text'}),
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={'targets': seqio.Feature(TaskVocabulary(vocabulary), dtype=tf.int32)},
    metric_fns=[],
  )
  return task


@dataclasses.dataclass(frozen=True)
class TfdsShards:
  """Shards of a split prepared by TFDS, see `corpus.Shards`.

  Attributes:
    source: a `seqio.TfdsDataSource`.
    split: the split.
  """

  source: Any
  split: str

  @functools.cached_property
  def files(self) -> tuple[pathlib.Path, ...]:
    """Paths of the shards, in order."""
    return tuple(map(storage.path, self.source.list_shards(self.split)))

  def read(
    self, shard: int, position: FilePosition = START
  ) -> Iterator[tuple[bytes, FilePosition]]:
    """See `corpus.Shards`. The position is the number of the document."""
    info = seqio.ShardInfo(shard, len(self.files))
    dataset = self.source.get_dataset(self.split, shuffle=False, shard_info=info)
    options = tf.data.Options()
    # Many datasets are open at once. With autotuning, closing one takes seconds.
    options.autotune.enabled = False
    document = position.document
    dataset = dataset.skip(document).batch(READ_BATCH).with_options(options)
    try:
      for examples in dataset.as_numpy_iterator():
        for text in examples['text']:
          document += 1
          yield text, FilePosition(document)
    except tf.errors.OpError as error:
      raise errors.BadInput(f'{self.files[shard]} is damaged: {error.message}') from error

  def text(self, shard: int, document: int, record: bytes) -> DocumentText:
    """See `corpus.Shards`."""
    text_files.decode(record, f'{self.files[shard]}, example {document + 1:,}')
    return DocumentText(record)


def _open_source(name: str, data_dir: str | None) -> Any:
  """Returns the seqio source of the newest prepared version. Raises BadInput without one."""
  import tensorflow_datasets as tfds

  root = data_dir or tfds.core.constants.DATA_DIR
  if storage.is_remote(root):
    root = storage.path(root)
  else:
    root = storage.user_path('data.path', root)
  folders = [path.parent for path in (root / name).glob('*/dataset_info.json')]
  prepared = sorted(folders, key=_version)
  if not prepared:
    raise errors.BadInput(
      f'data.corpus={name!r}: TFDS has prepared nothing in {root / name}. Set data.path to the '
      f'data directory that has it, prepare it (tfds build {name}, which takes Apache Beam and '
      f'hours), or read its files with data.corpus=shards'
    )
  return seqio.TfdsDataSource(
    f'{name}:{prepared[-1].name}', tfds_data_dir=str(root), read_only=True
  )


def _version(folder: pathlib.Path) -> tuple[int, ...]:
  """Returns the version numbers in a folder name."""
  return tuple(int(part) for part in folder.name.split('.') if part.isdigit())
