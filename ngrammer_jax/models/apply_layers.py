"""Applies a run of layers: one after the other, or in one scan over their parameters.

B batch, T segment length, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

LayerResult = Sequence[Any]  # of one layer: its next memory and its spans


def in_a_row(
  layers: Sequence[Callable[..., tuple[jax.Array, LayerResult]]],
  x_BxTxD: jax.Array,
  memory: Sequence[Any],
  dropout_keys: jax.Array | None,
) -> tuple[jax.Array, list[LayerResult]]:
  """Applies layers one after the other. Returns [B, T, D] and the result of each."""
  results = []
  for index, layer in enumerate(layers):
    dropout_key = select_keys(dropout_keys, index)
    x_BxTxD, result = layer(x_BxTxD, memory[index], dropout_key)
    results.append(result)
  return x_BxTxD, results


def in_a_scan(
  period: Sequence[Callable[..., tuple[jax.Array, LayerResult]]],
  params: Sequence[Any],
  x_BxTxD: jax.Array,
  memory: Sequence[Any],
  dropout_keys: jax.Array | None,
) -> tuple[jax.Array, list[LayerResult]]:
  """Applies layers in a scan over repetitions of a period.

  Args:
    period: applies one layer, for each layer of a period.
    params: parameters of each layer of all repetitions.
    x_BxTxD: input of the first layer.
    memory: memory of each layer.
    dropout_keys: key of each layer. None: no dropout.

  Returns:
    [B, T, D], and the result of each layer.
  """
  stacked_layers = []
  for index in range(len(period)):
    repetitions = slice(index, None, len(period))
    keys = select_keys(dropout_keys, repetitions)
    stacked_layers.append((_stack(params[repetitions]), _stack(memory[repetitions]), keys))

  def apply_period(x_BxTxD, layers):
    results = []
    for apply, (params, memory, dropout_key) in zip(period, layers, strict=True):
      x_BxTxD, result = apply(params, x_BxTxD, memory, dropout_key)
      results.append(result)
    return x_BxTxD, results

  x_BxTxD, stacked_results = jax.lax.scan(apply_period, x_BxTxD, stacked_layers)
  results = []
  for number in range(len(params)):
    repetition, index = divmod(number, len(period))
    results.append(_take(stacked_results[index], repetition))
  return x_BxTxD, results


def select_keys(dropout_keys: jax.Array | None, index: int | slice) -> jax.Array | None:
  """Returns the dropout keys of some layers. None: no dropout."""
  if dropout_keys is None:
    return None
  return dropout_keys[index]


def _stack(trees: Sequence[Any]) -> Any:
  """Stacks the corresponding arrays of trees along a new first axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _take(tree: Any, index: int) -> Any:
  """Takes one entry along the first axis of all arrays of a tree."""
  return jax.tree.map(lambda leaf: leaf[index], tree)
