"""C4 as TFDS prepares it: the same as from files, and a task of seqio."""

import json

from etils import epath
import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.data import packing, shards, token_cache
from ngrammer_jax.data import vocabulary as vocabularies
from tests.checks import bad_input

seqio = pytest.importorskip('seqio')
tfds = pytest.importorskip('tensorflow_datasets')

from ngrammer_jax.tasks import c4, tensorflow  # noqa: E402

tf, _ = tensorflow.load()
BYTES = vocabularies.ByteVocabulary()
TEXTS = {'train': [f'text number {i} of some' for i in range(20)], 'validation': ['a', 'b']}


def write_tfds(root, shards_of=3):
  """The texts, as TFDS keeps a dataset that is prepared."""
  folder = epath.Path(root) / 'c4' / 'en' / '3.1.0'
  folder.mkdir(parents=True)
  infos = []
  for split, texts in TEXTS.items():
    count = shards_of if split == 'train' else 1
    files = tfds.core.ShardedFileTemplate(
      data_dir=folder, dataset_name='c4', split=split, filetype_suffix='tfrecord'
    )
    for i, path in enumerate(files.sharded_filepaths(count)):
      with tf.io.TFRecordWriter(str(path)) as file:
        for text in texts[i::count]:
          value = tf.train.BytesList(value=[text.encode()])
          feature = {'text': tf.train.Feature(bytes_list=value)}
          example = tf.train.Example(features=tf.train.Features(feature=feature))
          file.write(example.SerializeToString())
    lengths = [len(texts[i::count]) for i in range(count)]
    info = tfds.core.SplitInfo(
      name=split, shard_lengths=lengths, num_bytes=0, filename_template=files
    )
    infos.append(info)
  features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
  tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=infos)
  return token_cache.DataConfig(corpus='c4/en', path=str(root), vocabulary='bytes')


def write_files(root, shards_of=3):
  root.mkdir()
  for split, texts in TEXTS.items():
    count = shards_of if split == 'train' else 1
    for i in range(count):
      lines = (json.dumps({'text': text}) for text in texts[i::count])
      (root / f'{split}-{i}.jsonl').write_text('\n'.join(lines) + '\n')
  return shards.find(root)['train']


def test_rows_are_those_of_the_same_files(tmp_path, cache):
  config = write_tfds(tmp_path / 'tfds')
  prepared = token_cache.prepare(config, runs.finder(config))
  assert list(prepared.splits) == ['validation']
  assert bytes(prepared.splits['validation'].tokens[[0, 2]].astype(np.uint8)) == b'ab'
  files = write_files(tmp_path / 'files')
  for batch_size in (2, 3, 5):
    rows, expected = (
      packing.Packing(source, BYTES, batch_size, 16, tmp_path / f'{batch_size}{kind}')
      for kind, source in (('tfds', prepared.stream), ('files', files))
    )
    for step in (0, 1, 2, 30, 7):
      one, other = rows.segment(step), expected.segment(step)
      np.testing.assert_array_equal(one.targets_BxT, other.targets_BxT)


def test_the_task(tmp_path):
  write_tfds(tmp_path)
  for _ in range(2):  # again is no error
    name = c4.register(BYTES, data_dir=str(tmp_path))
  task = seqio.get_mixture_or_task(name)
  dataset = task.get_dataset({'targets': 64}, 'validation', shuffle=False)
  found = [example['targets'].tolist() for example in dataset.as_numpy_iterator()]
  assert found == [[ord(text) + 1, BYTES.document_end + 1] for text in 'ab']


def test_what_is_not_prepared_is_not_fetched(tmp_path):
  with bad_input(
    f"data.corpus='c4/en': TFDS has prepared nothing in {tmp_path}/c4/en. Set data.path to the "
    f'data directory that has it, prepare it (tfds build c4/en, which takes Apache Beam and '
    f'hours), or read its files with data.corpus=shards'
  ):
    c4.open_corpus(token_cache.DataConfig(corpus='c4/en', path=str(tmp_path)))


def test_the_vocabulary_cannot_know_all_of_it():
  with bad_input(
    "data.corpus='c4/en' is read as it is needed, and data.vocabulary='words' would have to know "
    'all of it: use sentencepiece or bytes'
  ):
    token_cache.DataConfig(corpus='c4/en', vocabulary='words').check()
