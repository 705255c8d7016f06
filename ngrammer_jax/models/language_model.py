"""Builds the language model of a config, a Transformer or a recurrent model.

Both have the same interface, see `TransformerLM.__call__`.
"""

from typing import Any

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import block, recurrent, transformer, view

LanguageModel = transformer.TransformerLM | recurrent.RecurrentLM


def build(
  config: model_config.ModelConfig, vocabulary_size: int, windows: view.Windows | None = None
) -> LanguageModel:
  """Returns the model, without its variables.

  Args:
    config: of the model.
    vocabulary_size: V.
    windows: maximum attention distance of the heads of a Transformer with learned spans.
  """
  model = transformer.TransformerLM if config.recurrent is None else recurrent.RecurrentLM
  return model(config, vocabulary_size, windows)


def empty_memory(
  config: model_config.ModelConfig, batch: int, *args: Any, **kwargs: Any
) -> block.Memory:
  """Returns the memory before the first segment, see `transformer.empty_memory`."""
  module = transformer if config.recurrent is None else recurrent
  return module.empty_memory(config, batch, *args, **kwargs)
