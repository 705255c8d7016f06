"""The optional memory blocks of a model; memories can be added to a trained model."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from ngrammer_jax.config import conversion, resume
from ngrammer_jax.config.model import ModelConfig, placed_blocks

# Properties of attention; all other memories declare their places.
OF_ATTENTION = ('memory', 'span', 'persistent')
NAMES = (*placed_blocks(), *OF_ATTENTION)


def blocks(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields path and values of the memories in the values of a model."""
  for name in NAMES:
    value = model.get(name)
    if name == 'ngram_memories':
      for number, block in conversion.blocks_by_number(value or ()).items():
        yield f'model.{name}.{number}', block
    elif value is not None:
      yield f'model.{name}', value


def added(source: ModelConfig, model: ModelConfig) -> dict[str, Any]:
  """Returns the added memories by path, such as `model.ngram_memories.0`."""
  paths = [path for path, _ in blocks(dataclasses.asdict(model))]
  added_blocks = {}
  for key, old, new in resume.differences(source, model, 'model.', lambda key: False):
    if key.path in paths and old is None:
      added_blocks[key.path] = new
  return added_blocks
