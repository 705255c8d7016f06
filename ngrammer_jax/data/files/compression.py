"""Compressed files: recognised by their first bytes, read from any of their frames on.

A gzip, bzip2, xz or zstandard file is one frame or several, one after another. Reading can begin at
any frame, so a position in a file of many frames is reached without decompressing earlier frames. A
file of one frame is decompressed from its beginning.

Only the decompressors of the libraries are used. Their file readers end without an error where text
is missing: `zstandard` in a truncated file, `bz2` and `lzma` at a damaged frame after the first,
and at zeros between frames.
"""

import bz2
import collections
from collections.abc import Callable
import io
import lzma
import pathlib
from typing import Any, BinaryIO
import zipfile
import zlib

from ngrammer_jax import errors
from ngrammer_jax.system import git_lfs

HEAD = 64  # bytes that tell how a file is compressed
READ_BYTES = 1 << 16  # of a file, at a time
DECOMPRESSED_BYTES = 1 << 18
SKIPPED_BYTES = 1 << 20
ZSTANDARD_WINDOW = 1 << 31  # of `zstd --long=31`; only as much is allocated as a file needs
SUFFIXES = {'.gz': 'gzip', '.bz2': 'bzip2', '.xz': 'xz', '.zst': 'zstandard', '.zip': 'zip'}
MAGIC = {
  b'\x1f\x8b': 'gzip',
  b'BZh': 'bzip2',
  b'\xfd7zXZ\0': 'xz',
  b'\x28\xb5\x2f\xfd': 'zstandard',
  b'PK\x03\x04': 'zip',
}
for byte in range(0x50, 0x60):
  MAGIC[bytes([byte, 0x2A, 0x4D, 0x18])] = 'zstandard'  # a frame without text


def _gzip_decompressor() -> Any:
  return zlib.decompressobj(31)  # 31: with the header of gzip


def _zstandard_decompressor() -> Any:
  import zstandard  # only for such files

  return zstandard.ZstdDecompressor(max_window_size=ZSTANDARD_WINDOW).decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
  'gzip': _gzip_decompressor,
  'bzip2': bz2.BZ2Decompressor,
  'xz': lzma.LZMADecompressor,
  'zstandard': _zstandard_decompressor,
}


def find(path: pathlib.Path, head: bytes) -> str | None:
  """Returns the compression of a file with these first bytes; None: uncompressed.

  Raises:
    BadInput: a pointer of Git LFS, or a compression that does not match the name.
  """
  git_lfs.check(path, head)
  actual = next((method for magic, method in MAGIC.items() if head.startswith(magic)), None)
  expected = SUFFIXES.get(path.suffix.lower())
  if head and expected not in (None, actual):
    content = f'not compressed by {expected}'
    if actual:
      content = f'{actual} compressed'
    raise errors.BadInput(
      f'{path} is damaged: it is named {path.suffix}, but is {content}: copy it again, or rename it'
    )
  return actual


def open_binary(path: pathlib.Path, frame: int = 0, offset: int = 0) -> io.BufferedIOBase:
  """Opens a file for reading its bytes, decompressed if it is compressed.

  Args:
    path: the file; for a zip archive, its only member.
    frame: position of the first frame to read in the file, see `frame_offset`.
    offset: number of bytes of the decompressed text to skip.

  Raises:
    BadInput: a pointer of Git LFS, a compression that does not match the name, or an archive of
      several files.
  """
  file = path.open('rb', buffering=READ_BYTES)
  method = find(path, file.peek(HEAD)[:HEAD])
  if method is None:
    file.seek(offset)
    return file
  if method == 'zip':
    archive = zipfile.ZipFile(file)
    members = archive.namelist()
    if len(members) != 1:
      raise errors.BadInput(f'{path} has {len(members)} files: use an archive of one file')
    decompressed = archive.open(members[0])
  else:
    decompressed = io.BufferedReader(Frames(file, method, frame), DECOMPRESSED_BYTES)
  while data := decompressed.read(min(offset, SKIPPED_BYTES)):
    offset -= len(data)
  return decompressed


def frame_offset(file: BinaryIO, offset: int) -> tuple[int, int]:
  """Returns the offset within its frame, and the position of the frame in the file.

  Args:
    file: an open file of `open_binary`.
    offset: a number of decompressed bytes since the opened frame; all were read.
  """
  raw = getattr(file, 'raw', None)
  if isinstance(raw, Frames):
    return raw.frame_offset(offset)
  return offset, 0


class Frames(io.RawIOBase):
  """The decompressed bytes of a file from a frame on.

  Args:
    file: the compressed file.
    method: a key of DECOMPRESSORS.
    start: position of the first frame.
  """

  def __init__(self, file: BinaryIO, method: str, start: int = 0):
    self._file = file
    self._make_decompressor = DECOMPRESSORS[method]
    self._decompressor = None
    self._unused_input = b''
    self._text = memoryview(b'')
    self._offset = 0
    # Of each frame: bytes of text before it, and where it begins in the file.
    self._frames: collections.deque[tuple[int, int]] = collections.deque()
    file.seek(start)

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    while not self._text:
      if not self._decompress_more():
        break
    size = min(len(buffer), len(self._text))
    buffer[:size] = self._text[:size]
    self._text = self._text[size:]
    self._offset += size
    return size

  def _decompress_more(self) -> bool:
    """Decompresses the next bytes; False at the end of the file."""
    data = self._unused_input or self._file.read(READ_BYTES)
    self._unused_input = b''
    if self._decompressor is None or self._decompressor.eof:
      data = self._skip_padding(data)
      if not data:
        return False
      self._frames.append((self._offset, self._file.tell() - len(data)))
      self._decompressor = self._make_decompressor()
    elif not data:
      raise EOFError('Compressed file ended before the end-of-stream marker was reached')
    try:
      self._text = memoryview(self._decompressor.decompress(data))
    except Exception as error:  # each library has a class of its own
      raise ValueError(f'{error}') from error
    if self._decompressor.eof:
      self._unused_input = self._decompressor.unused_data
    return True

  def _skip_padding(self, data: bytes) -> bytes:
    """Returns data without the zero padding of some writers."""
    while data:
      stripped = data.lstrip(b'\0')
      if stripped:
        return stripped
      data = self._file.read(READ_BYTES)
    return b''

  def frame_offset(self, offset: int) -> tuple[int, int]:
    """See the function `frame_offset`. The frame is the last one that begins at `offset` or before.

    Offsets must be ascending.
    """
    while len(self._frames) > 1 and self._frames[1][0] <= offset:
      self._frames.popleft()
    before, begin = self._frames[0]
    return offset - before, begin
