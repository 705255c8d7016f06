"""A signal is a request to save and stop, and the same command goes on."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading

from jax.experimental import multihost_utils
import pytest

from ngrammer_jax import errors, flags, train
from ngrammer_jax.checkpoints import manifest, reader
from ngrammer_jax.data import prefetch
from ngrammer_jax.system import hosts, signals
from ngrammer_jax.training import loop
from tests.training import toy
from tests.training.helpers import arrays, records, signal_at, write_config


def handlers():
  return [signal.getsignal(number) for number in signals.SIGNALS]


@contextlib.contextmanager
def of_a_command():
  """Restores the handlers that a command sets up to the end of its process."""
  before = handlers()
  try:
    yield
  finally:
    for number, handler in zip(signals.SIGNALS, before, strict=True):
      signal.signal(number, handler)


@pytest.fixture(autouse=True)
def handlers_are_those_of_before():
  with of_a_command():
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # pytest under nohup
      signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = handlers()
    yield
    assert handlers() == before


def interrupt():
  os.kill(os.getpid(), signal.SIGTERM)


def test_who_was_stopped_goes_on_bit_by_bit(tiny, reference_run, tmp_path, monkeypatch, capfd):
  """No checkpoint is due before the last step: what is there was saved for a signal."""
  signal_at(monkeypatch, at := {4: signal.SIGUSR1, 10: signal.SIGTERM})
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # the command adds to it
  config = write_config(tmp_path / 'config.py', tiny())
  arguments = [f'--workdir={tmp_path}/run', f'--config={config}']
  monkeypatch.setattr(sys, 'argv', ['train', *arguments, '--config.training.checkpoint_every=12'])
  statuses = []
  for _ in range(3):
    with pytest.raises(SystemExit) as stopped, of_a_command():
      flags.run(train.main)
    statuses.append((stopped.value.code, reader.steps(tmp_path / 'run')))
  assert statuses == [(138, [4]), (143, [4, 10]), (0, [4, 10, 12])] and not at
  out, err = capfd.readouterr()
  for name in ('SIGUSR1', 'SIGTERM'):
    assert err.count(f'{name}: saving a checkpoint, then stopping\n') == 1
    assert err.count(f'stopped by {name}; rerun the same command to resume\n') == 1
  assert out.startswith('finished: 12 steps')
  assert arrays(tmp_path / 'run') == arrays(reference_run)
  assert records(tmp_path / 'run') == records(reference_run)

  with pytest.raises(SystemExit) as finished, of_a_command():
    flags.run(train.main)
  assert finished.value.code == 0
  assert capfd.readouterr().out.startswith('already finished: 12 steps')


@pytest.mark.full
def test_a_validation_that_was_stopped_is_made_up_for(tiny, reference_run, tmp_path, monkeypatch):
  """Also when that is stopped again, and also that of the last step."""
  evaluate, calls = toy.Programs.evaluate, []

  def interrupted(self, state, *args):
    calls.append(state)
    if len(calls) not in (3, 6):
      interrupt()
    return evaluate(self, state, *args)

  monkeypatch.setattr(toy.Programs, 'evaluate', interrupted)
  for at in (6, 6, 12, 12):
    with pytest.raises(errors.Interrupted):
      loop.train(tiny(), tmp_path / 'run')
    assert reader.steps(tmp_path / 'run')[-1] == at
    last = records(tmp_path / 'run')[-1]
    assert last['step'] == at and 'loss' in last
  assert loop.train(tiny(), tmp_path / 'run')
  assert len(calls) == 6
  assert arrays(tmp_path / 'run') == arrays(reference_run)
  assert records(tmp_path / 'run') == records(reference_run)
  # It counts for which checkpoint is the best, also where the process died in between.
  folder = tmp_path / 'run' / 'checkpoints' / '12'
  loss = records(reference_run)[-1]['validation/nll_nats_per_token']
  assert manifest.read(folder).validation == loss
  manifest.write(folder, dataclasses.replace(manifest.read(folder), validation=None))
  assert not loop.train(tiny(), tmp_path / 'run')
  assert manifest.read(folder).validation == loss


def test_a_signal_while_waiting_for_data_loses_no_step(tiny, tmp_path, monkeypatch, toy_model):
  config = tiny(training={'checkpoint_every': 12})
  run_ahead = prefetch.run_ahead

  def interrupt_later(batches):
    for i, batch in enumerate(batches):
      if i == 3:  # six steps are done, and not saved
        interrupt()
      yield batch

  @contextlib.contextmanager
  def late(items):
    with run_ahead(items) as batches:
      yield interrupt_later(batches)

  monkeypatch.setattr(prefetch, 'run_ahead', late)
  with pytest.raises(errors.Interrupted):
    loop.train(config, tmp_path / 'run')
  (saved,) = reader.steps(tmp_path / 'run')
  assert saved == records(tmp_path / 'run')[-1]['step'] == 8


def test_a_signal_before_the_first_step_stops_at_once(tiny, tmp_path, monkeypatch, toy_model):
  monkeypatch.setattr(toy.Programs, 'compile', lambda *arguments: interrupt())
  with pytest.raises(errors.Interrupted):
    loop.train(tiny(), tmp_path / 'run')
  assert not reader.steps(tmp_path / 'run') and not records(tmp_path / 'run')


@pytest.mark.parametrize('number', signals.SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_counts_and_only_the_third_interrupt_ends(number, capfd):
  with signals.SignalHandler() as stop:
    stop.check_interrupted()
    try:  # terminals and launchers send two interrupts
      for sent in (number, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), sent)
        with pytest.raises(errors.Interrupted) as caught:
          stop.check_interrupted()
        assert caught.value.signal == number
      if number != signal.SIGINT:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
      pytest.fail('the second interrupt ended it')  # pytest itself would stop
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert capfd.readouterr().err == f'{number.name}: saving a checkpoint, then stopping\n'


@pytest.mark.parametrize('number', signals.SIGNALS, ids=lambda number: number.name)
def test_what_was_ignored_at_the_start_stays_ignored(number):
  with of_a_command():
    signal.signal(number, signal.SIG_IGN)
    signals.exit_on_signals()
    with signals.SignalHandler() as stop:
      os.kill(os.getpid(), number)
      stop.check_interrupted()
    os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_IGN


def test_several_processes_pass_a_signal_on_once_as_sigterm(monkeypatch, capfd):
  """To JAX, whose handler tells all of them."""
  monkeypatch.setitem(hosts._process, 'count', 2)
  received = []
  with of_a_command():
    signals.exit_on_signals()
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    os.kill(os.getpid(), signal.SIGUSR2)  # while the text is read
    assert received == [signal.SIGTERM]
    monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', lambda step: True)
    with signals.SignalHandler() as stop:
      with pytest.raises(errors.Interrupted, match='^stopped by SIGTERM, or a signal to another p'):
        stop.check_interrupted()
      os.kill(os.getpid(), signal.SIGUSR1)
      os.kill(os.getpid(), signal.SIGHUP)
      assert received == [signal.SIGTERM] * 2
      with pytest.raises(errors.Interrupted, match='^stopped by SIGUSR1; rerun'):
        stop.check_interrupted()
    monkeypatch.setitem(hosts._process, 'index', 1)
    with signals.SignalHandler():
      os.kill(os.getpid(), signal.SIGUSR1)
  said = 'SIGUSR1: saving a checkpoint, then stopping\n'
  assert capfd.readouterr().err == f'{said}process 1: {said}'


def test_of_several_processes_the_first_says_the_signal_and_all_exit_with_143(monkeypatch, capfd):
  def stop(argv):
    raise errors.Interrupted(signal.SIGUSR1)

  monkeypatch.setitem(hosts._process, 'count', 2)
  monkeypatch.setattr(sys, 'argv', ['train'])
  for index, message in enumerate(('stopped by SIGUSR1; rerun the same command to resume\n', '')):
    monkeypatch.setitem(hosts._process, 'index', index)
    with pytest.raises(SystemExit) as stopped, of_a_command():
      flags.run(stop)
    assert stopped.value.code == 143 and capfd.readouterr().err == message


def test_handlers_come_back_after_an_error():
  before = handlers()
  with pytest.raises(ZeroDivisionError), signals.SignalHandler():
    raise ZeroDivisionError
  assert handlers() == before


def test_outside_the_main_thread_nothing_is_caught(tiny, tmp_path, toy_model):
  before, seen = handlers(), []

  def work():
    with signals.SignalHandler() as stop:
      seen.append(handlers())
      stop.check_interrupted()
    seen.append(loop.train(tiny(training={'steps': 2, 'evaluate_every': 0}), tmp_path / 'run'))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [before, True]


@pytest.mark.slow
def test_who_is_stopped_while_nobody_listens_saves_too(tiny, tmp_path):
  """As in `train 2>&1 | tee log`, where Ctrl-C ends tee as well."""
  config = tiny(training={'steps': 400, 'evaluate_every': 0, 'checkpoint_every': 400})
  command = [sys.executable, '-m', 'ngrammer_jax.train', f'--workdir={tmp_path}/run']
  command += [f'--config={write_config(tmp_path / "config.py", config)}']
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  while b'loss' not in process.stderr.readline():
    assert process.poll() is None
  process.stderr.close()
  process.stdout.close()
  process.send_signal(signal.SIGINT)
  assert process.wait() == 130
  assert len(reader.steps(tmp_path / 'run')) == 1
