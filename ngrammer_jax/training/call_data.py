"""The data of each call of the training step, on the devices.

B batch, T segment length.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.training import table_pages, train_task


class CallData(NamedTuple):
  """The data of a call.

  Attributes:
    first: step before the call.
    end: step after the call.
    segments: its segments, stacked [steps, B, T], on the devices; with look-ups for tables in host
      memory.
    row_states: states of the rows of this process after the call, see `TrainTask.row_states`.
  """

  first: int
  end: int
  segments: table_pages.Segments
  row_states: Any


def read_calls(
  task: train_task.TrainTask,
  config: experiment.Config,
  mesh: jax.sharding.Mesh,
  first_step: int,
  look_up: table_pages.LookupReader | None = None,
) -> Iterator[CallData]:
  """Yields the data of each call from `first_step` on.

  If a call has fewer steps than the program, its last segment is repeated.

  Args:
    task: the task that provides the data.
    config: the experiment.
    mesh: device mesh.
    first_step: step before the first call.
    look_up: returns the look-ups of a segment; None: no tables in host memory.
  """
  t = config.training
  for first, end in t.calls(first_step):
    parts = {}  # the rows read here, by the first row

    def stack(
      rows: slice, first: int = first, end: int = end, parts: dict[int, Any] = parts
    ) -> token_batch.Batch:
      segments = [task.segment(step, rows) for step in range(first, end)]
      segments += [segments[-1]] * (t.segments_per_call - len(segments))
      parts[rows.start] = segments[0]
      return token_batch.map_batches(lambda *arrays: np.stack(arrays), *segments)

    segments = sharding.global_rows(mesh, t.batch_size, stack, axis=1)
    if look_up is not None:
      segments = table_pages.PagedSegments(segments, look_up(first, parts))
    yield CallData(first, end, segments, task.row_states(end))
