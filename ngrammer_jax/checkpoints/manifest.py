"""The manifest of a checkpoint: written last, read first.

manifest.json holds the size and SHA-256 of every file, and the shape, dtype and checksum of every
array. The digests reveal truncated, changed or missing files without the model. The checksums
reveal arrays that differ from the saved state. A digest of the manifest itself reveals changes, but
anybody can compute it: the content is checked as well, and nothing outside of the folder is read.
"""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.system import files, json_files

FILE_NAME = 'manifest.json'


class CorruptError(Exception):
  """A checkpoint differs from what was written. The message names the file or array."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The content of manifest.json.

  Attributes:
    step: step of the train state.
    saved_at: date and time, UTC.
    validation: nats per token on the validation split at this step, None if not measured.
    files: size in bytes and SHA-256 by path.
    leaves: dtype, shape and checksum of each array by name.
  """

  step: int
  saved_at: str
  validation: float | None
  files: dict[str, tuple[int, str]]
  leaves: dict[str, tuple[str, list[int], str]]

  @property
  def size(self) -> int:
    """Total size of the files in bytes."""
    return sum(size for size, _ in self.files.values())

  @property
  def checksum(self) -> str:
    """Checksum of all arrays: equal for two runs that are bit-identical."""
    return hashlib.sha256(_canonical_json(self.leaves)).hexdigest()[:16]


def write(folder: pathlib.Path, manifest: Manifest) -> None:
  """Writes the manifest of a checkpoint folder."""
  content = dataclasses.asdict(manifest)
  digest = hashlib.sha256(_canonical_json(content)).hexdigest()
  files.write(folder / FILE_NAME, json.dumps({'sha256': digest, **content}, indent=1) + '\n')


def read(folder: pathlib.Path) -> Manifest:
  """Returns the manifest of a checkpoint. Raises CorruptError if missing, changed or forged."""
  try:
    _check_links(folder)
    content = json_files.read_object(folder / FILE_NAME)
    digest = content.pop('sha256')
    if digest != hashlib.sha256(_canonical_json(content)).hexdigest():
      raise CorruptError(f'{FILE_NAME} was changed')
    names = {field.name for field in dataclasses.fields(Manifest)}
    manifest = Manifest(**{name: content[name] for name in names & content.keys()})
  except OSError as error:
    raise _translate(FILE_NAME, error) from error
  except (ValueError, KeyError, TypeError) as error:
    raise CorruptError(f'{FILE_NAME} cannot be read') from error
  if not _is_valid(manifest):
    raise CorruptError(f'{FILE_NAME} cannot be read')
  if folder.name.isdecimal() and manifest.step != int(folder.name):
    raise CorruptError(f'{FILE_NAME} is of step {manifest.step:,}')
  return manifest


def verify(folder: pathlib.Path) -> Manifest:
  """Reads every file of a checkpoint. Raises CorruptError for the first that has changed."""
  manifest = read(folder)
  for name, (size, digest) in manifest.files.items():
    try:
      files.check_regular(folder / name)
      actual_size = files.size(folder / name)
      if actual_size != size:
        raise CorruptError(f'{name} has {actual_size:,} bytes, expected {size:,}')
      if _sha256(folder / name) != digest:
        raise CorruptError(f'{name} was changed: wrong checksum')
    except ValueError as error:  # a folder, or a name that no file can have
      raise CorruptError(f'{name!r} is not a file') from error
    except OSError as error:
      raise _translate(name, error) from error
  return manifest


def _check_links(folder: pathlib.Path) -> None:
  """Raises CorruptError for a link in a local checkpoint: it may lead out of the folder."""
  if files.is_remote(folder):
    return
  paths = [folder]
  for parent, folder_names, file_names in os.walk(folder):
    paths += [pathlib.Path(parent, name) for name in (*folder_names, *file_names)]
  for path in paths:
    if path.is_symlink():
      raise CorruptError(f'{path.relative_to(folder.parent)} is a link')


def _is_valid(manifest: Manifest) -> bool:
  """Whether all values have their types, and the files are in the folder of the checkpoint."""

  def is_count(value):
    return type(value) is int and value >= 0

  def is_list(value, length):
    return type(value) is list and len(value) == length

  def is_file(name, entry):
    path = pathlib.PurePosixPath(name)
    is_inside = not path.is_absolute() and '..' not in path.parts
    return is_inside and is_list(entry, 2) and is_count(entry[0]) and type(entry[1]) is str

  def is_leaf(entry):
    dtype, shape, checksum = entry if is_list(entry, 3) else (None, None, None)
    is_shape = type(shape) is list and all(map(is_count, shape))
    return is_shape and type(dtype) is str and type(checksum) is str

  return (
    is_count(manifest.step)
    and type(manifest.saved_at) is str
    and type(manifest.validation) in (float, int, type(None))
    and type(manifest.files) is dict
    and all(is_file(name, entry) for name, entry in manifest.files.items())
    and type(manifest.leaves) is dict
    and all(map(is_leaf, manifest.leaves.values()))
  )


def digest_files(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """Returns the size and SHA-256 of every file in a folder, by path."""
  paths = sorted(files.iter_files(folder))
  return {str(p.relative_to(folder)): (files.size(p), _sha256(p)) for p in paths}


def _translate(name: str, error: OSError) -> Exception:
  """Returns a CorruptError if the error is about the content, BadInput if about permissions."""
  is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
  if is_missing or error.errno == errno.ENAMETOOLONG:
    return CorruptError(f'{name} is missing')
  if isinstance(error, PermissionError):
    return errors.BadInput(f'{error.filename} cannot be read: {error.strerror}; permit it')
  is_unreadable = error.errno == errno.EIO
  return CorruptError(f'{name} cannot be read: {error.strerror}') if is_unreadable else error


def _sha256(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _canonical_json(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True).encode()
