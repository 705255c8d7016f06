"""Where there is no TPU, JAX does not load libtpu."""

import importlib.util
import os
import subprocess
import sys

import pytest

from ngrammer_jax.system import libtpu
from tests.loops import each

SIGNS = ('JAX_PLATFORMS', 'JAX_FORCE_TPU_INIT', 'TPU_')

COMMAND = """
import sys
from ngrammer_jax import flags

def main(argv):
  import jax
  print(jax.devices()[0].platform)

flags.run(main)
"""

LIBRARY_USE = """
import os, sys
import jax
from ngrammer_jax import sharding

before = sys.modules.get('libtpu'), os.environ.get('TPU_LIBRARY_PATH')
print(sharding.make_mesh(1, 1, 1, None).devices.flat[0].platform)
assert (sys.modules.get('libtpu'), os.environ.get('TPU_LIBRARY_PATH')) == before
"""


@pytest.fixture
def no_tpu(monkeypatch):
  """As on a machine without a TPU and without variables that speak of one."""
  for name in list(os.environ):
    if name.startswith(SIGNS):
      monkeypatch.delenv(name)
  monkeypatch.setattr(libtpu.glob, 'glob', lambda pattern: [])
  monkeypatch.setitem(sys.modules, 'libtpu', object())
  return monkeypatch


def test_libtpu_is_hidden_without_a_tpu(no_tpu):
  no_tpu.setenv('TPU_LIBRARY_PATH', 'libtpu.so')  # as libtpu itself sets it
  no_tpu.setenv('TPU_SKIP_MDS_QUERY', '1')  # as JAX sets it
  libtpu.skip_without_tpu()
  assert sys.modules['libtpu'] is None
  assert 'TPU_LIBRARY_PATH' not in os.environ
  with pytest.raises(ImportError):
    import libtpu as _  # noqa: F401


@each(
  'name, value',
  [
    ('JAX_PLATFORMS', 'tpu'),
    ('JAX_PLATFORMS', 'cpu'),
    ('JAX_FORCE_TPU_INIT', ''),
    ('TPU_WORKER_ID', '0'),
    ('TPU_TOPOLOGY', '2x2'),
  ],
)
def test_environment_decides(no_tpu, name, value):
  with no_tpu.context() as patch:
    patch.setenv(name, value)
    libtpu.skip_without_tpu()
    assert sys.modules['libtpu'] is not None


@each('pattern', ['/dev/accel*', '/dev/vfio/*'])
def test_a_device_file_is_a_tpu(no_tpu, pattern):
  with no_tpu.context() as patch:
    patch.setattr(libtpu.glob, 'glob', lambda asked: ['a file'] if asked == pattern else [])
    libtpu.skip_without_tpu()
    assert sys.modules['libtpu'] is not None


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
@each('script', [COMMAND, LIBRARY_USE])
def test_processes_are_silent(script):
  environment = {name: value for name, value in os.environ.items() if not name.startswith(SIGNS)}
  environment['JAX_NUM_CPU_DEVICES'] = '1'
  if any(libtpu.glob.glob(pattern) for pattern in libtpu.DEVICE_FILES):
    pytest.skip('this machine may have a TPU')
  result = subprocess.run(
    [sys.executable, '-c', script], env=environment, capture_output=True, text=True, check=True
  )
  assert result.stdout in ('cpu\n', 'gpu\n')
  assert 'TPU' not in result.stderr
