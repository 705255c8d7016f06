"""Builds the language model of a config, a Transformer or a recurrent model.

Both have the same interface, see `TransformerLM.__call__`.
"""

from typing import Any

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import recurrent, transformer

LanguageModel = transformer.TransformerLM | recurrent.RecurrentLM


def build(
  config: model_config.ModelConfig, vocabulary_size: int | None, jit_layers: bool = False
) -> LanguageModel:
  """Returns the model, without its variables.

  Args:
    config: model config.
    vocabulary_size: V. None: the model is not applied.
    jit_layers: see `TransformerLM`; ignored by recurrent models.
  """
  if config.recurrent is not None:
    return recurrent.RecurrentLM(config, vocabulary_size)
  return transformer.TransformerLM(config, vocabulary_size, jit_layers)


def empty_memory(
  config: model_config.ModelConfig, batch: int, cache_slots: int = 0
) -> dict[str, Any]:
  """Returns the memory before the first segment of `batch` streams.

  See `TransformerLM.empty_memory` and `RecurrentLM.empty_memory`.
  """
  return build(config, None).empty_memory(batch, cache_slots)
