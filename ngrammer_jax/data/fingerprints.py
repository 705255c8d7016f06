"""Fingerprints of the shards of a corpus, taken when a run first reads them.

A shard that has changed since then is refused before a token of it is trained on. One that was
found damaged may be replaced: the run goes on with the new file.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import pathlib
from typing import Any
import zlib

from ngrammer_jax import errors
from ngrammer_jax.data import buckets
from ngrammer_jax.system import files, hosts, synced_folder

SAMPLES, SAMPLE_BYTES = 16, 4096  # what is compared of a file, beside its size


class ShardFingerprints:
  """The fingerprints of the shards that a run has read so far, in a folder of the run.

  Args:
    folder: local folder, with a file for each process.
    paths: the shards, which are known by their numbers.
  """

  def __init__(self, folder: synced_folder.SyncedFolder, paths: Sequence[pathlib.Path]):
    self._folder, self._paths = folder, paths
    self._lines: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)  # of each shard
    self._checked: dict[int, dict[str, Any]] = {}
    for line in _read(folder.folder):
      self._lines[line['file']].append(line)

  def check(self, number: int) -> None:
    """Raises BadInput if a shard is no longer what the run first read, which was not damaged."""
    path, lines = self._paths[number], self._lines[number]
    with files.translate_damage(path):
      size, content = files.size(path), _fingerprint(path)
    contents = {line['content'] for line in lines}
    # A content that any process has found damaged is damaged.
    intact = contents - {line['content'] for line in lines if line.get('was_damaged')}
    if intact and content not in intact:
      raise errors.BadInput(
        f'{path} has changed since this run first read it: put the old file back, or use another '
        f'workdir'
      )
    # The text that a run began with is known by the first size.
    line = {'file': number, 'name': path.name, 'size': lines[0]['size'] if lines else size}
    self._checked[number] = line | {'content': content}
    if content not in contents:
      self._write(self._checked[number])

  @contextlib.contextmanager
  def record_damage(self, number: int) -> Iterator[None]:
    """Records that a shard is damaged, so that another file may take its place."""
    try:
      yield
    except errors.BadInput as error:
      if getattr(error.__cause__, 'errno', None) is None:  # else it says nothing about the content
        self._write(self._checked[number] | {'was_damaged': True})
        self._folder.sync()
      raise

  def _write(self, line: dict[str, Any]) -> None:
    self._lines[line['file']].append(line)
    files.append_json(self._folder.folder / f'files-{hosts.process_index()}.jsonl', line)


def first_sizes(workdir: pathlib.Path | None, pattern: str) -> dict[tuple[int, str], int]:
  """Returns the sizes that the shards had which were found damaged, by their numbers and names.

  Args:
    workdir: run directory; None: there is none.
    pattern: of the names of the folders of `ShardFingerprints`.
  """
  folders = [] if workdir is None else list((workdir / 'places').glob(pattern))
  lines = [line for folder in folders for line in _read(folder)]
  return {(line['file'], line['name']): line['size'] for line in lines if line.get('was_damaged')}


def _read(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  for path in sorted(folder.glob('files-*.jsonl')):
    for line in files.read_json_lines(path):
      if {'file', 'name', 'size', 'content'} <= line.keys():
        yield line


def _fingerprint(path: pathlib.Path) -> str:
  """Returns a checksum of parts of a file that are spread evenly over it."""
  size, checksum = files.size(path), 0
  if isinstance(path, buckets.BucketFile):
    return f'{size}-{path.version}'
  with path.open('rb') as file:
    for i in range(SAMPLES):
      file.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
      checksum = zlib.crc32(file.read(SAMPLE_BYTES), checksum)
  return f'{size}-{checksum:08x}'
