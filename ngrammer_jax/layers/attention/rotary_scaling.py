"""Rotary frequencies for texts longer than the training texts.

f is the frequency of a pair of features, M the original length and F the factor.

  linear    f / F
  llama3    b f + (1 - b) f / F, where b rises from 0 to 1 with the turns M f / 2 pi, from the low
            to the high frequency factor
  yarn      f (1 - ramp) + ramp f / F, where the ramp rises with the number of the pair, between
            those that turn beta_fast and beta_slow times in M (Peng et al. 2023)
  longrope  f / e, with a factor e of each pair, for short or for long texts

yarn and longrope also multiply sine and cosine: by 0.1 ln F + 1, and by sqrt(1 + ln F / ln M).
"""

import math

import numpy as np

from ngrammer_jax.config.positions import RotaryScalingConfig


def timescales(features: int, min_timescale: float, max_timescale: float) -> np.ndarray:
  """Returns the inverse frequency of each pair of features without scaling, float64."""
  exponent_h = np.arange(features // 2) / (features // 2)
  return min_timescale * (max_timescale / min_timescale) ** exponent_h


def scale(
  frequency_h: np.ndarray, scaling: RotaryScalingConfig, max_timescale: float
) -> tuple[np.ndarray, float]:
  """Returns the scaled frequencies, and the factor of sine and cosine."""
  c = scaling
  M = c.original_length
  if c.kind == 'linear':
    return frequency_h / c.factor, 1.0
  if c.kind == 'llama3':
    turns_h = M * frequency_h / (2 * math.pi)
    low = c.low_frequency_factor
    high = c.high_frequency_factor
    kept_h = np.clip((turns_h - low) / (high - low), 0, 1)
    return frequency_h * (kept_h + (1 - kept_h) / c.factor), 1.0
  if c.kind == 'yarn':
    ramp_h = _yarn_ramp(len(frequency_h), c, max_timescale)
    factor = 0.1 * math.log(c.factor) + 1
    frequency_h = frequency_h * (1 - ramp_h) + frequency_h / c.factor * ramp_h
  else:
    factors_h = c.long_factors if c.is_long else c.short_factors
    frequency_h = frequency_h / np.asarray(factors_h)
    factor = math.sqrt(1 + math.log(c.factor) / math.log(M))
  if c.attention_factor is not None:
    factor = c.attention_factor
  return frequency_h, factor


def _yarn_ramp(pairs: int, scaling: RotaryScalingConfig, max_timescale: float) -> np.ndarray:
  """Returns the weight of the divided frequency for each pair."""
  c = scaling
  r = 2 * pairs

  def pair_with_turns(turns: float) -> float:
    """Returns the (fractional) index of the pair with this many turns in the length."""
    timescale = c.original_length / (2 * math.pi * turns)
    return r * math.log(timescale) / (2 * math.log(max_timescale))

  low = pair_with_turns(c.beta_fast)
  high = pair_with_turns(c.beta_slow)
  if c.truncate:
    low = math.floor(low)
    high = math.ceil(high)
  low = max(low, 0)
  high = min(high, r - 1)
  if low == high:
    high += 0.001
  return np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
