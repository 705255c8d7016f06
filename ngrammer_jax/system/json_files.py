"""JSON objects in files: one per file, or one per line."""

from collections.abc import Iterator
import contextlib
import json
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.system import git_lfs


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file.

  Raises one of `file_errors.DAMAGE_ERRORS`, or BadInput if the file is a pointer of Git LFS.
  """
  value = json.loads(git_lfs.read_bytes(path))
  if not isinstance(value, dict):
    raise ValueError('expected an object {...}')
  return value


def read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the objects of `append_line`, without damaged lines."""
  with path.open('rb') as file:
    for line in file:
      with contextlib.suppress(ValueError):
        value = json.loads(line.decode(errors='replace'))
        if isinstance(value, dict):
          yield value


def append_line(path: pathlib.Path, value: dict[str, Any]) -> None:
  """Appends an object as a line to a local file. Raises BadInput if it cannot be written."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', encoding='utf-8') as file:
      if file.tell():
        file.write('\n')  # a killed process may have left an incomplete line: start a new one
      file.write(json.dumps(value) + '\n')
  except OSError as error:
    raise errors.BadInput(f'{path} cannot be written: {error.strerror}') from error
