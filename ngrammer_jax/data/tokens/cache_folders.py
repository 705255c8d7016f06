"""Folders of the cache: written to a temporary folder and renamed when complete.

A killed process never leaves an incomplete folder. Only the user can read the cache.
"""

from collections.abc import Callable
import contextlib
import hashlib
import json
import logging
import pathlib
import shutil
import tempfile
import time
from typing import Any, TypeVar

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.system import file_errors, files, storage

KEY = 'data.cache_dir'
FORMAT_VERSION = 3  # increase it when the cache files or the reading of a corpus change
ABANDONED_SECONDS = 86_400  # after this time an incomplete folder belongs to a killed process
Content = TypeVar('Content')


def hash_json(value: Any) -> str:
  """Returns a hash of a JSON value, for the name of a folder of the cache."""
  return hashlib.sha256(json.dumps([FORMAT_VERSION, value]).encode()).hexdigest()[:16]


def load_or_write(
  config: data_config.DataConfig,
  name: str,
  load: Callable[[pathlib.Path], Content],
  write: Callable[[pathlib.Path], None],
  may_delete: bool,
) -> Content:
  """Loads a folder of the cache, after writing it if it is missing or damaged.

  Args:
    config: data config.
    name: name of the folder.
    load: loads a folder; raises one of `file_errors.DAMAGE_ERRORS` for damage.
    write: writes an empty folder.
    may_delete: whether damaged and abandoned folders may be deleted.

  Raises:
    BadInput: a damaged folder that must not be deleted, or a folder that cannot be written.
  """
  if config.cache_dir:
    root = storage.user_path(KEY, config.cache_dir)
  else:
    root = storage.user_cache(KEY)
  folder = root / name
  if folder.exists():
    try:
      return load(folder)
    except file_errors.DAMAGE_ERRORS as error:
      if file_errors.is_busy(error):
        raise
      if not may_delete:
        raise errors.BadInput(
          f'{folder} is damaged ({error}), and only the config of the run names this cache: delete '
          f'the folder, and it is prepared again'
        ) from error
      logging.warning('%s is damaged (%s); preparing it again', folder, error)
      with contextlib.suppress(FileNotFoundError):  # another process may remove it too
        files.remove(folder)
  try:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if may_delete:
      _remove_abandoned(root)
    with tempfile.TemporaryDirectory(
      dir=root, prefix='preparing-', ignore_cleanup_errors=True
    ) as scratch:
      write(pathlib.Path(scratch))
      pathlib.Path(scratch).rename(folder)
  except OSError as error:
    if not folder.exists():  # else another process was faster
      remedy = ''
      if not config.cache_dir:
        remedy = '; name another folder with NGRAMMER_JAX_CACHE'
      raise errors.BadInput(
        f'{KEY}={root} cannot be written: {error.strerror}; no incomplete cache is left{remedy}'
      ) from error
  return load(folder)


def _remove_abandoned(root: pathlib.Path) -> None:
  """Removes incomplete folders of killed processes."""
  for folder in root.glob('preparing-*'):
    with contextlib.suppress(OSError):  # another process may remove it too
      changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
      if time.time() - changed > ABANDONED_SECONDS:
        shutil.rmtree(folder, ignore_errors=True)
