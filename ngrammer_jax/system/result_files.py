"""Files of results: computed results are not overwritten or lost."""

from collections.abc import Mapping
import itertools
import logging
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, files, storage


def make_output_folder(folder: pathlib.Path) -> None:
  """Creates the folder of results. Raises BadInput if it cannot be written to."""
  files.check_writable(f'--output={folder}', folder)
  try:
    files.make_folder(folder)
  except OSError as error:  # a link to nothing, or a folder of the system
    raise errors.BadInput(
      f'--output={folder} cannot be created: {error.strerror}; {file_errors.remedy(error)}'
    ) from error


def check_output_file(flag: str, path: pathlib.Path, example: str) -> None:
  """Raises BadInput for a file that cannot be written, before its results are computed.

  Args:
    flag: the flag of the file, for the error message.
    path: the file.
    example: an example of a file name for folders.
  """
  storage.check_reachable(path)
  if path.is_dir():
    raise errors.BadInput(f'{flag}={path} is a folder: name a file, such as {path}/{example}')
  files.check_writable(f'{flag}={path}', path.parent)
  if path.exists():
    files.check_permission(f'{flag}={path}', path)


def write_output(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file of results, and its folder. Raises BadInput if they cannot be written."""
  try:
    files.make_folder(path.parent)
    files.write(path, content)
  except Exception as error:  # the client library raises many classes
    reason = getattr(error, 'strerror', None) or error
    raise errors.BadInput(f'{path} cannot be written: {reason}') from error


def write_results(contents: Mapping[pathlib.Path, str | bytes]) -> None:
  """Writes the files of a result; renames files of another result, such as to test.1.json.

  Raises BadInput if they cannot be written, after printing the texts and restoring the names of the
  other files.
  """
  previous = [path for path in contents if path.is_file()]
  renamed: dict[pathlib.Path, pathlib.Path] = {}
  try:
    if any(path.read_bytes() != files.encode(contents[path]) for path in previous):
      number = _free_number(contents)
      for path in previous:
        renamed[path] = path.rename(_numbered(path, number))
    for path, content in contents.items():
      write_output(path, content)
  except Exception as error:
    for path, new_path in renamed.items():
      new_path.replace(path)
    for content in contents.values():
      if isinstance(content, str):
        print(content, end='')
    if isinstance(error, errors.BadInput):
      raise
    name = getattr(error, 'filename', None) or ', '.join(map(str, previous))
    reason = getattr(error, 'strerror', None) or error
    raise errors.BadInput(f'{name}, which is another result, cannot be kept: {reason}') from error
  for path, new_path in renamed.items():
    logging.info('the previous %s is now %s', path, new_path.name)


def _free_number(paths: Mapping[pathlib.Path, object]) -> int:
  """Returns the smallest number unused by all paths."""
  for number in itertools.count(1):
    if not any(_numbered(path, number).exists() for path in paths):
      return number


def _numbered(path: pathlib.Path, number: int) -> pathlib.Path:
  """Returns the path with a number before its suffix: test.1.json."""
  return path.with_name(f'{path.stem}.{number}{path.suffix}')
