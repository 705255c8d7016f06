"""Prefetches batches in a background thread while the device computes."""

import collections
from collections.abc import Iterator
from concurrent import futures
import contextlib
from typing import Any

_END = object()


@contextlib.contextmanager
def run_ahead(items: Iterator[Any], depth: int = 2) -> Iterator[Iterator[Any]]:
  """Runs an iterator ahead in a thread, which ends with the block.

  An exception of the iterator is raised in place of the item.

  Args:
    items: the iterator.
    depth: maximum number of items that wait while the thread computes the next one.
  """
  executor = futures.ThreadPoolExecutor(1, thread_name_prefix='prefetch')
  compute_next = lambda: executor.submit(next, items, _END)
  pending = collections.deque(compute_next() for _ in range(depth + 1))

  def iterate():
    while (item := pending.popleft().result()) is not _END:
      pending.append(compute_next())
      yield item

  try:
    yield iterate()
  finally:
    executor.shutdown(cancel_futures=True)
