"""Paths on local disks and in Google Cloud Storage.

A path is local, or remote: gs://bucket/run. A remote object is written atomically but cannot be
appended to. A remote folder cannot be renamed atomically or locked.
"""

from collections.abc import Iterator
import functools
import glob
import importlib.util
import os
import pathlib
import re

from ngrammer_jax import errors

REMOTE = 'gs://'
os.environ.setdefault('EPATH_USE_TF', 'false')  # or etils uses TensorFlow where it is installed


def path(text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns a path with a leading `~` expanded to the home folder, as in a shell.

  A remote path is an `epath.Path`, with the same methods.
  """
  if not is_remote(text):
    return pathlib.Path(os.path.expanduser(text))
  import fsspec

  # Objects that other processes write are visible at once.
  fsspec.config.conf.setdefault('gs', {})['use_listings_cache'] = False
  return _literal_path_class()(text)


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is in Google Cloud Storage."""
  return os.fspath(path).startswith(REMOTE)


@functools.cache
def _literal_path_class() -> type[pathlib.PurePosixPath]:
  """Returns the path class of etils with a `glob` that does not expand [, * or ? of the folder."""
  from etils import epath  # heavy: only for remote paths and Orbax

  class LiteralPath(type(epath.Path())):
    """A path with a folder that is never a pattern."""

    def glob(self, pattern: str) -> Iterator['LiteralPath']:
      return map(type(self), epath.Path(glob.escape(os.fspath(self))).glob(pattern))

  return LiteralPath


def orbax_path(path: pathlib.Path) -> pathlib.PurePosixPath:
  """Returns the absolute path for Orbax, safe for its use of `glob`."""
  if is_remote(path):
    return path
  return _literal_path_class()(path.resolve())


def check_reachable(path: pathlib.Path) -> None:
  """Raises BadInput for a path in another object store, or an unreachable bucket."""
  if is_remote(path):
    _check_bucket(path)
    return
  address = str(path)
  if re.match(r'\w+:/', address):
    if not address.startswith('gs:'):  # of gs://, only a `pathlib.Path` gets here
      address = address.replace(':/', '://', 1)  # pathlib makes s3:/bucket of s3://bucket
    raise errors.BadInput(
      f'{address} is neither a local path nor {REMOTE}BUCKET/FOLDER: mount the bucket and pass the '
      f'folder'
    )
  _check_local(path)


def _check_bucket(path: pathlib.Path) -> None:
  """Raises BadInput if the bucket of a remote path is unreachable."""
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
  """Raises BadInput for an invalid or unreachable local path."""
  try:
    path.lstat()
  except (FileNotFoundError, NotADirectoryError):
    pass
  except OSError as error:
    raise errors.BadInput(
      f'{prefix}{path} cannot be used: {error.strerror}; use another path'
    ) from error


def user_path(key: str, text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path of a user, with ~ expanded.

  Args:
    key: the flag or key of the path, for error messages.
    text: the path.

  Raises:
    BadInput: an unknown user after ~, or an invalid path.
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
    key: the flag or key for another folder, for error messages.

  Raises:
    BadInput: see `user_path`.
  """
  folder = os.environ.get('NGRAMMER_JAX_CACHE')
  if folder:
    return user_path('NGRAMMER_JAX_CACHE', folder)
  return user_path(key, '~/.cache/ngrammer_jax')
