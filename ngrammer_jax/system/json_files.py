"""JSON of files that anybody may have changed: limits, and one error for any damage."""

import json
import pathlib
from typing import Any

from ngrammer_jax.system import files

MAX_BYTES = 1 << 26
MAX_DEPTH = 20


def read_object(path: pathlib.Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
  """Returns the JSON object of a file.

  Raises:
    DamagedError: the file is not an object in JSON, or exceeds a limit.
    OSError: the file is missing, or cannot be read.
  """
  value = parse(files.read(path, max_bytes))
  if not isinstance(value, dict):
    raise files.DamagedError('expected an object {...}')
  return value


def parse(data: bytes) -> Any:
  """Returns the value of JSON bytes. Raises DamagedError if they are not JSON, or nested deeply."""
  try:
    value = json.loads(data.decode())
  except UnicodeDecodeError as error:
    byte = f'0x{data[error.start]:02x}'
    raise files.DamagedError(f'byte {error.start:,} ({byte}): not valid UTF-8') from error
  except json.JSONDecodeError as error:
    raise files.DamagedError(f'line {error.lineno}: {error.msg}') from error
  except RecursionError as error:
    raise files.DamagedError(f'nested more than {MAX_DEPTH} deep') from error
  except ValueError as error:  # Python converts no longer ones
    raise files.DamagedError('a number of thousands of digits') from error
  _check_depth(value, MAX_DEPTH)
  return value


def _check_depth(value: Any, levels: int) -> None:
  """Raises DamagedError if lists and objects are nested more than `levels` deep."""
  if not isinstance(value, list | dict):
    return
  if not levels:
    raise files.DamagedError(f'nested more than {MAX_DEPTH} deep')
  for item in value.values() if isinstance(value, dict) else value:
    _check_depth(item, levels - 1)
