"""A folder of growing files, also in Google Cloud Storage, where files cannot be appended to."""

import logging
import pathlib
import tempfile
import threading

from ngrammer_jax.system import files, storage

SYNC_INTERVAL = 30.0  # seconds between uploads of appended files


class SyncedFolder:
  """A folder of growing files.

  For a local folder, `folder` is the folder itself. For a remote folder, it is a temporary local
  copy; changed files are uploaded periodically and by `sync`.

  Args:
    folder: final location of the files.
    pattern: glob of the growing remote files.
  """

  def __init__(self, folder: pathlib.Path, pattern: str):
    self.folder = folder
    self._remote = folder if storage.is_remote(folder) else None
    if self._remote is None:
      return
    self._scratch = tempfile.TemporaryDirectory(prefix='ngrammer_jax-')
    self.folder = pathlib.Path(self._scratch.name)
    for file in folder.glob(pattern):
      (self.folder / file.name).write_bytes(file.read_bytes())
    self._uploaded_sizes = {file: files.size(file) for file in files.iter_files(self.folder)}
    self._lock = threading.Lock()
    self._closed = threading.Event()
    threading.Thread(target=self._sync_periodically, name='sync', daemon=True).start()

  def sync(self) -> None:
    """Uploads the changed files."""
    if self._remote is None:
      return
    with self._lock:
      for file in files.iter_files(self.folder):
        new_size = files.size(file)
        if self._uploaded_sizes.get(file) != new_size:
          files.write(self._remote / str(file.relative_to(self.folder)), file.read_bytes())
          self._uploaded_sizes[file] = new_size

  def close(self) -> None:
    """Uploads the changed files and deletes the temporary folder. Close the files first."""
    if self._remote is not None:
      self._closed.set()
      self._try_sync()
      self._scratch.cleanup()

  def _sync_periodically(self) -> None:
    while not self._closed.wait(SYNC_INTERVAL):
      self._try_sync()

  def _try_sync(self) -> None:
    try:
      self.sync()
    except Exception as error:  # a failed upload must not end the run
      logging.warning('%s cannot be written: %s', self._remote, error)
