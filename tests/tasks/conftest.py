"""Fixtures that import TensorFlow on first use.

All tests of this folder run in the same worker, so that TensorFlow is imported only once.
"""

import importlib

import pytest


@pytest.fixture(scope='session')
def seqio():
  return pytest.importorskip('seqio')


def module_fixture(name):
  """Returns a fixture that imports and returns a module of `ngrammer_jax.tasks`."""

  @pytest.fixture(scope='session')
  def module(seqio):
    return importlib.import_module(f'ngrammer_jax.tasks.{name}')

  return module


c4 = module_fixture('c4')
features = module_fixture('superglue.features')
finetuning = module_fixture('superglue.finetuning')
registration = module_fixture('superglue.registration')
