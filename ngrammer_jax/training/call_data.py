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
from ngrammer_jax.training import train_task


class CallData(NamedTuple):
  """The data of a call.

  Attributes:
    first: step before the call.
    end: step after the call.
    segments: its segments, stacked [steps, B, T], on the devices.
    row_states: states of the rows of this process after the call, see `TrainTask.row_states`.
  """

  first: int
  end: int
  segments: token_batch.Batch
  row_states: Any


def read_calls(
  task: train_task.TrainTask, config: experiment.Config, mesh: jax.sharding.Mesh, first_step: int
) -> Iterator[CallData]:
  """Yields the data of each call from `first_step` on.

  If a call has fewer steps than the program, its last segment is repeated.
  """
  t = config.training
  for first, end in t.calls(first_step):

    def stack(rows: slice, first: int = first, end: int = end) -> token_batch.Batch:
      segments = [task.segment(step, rows) for step in range(first, end)]
      segments += [segments[-1]] * (t.segments_per_call - len(segments))
      return token_batch.map_batches(lambda *arrays: np.stack(arrays), *segments)

    segments = sharding.global_rows(mesh, t.batch_size, stack, axis=1)
    yield CallData(first, end, segments, task.row_states(end))
