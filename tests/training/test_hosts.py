"""Several processes on this machine train as one; they agree, stop together and go on exactly."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ngrammer_jax.checkpoints import manifest, reader
from ngrammer_jax.system import hosts
from ngrammer_jax.training import loop
from tests.training import toy
from tests.training.helpers import damage, names, write_config
from tests.training.test_kills import flags

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ('-m', 'ngrammer_jax.train', '--config.evaluation.streams=4')


def start(processes, *arguments, devices=1):
  """Starts a launcher of processes."""
  command = [sys.executable, ROOT / 'launch' / 'local_processes.py', f'--processes={processes}']
  return subprocess.Popen(
    [*command, f'--devices={devices}', '--', sys.executable, *map(str, arguments)],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def train(processes, workdir, *keys, devices=1, **training):
  keys = [f'--config.{key}' for key in keys]
  arguments = *TRAIN, f'--workdir={workdir}', *flags(**training), *keys
  process = start(processes, *arguments, devices=devices)
  output, _ = process.communicate(timeout=500)
  assert process.returncode == 0, output
  return output


def losses(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = [r for r in map(json.loads, lines) if 'loss' in r or 'validation/tokens' in r]
  name = lambda r: 'loss' if 'loss' in r else 'validation/nll_nats_per_token'
  return {(r['step'], name(r)): r[name(r)] for r in records}


def sums(workdir, step):
  return manifest.verify(workdir / 'checkpoints' / str(step)).leaves


SHORT = {'steps': 20, 'evaluate_every': 10, 'checkpoint_every': 10}

# The command, with a model that compiles in no time, once the processes have said a few things.
DRIVER = """
from ngrammer_jax import errors, flags, train
from ngrammer_jax.system import hosts
from tests.training import toy

def join_and_agree(options, join=hosts.join):
  join(options)
  number = hosts.process_index()
  assert hosts.is_multiprocess() and hosts.is_primary() == (number == 0)
  assert hosts.all_gather('ab' * number) == ['', 'ab']
  assert hosts.broadcast(['first', 'second'][number]) == 'first'
  done = []
  hosts.on_primary(done.append, number)
  assert done == [0] * (number == 0)
  try:
    with hosts.collective_errors():
      if number == 1:
        raise errors.BadInput('cannot')
  except errors.BadInput as error:
    assert str(error) == 'process 1: cannot'
  else:
    raise AssertionError('what one cannot do, the other does')

hosts.join = join_and_agree
toy.install()
flags.run(train.main)
"""


@pytest.mark.full
def test_two_processes_agree_and_train_as_one(tiny, tmp_path, monkeypatch):
  """Both notice that the newest checkpoint of one process is damaged; one resumes after them."""
  toy.install(monkeypatch.setattr)
  config = tiny(optimizer={'schedule': 'constant'})
  reference, run = tmp_path / 'reference', tmp_path / 'run'
  loop.train(config, reference)
  shutil.copytree(reference, run)
  damage(run / 'checkpoints' / '12')
  file = write_config(tmp_path / 'config.py', config)
  process = start(2, '-c', DRIVER, f'--workdir={run}', f'--config={file}')
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  assert output.count('step 12/12') == 1 and output.count('finished: 12 steps') == 1, output
  assert output.count('if a process is lost, JAX ends all others after 30 s') == 1, output
  assert output.count('12 is corrupt: ') == 2 and 'restoring step 8' in output, (
    output
  )  # both say so
  assert len(losses(reference)) == 8 and losses(run) == pytest.approx(losses(reference), rel=1e-5)
  assert (run / 'logs' / 'process_1.log').exists()
  assert names(run) == ['12', '12.damaged', '4', '8'] and reader.verify(run, 12).step == 12
  longer = tiny(optimizer={'schedule': 'constant'}, training={'steps': 16})
  assert loop.train(longer, run) and loop.train(longer, reference)
  assert len(losses(reference)) == 11 and losses(run) == pytest.approx(losses(reference), rel=1e-5)


def test_what_the_first_process_finds_out_the_others_learn(tmp_path, monkeypatch):
  """Seen by one of them that is not the first, and reads nothing."""
  monkeypatch.setattr(hosts, 'is_primary', lambda: False)
  monkeypatch.setattr(hosts, 'broadcast', lambda value: [None, 'a file is missing'])
  with pytest.raises(manifest.CorruptError, match=r'\Aa file is missing\Z'):
    reader.restore(tmp_path, 4, None)


@pytest.mark.slow
def test_two_processes_with_tables_in_host_memory_train_as_one_with_tables_on_the_device(
  tmp_path, cache
):
  """Each has half of the rows. A restart is exact; another number of processes can go on."""
  keys, on_host = host_table_keys()
  train(2, tmp_path / 'two', *on_host, **SHORT)
  train(1, tmp_path / 'one', *keys, devices=2, **SHORT)
  expected = losses(tmp_path / 'one')
  assert len(expected) == 6 and losses(tmp_path / 'two') == pytest.approx(expected, rel=1e-5)
  before = sums(tmp_path / 'two', 20)
  shutil.rmtree(tmp_path / 'two' / 'checkpoints' / '20')
  train(2, tmp_path / 'two', *on_host, **SHORT)
  assert sums(tmp_path / 'two', 20) == before
  results = []
  for processes in (2, 1):
    arguments = '-m', 'ngrammer_jax.evaluate', f'--workdir={tmp_path}/two', '--split=test'
    evaluate = start(processes, *arguments, devices=2 // processes)
    output, _ = evaluate.communicate(timeout=300)
    assert evaluate.returncode == 0, output
    result = json.loads((tmp_path / 'two' / 'evaluation' / 'test.json').read_text())
    results.append(result['nll_nats_per_token'])
  assert results[0] == pytest.approx(results[1], rel=1e-6)
  shutil.rmtree(tmp_path / 'two' / 'checkpoints' / '20')
  train(1, tmp_path / 'two', *on_host, devices=2, **SHORT)
  assert losses(tmp_path / 'two') == pytest.approx(expected, rel=1e-5)
  shutil.rmtree(tmp_path / 'one' / 'checkpoints' / '20')
  train(2, tmp_path / 'one', *on_host, **SHORT)
  assert losses(tmp_path / 'one') == pytest.approx(expected, rel=1e-5)


def host_table_keys():
  """The keys of a small model with a table on the device, and with the table in host memory."""
  memory = {'preset': 'engram', 'heads': 2, 'rows': 509, 'width': 8, 'layers': 0}
  memory |= {'optimizer': 'adagrad', 'learning_rate_factor': None}
  keys = [f'model.ngram_memories.0.{name}={value}' for name, value in memory.items()]
  keys += ['model.ngram=None', 'training.segments_per_call=1']
  return keys, [*keys, 'model.ngram_memories.0.table_memory=host']


@pytest.mark.slow
def test_a_signal_ends_processes_with_tables_in_host_memory_soon_and_a_restart_is_exact(
  tmp_path, cache
):
  """Although one may have read ahead further than the other."""
  _, on_host = host_table_keys()
  train(2, tmp_path / 'reference', *on_host, **LONG)
  keys = [f'--config.{key}' for key in on_host]
  process = start(2, *TRAIN, f'--workdir={tmp_path}/run', *flags(**LONG), *keys)
  pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
  wait_for(process, tmp_path / 'run' / 'checkpoints' / '10')
  os.kill(pids[1], signal.SIGTERM)
  output, _ = process.communicate(timeout=100)
  assert process.returncode == 143, output
  assert 'restoring step' in train(2, tmp_path / 'run', *on_host, **LONG)
  assert sums(tmp_path / 'run', 60) == sums(tmp_path / 'reference', 60)


@pytest.mark.slow
def test_two_processes_with_ngram_memories_train_as_one(tmp_path, cache):
  """Compressed tokens, whose classes each process computes, and clusters of hidden states."""
  sizes = {'heads': 2, 'rows': 509, 'width': 8}
  engram = sizes | {'layers': 0, 'optimizer': 'adagrad', 'learning_rate_factor': None}
  clusters = sizes | {'layers': 1, 'key': 'clusters', 'clusters': 8, 'orders': 2}
  memories = {0: {'preset': 'engram'} | engram, 1: clusters}
  keys = ['model.ngram=None'] + [
    f'model.ngram_memories.{i}.{name}={value}'
    for i, memory in memories.items()
    for name, value in memory.items()
  ]
  train(2, tmp_path / 'two', *keys, **SHORT)
  train(1, tmp_path / 'one', *keys, devices=2, **SHORT)
  expected = losses(tmp_path / 'one')
  assert len(expected) == 6 and losses(tmp_path / 'two') == pytest.approx(expected, rel=1e-5)
  two, one = (sums(tmp_path / name, 20) for name in ('two', 'one'))
  same = [name for name in one if name.endswith(('token_classes', 'multipliers'))]
  assert two.keys() == one.keys() and len(same) == 2
  assert [two[name] for name in same] == [one[name] for name in same]
  evaluate = start(2, '-m', 'ngrammer_jax.evaluate', f'--workdir={tmp_path}/one', '--split=test')
  output, _ = evaluate.communicate(timeout=300)
  assert evaluate.returncode == 0 and output.count('wrote ') == 1, output
  # Either continues the run of the other one.
  for name, processes, devices in (('two', 1, 2), ('one', 2, 1)):
    shutil.rmtree(tmp_path / name / 'checkpoints' / '20')
    output = train(processes, tmp_path / name, *keys, devices=devices, **SHORT)
    assert 'restoring step 10' in output
    assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'processes, number', [(1, signal.SIGTERM), (4, signal.SIGUSR1), (2, signal.SIGHUP)]
)
def test_what_two_processes_saved_others_restore(tmp_path, cache, processes, number):
  """SIGTERM to the launcher, or another signal to one of them."""
  signal.signal(number, signal.SIG_DFL)  # it is ignored in what `nohup` started
  long = SHORT | {'steps': 60}  # it must not be finished when the signal arrives
  train(1, tmp_path / 'reference', devices=4, **long)
  process = start(2, *TRAIN, f'--workdir={tmp_path}/run', *flags(**long))
  pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
  wait_for(process, tmp_path / 'run' / 'checkpoints' / '10')
  if number == signal.SIGTERM:
    process.send_signal(number)
  else:
    os.kill(pids[processes == 4], number)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 143, output
  known = 'SIGHUP;' if number == signal.SIGHUP else 'SIGTERM, or a signal to another process;'
  assert output.count('stopped by') == output.count(f'stopped by {known}') == 1, output
  if number == signal.SIGTERM:
    assert 'SIGTERM: passed on to all as SIGTERM\n' in output, output
  else:
    who = 'process 1: ' if number == signal.SIGUSR1 else '\n'
    assert f'{who}{number.name}: saving a checkpoint, then stopping\n' in output, output
  assert output.count('ended with status 143') == 2, output
  assert 'restoring step' in train(processes, tmp_path / 'run', **long)
  assert losses(tmp_path / 'run') == pytest.approx(losses(tmp_path / 'reference'), rel=1e-4)


LONG = {'steps': 60, 'checkpoint_every': 10, 'evaluate_every': 30}


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """A run of two processes of which none was lost."""
  folder = tmp_path_factory.mktemp('undisturbed')
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('NGRAMMER_JAX_CACHE', str(folder / 'cache'))
    train(2, folder / 'run', **LONG)
  return folder / 'run'


# What JAX says of a lost process. It names all but the one that receives the heartbeats.
LOST = {0: 'JAX distributed service detected fatal errors', 1: 'stopped sending heartbeats):\n1\n'}


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_one_is_named_by_the_others_and_a_restart_is_exact(
  tmp_path, cache, undisturbed, how, victim
):
  process = start(2, *TRAIN, f'--workdir={tmp_path}/run', *flags(**LONG))
  wait_for(process, tmp_path / 'run' / 'checkpoints' / '10')
  pids = started_by(process)
  os.kill(pids[victim], how)
  wait_for_end(pids[1 - victim], 60)
  if how == signal.SIGSTOP:
    os.kill(pids[victim], signal.SIGKILL)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == {signal.SIGKILL: 137, signal.SIGSTOP: 134}[how], output
  assert f'process {1 - victim} ended with SIGABRT' in output, output
  assert LOST[victim] in output, output
  assert 'then rerun the same command in all processes to resume from the last' in output, output
  assert 'restoring step' in train(2, tmp_path / 'run', **LONG)
  assert sums(tmp_path / 'run', 60) == sums(undisturbed, 60)
  assert losses(tmp_path / 'run') == losses(undisturbed)


# Its first argument says what one of the processes does while the other one goes on.
ONE = """
import ctypes, sys
from ngrammer_jax import errors, flags
from ngrammer_jax.system import hosts

def main(argv):
  action, number = argv[0].split(':')
  hosts.add_flags(parser := flags.make_parser('train', ''))
  hosts.join(parser.parse_args(argv[1:]))
  if hosts.process_index() == int(number):
    if action == 'refuse':
      raise errors.BadInput('the disk is full')
    ctypes.PyDLL(None).sleep(40)  # with the lock of the interpreter
  elif action == 'refuse':
    hosts.all_gather(0)

flags.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize('slow', [0, 1])
def test_one_that_is_busy_is_not_lost_nor_one_that_has_ended(slow):
  """For longer than JAX waits for a heartbeat."""
  process = start(2, '-c', ONE, f'sleep:{slow}')
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize('failing', [0, 1])
def test_one_that_cannot_go_on_alone_ends_as_bad_input(failing):
  process = start(2, '-c', ONE, f'refuse:{failing}')
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 2 and 'error: the disk is full' in output, output
  assert f'process {1 - failing} ended with ' in output and 'killing it' not in output, output


def started_by(launcher):
  """The processes of a launcher, in their order."""
  found = {}
  for folder in pathlib.Path('/proc').iterdir():
    with contextlib.suppress(OSError):
      parent = re.search(r'^PPid:\t(\d+)$', (folder / 'status').read_text(), re.MULTILINE)
      number = re.search(r'--process_id=(\d+)\0$', (folder / 'cmdline').read_text())
      if parent and number and int(parent[1]) == launcher.pid:
        found[int(number[1])] = int(folder.name)
  return [pid for _, pid in sorted(found.items())]


def wait_for_end(pid, seconds):
  deadline = time.monotonic() + seconds
  with contextlib.suppress(ProcessLookupError):
    while time.monotonic() < deadline:
      os.kill(pid, 0)
      time.sleep(0.1)
    raise AssertionError(f'{pid} has not ended in {seconds} s')


def wait_for(process, folder):
  while not folder.exists():
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05)


@pytest.mark.slow
def test_what_one_process_cannot_do_none_does(tmp_path, cache):
  """The text is there for one of them only."""
  text = tmp_path / 'text.txt'
  text.write_text('the union of states is strong\n' * 400)
  arguments = (*flags(**SHORT), '--config.data.corpus=text', f'--config.data.path={text}')
  code = (
    'import pathlib, sys; from ngrammer_jax import flags, train\n'
    f'if sys.argv[-1] == "--process_id=1": sys.argv = [a.replace({str(text)!r}, "/none") '
    'for a in sys.argv]\nflags.run(train.main)'
  )
  process = start(2, '-c', code, f'--workdir={tmp_path}/run', *arguments)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 2 and output.count('error: process 1: data.path=/none') == 1, output
  assert output.count('ended with status 2') == 2, output
  assert not (tmp_path / 'run').exists()


@pytest.mark.full
def test_flags_that_do_not_say_where_the_others_are():
  """Before any connection; in another process, as JAX connects only before it has devices."""
  code = (
    'import argparse, sys; from ngrammer_jax.system import hosts\n'
    'hosts.add_flags(parser := argparse.ArgumentParser())\n'
    'for line in sys.argv[1:]:\n'
    '  try: hosts.join(parser.parse_args(line.split()))\n'
    '  except hosts.errors.BadInput as error: print(error)\n'
  )
  wrong = '--processes=2', '--coordinator=x:1 --processes=2 --process_id=2'
  command = [sys.executable, '-c', code, *wrong, '--coordinator=x']
  process = subprocess.run(command, capture_output=True, text=True)
  assert '--coordinator: x is not HOST:PORT' in process.stderr and process.returncode == 2
  lines = process.stdout.splitlines()
  problems = (
    'coordinator_address should be defined.',
    'process_id < num_processes. Got process_id=2',
  )
  for line, problem in zip(lines, problems, strict=True):
    assert line.startswith('cannot detect the cluster environment (') and problem in line
    assert line.endswith('): set --coordinator, --processes and --process_id')
