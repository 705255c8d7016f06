"""C4 through seqio: what TFDS has prepared, as a task and as the shards of a training.

  name = c4.register(vocabulary, data_dir='/path/to/tensorflow_datasets')
  dataset = seqio.get_mixture_or_task(name).get_dataset({'targets': 512}, 'train')

This file imports seqio and TensorFlow, and is itself imported only where C4 is used.
"""

from collections.abc import Iterator
import dataclasses
import functools
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data import corpora, token_cache
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks import tensorflow
from ngrammer_jax.tasks.vocabulary import TaskVocabulary

tf, seqio = tensorflow.load()

PREFIX = 'ngrammer_'
SPLITS = ('train', 'validation')
TOGETHER = 16  # texts that TensorFlow gives at a time, which costs it less


def open_corpus(config: token_cache.DataConfig) -> corpora.Corpus:
  """What TFDS has prepared of `data.corpus` in `data.path`, its data directory, or its own one.

  Nothing is ever downloaded. Raises BadInput where it is not there.
  """
  source = _source(config.corpus, config.path)
  found = {split: TfdsShards(source, split) for split in SPLITS}
  return corpora.from_shards(config.corpus, found)


def register(
  vocabulary: vocabularies.Vocabulary, name: str = 'c4/en', data_dir: str | None = None
) -> str:
  """Registers a task with the texts of C4 as its targets. Again is no error. Returns its name.

  Ids are one more than those of the vocabulary, see `TaskVocabulary`.
  """
  task = PREFIX + name.replace('/', '_').replace('.', '_')
  seqio.TaskRegistry.remove(task)
  seqio.TaskRegistry.add(
    task,
    source=_source(name, data_dir),
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
  """The shards of a split that TFDS has prepared (see `data.shards.Shards`)."""

  source: Any
  split: str

  @functools.cached_property
  def files(self) -> tuple[pathlib.Path, ...]:
    """The files, in order."""
    return tuple(map(pathlib.Path, self.source.list_shards(self.split)))

  @property
  def names(self) -> tuple[str, ...]:
    """As they are said in errors."""
    return tuple(map(str, self.files))

  def read(self, shard: int, document: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """See `data.shards.Shards`. Examples are counted, not looked for: there are no offsets."""
    info = seqio.ShardInfo(shard, len(self.files))
    dataset = self.source.get_dataset(self.split, shuffle=False, shard_info=info)
    options = tf.data.Options()
    # Of many datasets at once: where each is tuned all the time, to end one takes seconds.
    options.autotune.enabled = False
    dataset = dataset.skip(document).batch(TOGETHER).with_options(options)
    try:
      for examples in dataset.as_numpy_iterator():
        for text in examples['text']:
          yield text, 0
    except tf.errors.OpError as error:
      raise errors.BadInput(f'{self.names[shard]} is damaged: {error.message}') from error

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """See `data.shards.Shards`."""
    try:
      record.decode()
    except UnicodeDecodeError as error:
      name = f'{self.names[shard]}, example {document + 1:,}'
      raise errors.BadInput(f'{name}: {error.reason} in UTF-8') from error
    return record


def _source(name: str, data_dir: str | None) -> Any:
  """The source of the newest version that is prepared."""
  import tensorflow_datasets as tfds

  root = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  prepared = sorted(
    (folder.parent for folder in (root / name).glob('*/dataset_info.json')),
    key=lambda folder: tuple(int(part) for part in folder.name.split('.') if part.isdigit()),
  )
  if not prepared:
    raise errors.BadInput(
      f'data.corpus={name!r}: TFDS has prepared nothing in {root / name}. Set data.path to the '
      f'data directory that has it, prepare it (tfds build {name}, which takes Apache Beam and '
      f'hours), or read its files with data.corpus=shards'
    )
  return seqio.TfdsDataSource(
    f'{name}:{prepared[-1].name}', tfds_data_dir=str(root), read_only=True
  )
