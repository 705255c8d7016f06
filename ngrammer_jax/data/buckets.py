"""Files of a corpus in object storage: gs://, s3:// and hf://, read ahead.

At most 3 blocks of BLOCK bytes are held or on their way for each open file. The libraries of the
stores try transient errors again, a few times.
"""

from collections.abc import Callable
import dataclasses
import importlib.util
import io
import pathlib
import re
from typing import Any

from ngrammer_jax import errors

BLOCK = 512 << 10  # bytes of a request
TIMEOUT = 60  # seconds for one
# Package, extra, where credentials come from, and options of the file system.
STORES = {
  'gs': (*('gcsfs', 'gcs', 'gcloud auth application-default login'), {'requests_timeout': TIMEOUT}),
  's3': (
    *('s3fs', 's3', 'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws'),
    {'config_kwargs': {'connect_timeout': TIMEOUT, 'read_timeout': TIMEOUT}},
  ),
  'hf': ('huggingface_hub', 'hf', 'hf auth login', {}),
}
LOST = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError
VERSIONS = ('md5Hash', 'ETag', 'etag', 'blob_id', 'generation', 'LastModified', 'mtime')


def is_bucket(path: str | pathlib.Path) -> bool:
  """Whether a path is in object storage."""
  return re.match(r'(gs|s3|hf)://', str(path)) is not None


@dataclasses.dataclass(frozen=True)
class BucketFile:
  """A file in object storage, with the methods of a path that corpora use.

  Attributes:
    url: its address.
    st_size: its size in bytes.
    version: a checksum or time that changes with its content.
  """

  url: str
  st_size: int
  version: str

  def __str__(self) -> str:
    return self.url

  def __lt__(self, other: 'BucketFile') -> bool:
    return pathlib.PurePosixPath(self.url) < pathlib.PurePosixPath(other.url)

  name = property(lambda self: pathlib.PurePosixPath(self.url).name)
  suffix = property(lambda self: pathlib.PurePosixPath(self.url).suffix)
  parent = property(lambda self: self.url.rpartition('/')[0])

  def relative_to(self, root: str) -> pathlib.PurePosixPath:
    """Returns its path within a folder; a store may write the address of the folder otherwise."""
    return pathlib.PurePosixPath(self.url.removeprefix(root).lstrip('/'))

  def stat(self) -> 'BucketFile':
    """Returns itself, which has `st_size`."""
    return self

  def open(self, mode: str = 'rb', buffering: int = BLOCK) -> io.BufferedReader:
    """Opens it for reading, with a buffer of so many bytes."""
    return io.BufferedReader(_Stream(self), buffering)


def find(url: str) -> list[BucketFile]:
  """Returns the files at an address, a folder or one file.

  Raises:
    BadInput: there are none, a package is missing, or the bucket cannot be reached.
  """
  kind = url.partition('://')[0]
  package, extra, credentials, _ = STORES[kind]
  if importlib.util.find_spec(package) is None:
    raise errors.BadInput(f"{url} needs {package}: pip install 'ngrammer_jax[{extra}]'")
  try:
    infos = _file_system(url).find(url, detail=True)
  except Exception as error:  # each library has classes of its own
    raise errors.BadInput(
      f'data.path={url} cannot be read: check its name, the network and the credentials '
      f'({credentials}). {_one_line(error)}'
    ) from error
  if not infos:
    raise errors.BadInput(f'data.path={url} has no files: expected those of a corpus')
  version = lambda info: next((str(info[name]) for name in VERSIONS if info.get(name)), '')
  to_file = lambda path, info: BucketFile(f'{kind}://{path}', info['size'] or 0, version(info))
  return [to_file(path, info) for path, info in infos.items()]


def _file_system(url: str) -> Any:
  """Returns the file system of an address."""
  import fsspec  # only for such files

  kind = url.partition('://')[0]
  return fsspec.filesystem(kind, use_listings_cache=False, **STORES[kind][-1])


def _one_line(error: Exception) -> str:
  return f'{type(error).__name__}: {" ".join(str(error).split())}'


class _Stream(io.RawIOBase):
  """The bytes of a file; the block after the one that is read is on its way."""

  def __init__(self, file: BucketFile):
    self._file, options = file, {'cache_type': 'background', 'cache_options': {'maxblocks': 2}}
    open_file = lambda: _file_system(file.url).open(file.url, block_size=BLOCK, **options)
    self._stream = self._translate_errors(open_file)
    self.readable = self.seekable = lambda: True
    self.seek, self.tell = self._stream.seek, self._stream.tell

  def readinto(self, buffer: Any) -> int:
    data = self._translate_errors(lambda: self._stream.read(len(buffer)))
    buffer[: len(data)] = data
    return len(data)

  def _translate_errors(self, call: Callable[[], Any]) -> Any:
    try:
      return call()
    except LOST as error:
      raise errors.BadInput(f'{self._file} is lost: {_one_line(error)}') from error
    except Exception as error:
      raise errors.PeerLostError(
        f'{self._file} cannot be read: {_one_line(error)}; {errors.RERUN_ALL}'
      ) from error
