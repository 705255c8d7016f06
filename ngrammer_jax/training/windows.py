"""How far heads may look until the spans are checked again (see `models.view.Windows`).

What is computed has static shapes: of each head the keys within a window of 64 2^k tokens, at
most the limit of the span. A window holds the span, its ramp and a reserve; until the next
check the span is held below its end, so that nothing is ever left out. The windows depend on
the spans of that step and on the windows before, which are saved with the checkpoint.

L layers, N heads.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers import documents
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import view

SMALLEST = 64
# Every change is compiled. After so many, windows do not shrink any more, and grow to the limit.
CHANGES = 16


def learned(config: model_config.ModelConfig) -> bool:
  """Whether windows can follow the spans.

  They are numbers of each head, what is beyond them is not missed, and heads can be told apart.
  """
  c = config
  return (
    c.span is not None
    and c.span.kind == 'adaptive'
    and c.span.renormalize
    and (c.ngram is None or c.ngram.layer != 'attention')
    and (c.persistent is None or c.persistent.kind in ('all_attention', 'attention_split'))
  )


def spans(config: model_config.ModelConfig, params: Any) -> np.ndarray:
  """The spans of all heads, in tokens, [L, N]."""
  of_layer = lambda i: params[f'layer_{i}']['attention']['span']['span']
  return config.span.limit * np.stack(
    [np.asarray(of_layer(i), np.float64) for i in range(config.layers)]
  )


def chosen(
  config: model_config.ModelConfig,
  spans_LxN: np.ndarray,
  before: view.Windows | None = None,
  changes: int = 0,
  reserve: int | None = None,
) -> view.Windows:
  """The windows for the spans, [L][N].

  Args:
    config: of the model.
    spans_LxN: in tokens.
    before: windows in force, kept where the spans neither outgrow them nor are far below. None:
      there are none yet.
    changes: made so far.
    reserve: tokens that a span may grow. None: those of the config.
  """
  s = config.span
  reserve = s.reserve if reserve is None else reserve
  # A key at the very end of the ramp has no weight, but a slope.
  needed_LxN = np.floor(spans_LxN + s.ramp).astype(int) + 1
  return tuple(
    tuple(
      _window(s, needed, before and before[layer][head], changes, reserve)
      for head, needed in enumerate(row)
    )
    for layer, row in enumerate(needed_LxN)
  )


def _window(s, needed, now, changes, reserve):
  if now is None:
    return _bucket(needed + reserve, s.limit)
  if now < s.limit and needed + reserve > now:
    at_its_end = needed >= now
    wanted = max(needed + reserve, 2 * now if at_its_end else 0)
    return _bucket(wanted, s.limit) if changes < CHANGES else s.limit
  smaller = _bucket(needed + 2 * reserve, s.limit)
  return smaller if smaller < now and changes < CHANGES else now


def _bucket(tokens, limit):
  size = SMALLEST
  while size < tokens:
    size *= 2
  return min(size, limit)


def held(config: model_config.ModelConfig, params: Any, windows: view.Windows) -> tuple[Any, Any]:
  """Parameters whose spans end within the windows, and the number of heads that had to be held."""
  s, count = config.span, jnp.zeros(())
  params = dict(params)
  for i, sizes in enumerate(windows):
    layer = params[f'layer_{i}']
    span_N = layer['attention']['span']['span']
    ends = [(size - 1 - s.ramp) / s.limit if size < s.limit else 1.0 for size in sizes]
    # Below the next whole token, with what rounding may add.
    ceiling_N = jnp.asarray(ends, span_N.dtype) * (1 - 1e-6)
    ceiling_N = jnp.where(jnp.asarray(sizes) < s.limit, ceiling_N, 1)
    count += (span_N > ceiling_N).sum()
    attention = layer['attention'] | {'span': {'span': jnp.minimum(span_N, ceiling_N)}}
    params[f'layer_{i}'] = layer | {'attention': attention}
  return params, count


def resized(config: model_config.ModelConfig, memory: Any, windows: view.Windows) -> Any:
  """The memory of training for other windows: its last tokens, and before them empty slots.

  Windows that double find everything there, see `view.inputs_kept`.
  """
  c, looks_back = config, (config.convolution or 1) - 1
  zeros = c.memory.first == 'zeros'

  def last(array, rows, empty):
    M = array.shape[1]
    if rows <= M:
      return array[:, M - rows :]
    pad = [(0, 0), (rows - M, 0)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, pad, constant_values=empty)

  length = view.inputs_kept(c, tuple(view.sizes(windows)))
  recent, none = memory['recent'], documents.NONE
  recent = recent | {
    'documents': last(recent['documents'], length, 0 if zeros else none),
    'positions': last(recent['positions'], length, none),
  }
  layers = tuple(
    layer | {'hidden': last(layer['hidden'], view.inputs_kept(c, sizes) + looks_back, 0)}
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
