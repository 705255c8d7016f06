"""What a checkpoint must look like: the last file written, the first one read.

manifest.json holds the size and SHA-256 of every file and the shape, dtype and checksum of
every array, so that a file that was cut, changed or lost is found without a model, and an
array that reads differently from what was in memory is found after.
"""

import dataclasses
import errno
import hashlib
import json
import pathlib
from typing import Any

from ngrammer_jax import files

NAME = 'manifest.json'


class Damaged(Exception):
  """A checkpoint is not what was written. The message says which part, and how."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The content of manifest.json.

  Attributes:
    step: of the train state.
    saved_at: date and time, UTC.
    validation: nats per token on the validation split at this step, where it was measured.
    files: size in bytes and SHA-256 by path.
    leaves: dtype, shape and checksum by name of the array.
  """

  step: int
  saved_at: str
  validation: float | None
  files: dict[str, tuple[int, str]]
  leaves: dict[str, tuple[str, list[int], str]]

  @property
  def size(self) -> int:
    """Bytes of all files."""
    return sum(size for size, _ in self.files.values())

  @property
  def checksum(self) -> str:
    """Of all leaves together: equal for two runs that are equal bit by bit."""
    return hashlib.sha256(_canonical(self.leaves)).hexdigest()[:16]


def write(folder: pathlib.Path, manifest: Manifest) -> None:
  """Writes the manifest of a checkpoint folder."""
  body = dataclasses.asdict(manifest)
  seal = hashlib.sha256(_canonical(body)).hexdigest()
  files.write(folder / NAME, json.dumps({'sha256': seal, **body}, indent=1) + '\n')


def read(folder: pathlib.Path) -> Manifest:
  """The manifest of a checkpoint. Raises Damaged where it is missing or changed."""
  try:
    body = json.loads((folder / NAME).read_text(encoding='utf-8'))
    seal = body.pop('sha256')
    if seal != hashlib.sha256(_canonical(body)).hexdigest():
      raise Damaged(f'{NAME} was changed')
    known = {field.name for field in dataclasses.fields(Manifest)}
    return Manifest(**{name: value for name, value in body.items() if name in known})
  except OSError as error:
    raise _damage(NAME, error) from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise Damaged(f'{NAME} cannot be read') from error


def verify(folder: pathlib.Path) -> Manifest:
  """Reads every file of a checkpoint. Raises Damaged for the first that is not as written."""
  manifest = read(folder)
  for name, (size, sha256) in manifest.files.items():
    try:
      found = files.size(folder / name)
      if found != size:
        raise Damaged(f'{name} has {found:,} bytes, expected {size:,}')
      if _sha256(folder / name) != sha256:
        raise Damaged(f'{name} was changed: wrong checksum')
    except OSError as error:
      raise _damage(name, error) from error
  return manifest


def describe(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """Size and SHA-256 of every file in a folder, by path."""
  paths = sorted(files.inside(folder))
  return {str(p.relative_to(folder)): (files.size(p), _sha256(p)) for p in paths}


def _damage(name: str, error: OSError) -> Exception:
  """What an error of a file says of the checkpoint; of other errors nothing."""
  if isinstance(error, FileNotFoundError | NotADirectoryError):
    return Damaged(f'{name} is missing')
  return Damaged(f'{name} cannot be read: {error.strerror}') if error.errno == errno.EIO else error


def _sha256(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _canonical(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True).encode()
