"""Files and folders on local disks and in Google Cloud Storage: atomic writes, sizes, deletion."""

from collections.abc import Iterator
import os
import pathlib
import shutil
import uuid

from ngrammer_jax import errors
from ngrammer_jax.system.storage import is_remote


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file atomically: a killed process leaves the old file or the new one."""
  data = encode(content)
  if is_remote(path):
    path.write_bytes(data)
    return
  scratch = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.scratch')  # of this call alone
  try:
    with scratch.open('wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    scratch.replace(path)
  except OSError as error:
    error.filename = str(path)  # a full disk names no file
    raise
  finally:
    scratch.unlink(missing_ok=True)


def encode(content: str | bytes) -> bytes:
  """Returns the bytes for `write`."""
  if isinstance(content, str):
    return content.encode()
  return content


def make_folder(folder: pathlib.Path) -> None:
  """Creates a local folder and its parents; remote folders need not be created."""
  if not is_remote(folder):
    folder.mkdir(parents=True, exist_ok=True)


def check_writable(name: str, folder: pathlib.Path) -> None:
  """Raises BadInput if a local folder cannot be written or created.

  Args:
    name: flag and path for the error message.
    folder: the folder.
  """
  if is_remote(folder):
    return
  existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if not existing.is_dir():
    raise errors.BadInput(f'{name}: {existing} is a file, expected a folder')
  check_permission(name, existing)


def check_permission(name: str, path: pathlib.Path) -> None:
  """Raises BadInput if an existing local file or folder cannot be written."""
  if not os.access(path, os.W_OK):
    raise errors.BadInput(
      f'{name}: {path} cannot be written to; change its permissions, or name another place'
    )


def iter_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all files in a folder, recursively."""
  for entry in folder.iterdir():
    if entry.is_dir():
      yield from iter_files(entry)
    else:
      yield entry


def size(path: pathlib.Path) -> int:
  """Returns the size of a file in bytes."""
  status = path.stat()
  if hasattr(status, 'length'):  # of a remote path
    return status.length
  return status.st_size


def free_bytes(folder: pathlib.Path) -> float:
  """Returns the free space on the disk of a folder; infinite if the folder is remote."""
  if is_remote(folder):
    return float('inf')
  return shutil.disk_usage(folder).free


def remove(path: pathlib.Path) -> None:
  """Deletes a file, a folder, or a link (without its target)."""
  if is_remote(path):
    path.rmtree()
  elif path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
