"""How far heads may look until the spans are checked again (see `models.view.Windows`).

What is computed has static shapes: of each head the keys within a window of 64 2^k tokens, at
most the limit of the span. A window holds the span, its ramp, and as much as the optimiser can add
to it until the next check (see `growth`), so that nothing is ever left out. The windows depend
on the state of that step and on the windows before, which are saved with the checkpoint.

L layers, N heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax.layers import documents
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import view
from ngrammer_jax.training import optimizers

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
  return config.span.limit * _of_heads(config, params)


def _of_heads(config, tree):
  """What a tree like the parameters has for the spans, [L, N]."""
  of_layer = lambda i: tree[f'layer_{i}']['attention']['span']['span']
  return np.stack(jax.device_get([of_layer(i) for i in range(config.layers)])).astype(np.float64)


def growth(
  config: experiment.Config, step: int = 0, opt_state: Any | None = None
) -> np.ndarray | float:
  """Tokens that spans can grow, at most, until the next check, [L, N] or of all.

  Args:
    config: of the run.
    step: updates made so far.
    opt_state: of the optimiser. None: that of the start.
  """
  m, sums_LxN = config.model, 0.0
  if opt_state is not None and config.optimizer.algorithm == 'adagrad':
    sums_LxN = _of_heads(m, optax.tree.get(opt_state, 'sums'))
  share = optimizers.largest_growth(
    config.optimizer,
    config.training.steps,
    np.arange(step, step + config.training.span_check_every),
    sums_LxN,
    m.heads,
  )
  return 1.001 * m.span.limit * share  # with what rounding may add


def chosen(
  config: model_config.ModelConfig,
  spans_LxN: np.ndarray,
  before: view.Windows | None = None,
  changes: int = 0,
  growth: np.ndarray | float = 0.0,
) -> view.Windows:
  """The windows for the spans, [L][N].

  Args:
    config: of the model.
    spans_LxN: in tokens.
    before: windows in force, kept where the spans neither outgrow them nor are far below. None:
      there are none yet.
    changes: made so far.
    growth: tokens that spans may grow, [L, N].
  """
  s = config.span
  # A key at the very end of the ramp has no weight, but a slope.
  needed = lambda spans_LxN: np.floor(np.minimum(spans_LxN, s.limit) + s.ramp).astype(int) + 1
  enough_LxN, plenty_LxN = (needed(spans_LxN + times * growth) for times in (1, 2))
  return tuple(
    tuple(
      _window(s.limit, *head, changes)
      for head in zip(*layer, before[i] if before else [None] * len(layer[0]), strict=True)
    )
    for i, layer in enumerate(zip(enough_LxN.tolist(), plenty_LxN.tolist(), strict=True))
  )


def _window(limit, enough, plenty, now, changes):
  """The window for so many tokens; one in force is kept until there is plenty to spare."""
  if now is None:
    return _bucket(enough, limit)
  if enough > now:
    return _bucket(enough, limit) if changes < CHANGES else limit
  smaller = _bucket(plenty, limit)
  return smaller if smaller < now and changes < CHANGES else now


def _bucket(tokens, limit):
  size = SMALLEST
  while size < tokens:
    size *= 2
  return min(size, limit)


def resized(config: model_config.ModelConfig, memory: Any, windows: view.Windows) -> Any:
  """The memory of training for other windows: its last tokens, and before them empty slots.

  Windows that double find everything there, see `view.inputs_kept`. So do larger ones, where
  spans grow no faster than the text goes on: they have reached no farther when the memory is full.
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
