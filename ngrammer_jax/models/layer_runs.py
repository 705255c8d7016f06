"""Runs of layers: consecutive layers applied together, in one scan if their types repeat.

For example, alternating windowed and full attention repeats with a period of two: a scan over pairs
compiles two layers, whatever their number.
"""

from collections.abc import Collection, Hashable, Sequence
import itertools
from typing import NamedTuple

# With more layers, `model.scan_layers=None` scans over them: see docs/tpu_predictions.md.
MAX_LAYERS_IN_A_ROW = 32


def layers_in_a_scan(scan_layers: bool | int | None, layers: int, must_differ: bool = False) -> int:
  """Returns the minimum number of consecutive layers compiled by a scan, 0 for no scans.

  Args:
    scan_layers: `model.scan_layers`: True for 1, False for no scans, or the number. None: 1 for
      models of many layers, else no scans.
    layers: number of layers of the model.
    must_differ: whether layers must not have equal attention calls (see `kernels.repeats_calls`). A
      scan has a single call.
  """
  if scan_layers is None:
    return 1 if layers > MAX_LAYERS_IN_A_ROW or must_differ else 0
  return int(scan_layers)


class LayerRun(NamedTuple):
  """Layers `first`, ..., `end - 1`: whole repetitions of the first `period` layers.

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
    """Whether a scan over the run compiles fewer layers, or the run has a single layer."""
    return self.period == 1 or self.period < self.length


def find(
  layer_types: Sequence[Hashable], splits: Collection[int], min_period: int
) -> list[LayerRun]:
  """Returns the runs of a model, in order.

  Layers after the last full repetition of a period are runs of their own.

  Args:
    layer_types: the type of each layer. Layers of one type differ in their parameters alone.
    splits: numbers of layers that start a new run regardless of their type.
    min_period: smallest period, the number of consecutive layers compiled by a scan.
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
