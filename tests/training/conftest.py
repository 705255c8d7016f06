"""A small model in place of a real one."""

import pytest


@pytest.fixture
def toy_model(monkeypatch):
  """Has the loop train a model that compiles in no time."""
  from tests.training import toy

  toy.install(monkeypatch.setattr)


@pytest.fixture
def reference_run(tiny, tmp_path, toy_model):
  """A finished run of 12 steps of the small model, with checkpoints of 4, 8 and 12."""
  from ngrammer_jax.training import loop

  loop.train(tiny(), tmp_path / 'reference')
  return tmp_path / 'reference'
