"""Means over seeds and differences paired by seed, with intervals of 95 %; data equivalents."""

from collections.abc import Iterable, Mapping, Sequence
import math
import statistics
from typing import NamedTuple

from scipy import stats

from studies import results

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """A mean, and half of the width of its interval; None for a single value."""

  mean: float
  half_width: float | None

  def __str__(self) -> str:
    if self.half_width is None:
      return f'{self.mean:.4f}'
    return f'{self.mean:.4f} ± {self.half_width:.4f}'


def mean_interval(values: Sequence[float]) -> Interval:
  """Returns the mean of values with its interval of 95 % by Student's t."""
  mean = statistics.fmean(values)
  if len(values) == 1:
    return Interval(mean, None)
  error = statistics.stdev(values) / math.sqrt(len(values))
  quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
  return Interval(mean, float(quantile * error))


def paired_difference(
  losses: Mapping[int, float], baseline: Mapping[int, float]
) -> Interval | None:
  """Returns the mean difference of losses by seed from those of a baseline with equal seeds.

  None if they have no seed in common.
  """
  seeds = losses.keys() & baseline.keys()
  if not seeds:
    return None
  return mean_interval([losses[seed] - baseline[seed] for seed in sorted(seeds)])


def losses_by_seed(runs: Iterable[results.Result], loss: results.Loss) -> dict[int, float]:
  """Returns losses by seed. Raises ValueError if two runs have the same seed."""
  losses: dict[int, float] = {}
  for run in runs:
    if run['seed'] in losses:
      raise ValueError(f'{run["cell"]}: {run["model"]} has another run of seed {run["seed"]}')
    losses[run['seed']] = loss(run)
  return losses


def difference_of_runs(
  runs: Iterable[results.Result],
  baseline: Iterable[results.Result],
  loss: results.Loss = results.bits_per_byte,
) -> Interval | None:
  """Returns the mean difference of the losses of runs from those of a baseline with equal seeds.

  None if they have no seed in common. Raises ValueError if two runs have the same seed.
  """
  return paired_difference(losses_by_seed(runs, loss), losses_by_seed(baseline, loss))


def data_equivalent(loss: float, tokens: int, baseline: Mapping[int, Sequence[float]]) -> float:
  """Returns how many times the tokens of an arm the baseline needs for the same loss.

  The losses of the baseline are interpolated linearly in the logarithm of the tokens.

  Args:
    loss: the loss of the arm.
    tokens: the tokens of the arm.
    baseline: losses of the baseline by number of tokens.

  Returns:
    The factor; infinity if the baseline has no loss as low, and 0 if it has none as high.
  """
  points = [(math.log(n), statistics.fmean(baseline[n])) for n in sorted(baseline)]
  if loss > points[0][1]:
    return 0.0
  for (before, higher), (after, lower) in zip(points, points[1:], strict=False):
    if lower <= loss <= higher:
      share = (higher - loss) / (higher - lower)
      return math.exp(before + share * (after - before)) / tokens
  return math.inf
