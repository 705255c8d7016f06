"""Warnings about texts longer than a segment for models with longrope."""

from collections.abc import Mapping
import logging

from ngrammer_jax import config as experiment


def log(config: experiment.Config, counts: Mapping[str, int]) -> None:
  """Logs the longest text read in segments, if rotary factors depend on its length.

  Other libraries read a text at once, with the long factors if it exceeds the original length.

  Args:
    config: the config of the run.
    counts: number of tokens of each text by its name.
  """
  scaling = config.evaluation_model().positions().scaling
  context = config.evaluation_context()
  name = max(counts, key=counts.__getitem__, default='')
  if scaling is None or scaling.kind != 'longrope' or counts.get(name, 0) <= context:
    return
  if scaling.short_factors == scaling.long_factors:
    return
  if scaling.is_long:
    factors = 'long factors'
    remedy = 'a higher evaluation.segment_length reads more at once'
  else:
    factors = 'short factors'
    remedy = f'the long ones are for evaluation.segment_length above {scaling.original_length:,}'
  logging.info(
    '%s: %s tokens are read in segments of %s with the %s of longrope; %s',
    name,
    f'{counts[name]:,}',
    f'{context:,}',
    factors,
    remedy,
  )
