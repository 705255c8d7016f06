"""Errors of files and disks: damaged files, full disks, missing permissions."""

from collections.abc import Callable, Iterator
import contextlib
import errno
import os
import zipfile
import zlib

from ngrammer_jax import errors

# Errors that reading a damaged file may raise.
DAMAGE_ERRORS = (
  OSError,
  EOFError,
  ValueError,
  LookupError,
  TypeError,
  AttributeError,
  RuntimeError,
  ArithmeticError,
  zipfile.BadZipFile,
  zlib.error,
)
FULL = (errno.ENOSPC, errno.EDQUOT)  # numbers of the errors of a full disk
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)  # of a path that may not be used
FULL_MESSAGES = ('No space left', 'Disk quota exceeded')  # in errors of libraries without a number


@contextlib.contextmanager
def translate_damage(name: str | os.PathLike[str], remedy: str = '') -> Iterator[None]:
  """Raises BadInput for any error of reading.

  Args:
    name: name of the data in the error message.
    remedy: remedy for the damage.
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
    if isinstance(error, KeyError):
      reason = f'no {error}'
    else:
      reason = getattr(error, 'strerror', None) or str(error)
    if remedy:
      reason = f'{reason}; {remedy}'
    raise errors.BadInput(f'{name} is damaged: {reason}') from error


@contextlib.contextmanager
def translate_disk_full(message: Callable[[], str]) -> Iterator[None]:
  """Raises BadInput with the message for any error caused by a full disk."""
  try:
    yield
  except Exception as error:
    has_number = getattr(error, 'errno', None) in FULL
    has_text = any(text in str(error) for text in FULL_MESSAGES)
    if not has_number and not has_text:
      raise
    raise errors.BadInput(message()) from error


def is_busy(error: Exception) -> bool:
  """Whether an error means too many open files, and not a bad file."""
  return getattr(error, 'errno', None) in (errno.EMFILE, errno.ENFILE)


def is_unusable_path(error: OSError) -> bool:
  """Whether an error means a full disk, or a path without permission."""
  if error.errno in FULL:
    return True
  return error.errno in FORBIDDEN and error.filename is not None


def remedy(error: OSError) -> str:
  """Returns the remedy for an error of writing."""
  if error.errno in FULL:
    return 'free some space, or use another path'
  return 'use another path'
