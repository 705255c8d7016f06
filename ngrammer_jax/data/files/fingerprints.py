"""Fingerprints of the shards of a corpus, taken when a run first reads them.

A shard changed since then is refused before training on it. A damaged shard may be replaced: the
run continues with the new file.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import pathlib
from typing import Any
import zlib

from ngrammer_jax import errors
from ngrammer_jax.data.files import buckets
from ngrammer_jax.system import file_errors, files, hosts, json_files, synced_folder

FOLDER = 'shards'  # in the workdir
OLD_FOLDER = 'places'  # of version 0.3.0
LINE_TYPES = {'file': int, 'name': str, 'size': int, 'content': str}
SAMPLES = 16  # compared parts of a file, beside its size
SAMPLE_BYTES = 4096  # of each part


class ShardFingerprints:
  """The fingerprints of the shards read so far by a run, in a folder of the run.

  Args:
    folder: local folder, with a file for each process.
    paths: the shards, by number.
    old_folder: folder of version 0.3.0.
  """

  def __init__(
    self,
    folder: synced_folder.SyncedFolder,
    paths: Sequence[pathlib.Path],
    old_folder: pathlib.Path | None = None,
  ):
    self._folder = folder
    self._paths = paths
    self._lines: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)  # of each shard
    self._checked: dict[int, dict[str, Any]] = {}
    if old_folder is not None:
      self._add_lines(old_folder)
    self._add_lines(folder.folder)

  def _add_lines(self, folder: pathlib.Path) -> None:
    for line in _read(folder):
      self._lines[line['file']].append(line)

  def check(self, number: int) -> None:
    """Raises BadInput if a shard has changed since the run first read it, undamaged."""
    path = self._paths[number]
    lines = self._lines[number]
    with file_errors.translate_damage(path):
      size = files.size(path)
      content = _fingerprint(path)
    contents = {line['content'] for line in lines}
    # A content that any process has found damaged is damaged.
    intact = contents - {line['content'] for line in lines if line.get('was_damaged')}
    if intact and content not in intact:
      raise errors.BadInput(
        f'{path} has changed since this run first read it: put the old file back, or use another '
        f'workdir'
      )
    if lines:  # the first size identifies the initial text of a run
      size = lines[0]['size']
    line = {'file': number, 'name': path.name, 'size': size, 'content': content}
    self._checked[number] = line
    if content not in contents:
      self._write(line)

  @contextlib.contextmanager
  def record_damage(self, number: int) -> Iterator[None]:
    """Records a damaged shard, to allow a replacement."""
    try:
      yield
    except errors.BadInput as error:
      if getattr(error.__cause__, 'errno', None) is None:  # else it says nothing about the content
        self._write(self._checked[number] | {'was_damaged': True})
        self._folder.sync()
      raise

  def _write(self, line: dict[str, Any]) -> None:
    self._lines[line['file']].append(line)
    json_files.append_line(self._folder.folder / f'files-{hosts.process_index()}.jsonl', line)


def first_sizes(workdir: pathlib.Path | None, pattern: str) -> dict[tuple[int, str], int]:
  """Returns the sizes of damaged shards before the damage, by number and name.

  Args:
    workdir: run directory; None: no run directory.
    pattern: glob pattern of the folders of `ShardFingerprints`.
  """
  sizes: dict[tuple[int, str], int] = {}
  if workdir is None:
    return sizes
  for parent in (OLD_FOLDER, FOLDER):
    for folder in (workdir / parent).glob(pattern):
      for line in _read(folder):
        if line.get('was_damaged'):
          sizes[line['file'], line['name']] = line['size']
  return sizes


def _read(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the lines of all processes, without damaged ones."""
  for path in sorted(folder.glob('files-*.jsonl')):
    for line in json_files.read_lines(path):
      if all(type(line.get(name)) is kind for name, kind in LINE_TYPES.items()):
        yield line


def _fingerprint(path: pathlib.Path) -> str:
  """Returns a checksum of evenly spread parts of a file."""
  size = files.size(path)
  if isinstance(path, buckets.BucketFile):
    return f'{size}-{path.version}'
  checksum = 0
  with path.open('rb') as file:
    for i in range(SAMPLES):
      file.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
      checksum = zlib.crc32(file.read(SAMPLE_BYTES), checksum)
  return f'{size}-{checksum:08x}'
