"""A small model in place of a real one, and checksums in small chunks."""

import pytest


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
  """The sums are the same in chunks of any size (see test_checksums), and here soon made."""
  from ngrammer_jax.training import checksums

  monkeypatch.setattr(checksums, 'CHUNK', 2**10)


@pytest.fixture
def small(monkeypatch):
  """Has the loop train a model that compiles in no time."""
  from tests.training import toy

  toy.install(monkeypatch.setattr)


@pytest.fixture
def whole(tiny, tmp_path, small):
  """A finished run of 12 steps of the small model, with checkpoints of 4, 8 and 12."""
  from ngrammer_jax.training import loop

  loop.train(tiny(), tmp_path / 'whole')
  return tmp_path / 'whole'
