"""A trace of some steps, for TensorBoard: what ran on the devices, and how long.

<workdir>/tensorboard/plugins/profile   with `pip install tensorboard-plugin-profile`
"""

from collections.abc import Iterable, Iterator
import logging
import pathlib
from typing import NamedTuple, TypeVar

import jax

Item = TypeVar('Item')


class Steps(NamedTuple):
  """The first step to trace, and that before which it ends."""

  first: int
  last: int


def traced(
  calls: Iterable[Item], starts: Iterable[int], steps: Steps | None, workdir: pathlib.Path
) -> Iterator[Item]:
  """What is computed, call by call; a trace is taken of the calls with these steps.

  Args:
    calls: what each call takes.
    starts: the first step of each.
    steps: to trace, whole calls. Those of before a resume are not.
    workdir: of the run.
  """
  folder, going = workdir / 'tensorboard', False
  try:
    for start, call in zip(starts, calls, strict=True):
      if steps is not None and not going and steps.first <= start < steps.last:
        logging.info('step %s  tracing, into %s/plugins/profile', f'{start:,}', folder)
        jax.profiler.start_trace(str(folder))
        going = True
      elif going and start >= steps.last:
        jax.profiler.stop_trace()
        going = False
      yield call
  finally:
    if going:
      jax.profiler.stop_trace()
