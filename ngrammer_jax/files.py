"""Files that are whole or not there, wherever a process is killed; and disks that are full.

A path is a local one, or one in Google Cloud Storage: gs://bucket/run. There an object is put whole
or not at all, but nothing can be appended to one, and no folder can be renamed at once or locked.
"""

from collections.abc import Callable, Iterator
import contextlib
import errno
import importlib.util
import logging
import os
import pathlib
import re
import shutil
import tempfile
import threading

from ngrammer_jax import errors

REMOTE = 'gs://'
EVERY = 30.0  # seconds between what growing files put into a store
os.environ.setdefault('EPATH_USE_TF', 'false')  # or etils takes TensorFlow where it is installed


def path(text: str | os.PathLike[str]) -> pathlib.Path:
  """The path that a text names; in an object store one of etils, which is used alike."""
  if not stored(text):
    return pathlib.Path(text)
  from etils import epath
  import fsspec

  # Objects that other processes write are seen at once.
  fsspec.config.conf.setdefault('gs', {})['use_listings_cache'] = False
  return epath.Path(text)


def stored(path: str | os.PathLike[str]) -> bool:
  """Whether a path is of an object store."""
  return os.fspath(path).startswith(REMOTE)


def reach(path: pathlib.Path) -> None:
  """Raises BadInput where a path is in another object store, or its store cannot be reached."""
  if not stored(path):
    if re.match(r'\w+:/', str(path)):  # pathlib makes s3:/bucket of s3://bucket
      raise errors.BadInput(
        f'{path} is neither a local path nor {REMOTE}BUCKET/FOLDER: mount the bucket and pass the '
        f'folder'
      )
    return
  if not os.fspath(path).removeprefix(REMOTE).strip('/'):
    raise errors.BadInput(f'{path} names no bucket: expected as in {path}bucket/run')
  if importlib.util.find_spec('gcsfs') is None:
    raise errors.BadInput(f"{path} needs gcsfs: pip install 'ngrammer_jax[gcs]'")
  try:
    path.exists()
  except Exception as error:  # the library raises errors of many classes
    raise errors.BadInput(
      f'{path} cannot be reached, is there a network, are there credentials? '
      f'(gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS) '
      f'{type(error).__name__}: {error}'
    ) from error


def absolute(path: pathlib.Path) -> pathlib.Path:
  """The same place from anywhere."""
  return path if stored(path) else path.resolve()


def make(folder: pathlib.Path) -> None:
  """Makes a folder and those that it is in; a store has none."""
  if not stored(folder):
    folder.mkdir(parents=True, exist_ok=True)


def inside(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """All files of a folder and the folders in it."""
  for path in folder.iterdir():
    yield from inside(path) if path.is_dir() else (path,)


def move(folder: pathlib.Path, place: pathlib.Path) -> None:
  """Renames a folder; in a store, one file after the other."""
  if not stored(folder):
    folder.rename(place)
    return
  for path in inside(folder):
    path.copy(place / str(path.relative_to(folder)))
  folder.rmtree()


def size(path: pathlib.Path) -> int:
  """Bytes of a file."""
  return path.stat().length if stored(path) else path.stat().st_size


def free(folder: pathlib.Path) -> float:
  """Bytes that there is room for."""
  return float('inf') if stored(folder) else shutil.disk_usage(folder).free


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file beside its place, then moves it there in one step."""
  data = content.encode() if isinstance(content, str) else content
  if stored(path):
    path.write_bytes(data)
    return
  scratch = path.with_name(f'{path.name}.scratch')
  with scratch.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  scratch.replace(path)


class Growing:
  """A folder whose files are appended to.

  On a disk it is the folder itself. For an object store it is a local one, which begins with
  what is there; its files are put into the store now and then, and by `put`.

  Args:
    folder: where the files are to be in the end.
    pattern: of those to go on with.
  """

  def __init__(self, folder: pathlib.Path, pattern: str):
    self.folder, self._store = folder, folder if stored(folder) else None
    if self._store is None:
      return
    self._scratch = tempfile.TemporaryDirectory(prefix='ngrammer_jax-')
    self.folder = pathlib.Path(self._scratch.name)
    for there in folder.glob(pattern):
      (self.folder / there.name).write_bytes(there.read_bytes())
    self._known = {file: size(file) for file in inside(self.folder)}
    self._turn, self._closed = threading.Lock(), threading.Event()
    threading.Thread(target=self._now_and_then, name='growing', daemon=True).start()

  def put(self) -> None:
    """Brings the store up to date."""
    if self._store is None:
      return
    with self._turn:
      for file in inside(self.folder):
        grown = size(file)
        if self._known.get(file) != grown:
          write(self._store / str(file.relative_to(self.folder)), file.read_bytes())
          self._known[file] = grown

  def close(self) -> None:
    """Puts the rest; the files must be closed."""
    if self._store is not None:
      self._closed.set()
      self._try()
      self._scratch.cleanup()

  def _now_and_then(self) -> None:
    while not self._closed.wait(EVERY):
      self._try()

  def _try(self) -> None:
    try:
      self.put()
    except Exception as error:  # no reason to end otherwise than the run does
      logging.warning('%s cannot be written: %s', self._store, error)


@contextlib.contextmanager
def full_disk(sentence: Callable[[], str]) -> Iterator[None]:
  """Makes a BadInput of the many ways in which libraries say that a disk is full."""
  try:
    yield
  except Exception as error:
    full = getattr(error, 'errno', None) in (errno.ENOSPC, errno.EDQUOT)
    if not full and not any(w in str(error) for w in ('No space left', 'Disk quota exceeded')):
      raise
    raise errors.BadInput(sentence()) from error
