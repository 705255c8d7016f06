"""The n-gram memories of a model, `model.ngram_memories` (see `layers.ngram.memory`)."""

import functools

import jax.numpy as jnp

from ngrammer_jax.config.memory import Place
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers.memory import PlacedMemory
from ngrammer_jax.layers.ngram.memory import NGramMemory

PREFIX = 'ngram_memory_'  # of the name of a memory


def name(number: int) -> str:
  """Returns the name of memory `number`: of its parameters, and of its optimiser."""
  return f'{PREFIX}{number}'


def memory(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None, number: int
) -> PlacedMemory:
  """Returns memory `number` at a place, see `memories.MEMORIES`."""
  make = functools.partial(
    NGramMemory,
    options=config.ngram_memories[number],
    vocabulary_size=vocabulary_size,
    width=config.width,
    block=place.block,
    dtype=dtype,
  )
  return PlacedMemory(name(number), place, make)
