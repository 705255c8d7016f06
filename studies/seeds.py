"""Means over seeds, their standard errors, and differences of runs with the same seed."""

from collections.abc import Iterable, Mapping, Sequence
import math
import statistics
from typing import Any


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
  """Returns the mean and its standard error; no error for a single value."""
  error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
  return statistics.fmean(values), error


def summarise(values: Sequence[float]) -> str:
  """Formats the mean of values, and its standard error if there are several."""
  mean, error = mean_and_error(values)
  return f'{mean:.4f}' if error is None else f'{mean:.4f} ± {error:.4f}'


def difference(results: Iterable[Mapping[str, Any]], model: str, baseline: str) -> str:
  """Formats the mean over seeds of a model minus its baseline, in test bits per byte.

  Returns '' if they have no seed in common.
  """
  scores = {(r['model'], r['seed']): r['test']['bits_per_byte'] for r in results}
  seeds = [seed for name, seed in scores if name == model and (baseline, seed) in scores]
  if model == baseline or not seeds:
    return ''
  return summarise([scores[model, seed] - scores[baseline, seed] for seed in seeds])
