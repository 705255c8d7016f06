"""What the files of a streamed corpus were like when a run first read them.

A file that has changed since then is refused before a token of it is trained on. One that was found
damaged may be replaced: the run goes on with the new file.
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
import pathlib
from typing import Any
import zlib

from ngrammer_jax import errors
from ngrammer_jax.data import buckets
from ngrammer_jax.system import files, hosts

SAMPLES, SAMPLE_BYTES = 16, 4096  # what is compared of a file, beside its size


class SeenFiles:
  """The files that a run has read so far, in a folder of the run.

  Args:
    folder: local folder, with a file for each process.
    paths: the files of the corpus, which are known by their numbers.
  """

  def __init__(self, folder: files.SyncedDir, paths: Sequence[pathlib.Path]):
    self._folder, self._paths = folder, paths
    self._seen: dict[int, dict[str, Any]] = {}
    for line in _read(folder.folder):  # of several processes: one that found damage is believed
      if not self._seen.get(line['file'], {}).get('was_damaged'):
        self._seen[line['file']] = line
    self._checked: set[int] = set()

  def check(self, number: int) -> None:
    """Raises BadInput if a file has changed since the run first read it."""
    if number in self._checked:
      return
    path, old = self._paths[number], self._seen.get(number)
    with files.translate_damage(path):
      size, content = path.stat().st_size, _fingerprint(path)
    line = {'file': number, 'name': path.name, 'size': size, 'content': content}
    if old is None or old.get('was_damaged'):
      self._write(line if old is None else line | {'size': old['size'], 'was_damaged': True})
    elif old['content'] != line['content']:
      raise errors.BadInput(
        f'{path} has changed since this run first read it: put the old file back, or use another '
        f'workdir'
      )
    self._checked.add(number)

  @contextlib.contextmanager
  def notice_damage(self, number: int) -> Iterator[None]:
    """Remembers that a file is damaged, so that another one may take its place."""
    try:
      yield
    except errors.BadInput:
      self._write(self._seen[number] | {'was_damaged': True})
      self._folder.sync()
      raise

  def _write(self, line: dict[str, Any]) -> None:
    self._seen[line['file']] = line
    path = self._folder.folder / f'files-{hosts.process_index()}.jsonl'
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open('a', encoding='utf-8') as file:
        file.write('\n' * bool(file.tell()) + json.dumps(line) + '\n')
    except OSError as error:
      raise errors.BadInput(f'{path} cannot be written: {error.strerror}') from error


def first_sizes(workdir: pathlib.Path | None, pattern: str) -> dict[str, int]:
  """Returns the sizes that the files had which were found damaged, by their names.

  Args:
    workdir: run directory; None: there is none.
    pattern: of the names of the folders of `SeenFiles`.
  """
  folders = [] if workdir is None else list((workdir / 'places').glob(pattern))
  lines = [line for folder in folders for line in _read(folder)]
  return {line['name']: line['size'] for line in lines if line.get('was_damaged')}


def _read(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields what was written, without lines that a killed process has left incomplete."""
  for path in sorted(folder.glob('files-*.jsonl')):
    for text in path.read_bytes().decode('utf-8', 'replace').splitlines():
      with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and {'file', 'name', 'size', 'content'} <= line.keys():
          yield line


def _fingerprint(path: pathlib.Path) -> str:
  """Returns a checksum of parts of a file that are spread evenly over it."""
  size, checksum = path.stat().st_size, 0
  if isinstance(path, buckets.BucketFile):
    return f'{size}-{path.version}'
  with path.open('rb') as file:
    for i in range(SAMPLES):
      file.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
      checksum = zlib.crc32(file.read(SAMPLE_BYTES), checksum)
  return f'{size}-{checksum:08x}'
