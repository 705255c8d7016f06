"""Checkpoints of tiny arrays, whose checksums need no large chunks."""

import pytest


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
  """The sums are the same in chunks of any size (see test_checksums), and here soon made."""
  from ngrammer_jax.training import checksums

  monkeypatch.setattr(checksums, 'CHUNK', 2**10)
