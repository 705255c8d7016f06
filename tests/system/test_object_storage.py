"""A workdir in an object store is as good as one on a disk. The store is an emulator."""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ngrammer_jax import analyze, evaluate, generate, runs
from ngrammer_jax.checkpoints import manifest, reader
from ngrammer_jax.system import files, storage, synced_folder
from ngrammer_jax.training import loop
from tests import fake_gcs
from tests.checkpoints import test_checkpoints as small
from tests.checks import bad_input
from tests.training import test_hosts as hosts
from tests.training.helpers import records
from tests.training.test_kills import flags


@pytest.fixture(scope='module')
def store():
  """Environment variables of the emulator; libraries remember where their store is."""
  pytest.importorskip('gcsfs')
  address = fake_gcs.start()
  return {
    'STORAGE_EMULATOR_HOST': address,  # for gcsfs
    'TENSORSTORE_GCS_HTTP_URL': address,
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # which asks another service first
  }


@pytest.fixture
def bucket(store, tmp_path, monkeypatch):
  """The address of an empty folder of the store."""
  for name, value in store.items():
    monkeypatch.setenv(name, value)
  return f'gs://bucket/{tmp_path.name}'


def arrays(workdir):
  """Dtype, shape and checksum of every array of the last checkpoint, each bit of it read."""
  return reader.verify(workdir, reader.steps(workdir)[-1]).leaves


@pytest.mark.full
def test_a_run_of_a_disk_is_one_of_the_store(bucket, trained, caplog):
  local_run, run = trained, storage.path(f'{bucket}/run')
  for path in files.iter_files(local_run):
    name = str(path.relative_to(local_run))
    if name.startswith(('checkpoints/12/', 'co', 'metrics', 'vocabulary')):
      files.write(run / name, path.read_bytes())
  files.write(run / 'checkpoints' / '16' / '_METADATA', 'half of a checkpoint')
  assert reader.steps(run) == [12]
  # It is restored, each bit of it compared, and there is nothing left to do.
  assert not loop.train(runs.load_run(run).config, run)
  assert reader.steps(run) == [12] and records(run) == records(local_run)
  caplog.set_level('INFO')
  assert runs.load_run(run).restored.step == 12
  assert f'downloading the parameters of {run}/checkpoints/12' in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize(
  'owner, name, newest',
  [
    ('ngrammer_jax.checkpoints.manifest', 'digest_files', 8),
    ('ngrammer_jax.checkpoints.manifest', 'write', 8),
    ('etils.epath.gpath._GPath', 'rmtree', 12),  # while an old one is deleted
  ],
)
def test_killed_between_any_two_steps_of_a_save(bucket, monkeypatch, owner, name, newest):
  run = storage.path(f'{bucket}/run')
  small.save(run, 4, 8, keep=2)

  def killed(*arguments, **options):
    raise small.Killed

  with pytest.raises(small.Killed), monkeypatch.context() as patch:
    patch.setattr(f'{owner}.{name}', killed)
    small.save(run, 12, keep=2)
  assert len(list((run / 'checkpoints').iterdir())) == 3
  assert reader.steps(run) == ([8, 12] if newest == 12 else [4, 8])
  assert reader.restore_newest(run, small.abstract())[0] == newest
  small.save(run, 16, keep=2)
  assert reader.steps(run) == [newest, 16]
  assert len(list((run / 'checkpoints').iterdir())) == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_is_found_and_set_aside(bucket):
  run = storage.path(f'{bucket}/run')
  small.save(run, 4, 8, keep=2)
  files.write(run / 'checkpoints' / '8' / '_METADATA', b'{}')
  step, state = reader.restore_newest(run, small.abstract(), set_aside=True)
  assert step == 4 and small.same(state, small.state(4))
  assert {path.name for path in (run / 'checkpoints').iterdir()} == {'4', '8.damaged'}


def test_a_store_without_its_package_is_refused(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  message = "gs://bucket/run needs gcsfs: pip install 'ngrammer_jax[gcs]'"
  with bad_input(message):
    loop.train(tiny(), storage.path('gs://bucket/run'))
  with bad_input(message):
    evaluate.main(['--workdir=gs://bucket/run'])
  with bad_input(message):
    analyze.main(['report', '--workdir=gs://bucket/run'])


NOT_A_PATH = 'is neither a local path nor gs://BUCKET/FOLDER: mount the bucket and pass the folder'


@pytest.mark.parametrize(
  'subcommand, arguments',
  [
    (evaluate, ['--workdir=s3://bucket/run']),
    (generate, ['--workdir=s3://bucket/run', '--prompt=the']),
    (analyze, ['checkpoint', '--workdir=s3://bucket/run']),
    (analyze, ['report', '--workdir=run', '--output=s3://bucket/run']),
  ],
)
def test_another_store_is_refused(subcommand, arguments):
  with bad_input(f's3://bucket/run {NOT_A_PATH}'):
    subcommand.main(arguments)


def test_a_compilation_cache_in_another_store_is_refused():
  with bad_input(f's3://bucket/cache {NOT_A_PATH}'):
    evaluate.main(['--workdir=run', '--compilation_cache=s3://bucket/cache'])


def test_a_path_of_the_store_is_not_taken_for_a_folder(tiny):
  with bad_input(f'gs:/bucket/run {NOT_A_PATH}'):
    loop.train(tiny(), pathlib.Path('gs://bucket/run'))


def test_what_grows_is_put_now_and_then_and_gone_on_with(bucket, monkeypatch):
  monkeypatch.setattr(synced_folder, 'SYNC_INTERVAL', 0.01)
  folder = storage.path(f'{bucket}/logs')
  for line in ('one\n', 'two\n'):
    synced = synced_folder.SyncedFolder(folder, '*.log')
    with (synced.folder / 'some.log').open('a') as file:
      file.write(line)
    until = time.monotonic() + 20
    while not (folder / 'some.log').exists() or line not in (folder / 'some.log').read_text():
      assert time.monotonic() < until
    synced.close()
    assert not synced.folder.exists()
  assert (folder / 'some.log').read_text() == 'one\ntwo\n'


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_identically_and_commands_read_it(bucket, tmp_path, cache):
  """SIGKILL once the second checkpoint is there, wherever the run is by then."""
  run, local_run = storage.path(f'{bucket}/run'), tmp_path / 'whole'

  def start(workdir):
    command = [sys.executable, '-m', 'ngrammer_jax.train', f'--workdir={workdir}', *flags()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

  process = start(run)
  hosts.wait_for(process, run / 'checkpoints' / '20' / manifest.FILE_NAME)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  for workdir in (run, local_run):
    process = start(workdir)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert workdir == local_run or ('restoring step' in output and 'cannot be locked' in output)
    assert 'cannot be written' not in output
  assert arrays(run) == arrays(local_run) and records(run) == records(local_run)
  log = (run / 'logs' / 'process_0.log').read_text()
  assert 'restoring step' in log and 'step 60/60' in log
  assert len({line.split()[2] for line in log.splitlines()} - {'INFO'}) == 0, log
  assert len(list((run / 'tensorboard').iterdir())) == 2
  assert not evaluate.main([f'--workdir={run}', '--split=validation'])
  assert json.loads((run / 'evaluation' / 'validation.json').read_text())['step'] == 60
  assert {path.name for path in run.iterdir()} == {
    'checkpoints',
    'evaluation',
    'logs',
    'tensorboard',
    'metrics.jsonl',
    'goodput.json',
    'config.json',
    'corpus.json',
    'vocabulary.json',
  }
  assert not generate.main([f'--workdir={run}', '--prompt=the union', '--tokens=5'])
  for analysis in ('checkpoint', 'report', 'clusters'):
    assert not analyze.main([analysis, f'--workdir={run}'])
  assert (run / 'clusters.png').read_bytes()[1:4] == b'PNG'


@pytest.mark.slow
def test_two_processes_train_as_on_a_disk(bucket, tmp_path, cache):
  run, local_run = storage.path(f'{bucket}/run'), tmp_path / 'whole'
  for workdir in (run, local_run):
    hosts.train(2, workdir, **hosts.SHORT)
  assert arrays(run) == arrays(local_run) and hosts.losses(run) == hosts.losses(local_run)
  assert 'restoring' not in (run / 'logs' / 'process_1.log').read_text()
  assert 'restoring step 20' in hosts.train(1, run, devices=2, **hosts.SHORT)


@pytest.mark.slow
def test_a_fine_tuning_begins_and_ends_there(tiny, bucket, tmp_path):
  pytest.importorskip('seqio')
  from ngrammer_jax import finetune
  from tests.tasks import superglue_files, test_finetuning

  assert loop.train(tiny(training={'steps': 2}), storage.path(f'{bucket}/begun'))
  lines = superglue_files.rte
  hidden = lines(6, labelled=False)
  superglue_files.write(tmp_path, 'RTE', train=lines(40), val=lines(12, 40), test=hidden)
  args = test_finetuning.arguments(tmp_path, 'rte', init_from=f'{bucket}/begun')
  assert not finetune.main([*args, f'--workdir={bucket}/rte'])
  assert not evaluate.main([f'--workdir={bucket}/rte', '--split=test'])
  evaluation = storage.path(f'{bucket}/rte/evaluation')
  assert {path.name for path in evaluation.iterdir()} == {
    'test.json',
    'validation.json',
    'validation_best.json',
    'RTE.jsonl',
    *(f'{name}_answers.jsonl' for name in ('test', 'validation', 'validation_best')),
  }
