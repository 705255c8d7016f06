"""The variables of a language model: parameters and codebooks, their shapes and their number."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.models import language_model, memories, transformer


class ModelVariables(NamedTuple):
  """The variables of a model after some training steps.

  Attributes:
    step: number of steps.
    params: parameters, trained by gradient.
    codebook: centroids and their statistics, trained by k-means.
  """

  step: int
  params: Any
  codebook: Any

  @property
  def collections(self) -> dict[str, Any]:
    """The Linen collections of the model."""
    return {'params': self.params, 'codebook': self.codebook}


def init(model: language_model.LanguageModel, batch_size: int, seed: int) -> dict[str, Any]:
  """Returns random variables of a model, with their logical axis names.

  Args:
    model: the model.
    batch_size: number of rows for tracing; it changes no value.
    seed: random seed of the parameters.
  """
  tokens = jnp.zeros((batch_size, 1), jnp.int32)
  memory = language_model.empty_memory(model.config, batch_size)
  return model.init(jax.random.key(seed), tokens, memory)


_jitted_init = jax.jit(init, static_argnums=(0, 1, 2))


def abstract(model: language_model.LanguageModel) -> dict[str, Any]:
  """Returns the shapes of the variables of a model, with their logical axis names."""
  config = model.config
  if not isinstance(model, transformer.TransformerLM) or any(memories.make(config).flatten()):
    return _trace(model)
  # Layers without memories have the same parameters, and tracing each of them takes seconds.
  variables = _trace(model.clone(config=dataclasses.replace(config, layers=1)))
  layer = variables['params'].pop('layer_0')
  for number in range(config.layers):
    variables['params'][f'layer_{number}'] = layer
  return variables


def _trace(model: language_model.LanguageModel) -> dict[str, Any]:
  """Returns the shapes of the variables; equal models are traced once per process."""
  return _jitted_init.eval_shape(model, 1, 0)


def count_elements(tree: Any) -> int:
  """Returns the number of elements of all arrays of a tree."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
