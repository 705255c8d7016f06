"""The learned spans of a model: modules, state, metrics, bounds and cache slots.

L layers, N heads, B batch.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers.attention.span import AdaptiveSpan, DynamicSpan, Spans

MODULES = {'adaptive': AdaptiveSpan, 'dynamic': DynamicSpan}


def module_of(model: ModelConfig, dtype: jnp.dtype) -> functools.partial[nn.Module]:
  """Returns the constructor of the spans of a layer."""
  config = model.span
  epsilon_keys = 'span'
  if config.counts_all_keys(model.kernel):
    epsilon_keys = 'all'
  return functools.partial(
    MODULES[config.kind],
    limit=config.limit,
    ramp=config.ramp,
    initial=config.initial_value(),
    dtype=jnp.promote_types(dtype, jnp.float32),
    renormalize=config.renormalize,
    epsilon_keys=epsilon_keys,
    is_neutral=config.start == 'neutral',
  )


def empty_state(config: ModelConfig, batch: int) -> dict[str, Spans]:
  """Returns the dynamic spans of the last segment, [B, L, ...], before the first one.

  Empty without dynamic spans.
  """
  if config.span is None or config.span.kind != 'dynamic':
    return {}
  means_BxL = jnp.zeros((batch, config.layers), jnp.float32)
  longest_BxLxN = jnp.zeros((batch, config.layers, config.context_heads), jnp.float32)
  return {'spans': Spans(means_BxL, longest_BxLxN)}


def stack(spans: Sequence[Spans]) -> Spans:
  """Stacks the spans of all layers, [B, L, ...]."""
  longest = [layer_spans.longest_BxN for layer_spans in spans]
  longest_BxLxN = jnp.stack(longest, axis=1).astype(jnp.float32)
  means_L = jnp.stack([layer_spans.mean for layer_spans in spans]).astype(jnp.float32)
  return Spans(jnp.broadcast_to(means_L, longest_BxLxN.shape[:2]), longest_BxLxN)


def adaptive_spans(config: ModelConfig, params: Any) -> jax.Array:
  """Returns the adaptive spans of all heads, in tokens, [L, N]."""
  layers = [params[f'layer_{i}']['attention']['span']['span'] for i in range(config.layers)]
  return config.span.limit * jnp.stack(layers)


def is_span(path: Any) -> bool:
  """Whether the parameter at a path is an adaptive span."""
  return path[-1].key == 'span'


def clip_updates(updates: Any, params: Any) -> Any:
  """Clips the updates so that adaptive spans stay in [0, 1]."""

  def clip(path, param, update):
    if not is_span(path):
      return update
    return jnp.clip(param + update, 0, 1) - param

  return jax.tree_util.tree_map_with_path(clip, params, updates)


def metrics(config: ModelConfig, params: Any, memory: Any) -> dict[str, jax.Array]:
  """Returns the mean and the longest span of each layer and of all, in tokens with the ramp.

  Dynamic spans are read from the memory: they belong to the last segment.
  """
  if config.span.kind == 'dynamic':
    spans_LxN = memory['spans'].longest_BxN.max(axis=0)
    means_L = memory['spans'].mean.mean(axis=0)
  else:
    spans_LxN = adaptive_spans(config, params)
    means_L = spans_LxN.mean(axis=1)
  averages_L = _with_ramp(config, means_L)
  longest_L = _with_ramp(config, spans_LxN.max(axis=1))
  result = {'span/average': averages_L.mean(), 'span/maximum': longest_L.max()}
  for i in range(config.layers):
    result[f'span/average/layer_{i}'] = averages_L[i]
    result[f'span/maximum/layer_{i}'] = longest_L[i]
  return result


def _with_ramp(config: ModelConfig, spans_L: jax.Array) -> jax.Array:
  """Returns spans in whole tokens with the ramp, up to the limit."""
  return jnp.minimum(jnp.ceil(spans_L) + config.span.ramp, config.span.limit)


def cache_slots(config: ModelConfig, params: Any, mesh: jax.sharding.Mesh | None = None) -> int:
  """Returns the number of cache slots for evaluation: the segment memory, cut to the longest span.

  Keys beyond all spans have no weight. The memory is not cut for dynamic spans (they depend on the
  tokens), nor if the normaliser of the softmax includes all keys.
  """
  if config.memory is None:
    return 0
  length = config.memory.length
  span = config.span
  if span is None or span.kind != 'adaptive' or not span.renormalize:
    return length
  if span.counts_all_keys(config.kernel):
    return length
  # Every process needs the spans of all heads.
  out_sharding = None if mesh is None else sharding.replicated(mesh)
  # A `functools.partial` would be compiled again in every call.
  spans = jax.jit(adaptive_spans, static_argnums=0, out_shardings=out_sharding)
  longest = np.nan_to_num(jax.device_get(spans(config, params))).max()
  # The next power of two, at least 64: few sizes need few compiled programs.
  return min(length, max(64, 1 << (int(longest) + span.ramp).bit_length()))
