"""Builds the language model of a config, a Transformer or a recurrent model.

Both have the same interface, see `TransformerLM.__call__`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import block, recurrent, transformer

LanguageModel = transformer.TransformerLM | recurrent.RecurrentLM


def build(config: model_config.ModelConfig, vocabulary_size: int) -> LanguageModel:
  """Returns the model, without its variables.

  Args:
    config: model config.
    vocabulary_size: V.
  """
  kind = transformer.TransformerLM if config.recurrent is None else recurrent.RecurrentLM
  return kind(config, vocabulary_size)


def adaptive_spans(config: model_config.ModelConfig, params: Any) -> jax.Array:
  """Returns the adaptive spans of all heads, in tokens, [L, N]."""
  layers = [params[f'layer_{i}']['attention']['span']['span'] for i in range(config.layers)]
  return config.span.limit * jnp.stack(layers)


def cache_slots(
  config: model_config.ModelConfig, params: Any, mesh: jax.sharding.Mesh | None = None
) -> int:
  """Returns the number of cache slots for evaluation: the segment memory, cut to the longest span.

  Keys beyond all spans have no weight. The memory is not cut for dynamic spans, which depend on the
  tokens, nor without `renormalize`, where the softmax includes all tokens.
  """
  length = 0 if config.memory is None else config.memory.length
  s = config.span
  if s is None or s.kind != 'adaptive' or not s.renormalize:
    return length
  # Every process needs the spans of all heads.
  out_sharding = None if mesh is None else sharding.replicated(mesh)
  # A `functools.partial` would be compiled again in every call.
  spans = jax.jit(adaptive_spans, static_argnums=0, out_shardings=out_sharding)
  longest = np.nan_to_num(jax.device_get(spans(config, params))).max()
  return min(length, _round_up_slots(int(longest) + s.ramp + 1))


def _round_up_slots(tokens):
  """Returns the smallest sufficient 64 2^k: few sizes need few compiled programs."""
  size = 64
  while size < tokens:
    size *= 2
  return size


def empty_memory(
  config: model_config.ModelConfig, batch: int, *args: Any, **kwargs: Any
) -> block.Memory:
  """Returns the memory before the first segment, see `transformer.empty_memory`."""
  module = transformer if config.recurrent is None else recurrent
  return module.empty_memory(config, batch, *args, **kwargs)
