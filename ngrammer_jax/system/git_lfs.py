"""Pointers of Git LFS: small texts in place of files after `git clone` without git-lfs."""

import os
import pathlib

from ngrammer_jax import errors

BEGINNING = b'version https://git-lfs.github.com/spec/'


def check(name: str | os.PathLike[str], head: bytes) -> None:
  """Raises BadInput if content is a pointer.

  Args:
    name: the file, for the error message.
    head: its first bytes, at least as many as BEGINNING.
  """
  if head.startswith(BEGINNING):
    raise errors.BadInput(
      f'{name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository'
    )


def check_file(path: str | os.PathLike[str]) -> None:
  """Raises BadInput if a file is a pointer. Missing files are ignored."""
  if os.path.isfile(path):
    with open(path, 'rb') as file:
      check(path, file.read(len(BEGINNING)))


def read_bytes(path: pathlib.Path) -> bytes:
  """Returns the content of a file. Raises BadInput if it is a pointer."""
  content = path.read_bytes()
  check(path, content)
  return content
