"""Eight simulated devices, and no accelerator unless one is asked for."""

import os
import pathlib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)

import jax  # noqa: E402  the flags above come first
import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def x64():
  """Double precision for one test."""
  with jax.enable_x64(True):
    yield


def data_root(name: str) -> pathlib.Path:
  """A folder of real data that is not part of the project, or skip.

  NGRAMMER_JAX_TEST_DATA names a folder with `data/` (corpora) and `reference/` (arrays
  computed with the official implementations); `../shared` is taken if it is there.
  """
  beside = pathlib.Path(__file__).resolve().parents[2] / 'shared'
  root = pathlib.Path(os.environ.get('NGRAMMER_JAX_TEST_DATA', beside))
  if not (root / name).is_dir():
    pytest.skip(f'{name}/ not found: set NGRAMMER_JAX_TEST_DATA to the folder that holds it')
  return root / name


@pytest.fixture
def reference():
  """Loads a file of reference arrays by name."""
  root = data_root('reference')
  return lambda name: dict(np.load(root / f'{name}.npz'))


@pytest.fixture
def corpora():
  """The folder of real corpora."""
  return data_root('data')


def assert_close(actual, expected, tolerance):
  """Maximum difference relative to the array maximum, as `tolerance * (1 + max|expected|)`."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.shape == expected.shape
  worst = np.abs(actual - expected).max()
  limit = tolerance * (1 + np.abs(expected).max())
  assert worst <= limit, f'differs by {worst:.3g}, limit {limit:.3g}'
