"""Files on local disks and in Google Cloud Storage: atomic writes, appended files, full disks.

A path is local, or remote: gs://bucket/run. A remote object is written as a whole or not at all,
but cannot be appended to, and a remote folder can neither be renamed atomically nor be locked.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import errno
import functools
import glob
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import threading
from typing import Any
import uuid
import zipfile
import zlib

from ngrammer_jax import errors

REMOTE = 'gs://'
FULL = errno.ENOSPC, errno.EDQUOT  # errors of a full disk
SYNC_INTERVAL = 30.0  # seconds between uploads of appended files
os.environ.setdefault('EPATH_USE_TF', 'false')  # or etils uses TensorFlow where it is installed


# Errors that reading a damaged file may raise.
DAMAGE_ERRORS = (
  *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
  *(ArithmeticError, zipfile.BadZipFile, zlib.error),
)


@contextlib.contextmanager
def translate_damage(name: str | os.PathLike[str], remedy: str = '') -> Iterator[None]:
  """Raises BadInput for any error of reading something.

  Args:
    name: what is read, for the error message.
    remedy: what a user can do about the damage.
  """
  try:
    yield
  except errors.BadInput:
    raise
  except Exception as error:
    # `tokenizers` raises the bare class.
    is_damage = isinstance(error, DAMAGE_ERRORS) or type(error) is Exception
    if is_busy(error) or not is_damage:
      raise
    if isinstance(error, PermissionError):
      raise errors.BadInput(f'{name} cannot be read: {error.strerror}') from error
    reason = getattr(error, 'strerror', None) or error
    reason = f'no {error}' if isinstance(error, KeyError) else reason
    raise errors.BadInput(f'{name} is damaged: {reason}{remedy and "; "}{remedy}') from error


def is_busy(error: Exception) -> bool:
  """Whether an error means too many open files, and so says nothing about the file."""
  return getattr(error, 'errno', None) in (errno.EMFILE, errno.ENFILE)


def is_of_place(error: Exception) -> bool:
  """Whether an error says that a disk is full, or that a path may not be used."""
  numbers = *FULL, errno.EROFS, errno.EACCES, errno.EPERM
  is_known = isinstance(error, OSError) and error.errno in numbers
  return is_known and (error.filename is not None or error.errno in FULL)


def remedy(error: OSError) -> str:
  """Returns what a user can do about an error of writing."""
  return 'free some space, or use another path' if error.errno in FULL else 'use another path'


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file. Raises one of DAMAGE_ERRORS."""
  value = json.loads(path.read_bytes())
  if not isinstance(value, dict):
    raise ValueError('expected an object {...}')
  return value


def read_json_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the objects of `append_json`, without lines that a killed process or a disk damaged."""
  with path.open(encoding='utf-8', errors='replace') as file:
    for text in file:
      with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
          yield value


def append_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  """Appends an object as a line to a local file. Raises BadInput if it cannot be written."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', encoding='utf-8') as file:
      # A killed process may have left an incomplete line: start a new one.
      file.write('\n' * bool(file.tell()) + json.dumps(value) + '\n')
  except OSError as error:
    raise errors.BadInput(f'{path} cannot be written: {error.strerror}') from error


def path(text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns a path, with the home folder for a leading `~`, as a shell does it.

  A remote one is an `epath.Path`, which has the same methods.
  """
  if not is_remote(text):
    return pathlib.Path(os.path.expanduser(text))
  import fsspec

  # Objects that other processes write are visible at once.
  fsspec.config.conf.setdefault('gs', {})['use_listings_cache'] = False
  return _literal_path_class()(text)


@functools.cache
def _literal_path_class() -> type[pathlib.PurePosixPath]:
  """Returns the path class of etils, but `glob` takes no [, * or ? of the folder for a pattern."""
  from etils import epath  # heavy: only for remote paths and Orbax

  class LiteralPath(type(epath.Path())):
    """A path whose folder is never a pattern."""

    def glob(self, pattern):
      return map(type(self), epath.Path(glob.escape(os.fspath(self))).glob(pattern))

  return LiteralPath


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is in Google Cloud Storage."""
  return os.fspath(path).startswith(REMOTE)


def check_reachable(path: pathlib.Path) -> None:
  """Raises BadInput if a path is in another object store, or its bucket cannot be reached."""
  if not is_remote(path):
    if re.match(r'\w+:/', str(path)):  # pathlib makes s3:/bucket of s3://bucket
      raise errors.BadInput(
        f'{path} is neither a local path nor {REMOTE}BUCKET/FOLDER: mount the bucket and pass the '
        f'folder'
      )
    _check_local(path)
    return
  if not os.fspath(path).removeprefix(REMOTE).strip('/'):
    raise errors.BadInput(f'{path} names no bucket: expected for example {path}bucket/run')
  if importlib.util.find_spec('gcsfs') is None:
    raise errors.BadInput(f"{path} needs gcsfs: pip install 'ngrammer_jax[gcs]'")
  try:
    path.exists()
  except Exception as error:  # the client library raises many classes
    raise errors.BadInput(
      f'{path} cannot be reached: check the network and the credentials '
      f'(gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS). '
      f'{type(error).__name__}: {error}'
    ) from error


def _check_local(path: pathlib.Path, prefix: str = '') -> None:
  """Raises BadInput if no local file can have this path, or it cannot be reached."""
  try:
    path.lstat()
  except (FileNotFoundError, NotADirectoryError):
    pass
  except OSError as error:
    raise errors.BadInput(
      f'{prefix}{path} cannot be used: {error.strerror}; use another path'
    ) from error


def user_path(key: str, text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path of a user, with ~ replaced.

  Args:
    key: the flag or key that has the path, for error messages.
    text: the path.

  Raises:
    BadInput: the user after ~ does not exist, or no file can have this path.
  """
  try:
    path = pathlib.Path(text).expanduser()
  except RuntimeError as error:
    raise errors.BadInput(
      f'{key}={text}: no user has this name, or the home directory is unknown; use another path'
    ) from error
  _check_local(path, f'{key}=')
  return path


def user_cache(key: str) -> pathlib.Path:
  """Returns the cache folder of the user: $NGRAMMER_JAX_CACHE, or ~/.cache/ngrammer_jax.

  Args:
    key: the flag or key that names another folder, for error messages.

  Raises:
    BadInput: see `user_path`.
  """
  variable = os.environ.get('NGRAMMER_JAX_CACHE')
  name = 'NGRAMMER_JAX_CACHE' if variable else key
  return user_path(name, variable or '~/.cache/ngrammer_jax')


def orbax_path(path: pathlib.Path) -> pathlib.PurePosixPath:
  """Returns the absolute path for Orbax, which searches in it with `glob`."""
  return path if is_remote(path) else _literal_path_class()(path.resolve())


def make_folder(folder: pathlib.Path) -> None:
  """Creates a local folder and its parents; remote folders need not be created."""
  if not is_remote(folder):
    folder.mkdir(parents=True, exist_ok=True)


def make_output_folder(folder: pathlib.Path) -> None:
  """Creates the folder of results. Raises BadInput if it cannot be written to."""
  check_writable(f'--output={folder}', folder)
  try:
    make_folder(folder)
  except OSError as error:  # a link to nothing, or a folder of the system
    raise errors.BadInput(
      f'--output={folder} cannot be created: {error.strerror}; {remedy(error)}'
    ) from error


def check_output_file(flag: str, path: pathlib.Path, example: str) -> None:
  """Raises BadInput for a file that cannot be written, before the work that makes it."""
  check_reachable(path)
  if path.is_dir():
    raise errors.BadInput(f'{flag}={path} is a folder: name a file, such as {path}/{example}')
  check_writable(f'{flag}={path}', path.parent)
  if path.exists():
    _check_access(f'{flag}={path}', path)


def check_writable(name: str, folder: pathlib.Path) -> None:
  """Raises BadInput if a local folder can be neither written to nor created.

  Args:
    name: flag and path of the user, for the error message.
    folder: the folder.
  """
  if is_remote(folder):
    return
  existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if not existing.is_dir():
    raise errors.BadInput(f'{name}: {existing} is a file, expected a folder')
  _check_access(name, existing)


def _check_access(name, path):
  if not os.access(path, os.W_OK):
    raise errors.BadInput(
      f'{name}: {path} cannot be written to; change its permissions, or name another place'
    )


def iter_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all files in a folder, recursively."""
  for path in folder.iterdir():
    yield from iter_files(path) if path.is_dir() else (path,)


def size(path: pathlib.Path) -> int:
  """Returns the size of a file in bytes."""
  status = path.stat()
  return status.length if hasattr(status, 'length') else status.st_size  # `epath` has its own


def free_bytes(folder: pathlib.Path) -> float:
  """Returns the free space on the disk of a folder; infinite if the folder is remote."""
  return float('inf') if is_remote(folder) else shutil.disk_usage(folder).free


def remove(path: pathlib.Path) -> None:
  """Deletes a file or a folder; of a link, the link alone."""
  if is_remote(path):
    path.rmtree()
  elif path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file atomically: a process that is killed leaves the old file or the new one."""
  data = _encode(content)
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


def _encode(content):
  return content.encode() if isinstance(content, str) else content


def write_output(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file of results, and its folder. Raises BadInput if they cannot be written."""
  try:
    make_folder(path.parent)
    write(path, content)
  except Exception as error:  # the client library raises many classes
    reason = getattr(error, 'strerror', None) or error
    raise errors.BadInput(f'{path} cannot be written: {reason}') from error


def write_results(contents: Mapping[pathlib.Path, str | bytes]) -> None:
  """Writes the files of a result; those of another one are renamed, such as to test.1.json.

  Raises BadInput if they cannot be written; then those of the other one have their names again, and
  the texts are printed.
  """
  numbered = lambda path, n: path.with_name(f'{path.stem}.{n}{path.suffix}')
  previous, renamed = [path for path in contents if path.is_file()], {}
  try:
    if any(path.read_bytes() != _encode(contents[path]) for path in previous):
      is_free = lambda n: not any(numbered(path, n).exists() for path in contents)
      number = next(filter(is_free, itertools.count(1)))
      for path in previous:
        renamed[path] = path.rename(numbered(path, number))
    for path, content in contents.items():
      write_output(path, content)
  except Exception as error:
    for path, other in renamed.items():
      other.replace(path)
    print(*(text for text in contents.values() if isinstance(text, str)), sep='', end='')
    if isinstance(error, errors.BadInput):
      raise
    name = getattr(error, 'filename', None) or ', '.join(map(str, previous))
    reason = getattr(error, 'strerror', None) or error
    raise errors.BadInput(f'{name}, which is another result, cannot be kept: {reason}') from error
  for path, other in renamed.items():
    logging.info('the previous %s is now %s', path, other.name)


class SyncedDir:
  """A folder of files that are appended to.

  For a local folder, `folder` is the folder itself. For a remote one, it is a temporary local
  folder that starts as a copy; changed files are uploaded periodically and by `sync`.

  Args:
    folder: final location of the files.
    pattern: glob of the remote files that are appended to.
  """

  def __init__(self, folder: pathlib.Path, pattern: str):
    self.folder, self._remote = folder, folder if is_remote(folder) else None
    if self._remote is None:
      return
    self._scratch = tempfile.TemporaryDirectory(prefix='ngrammer_jax-')
    self.folder = pathlib.Path(self._scratch.name)
    for file in folder.glob(pattern):
      (self.folder / file.name).write_bytes(file.read_bytes())
    self._uploaded_sizes = {file: size(file) for file in iter_files(self.folder)}
    self._lock, self._closed = threading.Lock(), threading.Event()
    threading.Thread(target=self._sync_periodically, name='sync', daemon=True).start()

  def sync(self) -> None:
    """Uploads the changed files."""
    if self._remote is None:
      return
    with self._lock:
      for file in iter_files(self.folder):
        new_size = size(file)
        if self._uploaded_sizes.get(file) != new_size:
          write(self._remote / str(file.relative_to(self.folder)), file.read_bytes())
          self._uploaded_sizes[file] = new_size

  def close(self) -> None:
    """Uploads the changed files and deletes the temporary folder. Close the files first."""
    if self._remote is not None:
      self._closed.set()
      self._try_sync()
      self._scratch.cleanup()

  def _sync_periodically(self) -> None:
    while not self._closed.wait(SYNC_INTERVAL):
      self._try_sync()

  def _try_sync(self) -> None:
    try:
      self.sync()
    except Exception as error:  # a failed upload must not end the run
      logging.warning('%s cannot be written: %s', self._remote, error)


@contextlib.contextmanager
def translate_disk_full(message: Callable[[], str]) -> Iterator[None]:
  """Raises BadInput with the message for any error of any library that means a full disk."""
  try:
    yield
  except Exception as error:
    is_full = getattr(error, 'errno', None) in FULL
    if not is_full and not any(s in str(error) for s in ('No space left', 'Disk quota exceeded')):
      raise
    raise errors.BadInput(message()) from error
