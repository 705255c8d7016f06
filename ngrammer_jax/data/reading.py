"""Text files, plain or compressed, read in pieces of bounded size."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import gzip
import io
import pathlib
import zipfile
import zlib

from ngrammer_jax import errors

PIECE = 1 << 20  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class Document:
  """One document of a corpus, read piece by piece as often as needed."""

  name: str
  pieces: Callable[[], Iterator[bytes]]


def pieces(path: pathlib.Path) -> Iterator[bytes]:
  """A file cut after newlines, else after spaces, else between characters."""
  return cut(blocks(path))


def lines(path: pathlib.Path) -> Iterator[bytes]:
  """The lines of a file with their ends; one that is longer than a piece comes in several."""
  for piece in pieces(path):
    yield from io.BytesIO(piece)


def cut(parts: Iterable[bytes]) -> Iterator[bytes]:
  """The same bytes cut after newlines, else after spaces, else between characters."""
  rest = b''
  for block in parts:
    rest += block
    while len(rest) >= PIECE:
      at = (
        rest.rfind(b'\n', 0, PIECE) + 1 or rest.rfind(b' ', 0, PIECE) + 1 or _boundary(rest, PIECE)
      )
      yield rest[:at]
      rest = rest[at:]
  if rest:
    yield rest


def _boundary(text: bytes, at: int) -> int:
  """The last place up to `at` (but at least 1) that is not inside a UTF-8 character."""
  for place in range(min(at, len(text) - 1), max(at - 4, 0), -1):
    if text[place] & 0xC0 != 0x80:
      return place
  return at


def within(parts: Iterable[bytes], first: int, last: int) -> Iterator[bytes]:
  """Bytes [first, last) of what `parts` make together."""
  offset = 0
  for part in parts:
    wanted = part[max(first - offset, 0) : max(last - offset, 0)]
    if wanted:
      yield wanted
    offset += len(part)


def blocks(path: pathlib.Path) -> Iterator[bytes]:
  """The bytes of a plain, .gz or single-member .zip file."""
  with damage_named(path), opened(path) as file:
    while block := file.read(PIECE):
      yield block


@contextlib.contextmanager
def damage_named(path: pathlib.Path) -> Iterator[None]:
  """Makes a BadInput of what the libraries say of a file that cannot be read."""
  try:
    yield
  except PermissionError as error:
    raise errors.BadInput(f'{path} cannot be read: {error.strerror}') from error
  except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise errors.BadInput(f'{path} is truncated or damaged: {error}') from error


def opened(path: pathlib.Path) -> io.BufferedIOBase:
  """A plain, .gz or single-member .zip file, to read its bytes."""
  if path.suffix == '.gz':
    return gzip.open(path)
  if path.suffix == '.zip':
    archive = zipfile.ZipFile(path)
    members = archive.namelist()
    if len(members) != 1:
      raise errors.BadInput(f'{path} holds {len(members)} files, expected one')
    return archive.open(members[0])
  return path.open('rb')
