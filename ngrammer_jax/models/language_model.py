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
    config: of the model.
    vocabulary_size: V.
  """
  kind = transformer.TransformerLM if config.recurrent is None else recurrent.RecurrentLM
  return kind(config, vocabulary_size)


def adaptive_spans(config: model_config.ModelConfig, params: Any) -> jax.Array:
  """The spans of all heads, in tokens, [L, N]."""
  layers = [params[f'layer_{i}']['attention']['span']['span'] for i in range(config.layers)]
  return config.span.limit * jnp.stack(layers)


def cache_slots(
  config: model_config.ModelConfig, params: Any, mesh: jax.sharding.Mesh | None = None
) -> int:
  """Tokens whose keys and values evaluation keeps: the segment memory, as far as spans reach.

  What is out of the reach of all spans changes nothing. Spans of tokens are not known before these
  are seen; and without `renormalize` all tokens are in the softmax.
  """
  length = 0 if config.memory is None else config.memory.length
  s = config.span
  if s is None or s.kind != 'adaptive' or not s.renormalize:
    return length
  # Every process needs the spans of all heads.
  everywhere = None if mesh is None else sharding.replicated(mesh)
  # The function of the module itself: a partial one would be compiled again in every call.
  spans = jax.jit(adaptive_spans, static_argnums=0, out_shardings=everywhere)
  longest = np.nan_to_num(jax.device_get(spans(config, params))).max()
  return min(length, _rounded_up(int(longest) + s.ramp + 1))


def _rounded_up(tokens):
  """Few sizes, so that few programs are compiled: the smallest 64 2^k."""
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
