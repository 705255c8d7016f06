"""The recorded validations of a run."""

import pathlib

from ngrammer_jax.system import hosts
from ngrammer_jax.training.records import writers


class ValidationHistory:
  """The recorded values of the validation metric that selects the best checkpoint.

  All processes read the same values.

  Args:
    workdir: run directory.
    metric: name of the metric; lower is better.
    patience: number of validations without an improvement after which training stops; None
      disables early stopping.
  """

  def __init__(self, workdir: pathlib.Path, metric: str, patience: int | None):
    self._workdir = workdir
    self._name = f'validation/{metric}'
    self._patience = patience

  def value_at(self, step: int) -> float | None:
    """Returns the metric at a step, None if it is not recorded."""
    return hosts.broadcast(self._values().get(step))

  def stops_at(self, step: int) -> bool:
    """Whether the last `patience` validations up to a step were no better than those before."""
    values = [value for recorded, value in self._values().items() if recorded <= step]
    return hosts.broadcast(self._has_stalled(values))

  def _has_stalled(self, values: list[float]) -> bool:
    """Whether the last `patience` values are no better than those before."""
    count = self._patience
    if count is None or len(values) <= count:
      return False
    return min(values[-count:]) >= min(values[:-count])

  def _values(self) -> dict[int, float]:
    """Returns the recorded metric by step."""
    values = {}
    for _, record in writers.read_lines(self._workdir):
      if self._name in record:
        values[record['step']] = record[self._name]
    return values
