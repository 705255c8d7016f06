"""Files that are whole or not there, wherever a process is killed."""

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
