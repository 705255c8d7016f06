"""The language model that a config describes: a Transformer, or a recurrent one.

Both keep one contract (see `TransformerLM.__call__`), so nobody above here needs to know which.
"""

from typing import Any

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import block, recurrent, transformer, view

LanguageModel = transformer.TransformerLM | recurrent.RecurrentLM


def build(
  config: model_config.ModelConfig, vocabulary_size: int, windows: view.Windows | None = None
) -> LanguageModel:
  """The model, without its variables.

  Args:
    config: of the model.
    vocabulary_size: V.
    windows: how far the heads of a Transformer look at most, where spans are learned.
  """
  kind = transformer.TransformerLM if config.recurrent is None else recurrent.RecurrentLM
  return kind(config, vocabulary_size, windows)


def empty_memory(
  config: model_config.ModelConfig, batch: int, *how: Any, **more: Any
) -> block.Memory:
  """The memory before the first segment; for the arguments see `transformer.empty_memory`."""
  of = transformer if config.recurrent is None else recurrent
  return of.empty_memory(config, batch, *how, **more)
