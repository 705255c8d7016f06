"""Files that are whole or not there, wherever a process is killed; and disks that are full."""

import errno
import os
import pathlib


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file beside its place, then moves it there in one step."""
  data = content.encode() if isinstance(content, str) else content
  scratch = path.with_name(f'{path.name}.scratch')
  with scratch.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  scratch.replace(path)


def disk_is_full(error: Exception) -> bool:
  """Whether this is what an error means, in the many ways that libraries say it."""
  if getattr(error, 'errno', None) in (errno.ENOSPC, errno.EDQUOT):
    return True
  return any(words in str(error) for words in ('No space left', 'Disk quota exceeded'))
