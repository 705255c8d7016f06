"""FLOPs of a token, and model FLOPs utilisation (MFU)."""

from collections.abc import Sequence
import math
import re
import time

import jax

from ngrammer_jax.config import model as model_config

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


def forward_flops(
  config: model_config.ModelConfig,
  vocabulary_size: int,
  length: int,
  spans: Sequence[float] | None = None,
) -> float:
  """Returns the FLOPs of one token's forward pass.

  It counts matrix products only, a multiply-add as two. A causal query attends to half of the
  segment on average, and to the memory or to a window. Keys and values of the memory are projected
  in every segment. Rematerialisation is not counted. `spans` are those of the layers, the mean of
  their heads; keys beyond cost nothing.
  """
  D, F = config.width, config.feed_forward_width
  clusters = (config.ngram.clusters or 0) if config.ngram else 0
  if config.recurrent is not None:
    width, layer = config.recurrent.width, config.recurrent.products(D)
    return 2 * (layer + _output_multiplications(config, width, vocabulary_size) + D * clusters)
  M = 0 if config.memory is None else config.memory.length
  fixed = config.memory is not None and config.memory.window() is not None
  attention = 0.0
  for span in (M,) * config.layers if spans is None else spans:
    keys = min(span, M) if fixed else M + length / 2
    attention += 4 * D * D + 2 * D * keys + 2 * D * D * min(span, M) / length
    if config.position in ('relative', 'shaw', 'table'):  # one more score, of all distances
      attention += D * (keys if fixed else M + length)
  if config.persistent is not None:
    attention += config.layers * 2 * D * config.persistent.vectors
  feed_forward = (3 if config.gated else 2) * D * F
  output = _output_multiplications(config, D, vocabulary_size)
  return 2 * (attention + config.layers * feed_forward + output + D * clusters)


def _output_multiplications(config, width, vocabulary_size):
  """Returns the multiplications of the output layer for one token."""
  if config.adaptive_softmax is None:
    return width * vocabulary_size
  return config.adaptive_softmax.products(width, vocabulary_size)


def train_flops(
  config: model_config.ModelConfig,
  vocabulary_size: int,
  length: int,
  spans: Sequence[float] | None = None,
) -> float:
  """Returns the FLOPs of training on one token: the backward pass costs twice the forward pass.

  k-means has no backward pass.
  """
  clusters = (config.ngram.clusters or 0) if config.ngram else 0
  quantiser = 2 * config.width * clusters
  return 3 * (forward_flops(config, vocabulary_size, length, spans) - quantiser) + quantiser


def peak_flops(kind: str) -> float | None:
  """Returns the peak of a device kind. A suffix is ignored, as in A100-SXM4-40GB."""
  names = [name for name in PEAK_FLOPS if re.match(rf'{re.escape(name)}($|-| \d| [A-Z])', kind)]
  return PEAK_FLOPS[max(names, key=len)] if names else None


class Meter:
  """Measures tokens per second, and MFU if the peak of the device is known.

  `pause` excludes time outside training (evaluation, checkpoints).

  Attributes:
    flops: of training on one token, set by the caller.
    rate: tokens per second at the last measurement; infinite before the first.
  """

  def __init__(self):
    self.flops, self.rate = 0.0, math.inf
    peak = peak_flops(jax.devices()[0].device_kind)
    self._peak = peak and peak * jax.device_count()
    self._seconds, self._start_time = 0.0, time.monotonic()

  def pause(self) -> None:
    """Stops the clock."""
    self._seconds += time.monotonic() - self._start_time

  def resume(self) -> None:
    """Starts the clock."""
    self._start_time = time.monotonic()

  def measure(self, tokens: int) -> dict[str, float]:
    """Returns the rates for `tokens` trained since the last measurement; empty for 0 tokens."""
    if not tokens:
      return {}
    now = time.monotonic()
    seconds = self._seconds + now - self._start_time
    self._seconds, self._start_time = 0.0, now
    self.rate = tokens / max(seconds, 1e-9)
    rates = {'tokens_per_second': self.rate}
    if self._peak is not None:
      rates['mfu'] = self.rate * self.flops / self._peak
    return rates
