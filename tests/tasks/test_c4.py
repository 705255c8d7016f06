"""C4 prepared by TFDS: equal to the same texts in files, and a seqio task."""

import json

from etils import epath
import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture, vocabularies
from ngrammer_jax.data.documents import shards
from ngrammer_jax.data.formats import FilePosition
from tests.checks import bad_input
from tests.data import document_files

BYTES = vocabularies.ByteVocabulary()
TEXTS = {'train': [f'text number {i} of some' for i in range(20)], 'validation': ['a', 'b']}


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, c4):
  """Writes the texts as a prepared TFDS dataset, and returns its data config."""
  import tensorflow as tf

  tfds = pytest.importorskip('tensorflow_datasets')
  root, train_shards = tmp_path_factory.mktemp('tfds'), 3
  folder = epath.Path(root) / 'c4' / 'en' / '3.1.0'
  folder.mkdir(parents=True)
  infos = []
  for split, texts in TEXTS.items():
    count = train_shards if split == 'train' else 1
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
  return data_config.DataConfig(corpus='c4/en', path=str(root), vocabulary='bytes')


def write_files(root, train_shards=3):
  root.mkdir()
  for split, texts in TEXTS.items():
    count = train_shards if split == 'train' else 1
    for i in range(count):
      lines = (json.dumps({'text': text}) for text in texts[i::count])
      (root / f'{split}-{i}.jsonl').write_text('\n'.join(lines) + '\n')
  return shards.find(root)[0]['train']


@pytest.mark.full
@pytest.mark.parametrize(
  'batch_size, steps',
  [
    (2, (0, 30, 7)),
    *(pytest.param(B, (0, 1, 2, 30, 7), marks=pytest.mark.slow) for B in (2, 3, 5)),
  ],
)
def test_rows_equal_those_of_files(prepared, tmp_path, cache, batch_size, steps):
  corpus = mixture.prepare(prepared, runs.open_corpus).parts['']
  assert list(corpus.splits) == ['validation']
  assert bytes(corpus.splits['validation'].tokens[[0, 2]].astype(np.uint8)) == b'ab'
  files = write_files(tmp_path / 'files')
  rows, expected = (
    document_files.Packed(source, BYTES, batch_size, 16, tmp_path / kind)
    for kind, source in (('tfds', corpus.train_shards), ('files', files))
  )
  for step in steps:
    actual_BxT, expected_BxT = rows.segment(step).targets_BxT, expected.segment(step).targets_BxT
    np.testing.assert_array_equal(actual_BxT, expected_BxT)


def test_shard_can_be_read_from_any_document(prepared, c4):
  shard = c4.open_corpus(prepared).train_shards
  texts = [text for text, _ in shard.read(1)]
  assert texts == [text.encode() for text in TEXTS['train'][1::3]]
  for document in (1, 5, len(texts)):
    assert [text for text, _ in shard.read(1, FilePosition(document))] == texts[document:]


@pytest.mark.full
def test_seqio_task(prepared, c4, seqio):
  for _ in range(2):  # registering again is not an error
    name = c4.register(BYTES, data_dir=prepared.path)
  task = seqio.get_mixture_or_task(name)
  dataset = task.get_dataset({'targets': 64}, 'validation', shuffle=False)
  targets = [example['targets'].tolist() for example in dataset.as_numpy_iterator()]
  assert targets == [[ord(text) + 1, BYTES.document_end + 1] for text in 'ab']


def test_missing_dataset_is_an_error_and_not_downloaded(tmp_path, c4):
  with bad_input(
    f"data.corpus='c4/en': TFDS has prepared nothing in {tmp_path}/c4/en. Set data.path to the "
    f'data directory that has it, prepare it (tfds build c4/en, which takes Apache Beam and '
    f'hours), or read its files with data.corpus=shards'
  ):
    c4.open_corpus(data_config.DataConfig(corpus='c4/en', path=str(tmp_path)))
