"""Eight simulated devices, no accelerator unless one is asked for, and fixtures of all tests.

JAX is imported where it is used: the process that hands out the tests does without it.
"""

import contextlib
import fcntl
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import tempfile

import pytest

from ngrammer_jax.system import signals

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    # The programs are tiny: what counts is how fast they compile.
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',
  ]
)
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later ones end at an unknown flag
  os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'  # half the time to compile


def compiled_programs() -> pathlib.Path:
  """A folder of this user alone: a program that somebody else could write there would be run."""
  folder = pathlib.Path(tempfile.gettempdir()) / f'ngrammer_jax-compiled-{os.getuid()}'
  folder.mkdir(mode=0o700, exist_ok=True)
  status = folder.lstat()
  if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
    raise pytest.UsageError(
      f'{folder} belongs to another user, or others may write there: remove it, or set '
      f'JAX_COMPILATION_CACHE_DIR'
    )
  return folder


# Tests compile the same tiny programs many times, some in processes of their own.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(compiled_programs())
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')

# Tracing leaves many live objects: collect garbage less often.
gc.set_threshold(50_000, 20, 100)

# A shell in the background ignores Ctrl-C, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that run in one worker, because they share a slow import or compiled programs.
WORKER_GROUPS = {
  'tensorflow': ('tests/tasks/',),
  'runs': (
    'tests/test_generate.py',
    'tests/test_processes.py',
    'tests/runs/test_run.py',
    'tests/test_results.py',
    'tests/test_out_of_range.py',
    'tests/inference/test_pairs.py',
  ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  """A slow case of a test that is marked `full` is only slow."""
  if config.option.markexpr == 'full':
    items[:] = [item for item in items if item.get_closest_marker('slow') is None]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
  """Pytest searches five times through all live objects, and JAX leaves many: for seconds."""
  gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """One worker runs all tests of a file, and all files of a group."""
  from xdist import scheduler

  class ByFile(scheduler.LoadFileScheduling):
    def _split_scope(self, nodeid):
      groups = (name for name, files in WORKER_GROUPS.items() if nodeid.startswith(files))
      return next(groups, super()._split_scope(nodeid))

  return ByFile(config, log)


@pytest.fixture(autouse=True)
def signal_handlers():
  """Restores the handlers of signals: a command sets them for the rest of its process."""
  before = {number: signal.getsignal(number) for number in signals.SIGNALS}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.fixture
def x64():
  """Double precision for one test."""
  import jax

  with jax.enable_x64(True):
    yield


@contextlib.contextmanager
def single_device(monkeypatch):
  """As on a machine with one device, for which programs compile faster than for eight."""
  import jax

  device = jax.devices()[:1]
  with monkeypatch.context() as patch:
    patch.setattr(jax, 'devices', lambda *backend: device)
    patch.setattr(jax, 'device_count', lambda *backend: 1)
    yield


@pytest.fixture
def one_device(monkeypatch):
  """JAX has one device instead of eight."""
  with single_device(monkeypatch):
    yield


@pytest.fixture
def reference():
  """Loads a file of reference arrays by name."""
  import numpy as np

  from tests import checks

  return lambda name: dict(np.load(checks.REFERENCE / f'{name}.npz'))


@pytest.fixture
def corpora():
  """The folder of real corpora."""
  from tests import checks

  return checks.data_root('data')


@pytest.fixture
def published_configs():
  """The folder of config.json files of published checkpoints, in a folder each."""
  from tests import checks

  return checks.data_root('published_configs')


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty folder for tokenised corpora, instead of the user's own."""
  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / 'cache'))
  yield tmp_path / 'cache'
  shutil.rmtree(tmp_path / 'cache', ignore_errors=True)  # pytest keeps the rest for a while


@pytest.fixture
def tiny(tmp_path, cache):
  """Makes configs of a tiny N-Grammer on a tiny text, see `tiny_run.config`."""
  from tests import tiny_run

  text = tiny_run.write_text(tmp_path / 'text.txt')
  return lambda *args, **given: tiny_run.config(text, *args, **given)


@pytest.fixture(scope='session')
def shared_folder(tmp_path_factory, worker_id):
  """One folder of all workers of this session."""
  base = tmp_path_factory.getbasetemp()
  folder = (base if worker_id == 'master' else base.parent) / 'shared'
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture
def trained(shared_folder, monkeypatch):
  """The workdir of a tiny N-Grammer, read-only: the first test that asks trains it for all."""
  from ngrammer_jax.training import loop
  from tests import tiny_run

  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(shared_folder / 'cache'))
  workdir = shared_folder / 'ngrammer'
  with (shared_folder / 'lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (workdir / 'trained').exists():
      text = tiny_run.write_text(shared_folder / 'text.txt')
      with single_device(monkeypatch):
        loop.train(tiny_run.config(text), workdir)
      (workdir / 'trained').touch()
  return workdir


@pytest.fixture
def trained_copy(trained, tmp_path):
  """A copy of `trained`, to be changed."""
  return shutil.copytree(trained, tmp_path / 'ngrammer')
