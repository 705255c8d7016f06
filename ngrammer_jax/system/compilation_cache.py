"""The persistent compilation cache of JAX.

It is on by default, in the cache folder of the user, unless JAX's own settings name another folder
(JAX_COMPILATION_CACHE_DIR). A cached program runs as this user, so the default folder is not used
if another user can write to it.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import time

from ngrammer_jax import errors
from ngrammer_jax.system import files, hosts, storage

DEFAULT = pathlib.Path('~/.cache/ngrammer_jax/programs')  # or in $NGRAMMER_JAX_CACHE
MIN_COMPILE_SECONDS = 0.1  # programs that compile faster are not cached
MAX_AGE = 30 * 86_400  # seconds after which a program is deleted


def add_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --compilation_cache, the argument of `enable`."""
  parser.add_argument(
    '--compilation_cache',
    type=_path_or_none,
    default=DEFAULT,
    metavar='DIR',
    help='folder, or None: no cache',
  )


def _path_or_none(text: str) -> pathlib.Path | None:
  """Parses --compilation_cache."""
  if text == 'None':
    return None
  return storage.path(text)


def enable(folder: pathlib.Path | None) -> None:
  """Enables the cache; call it before the first compilation.

  Args:
    folder: the value of --compilation_cache. None: keep JAX's settings. `DEFAULT`: keep them if
      they name a folder, otherwise use the default folder, or log a warning if this is not
      possible.

  Raises:
    BadInput: another folder cannot be used.
  """
  import jax  # not at the top: --help and errors in a config do not wait for it

  if folder is None or not jax.config.jax_enable_compilation_cache:
    return
  if folder == DEFAULT:
    if jax.config.jax_compilation_cache_dir is not None:
      return
    try:
      folder = _make_default()
    except (OSError, errors.BadInput) as error:
      logging.warning('no compilation cache: %s', error)
      return
  storage.check_reachable(folder)
  files.check_writable(f'--compilation_cache={folder}', folder)
  jax.config.update('jax_compilation_cache_dir', str(folder))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', MIN_COMPILE_SECONDS)
  if hosts.is_primary():
    logging.debug('compilation cache: %s (--compilation_cache=None: none)', folder)


def _make_default() -> pathlib.Path:
  """Creates the default folder, deletes old programs. Raises OSError, or BadInput if not private.

  It has a subfolder for each kind of processor, because machines may share a home directory.
  """
  root = storage.user_cache('--compilation_cache')
  folder = root / DEFAULT.name / _processor()
  for private in (root, folder.parent, folder):
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = private.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
      raise errors.BadInput(
        f'{private} belongs to another user, or others can write to it: change its permissions '
        f'with chmod go-w, or use another folder with --compilation_cache=DIR'
      )
  for program in folder.glob('*-cache'):
    with contextlib.suppress(OSError):  # another process may delete it too
      if time.time() - program.stat().st_mtime > MAX_AGE:
        program.unlink()
  return folder


def _processor() -> str:
  """Returns a name of the instruction set of this machine, for compiled programs."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
  except OSError:
    return platform.machine()
  features = next((line for line in lines if line.lower().startswith(('flags', 'features'))), '')
  return f'{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}'
