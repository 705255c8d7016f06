"""Fixtures that import TensorFlow on first use.

All tests of the folder run in one worker, so that one imports it.
"""

import importlib

import pytest


@pytest.fixture(scope='session')
def seqio():
  return pytest.importorskip('seqio')


def module(name):
  """A fixture that is a module of the package."""

  @pytest.fixture(scope='session')
  def imported(seqio):
    return importlib.import_module(f'ngrammer_jax.tasks.{name}')

  return imported


c4 = module('c4')
features = module('superglue.features')
finetuning = module('superglue.finetuning')
registration = module('superglue.registration')
