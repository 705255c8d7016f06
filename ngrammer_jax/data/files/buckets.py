"""Files of a corpus in object storage: gs://, s3:// and hf://, read ahead.

Each open file has at most 3 requests of REQUEST_BYTES in memory or in flight. The libraries of the
stores retry transient errors a few times.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import re
from typing import Any

from ngrammer_jax import errors

REQUEST_BYTES = 512 << 10
TIMEOUT = 60  # seconds for one


@dataclasses.dataclass(frozen=True)
class Store:
  """A kind of object storage.

  Attributes:
    package: the package to read it.
    extra: the extra of `ngrammer_jax` with this package.
    credentials: source of the credentials.
    options: options of the file system of `fsspec`.
  """

  package: str
  extra: str
  credentials: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


STORES = {
  'gs': Store(
    'gcsfs', 'gcs', 'gcloud auth application-default login', {'requests_timeout': TIMEOUT}
  ),
  's3': Store(
    's3fs',
    's3',
    'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws',
    {'config_kwargs': {'connect_timeout': TIMEOUT, 'read_timeout': TIMEOUT}},
  ),
  'hf': Store('huggingface_hub', 'hf', 'hf auth login'),
}
LOST = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
VERSIONS = ('md5Hash', 'ETag', 'etag', 'blob_id', 'generation', 'LastModified', 'mtime')


def is_bucket(path: str | pathlib.Path) -> bool:
  """Whether a path is in object storage."""
  return re.match(r'(gs|s3|hf)://', str(path)) is not None


@dataclasses.dataclass(frozen=True)
class BucketFile:
  """A file in object storage, with the methods of a path used by corpora.

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

  @property
  def name(self) -> str:
    """The last part of the address."""
    return pathlib.PurePosixPath(self.url).name

  @property
  def suffix(self) -> str:
    """The suffix of the name."""
    return pathlib.PurePosixPath(self.url).suffix

  @property
  def parent(self) -> str:
    """The address of the folder."""
    return self.url.rpartition('/')[0]

  def relative_to(self, root: str) -> pathlib.PurePosixPath:
    """Returns its path within a folder; stores may use another form of the address."""
    return pathlib.PurePosixPath(self.url.removeprefix(root).lstrip('/'))

  def stat(self) -> 'BucketFile':
    """Returns itself, for `st_size`."""
    return self

  def open(self, mode: str = 'rb', buffering: int = REQUEST_BYTES) -> io.BufferedReader:
    """Opens it for reading, with a buffer of `buffering` bytes."""
    return io.BufferedReader(_Stream(self), buffering)


def find(url: str) -> list[BucketFile]:
  """Returns the files at an address, a folder or one file.

  Raises:
    BadInput: no files, a missing package, or an unreachable bucket.
  """
  protocol = url.partition('://')[0]
  store = STORES[protocol]
  if importlib.util.find_spec(store.package) is None:
    raise errors.BadInput(f"{url} needs {store.package}: pip install 'ngrammer_jax[{store.extra}]'")
  try:
    infos = _file_system(url).find(url, detail=True)
  except Exception as error:  # each library has classes of its own
    raise errors.BadInput(
      f'data.path={url} cannot be read: check its name, the network and the credentials '
      f'({store.credentials}). {_one_line(error)}'
    ) from error
  if not infos:
    raise errors.BadInput(f'data.path={url} has no files: expected the files of a corpus')
  return [
    BucketFile(f'{protocol}://{path}', info['size'] or 0, _version(info))
    for path, info in infos.items()
  ]


def _version(info: Mapping[str, Any]) -> str:
  """Returns a checksum or time of a file, if the store has one."""
  for name in VERSIONS:
    if info.get(name):
      return str(info[name])
  return ''


def _file_system(url: str) -> Any:
  """Returns the file system of an address."""
  import fsspec  # only for such files

  protocol = url.partition('://')[0]
  return fsspec.filesystem(protocol, use_listings_cache=False, **STORES[protocol].options)


def _one_line(error: Exception) -> str:
  return f'{type(error).__name__}: {" ".join(str(error).split())}'


class _Stream(io.RawIOBase):
  """The bytes of a file, with the next request in flight."""

  def __init__(self, file: BucketFile):
    self._file = file
    with self._translate_errors():
      self._stream = _file_system(file.url).open(
        file.url, block_size=REQUEST_BYTES, cache_type='background', cache_options={'maxblocks': 2}
      )

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    return self._stream.seek(offset, whence)

  def tell(self) -> int:
    return self._stream.tell()

  def readinto(self, buffer: Any) -> int:
    with self._translate_errors():
      data = self._stream.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)

  @contextlib.contextmanager
  def _translate_errors(self) -> Iterator[None]:
    """Raises BadInput if the file is lost, PeerLostError for other errors of the store."""
    try:
      yield
    except LOST as error:
      raise errors.BadInput(f'{self._file} is lost: {_one_line(error)}') from error
    except Exception as error:
      raise errors.PeerLostError(
        f'{self._file} cannot be read: {_one_line(error)}; {errors.RERUN_ALL}'
      ) from error
