"""Makes the next batches in a thread while the device works on this one."""

from collections.abc import Iterator
import queue
import threading
from typing import Any


class Prefetch:
  """Runs an iterator ahead in a thread, as a context manager that ends the thread.

  An exception of the iterator is raised where its item would have come.
  """

  def __init__(self, items: Iterator[Any], depth: int = 2):
    self._items = items
    self._queue: queue.Queue = queue.Queue(depth)
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._fill, daemon=True, name='prefetch')

  def _fill(self) -> None:
    try:
      for item in self._items:
        if not self._put((item, None)):
          return
      self._put((None, StopIteration()))
    except Exception as error:  # noqa: BLE001  raised again by whoever takes it
      self._put((None, error))

  def _put(self, entry) -> bool:
    while not self._stopped.is_set():
      try:
        self._queue.put(entry, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False

  def __enter__(self) -> Iterator[Any]:
    self._thread.start()
    return self._take()

  def __exit__(self, *exception) -> None:
    self._stopped.set()
    self._thread.join()

  def _take(self) -> Iterator[Any]:
    while True:
      item, error = self._queue.get()
      if isinstance(error, StopIteration):
        return
      if error is not None:
        raise error
      yield item
