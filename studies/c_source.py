"""Cuts a text of C source for studies/program.md from the Linux kernel of Debian.

  apt-get install linux-source
  python -m studies.c_source --archive=/usr/src/linux-source-6.1.tar.xz --folder=/path/to/c_source

writes train.jsonl.xz, validation.jsonl.xz and test.jsonl.xz, which `data.corpus=text` reads with
`data.path` of the folder. A document is a file, with its path in the field `path`. The rule:

- Files are named *.c or *.h, and are UTF-8 of 1 to MAX_FILE_BYTES bytes. Most bytes of larger files
  are generated lists of registers.
- All files of the folders in HELD_OUT are for validation and for test.
- Files are in the order of the SHA-256 of SALT and their path. Training has the first of the other
  files, up to --megabytes.

The command prints a row for each file: documents, folders of two levels, bytes of text, bytes of
the compressed file, and the SHA-256 of its lines without compression (`xz -dc FILE | sha256sum`).
The archive is streamed. Training files are held in memory.
"""

import argparse
from collections.abc import Iterator
import hashlib
import heapq
import json
import lzma
import pathlib
import tarfile
from typing import NamedTuple

from ngrammer_jax import errors, flags
from ngrammer_jax.system import files as system_files
from ngrammer_jax.system import text_tables

SUFFIXES = ('.c', '.h')
MAX_FILE_BYTES = 100_000
SALT = 'ngrammer_jax c_source'
HELD_OUT = {
  'validation': ('arch/alpha', 'drivers/rtc', 'fs/ubifs', 'net/sched', 'sound/isa'),
  'test': ('arch/parisc', 'drivers/watchdog', 'fs/ocfs2', 'net/mac80211', 'sound/usb'),
}
SPLITS = ('train', *HELD_OUT)
MEGABYTES = 250
HEADER = ('split', 'files', 'folders', 'bytes', 'compressed', 'sha256 of the lines')


class SourceFile(NamedTuple):
  """A file of the archive.

  Attributes:
    digest: place in the order, a SHA-256.
    path: path without the top folder of the archive.
    content: its bytes.
  """

  digest: bytes
  path: str
  content: bytes

  @property
  def folder(self) -> str:
    """The first two levels of its folder."""
    *folders, _ = self.path.split('/')
    return '/'.join(folders[:2])


class FirstFiles:
  """The first files in the order of their digests, up to a number of bytes.

  Args:
    max_bytes: the last file is the first one with which all have at least this number of bytes.
  """

  def __init__(self, max_bytes: float):
    self._max_bytes = max_bytes
    self._bytes = 0
    # The file with the largest digest is the first entry.
    self._heap: list[tuple[int, SourceFile]] = []

  def add(self, file: SourceFile) -> None:
    """Adds a file, and drops the last ones that are not needed any more."""
    heapq.heappush(self._heap, (-int.from_bytes(file.digest), file))
    self._bytes += len(file.content)
    while self._bytes - len(self._heap[0][1].content) >= self._max_bytes:
      _, dropped = heapq.heappop(self._heap)
      self._bytes -= len(dropped.content)

  def files(self) -> list[SourceFile]:
    """Returns the files in their order."""
    return sorted(file for _, file in self._heap)


def split_of(folder: str) -> str:
  """Returns the split of a folder of two levels."""
  for split, folders in HELD_OUT.items():
    if folder in folders:
      return split
  return 'train'


def read_archive(archive: pathlib.Path) -> Iterator[SourceFile]:
  """Yields the files of C source in the order of the archive.

  Raises:
    BadInput: the archive is missing, or is not a tar archive.
  """
  try:
    with tarfile.open(archive, 'r|*') as tar:
      for member in tar:
        _, _, path = member.name.removeprefix('./').partition('/')
        if not member.isfile() or not path.endswith(SUFFIXES):
          continue
        if not 0 < member.size <= MAX_FILE_BYTES:
          continue
        content = tar.extractfile(member).read()
        if _is_utf8(content):
          yield SourceFile(hashlib.sha256(f'{SALT}{path}'.encode()).digest(), path, content)
  except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
    raise errors.BadInput(
      f'--archive={archive} cannot be read as a tar archive: {error}; expected the file of '
      'Debian, /usr/src/linux-source-VERSION.tar.xz (apt-get install linux-source)'
    ) from error


def _is_utf8(content: bytes) -> bool:
  try:
    content.decode()
  except UnicodeDecodeError:
    return False
  return True


def select(archive: pathlib.Path, megabytes: float) -> dict[str, list[SourceFile]]:
  """Returns the files of each split, in the order of their digests.

  Args:
    archive: the tar archive.
    megabytes: 10^6 bytes of training text.

  Raises:
    BadInput: the archive cannot be read, or a split would be empty.
  """
  splits = {split: FirstFiles(float('inf')) for split in HELD_OUT}
  splits['train'] = FirstFiles(1e6 * megabytes)
  for file in read_archive(archive):
    splits[split_of(file.folder)].add(file)
  selected = {split: splits[split].files() for split in SPLITS}
  for split, files in selected.items():
    if not files:
      folders = ', '.join(HELD_OUT.get(split, ['other folders']))
      raise errors.BadInput(
        f'--archive={archive} has no files for {split}: expected C source in {folders}'
      )
  return selected


def write(files: list[SourceFile], path: pathlib.Path) -> str:
  """Writes files as JSON lines, compressed with xz. Returns the SHA-256 of the lines."""
  lines = []
  for file in files:
    document = {'path': file.path, 'text': file.content.decode()}
    lines.append(json.dumps(document, ensure_ascii=False) + '\n')
  content = ''.join(lines).encode()
  system_files.write(path, lzma.compress(content))
  return hashlib.sha256(content).hexdigest()


def main(argv: list[str]) -> int:
  """Writes the text, and prints its sizes."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--archive', type=pathlib.Path, required=True, help='tar of Debian')
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='where the text goes')
  parser.add_argument(
    '--megabytes', type=float, default=MEGABYTES, help='training text, in 10^6 bytes'
  )
  options = parser.parse_args(argv)
  selected = select(options.archive, options.megabytes)
  options.folder.mkdir(parents=True, exist_ok=True)
  rows = [HEADER]
  for split, files in selected.items():
    path = options.folder / f'{split}.jsonl.xz'
    digest = write(files, path)
    counts = (
      len(files),
      len({file.folder for file in files}),
      sum(len(file.content) for file in files),
      path.stat().st_size,
    )
    rows.append((split, *(f'{count:,}' for count in counts), digest))
  print('\n'.join(text_tables.align_columns(rows, '<>>>><')))
  return 0


if __name__ == '__main__':
  flags.run(main)
