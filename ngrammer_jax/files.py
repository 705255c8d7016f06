"""Files that are whole or not there, wherever a process is killed; and disks that are full."""

from collections.abc import Callable, Iterator
import contextlib
import errno
import os
import pathlib

from ngrammer_jax import errors


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file beside its place, then moves it there in one step."""
  data = content.encode() if isinstance(content, str) else content
  scratch = path.with_name(f'{path.name}.scratch')
  with scratch.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  scratch.replace(path)


@contextlib.contextmanager
def full_disk(sentence: Callable[[], str]) -> Iterator[None]:
  """Makes a BadInput of the many ways in which libraries say that a disk is full."""
  try:
    yield
  except Exception as error:
    full = getattr(error, 'errno', None) in (errno.ENOSPC, errno.EDQUOT)
    if not full and not any(w in str(error) for w in ('No space left', 'Disk quota exceeded')):
      raise
    raise errors.BadInput(sentence()) from error
