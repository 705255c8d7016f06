"""Prefetches batches in a background thread while the device computes."""

from collections.abc import Iterator
import queue
import threading
from typing import Any


class Prefetcher:
  """Runs an iterator ahead in a thread. A context manager, whose exit stops the thread.

  An exception of the iterator is raised in place of the item.

  Args:
    items: the iterator.
    depth: maximum number of items in the queue.
  """

  def __init__(self, items: Iterator[Any], depth: int = 2):
    self._items = items
    self._queue: queue.Queue = queue.Queue(depth)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._fill_queue, daemon=True, name='prefetch')

  def _fill_queue(self) -> None:
    try:
      for item in self._items:
        if not self._put((item, None)):
          return
      self._put((None, StopIteration()))
    except Exception as error:  # noqa: BLE001  raised again in the consumer
      self._put((None, error))

  def _put(self, entry) -> bool:
    while not self._stop.is_set():
      try:
        self._queue.put(entry, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False

  def __enter__(self) -> Iterator[Any]:
    self._thread.start()
    return self._iterate()

  def __exit__(self, *exception) -> None:
    self._stop.set()
    self._thread.join()

  def _iterate(self) -> Iterator[Any]:
    while True:
      item, error = self._queue.get()
      if isinstance(error, StopIteration):
        return
      if error is not None:
        raise error
      yield item
