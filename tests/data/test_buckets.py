"""Corpora in object storage: the same rows as of local files, from emulators of three stores."""

import os
import shutil
import signal

import fsspec
from fsspec.implementations import local
import numpy as np
from pyarrow import parquet
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import formats, vocabularies
from ngrammer_jax.data.documents import shards
from ngrammer_jax.data.files import buckets
from ngrammer_jax.system import progress
from tests import fake_gcs
from tests.checks import bad_input
from tests.data import document_files
from tests.training import test_hosts as hosts

LONG = {'steps': 60, 'evaluate_every': 20, 'checkpoint_every': 20}
BYTES = vocabularies.ByteVocabulary()
NAMES = ('train-0.jsonl.zst', 'a/train-1.parquet', 'b/train-2.txt', 'train-3.arrow', 'valid.jsonl')


class HubFileSystem(local.LocalFileSystem):
  """Datasets of a hub, in a local folder. FAILURES: errors of the next readings."""

  protocol = 'hf'
  folder = None
  failures = []

  @classmethod
  def _strip_protocol(cls, path):
    path = str(path).removeprefix('hf://')
    return path if path.startswith('/') else f'{cls.folder}/{path}'

  def find(self, path, **options):
    found = super().find(path, **options)
    return {name.removeprefix(f'{self.folder}/'): info for name, info in found.items()}

  def _open(self, path, mode='rb', block_size=None, **options):
    if self.failures:
      raise self.failures.pop()
    return super()._open(path, mode, **{k: v for k, v in options.items() if 'cache' not in k})


@pytest.fixture
def hub(tmp_path, monkeypatch):
  monkeypatch.setattr(HubFileSystem, 'folder', tmp_path / 'hub')
  monkeypatch.setattr(HubFileSystem, 'failures', [])
  fsspec.register_implementation('hf', HubFileSystem, clobber=True)
  HubFileSystem.clear_instance_cache()
  return 'hf://datasets/someone/texts'


@pytest.fixture(scope='module')
def stores():
  """Addresses of emulated stores, in each a bucket."""
  pytest.importorskip('gcsfs')
  pytest.importorskip('s3fs')
  server = pytest.importorskip('moto.server')
  s3 = server.ThreadedMotoServer(port=0, verbose=False)
  s3.start()
  host, port = s3.get_host_and_port()
  with pytest.MonkeyPatch.context() as patch:
    variables = {
      'STORAGE_EMULATOR_HOST': fake_gcs.start(),
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
      'AWS_ENDPOINT_URL': f'http://{host}:{port}',
      'AWS_ACCESS_KEY_ID': 'key',
      'AWS_SECRET_ACCESS_KEY': 'secret',
      'AWS_DEFAULT_REGION': 'us-east-1',
    }
    for name, value in variables.items():
      patch.setenv(name, value)
    fsspec.filesystem('s3').mkdir('bucket')
    yield {'gs': 'gs://bucket/c', 's3': 's3://bucket/c'}
  s3.stop()


def write_corpus(folder):
  for number, name in enumerate(NAMES):
    texts = [f'{number}/{i} some text' + ' more' * (i % 7) for i in range(40)]
    document_files.write(folder / name, texts)


def rows(source, folder, batch_size=3, steps=60):
  dataset = document_files.Packed(source, BYTES, batch_size, 16, folder)
  return np.stack([dataset.segment(step).targets_BxT for step in range(steps)])


def assert_rows_equal_those_of_local_files(url, tmp_path):
  """The corpus of `write_corpus` is there and in the folder `local`."""
  expected = document_files.open_corpus('shards', str(tmp_path / 'local'))
  expected_rows = rows(expected.train_shards, tmp_path / 'expected')
  corpus = document_files.open_corpus('shards', url)
  assert [f.name for f in corpus.files] == [f.name for f in expected.files]
  assert len(corpus.files) == len(NAMES) and all(str(f).startswith(url) for f in corpus.files)
  places = tmp_path / url.partition(':')[0]
  np.testing.assert_array_equal(rows(corpus.train_shards, places), expected_rows)
  again = document_files.Packed(corpus.train_shards, BYTES, 3, 16, places)
  np.testing.assert_array_equal(again.segment(59).targets_BxT, expected_rows[59])
  for split in ('train', 'validation'):
    texts = [[b''.join(d.read_chunks()) for d in c.splits[split]] for c in (corpus, expected)]
    assert texts[0] == texts[1]


def test_rows_equal_those_of_local_files(hub, tmp_path):
  write_corpus(tmp_path / 'local')
  shutil.copytree(tmp_path / 'local', HubFileSystem.folder / 'datasets' / 'someone' / 'texts')
  assert_rows_equal_those_of_local_files(hub, tmp_path)
  for end in ('', '/'):  # files beside subfolders are enough for a text
    names = [file.name for file in document_files.open_corpus('text', hub + end).files]
    assert names == ['train-0.jsonl.zst', 'train-3.arrow', 'valid.jsonl']


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['gs', 's3'])
def test_rows_of_emulated_stores(stores, tmp_path, monkeypatch, kind):
  write_corpus(tmp_path / 'local')
  monkeypatch.setattr(buckets, 'REQUEST_BYTES', 500)  # many requests
  fsspec.filesystem(kind).put(str(tmp_path / 'local'), stores[kind], recursive=True)
  assert_rows_equal_those_of_local_files(stores[kind], tmp_path)


def test_reading_a_bucket_shows_its_progress(hub, tmp_path, monkeypatch, caplog):
  caplog.set_level('INFO')
  monkeypatch.setattr(progress, 'FIRST_LOG', 0)
  monkeypatch.setattr(progress, 'LOG_INTERVAL', 0)
  folder = HubFileSystem.folder / 'datasets' / 'someone' / 'texts'
  for name in ('train-0.jsonl', 'train-1.jsonl', 'valid.jsonl'):
    document_files.write(folder / name, ['some text of a bucket'] * 3)
  for corpus, bytes_read in (('text', 9 * 21), ('shards', 9 * 21)):
    caplog.clear()
    config = data_config.DataConfig(
      corpus=corpus, path=hub, vocabulary='bytes', cache_dir=str(tmp_path / corpus)
    )
    document_files.prepare(config)
    lines = [line.partition(', ')[0] for line in caplog.messages]
    assert lines[0] == f'listing the files of {hub}'
    if corpus == 'text':
      first_bytes = [line for line in lines if line.startswith('reading the first bytes in')]
      assert first_bytes[-1].endswith('100% of 3 files')
    assert f'tokenising {corpus}: {bytes_read} bytes' in lines


def test_an_error_of_the_network_ends_a_run_that_can_be_repeated(hub, tmp_path):
  write_corpus(HubFileSystem.folder / 'datasets' / 'someone' / 'texts')
  corpus = document_files.open_corpus('shards', hub)
  HubFileSystem.failures = [ConnectionError('reset by peer')]
  with pytest.raises(errors.PeerLostError) as caught:
    rows(corpus.train_shards, tmp_path / 'places')
  assert str(caught.value) == (
    f'{hub}/a/train-1.parquet cannot be read: ConnectionError: reset by peer; {errors.RERUN_ALL}'
  )


def test_a_lost_file_and_a_changed_one_are_named(hub, tmp_path):
  folder = HubFileSystem.folder / 'datasets' / 'someone' / 'texts'
  write_corpus(folder)
  corpus = document_files.open_corpus('shards', hub)
  rows(corpus.train_shards, tmp_path / 'places', batch_size=1, steps=3)  # shard 0
  path = folder / 'a' / 'train-1.parquet'
  content = path.read_bytes()
  path.write_bytes(content[:-9] + content[-9:][::-1])
  with bad_input(
    f'{hub}/a/train-1.parquet has changed since this run first read it: put the old file back, or '
    f'use another workdir'
  ):
    rows(shards.find(hub)[0]['train'], tmp_path / 'places', 1)
  path.unlink()
  with pytest.raises(
    errors.BadInput, match=rf'\A{hub}/a/train-1.parquet is lost: FileNotFoundError'
  ):
    rows(corpus.train_shards, tmp_path / 'other', 1)


def test_row_groups_in_a_bucket_are_read_once(hub, tmp_path, monkeypatch):
  monkeypatch.setattr(formats.parquet, 'PART_BYTES', 50)
  reads, read_row_groups = [], parquet.ParquetFile.read_row_groups
  note = lambda *args, **options: reads.append(args) or read_row_groups(*args, **options)
  monkeypatch.setattr(parquet.ParquetFile, 'read_row_groups', note)
  folder = HubFileSystem.folder / 'datasets' / 'someone' / 'texts'
  for root in (folder, tmp_path / 'local'):
    document_files.write(root / 'train.parquet', [f'{i} some text' for i in range(90)])
    document_files.write(root / 'valid.jsonl', ['x'])
    num_groups = parquet.ParquetFile(root / 'train.parquet').num_row_groups
    source = shards.find(hub if root == folder else root)[0]['train']
    del reads[:]
    assert len(list(source.read(0))) == 90
    assert (len(reads) == num_groups) == (root == folder)


def test_what_is_not_there_is_one_sentence(hub):
  url = 'hf://datasets/nobody/x'
  with bad_input(f'data.path={url} has no files: expected the files of a corpus'):
    document_files.open_corpus('shards', url)
  for name in ('.hidden', 'a/dataset_info.json'):
    document_files.write(HubFileSystem.folder / 'datasets' / 'nobody' / 'x' / name, ['no text'])
  with bad_input(
    f'data.path={url}: the corpus was not found; expected a text file, or a folder of them'
  ):
    document_files.open_corpus('text', url)


@pytest.mark.slow
def test_what_stores_do_not_have_is_one_sentence(stores):
  for url, message in (
    ('s3://none/x', 'cannot be read: check its name, the network and the credentials (AWS_ACCESS_'),
    ('gs://bucket/none', 'has no files: expected the files of a corpus'),
  ):
    with pytest.raises(errors.BadInput) as caught:
      document_files.open_corpus('shards', url)
    assert str(caught.value).startswith(f'data.path={url} {message}')
    assert '\n' not in str(caught.value)


def test_other_corpora_and_missing_packages(monkeypatch):
  with bad_input(
    "data.path=s3://b/x: data.corpus='wikitext' needs a local path; shards and text do not"
  ):
    document_files.open_corpus('wikitext', 's3://b/x')
  monkeypatch.setattr(buckets.importlib.util, 'find_spec', lambda name: None)
  with bad_input("s3://b/x needs s3fs: pip install 'ngrammer_jax[s3]'"):
    document_files.open_corpus('shards', 's3://b/x')


@pytest.mark.slow
def test_two_processes_train_from_a_bucket_and_are_killed(stores, tmp_path, cache):
  """One is killed; a restart of both equals a run of one process from local files, bit by bit."""
  texts = [f'{i} of some text' + ' and more' * (i % 30) for i in range(400)]
  for shard in range(4):
    document_files.write(tmp_path / 'local' / f'{shard:03}_00000.parquet', texts[shard::4])
  url = stores['s3'].replace('/c', '/fineweb')
  fsspec.filesystem('s3').put(str(tmp_path / 'local'), url, recursive=True)
  keys = 'data.corpus=shards', 'data.shuffle=1', 'training.batch_size=8'
  flags = [f'--config.{key}' for key in keys]
  hosts.train(1, tmp_path / 'whole', *keys, f'data.path={tmp_path}/local', devices=2, **LONG)
  run = tmp_path / 'run'
  arguments = *hosts.TRAIN, f'--workdir={run}', *hosts.flags(**LONG), *flags
  process = hosts.start(2, *arguments, f'--config.data.path={url}')
  hosts.wait_for(process, run / 'checkpoints' / '20')
  os.kill(hosts.started_by(process)[1], signal.SIGKILL)
  process.communicate(timeout=120)
  assert process.returncode
  output = hosts.train(2, run, *keys, f'data.path={url}', **LONG)
  assert 'restoring step' in output
  assert hosts.losses(run) == hosts.losses(tmp_path / 'whole')
