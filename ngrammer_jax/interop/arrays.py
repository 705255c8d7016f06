"""Name-to-array mappings of other frameworks, checked and reshaped into our variables."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors


@dataclasses.dataclass(frozen=True)
class Source:
  """Where one of our arrays comes from.

  Attributes:
    names: the foreign arrays that it is made of.
    shape: of each of them.
    convert: from the list of those arrays to ours.
  """

  names: tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[list[np.ndarray]], np.ndarray] = lambda arrays: arrays[0]


def convert(
  arrays: Mapping[str, Any],
  sources: Mapping[tuple[str, ...], Source],
  origin: str,
  ignored: Iterable[str] = (),
) -> dict[str, Any]:
  """Our variables, as a nested dict of arrays (float64 stays float64 in 64-bit mode).

  Args:
    arrays: the foreign arrays by name.
    sources: for each of our variables, by path, where it comes from.
    origin: what the arrays are, for the error message.
    ignored: foreign names that may be there and are not needed.

  Raises:
    BadInput: listing every missing, extra and misshapen array.
  """
  expected = {name: source.shape for source in sources.values() for name in source.names}
  problems = [f'missing: {name} {shape}' for name, shape in expected.items() if name not in arrays]
  problems += [
    f'extra: {name} {np.shape(array) if _numbers(array) else type(array).__name__}'
    for name, array in arrays.items()
    if name not in expected and name not in set(ignored)
  ]
  problems += [
    f'not numbers: {name}' for name in expected if name in arrays and not _numbers(arrays[name])
  ]
  problems += [
    f'misshapen: {name} is {np.shape(arrays[name])}, expected {shape}'
    for name, shape in expected.items()
    if name in arrays and _numbers(arrays[name]) and np.shape(arrays[name]) != shape
  ]
  if problems:
    listing, many = '\n  '.join(problems), len(problems) > 1
    raise errors.BadInput(
      f'{len(problems)} {"arrays do" if many else "array does"} not fit {origin}. '
      f'Check the config against them.\n  {listing}'
    )
  variables: dict[str, Any] = {}
  for path, source in sources.items():
    node = variables
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = jnp.asarray(source.convert([np.asarray(arrays[n]) for n in source.names]))
  return variables


def _numbers(array):
  """Whether it is an array of numbers, or can be made one."""
  try:
    return np.asarray(array).dtype.kind not in 'OSU'
  except ValueError:  # of rows that are not equally long
    return False


def check_switches(config: Any, switches: Mapping[str, tuple[Any, ...]]) -> None:
  """Raises BadInput naming every switch of a model config that theirs does not have.

  Args:
    config: a `ModelConfig`.
    switches: the values that theirs has, by key, such as `norm`, or `span.kind` where the config
      has that block.
  """
  wrong = []
  for key, values in switches.items():
    *block, name = key.split('.')
    owner = getattr(config, block[0]) if block else config
    if owner is not None and getattr(owner, name) not in values:
      theirs = ' or '.join(map(repr, values))
      wrong.append(f'model.{key}={getattr(owner, name)!r}: theirs has {theirs}')
  if wrong:
    raise errors.BadInput('\n'.join(wrong))


def with_usage(variables: dict[str, Any]) -> dict[str, Any]:
  """Adds the usage of clusters, which nobody else keeps: unknown, so uniform."""

  def add(node):
    if 'centroids' in node:
      shape = node['centroids'].shape[:2]
      node['usage'] = jnp.full(shape, 1 / shape[1], node['centroids'].dtype)
      node['changed'] = jnp.zeros(shape[:1])
    for child in node.values():
      if isinstance(child, dict):
        add(child)

  add(variables.get('codebook', {}))
  return variables
