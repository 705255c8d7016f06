"""Runs of layers: consecutive layers that are applied together, in one scan if their types repeat.

Layers that alternate between windowed and full attention, for example, repeat with a period of two:
a scan over pairs of layers compiles two of them, whatever their number.
"""

from collections.abc import Collection, Hashable, Sequence
import itertools
from typing import NamedTuple

# With more layers, `model.scan_layers=None` scans over them: see docs/tpu_predictions.md.
MAX_LAYERS_IN_A_ROW = 32


def layers_in_a_scan(scan_layers: bool | int | None, layers: int, must_differ: bool = False) -> int:
  """Returns the smallest number of layers that a scan compiles in a row, 0 for no scans.

  Args:
    scan_layers: of the config of the model: True for 1, False for no scans, or the number. None:
      1 for models of many layers, else no scans.
    layers: number of layers of the model.
    must_differ: whether layers must not have equal calls of attention, see `kernels.repeats_calls`.
      A scan has one of them.
  """
  if scan_layers is None:
    return 1 if layers > MAX_LAYERS_IN_A_ROW or must_differ else 0
  return int(scan_layers)


class LayerRun(NamedTuple):
  """Layers `first`, ..., `end - 1`: whole repetitions of the first `period` of them.

  Attributes:
    first: number of the first layer.
    end: number after the last layer.
    period: number of layers after which their types repeat. It divides the length.
  """

  first: int
  end: int
  period: int

  @property
  def length(self) -> int:
    """Number of layers."""
    return self.end - self.first

  @property
  def layers(self) -> slice:
    """The layers, as an index of a sequence of all layers."""
    return slice(self.first, self.end)

  @property
  def can_scan(self) -> bool:
    """Whether a scan over the run compiles fewer layers than there are, or a single one."""
    return self.period == 1 or self.period < self.length


def find(
  layer_types: Sequence[Hashable], splits: Collection[int], min_period: int
) -> list[LayerRun]:
  """Returns the runs of a model, in order.

  Layers after the last full repetition of a period are runs of their own.

  Args:
    layer_types: the type of each layer. Layers of one type differ in their parameters alone.
    splits: numbers of layers that begin a new run, whatever their type.
    min_period: smallest period, which is the number of layers that a scan compiles in a row.
  """
  runs = []
  for first, end in itertools.pairwise(sorted({0, len(layer_types), *splits})):
    while first < end:
      period = _find_period(layer_types[first:end], min_period)
      num_repetitions = (end - first) // period
      run = LayerRun(first, first + num_repetitions * period, period)
      runs.append(run)
      first = run.end
  return runs


def _find_period(layer_types: Sequence[Hashable], min_period: int) -> int:
  """Returns the smallest number of layers after which all types repeat, at most all layers."""
  for period in range(min(min_period, len(layer_types)), len(layer_types)):
    if layer_types[period:] == layer_types[:-period]:
      return period
  return len(layer_types)
