"""How far heads may look until the spans are checked again (see `models.view.Windows`).

What is computed has static shapes: of each head the keys within a window of 64 2^k tokens, at
most the limit of the span. A window holds the span, its ramp and a reserve. A step that would leave
something out is not made: where a span outgrows its window between two checks, the windows are
fitted to it at that step, and what it reaches in addition is there: beyond every window the text is
kept as far as the largest updates can take a span (`growth`). So windows depend on the spans and on
the windows before, which are saved with the checkpoint.

Spans of tokens are not known before these are seen. There layers choose, segment by segment, from
all windows of 64 2^k tokens; those in force do not change.

L layers, N heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import documents
from ngrammer_jax.models import view
from ngrammer_jax.training import optimizers

SMALLEST = 64
# Every change is compiled. After so many, windows do not shrink any more, and grow to the limit.
CHANGES = 16


def learned(config: model_config.ModelConfig) -> bool:
  """Whether windows can hold the spans: nothing is missed beyond them.

  Without `renormalize` something is: the softmax is over all there is.
  """
  return config.span is not None and config.span.renormalize


def fitted(config: model_config.ModelConfig) -> bool:
  """Whether windows are fitted to the spans as these move: to those of heads, not of tokens."""
  return learned(config) and config.span.kind == 'adaptive'


def apart(config: model_config.ModelConfig) -> bool:
  """Whether heads of a layer can have windows of their own. If not, all have the longest."""
  c = config
  return (c.ngram is None or c.ngram.layer != 'attention') and (
    c.persistent is None or c.persistent.kind in ('all_attention', 'attention_split')
  )


def first(config: model_config.ModelConfig) -> view.Windows | None:
  """The windows at the beginning of training; None where there are none."""
  if not learned(config):
    return None
  limit = config.span.limit
  if not fitted(config):
    every = (_bucket(2**k, limit) for k in range(limit.bit_length() + 1))
    return (tuple(sorted(set(every))),) * config.layers
  return chosen(config, np.full((config.layers, config.heads), limit * (config.span.initial or 0)))


def growth(config: experiment.Config) -> int:
  """Tokens kept beyond every window, so that a span that grows finds there what it reaches.

  It grows by the largest update at every step, which brings a segment in addition: after n of
  them, n - 1 segments are new, in rows without padding, as those of a corpus are.
  """
  if not fitted(config.model):
    return 0
  limit, T = config.model.span.limit, config.training.segment_length
  step = limit * optimizers.max_update_bound(config.optimizer, config.model.heads)
  if step >= limit:
    return limit
  return min(limit, math.ceil(step + (math.ceil(limit / step) - 1) * max(step - T, 0)) + 1)


def spans(config: model_config.ModelConfig, params: Any) -> jax.Array:
  """The spans of all heads, in tokens, [L, N]."""
  layers = (params[f'layer_{i}']['attention']['span']['span'] for i in range(config.layers))
  return config.span.limit * jnp.stack(list(layers))


def chosen(
  config: model_config.ModelConfig,
  spans_LxN: Any,
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

  def of_head(tokens, now):
    return _window(config.span.limit, tokens, now, changes, reserve)

  needed_LxN = needed(config, spans_LxN)
  if not apart(config):
    needed_LxN = needed_LxN.max(axis=1, keepdims=True).repeat(config.heads, axis=1)
  before = before or [[None] * config.heads for _ in needed_LxN]
  layers = zip(needed_LxN.tolist(), before, strict=True)
  return tuple(tuple(map(of_head, *layer)) for layer in layers)


def needed(config: model_config.ModelConfig, spans_LxN: Any) -> np.ndarray:
  """The shortest windows that leave nothing of the spans out, [L, N]."""
  spans_LxN = np.nan_to_num(np.asarray(jax.device_get(spans_LxN), np.float64))
  # A key at the very end of the ramp has no weight, but a slope.
  return np.floor(spans_LxN + config.span.ramp).astype(int) + 1


def _window(limit, needed, now, changes, reserve):
  if now is None:
    return _bucket(needed + reserve, limit)
  if needed + reserve > now:
    return _bucket(needed + reserve, limit) if changes < CHANGES else limit
  smaller = _bucket(needed + 2 * reserve, limit)
  return smaller if smaller < now and changes < CHANGES else now


def in_force(
  config: model_config.ModelConfig, windows: view.Windows | None, metrics: dict[str, Any]
) -> view.Windows | None:
  """The windows that a step was computed in, of all heads, from its metrics."""
  if not view.chooses(config, windows):
    return windows

  # They are rounded up: one that ends where its window does was in the next.
  def of_layer(number, sizes):
    longest = metrics[f'span/maximum/layer_{number}']
    return (next((size for size in sizes if longest <= size), sizes[-1]),) * config.heads

  return tuple(of_layer(*each) for each in enumerate(windows))


def _bucket(tokens, limit):
  size = SMALLEST
  while size < tokens:
    size *= 2
  return min(size, limit)


def fit(config: model_config.ModelConfig, params: Any, windows: view.Windows) -> jax.Array:
  """Whether the windows hold all spans, on the device."""
  s, spans_LxN = config.span, spans(config, params)
  sizes_LxN = np.array(windows)[:, : spans_LxN.shape[1]]
  # What `needed` says, and a little less for what rounding may add.
  below_LxN = np.where(sizes_LxN < s.limit, (1 - 1e-6) * (sizes_LxN - s.ramp), math.inf)
  # A span that is not a number fits: the loss of its step says what is wrong.
  return ~(spans_LxN >= jnp.asarray(below_LxN, spans_LxN.dtype)).any()


def resized(config: model_config.ModelConfig, memory: Any, windows: view.Windows, more: int) -> Any:
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


def metrics(config: model_config.ModelConfig, params: Any, memory: Any) -> dict[str, Any]:
  """The average and the longest span of each layer, and of all, in tokens with the ramp.

  Of tokens, those of the last segment, which the memory of training knows.
  """
  s = config.span
  if s.kind == 'dynamic':
    spans_LxN, means_L = memory['spans'].longest_BxN.max(axis=0), memory['spans'].mean.mean(axis=0)
  else:
    spans_LxN = spans(config, params)
    means_L = spans_LxN.mean(axis=1)
  of_all = lambda tokens_L: jnp.minimum(jnp.ceil(tokens_L) + s.ramp, s.limit)
  averages_L, longest_L = of_all(means_L), of_all(spans_LxN.max(axis=1))
  result = {'span/average': averages_L.mean(), 'span/maximum': longest_L.max()}
  for i in range(config.layers):
    result[f'span/average/layer_{i}'] = averages_L[i]
    result[f'span/maximum/layer_{i}'] = longest_L[i]
  return result
