"""How far heads may look until the spans are checked again (see `models.view.Windows`).

What is computed has static shapes: of each head the keys within a window of 64 2^k tokens, at
most the limit of the span. A window holds the span, its ramp and a reserve. A step that would leave
something out is not made: where a span outgrows its window between two checks, the windows are
fitted to it at that step, and what it reaches in addition is there: beyond every window the text is
kept as far as the largest updates can take a span (`growth`). So windows depend on the spans and on
the windows before, which are saved with the checkpoint.

L layers, N heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.layers import documents
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import view
from ngrammer_jax.training import optimizers

SMALLEST = 64
# Every change is compiled. After so many, windows do not shrink any more, and grow to the limit.
CHANGES = 16


def learned(config: model_config.ModelConfig) -> bool:
  """Whether windows can follow the spans: numbers of each head, beyond which nothing is missed.

  Without `renormalize` something is: the softmax is over all there is.
  """
  return config.span is not None and config.span.kind == 'adaptive' and config.span.renormalize


def apart(config: model_config.ModelConfig) -> bool:
  """Whether heads of a layer can have windows of their own. If not, all have the longest."""
  c = config
  return (c.ngram is None or c.ngram.layer != 'attention') and (
    c.persistent is None or c.persistent.kind in ('all_attention', 'attention_split')
  )


def growth(config: experiment.Config) -> int:
  """Tokens kept beyond every window, so that a span that grows finds there what it reaches.

  It grows by the largest update at every step, which brings a segment in addition: after n of
  them, n - 1 segments are new.
  """
  limit, T = config.model.span.limit, config.training.segment_length
  step = limit * optimizers.largest_update(config.optimizer, config.model.heads)
  if step >= limit:
    return limit
  return min(limit, math.ceil(step + (math.ceil(limit / step) - 1) * max(step - T, 0)) + 1)


def spans(config: model_config.ModelConfig, params: Any) -> np.ndarray:
  """The spans of all heads, in tokens, [L, N]."""
  of_layer = lambda i: params[f'layer_{i}']['attention']['span']['span']
  shares = jax.device_get([of_layer(i) for i in range(config.layers)])
  return config.span.limit * np.stack(shares).astype(np.float64)


def chosen(
  config: model_config.ModelConfig,
  spans_LxN: np.ndarray,
  before: view.Windows | None = None,
  changes: int = 0,
  reserve: int | None = None,
) -> view.Windows:
  """The windows for the spans, [L][N], of heads without a context too.

  Args:
    config: of the model.
    spans_LxN: in tokens, of the heads that look at the context.
    before: windows in force, kept where the spans neither outgrow them nor are far below. None:
      there are none yet.
    changes: made so far.
    reserve: tokens that a span may grow. None: those of the config.
  """
  reserve = config.span.reserve if reserve is None else reserve
  of_head = lambda tokens, now: _window(config.span.limit, tokens, now, changes, reserve)
  needed_LxN = needed(config, spans_LxN)
  if not apart(config):
    needed_LxN = needed_LxN.max(axis=1, keepdims=True).repeat(config.heads, axis=1)
  before = before or [[None] * config.heads for _ in needed_LxN]
  layers = zip(needed_LxN.tolist(), before, strict=True)
  return tuple(tuple(map(of_head, *layer)) for layer in layers)


def needed(config: model_config.ModelConfig, spans_LxN: np.ndarray) -> np.ndarray:
  """The shortest windows that leave nothing of the spans out, [L, N]."""
  # A key at the very end of the ramp has no weight, but a slope.
  return np.floor(np.nan_to_num(spans_LxN) + config.span.ramp).astype(int) + 1


def _window(limit, needed, now, changes, reserve):
  if now is None:
    return _bucket(needed + reserve, limit)
  if needed + reserve > now:
    return _bucket(needed + reserve, limit) if changes < CHANGES else limit
  smaller = _bucket(needed + 2 * reserve, limit)
  return smaller if smaller < now and changes < CHANGES else now


def _bucket(tokens, limit):
  size = SMALLEST
  while size < tokens:
    size *= 2
  return min(size, limit)


def fit(config: model_config.ModelConfig, params: Any, windows: view.Windows) -> jax.Array:
  """Whether the windows hold all spans, on the device."""
  s, fits = config.span, jnp.asarray(True)
  for i, sizes in enumerate(windows):
    span_N = params[f'layer_{i}']['attention']['span']['span']
    # What `needed` says, and a little less for what rounding may add.
    below = [(1 - 1e-6) * (size - s.ramp) / s.limit if size < s.limit else 2.0 for size in sizes]
    below = below[: len(span_N)]
    # A span that is not a number fits: the loss of its step says what is wrong.
    fits &= ~(span_N >= jnp.asarray(below, span_N.dtype)).any()
  return fits


def resized(
  config: model_config.ModelConfig, memory: Any, windows: view.Windows, more: int
) -> Any:
  """The memory of training for other windows: its last tokens, and before them empty slots.

  `more` tokens are kept beyond the windows, see `growth`.
  """
  c, looks_back = config, (config.convolution or 1) - 1
  zeros = c.memory.first == 'zeros'

  def last(array, rows, empty):
    M = array.shape[1]
    if rows <= M:
      return array[:, M - rows :]
    pad = [(0, 0), (rows - M, 0)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, pad, constant_values=empty)

  length = view.inputs_kept(c, tuple(view.sizes(windows)), more)
  recent, none = memory['recent'], documents.NONE
  recent = recent | {
    'documents': last(recent['documents'], length, 0 if zeros else none),
    'positions': last(recent['positions'], length, none),
  }
  layers = tuple(
    layer | {'hidden': last(layer['hidden'], view.inputs_kept(c, sizes, more) + looks_back, 0)}
    for layer, sizes in zip(memory['layers'], windows, strict=True)
  )
  return memory | {'recent': recent, 'layers': layers}


def metrics(config: model_config.ModelConfig, params: Any) -> dict[str, Any]:
  """The average and the longest span of each layer, and of all, in tokens with the ramp."""
  s, result = config.span, {}
  averages, longest = [], []
  for i in range(config.layers):
    z_N = s.limit * params[f'layer_{i}']['attention']['span']['span']
    averages.append(jnp.minimum(jnp.ceil(z_N.mean()) + s.ramp, s.limit))
    longest.append(jnp.minimum(jnp.ceil(z_N.max()) + s.ramp, s.limit))
    result[f'span/average/layer_{i}'] = averages[-1]
    result[f'span/maximum/layer_{i}'] = longest[-1]
  total = sum(averages) / len(averages)
  return {'span/average': total, 'span/maximum': jnp.stack(longest).max()} | result
