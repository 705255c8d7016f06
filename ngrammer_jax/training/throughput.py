"""Tokens per second, and the peak FLOP/s of devices."""

import math
import re
import time

import jax

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets.
PEAK_FLOPS = {
  'TPU v2': 22.5e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
  'NVIDIA L4': 121e12,
  'Tesla T4': 65e12,
  'Tesla V100': 125e12,
}


def peak_flops(kind: str) -> float | None:
  """Returns the peak of a device kind. A suffix is ignored, as in A100-SXM4-40GB."""
  names = [name for name in PEAK_FLOPS if re.match(rf'{re.escape(name)}($|-| \d| [A-Z])', kind)]
  return PEAK_FLOPS[max(names, key=len)] if names else None


class Meter:
  """Measures tokens per second.

  `pause` excludes time outside training (evaluation, checkpoints).

  Attributes:
    rate: tokens per second at the last measurement; infinite before the first.
    peak: FLOP/s of all devices; None if not known.
  """

  def __init__(self):
    self.rate = math.inf
    peak = peak_flops(jax.devices()[0].device_kind)
    self.peak = peak and peak * jax.device_count()
    self._seconds, self._start_time = 0.0, time.monotonic()

  def pause(self) -> None:
    """Stops the clock."""
    self._seconds += time.monotonic() - self._start_time

  def resume(self) -> None:
    """Starts the clock."""
    self._start_time = time.monotonic()

  def measure(self, tokens: int) -> None:
    """Sets the rate to that of `tokens` trained since the last measurement."""
    now = time.monotonic()
    seconds = self._seconds + now - self._start_time
    self._seconds, self._start_time = 0.0, now
    self.rate = tokens / max(seconds, 1e-9)
