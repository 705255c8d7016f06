"""The manifest of a checkpoint: written last, read first.

manifest.json holds the size and SHA-256 of every file, and the shape, dtype and checksum of every
array. The digests reveal truncated, changed or missing files without the model. The checksums
reveal arrays that differ from the saved state. A digest of the manifest itself reveals changes.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import errno
import hashlib
import json
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, files, hosts, json_files

FILE_NAME = 'manifest.json'
ROWS = 'rows.json'  # states of the rows of the batch, which only training reads
MAX_INDEX_BYTES = 2**20  # of a file that may be an index of arrays

Leaves = dict[str, tuple[str, list[int], str]]  # dtype, shape and checksum of arrays by name


class CorruptError(Exception):
  """A checkpoint differs from the saved one. The message names the file or array."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The content of manifest.json.

  Attributes:
    step: step of the train state.
    saved_at: date and time, UTC.
    validation: nats per token on the validation split at this step, None if not measured.
    files: size in bytes and SHA-256 by path.
    leaves: dtype, shape and checksum of each array by name.
    base: checksum of the arrays in the base of the run (see `reader`); '': no base.
  """

  step: int
  saved_at: str
  validation: float | None
  files: dict[str, tuple[int, str]]
  leaves: Leaves
  base: str = ''

  @property
  def size(self) -> int:
    """Total size of the files in bytes."""
    return sum(size for size, _ in self.files.values())

  @property
  def checksum(self) -> str:
    """Checksum of all arrays: equal for bit-identical runs."""
    return hashlib.sha256(_canonical_json(self.leaves)).hexdigest()[:16]


@contextlib.contextmanager
def refuse_corrupt(problem: str, remedy: str) -> Iterator[None]:
  """Raises BadInput for a CorruptError without an alternative checkpoint."""
  try:
    yield
  except CorruptError as error:
    raise errors.BadInput(f'{problem}: {error}; {remedy}') from error


def write(folder: pathlib.Path, manifest: Manifest) -> None:
  """Writes the manifest of a checkpoint folder."""
  content = dataclasses.asdict(manifest)
  digest = hashlib.sha256(_canonical_json(content)).hexdigest()
  files.write(folder / FILE_NAME, json.dumps({'sha256': digest, **content}, indent=1) + '\n')


def read(folder: pathlib.Path) -> Manifest:
  """Returns the manifest of a checkpoint. Raises CorruptError if missing or changed."""
  with _as_corrupt(FILE_NAME):
    content = json_files.read(folder / FILE_NAME)
    digest = content.pop('sha256')
    if digest != hashlib.sha256(_canonical_json(content)).hexdigest():
      raise CorruptError(f'{FILE_NAME} was changed')
    names = {field.name for field in dataclasses.fields(Manifest)}
    manifest = Manifest(**{name: content[name] for name in names & content.keys()})
    for path in map(pathlib.PurePosixPath, manifest.files):
      if path.is_absolute() or '..' in path.parts:
        raise CorruptError(f'{FILE_NAME} has the path {path}, which leaves the folder')
  if folder.name.isdecimal() and manifest.step != int(folder.name):
    raise CorruptError(f'{FILE_NAME} is of step {manifest.step:,}')
  return manifest


def verify_index(folder: pathlib.Path) -> Manifest:
  """Verifies the sizes of all files, and the checksums of small ones.

  Small files may hold the locations of arrays; if damaged, tensorstore prints many lines before it
  fails. They may also hold arrays, including ones that are not restored. Large files are not read,
  because each restored array is verified by its own checksum.

  Raises:
    CorruptError: a missing file, another size, or changed content.
  """
  manifest = read(folder)
  for name, (size, digest) in manifest.files.items():
    _check_size(folder, name, size)
    if size <= MAX_INDEX_BYTES and name != ROWS:
      _check_digest(folder, name, digest)
  return manifest


def verify(folder: pathlib.Path) -> Manifest:
  """Reads every file of a checkpoint. Raises CorruptError for the first changed file."""
  manifest = read(folder)
  for name, (size, digest) in manifest.files.items():
    _check_size(folder, name, size)
    _check_digest(folder, name, digest)
  return manifest


def _check_digest(folder: pathlib.Path, name: str, digest: str) -> None:
  """Raises CorruptError if a file has another SHA-256."""
  with _as_corrupt(name):
    if _sha256(folder / name) != digest:
      raise CorruptError(f'{name} was changed: wrong checksum')


def _check_size(folder: pathlib.Path, name: str, size: int) -> None:
  """Raises CorruptError if a file has another size."""
  with _as_corrupt(name):
    actual_size = files.size(folder / name)
    if actual_size != size:
      raise CorruptError(f'{name} has {actual_size:,} bytes, expected {size:,}')


def call_on_primary(
  read_folder: Callable[[pathlib.Path], Manifest], folder: pathlib.Path
) -> Manifest:
  """Reads or verifies a manifest in the primary process, for all processes.

  Args:
    read_folder: `read`, `verify_index` or `verify`.
    folder: the folder of the manifest.

  Raises:
    CorruptError: in all processes.
  """
  content = message = None
  with hosts.collective_errors():
    if hosts.is_primary():
      try:
        content = dataclasses.asdict(read_folder(folder))
      except CorruptError as error:
        message = str(error)
  content, message = hosts.broadcast([content, message])
  if message is not None:
    raise CorruptError(message)
  return Manifest(**content)


def digest_files(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """Returns the size and SHA-256 of every file in a folder, by path."""
  paths = sorted(files.iter_files(folder))
  return {str(p.relative_to(folder)): (files.size(p), _sha256(p)) for p in paths}


@contextlib.contextmanager
def _as_corrupt(name: str) -> Iterator[None]:
  """Raises CorruptError for an error of the content of a file, BadInput for missing permission."""
  try:
    yield
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    raise CorruptError(f'{name} is missing') from error
  except PermissionError as error:
    raise errors.BadInput(
      f'{error.filename} cannot be read: {error.strerror}; permit it'
    ) from error
  except file_errors.DAMAGE_ERRORS as error:
    if isinstance(error, OSError) and error.errno != errno.EIO:
      raise  # says nothing about the file
    reason = f': {error.strerror}' if isinstance(error, OSError) else ''
    raise CorruptError(f'{name} cannot be read{reason}') from error


def _sha256(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _canonical_json(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True).encode()
