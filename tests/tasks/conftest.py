"""Fixtures that import TensorFlow on first use.

All tests of this folder run in the same worker, so that TensorFlow is imported only once.
"""

import contextlib
import importlib

import pytest

from ngrammer_jax.system import progress


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


@pytest.fixture
def shown_progress(monkeypatch):
  """Returns a list of all progress bars: [description, total, unit, units done]."""
  shown = []

  class Progress(contextlib.nullcontext):
    def __init__(self, description, total, unit):
      super().__init__(self)
      shown.append([description, total, unit, 0])
      self._line = shown[-1]

    def advance(self, units):
      self._line[-1] += units

  monkeypatch.setattr(progress, 'Progress', Progress)
  return shown
