"""Files that are whole or not there."""

import os

import pytest

from ngrammer_jax.system import files


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / 'config.json'
  files.write(path, 'old, and longer')
  files.write(path, 'new')
  assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]

  def full(descriptor):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch, pytest.raises(OSError, match='No space left'):
    patch.setattr(os, 'fsync', full)
    files.write(path, 'half')
  assert path.read_text() == 'new'
  files.write(path, b'again')
  assert path.read_bytes() == b'again' and list(tmp_path.iterdir()) == [path]
