"""Converts named arrays of other frameworks to variables of this package, and back.

An `ArraySource` maps an array to a variable. Names and shapes are checked.
"""

import collections
from collections.abc import Callable, Collection, Mapping
import dataclasses
import itertools
import logging
import re
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.models import precision

Shapes = Mapping[str, tuple[int, ...]]  # by the name of the array

# Put before all names by DataParallel, torch.compile, and models around the language model.
WRAPPERS = {'module.', '_orig_mod.', 'model.', 'transformer.'}
MAX_SHOWN = 5  # arrays that an error lists


def unchanged(array: np.ndarray) -> np.ndarray:
  """Returns the array: the conversion of an unchanged variable."""
  return array


@dataclasses.dataclass(frozen=True)
class ArraySource:
  """The source of one variable: an array, or several arrays of one shape.

  Attributes:
    name: name of the source array, or a tuple of names.
    shape: shape of the source array, or of each of them.
    convert: function from the source array, or from all of them stacked, to the variable. It
      returns a view: `restore` writes the variable into it.
    added: constant that is added to all values of the view.
  """

  name: str | tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray] = unchanged
  added: int = 0

  @property
  def is_stacked(self) -> bool:
    """Whether the source is several arrays."""
    return not isinstance(self.name, str)

  @property
  def names(self) -> tuple[str, ...]:
    """Names of all source arrays."""
    if isinstance(self.name, str):
      return (self.name,)
    return self.name

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """Shape of the argument of `convert`."""
    if self.is_stacked:
      return (len(self.name), *self.shape)
    return self.shape

  @property
  def variable_shape(self) -> tuple[int, ...]:
    """Shape of the variable."""
    return self.convert(np.broadcast_to(0, self.stacked_shape)).shape


ArraySources = Mapping[str, ArraySource]  # by the path of the variable


def shapes_by_name(sources: ArraySources) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of all source arrays by name."""
  return {name: source.shape for source in sources.values() for name in source.names}


def convert(
  arrays: Mapping[str, Any],
  sources: ArraySources,
  origin: str,
  ignored: Collection[str] = (),
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts source arrays to variables, a nested dict.

  Codebooks get a uniform cluster usage.

  Args:
    arrays: the source arrays by name.
    sources: the source of each variable by its path, such as `params/layer_0/attention/bias`.
    origin: description of the source model, for the error message.
    ignored: names of optional, unused arrays.
    dtype: dtype of the parameters, such as 'bfloat16'. None: float32 (for training), even for half
      precision; float64 stays float64 in 64-bit mode.

  Raises:
    BadInput: see `check_shapes` and `precision.loaded_dtype`; or arrays with non-finite values.
  """
  dtype = precision.loaded_dtype(dtype)
  expected = shapes_by_name(sources)
  actual = {name: np.shape(array) for name, array in arrays.items()}
  check_shapes(expected, actual, origin, ignored)
  check_finite(origin, {name: count_not_finite(np.asarray(arrays[name])) for name in expected})
  variables = {}
  for path, source in sources.items():
    values = _convert_array(arrays, source)
    if path.startswith('params/'):
      variables[path] = jnp.asarray(values, dtype)
    else:
      variables[path] = jnp.asarray(values)
    if path.startswith('codebook/'):  # other frameworks do not store the cluster usage
      quantizer = path.removesuffix('centroids')
      N, K, _ = values.shape
      variables[f'{quantizer}usage'] = jnp.full((N, K), 1 / K, variables[path].dtype)
      variables[f'{quantizer}changed'] = jnp.zeros(N)
  return traverse_util.unflatten_dict(variables, sep='/')


def _convert_array(arrays: Mapping[str, Any], source: ArraySource) -> np.ndarray:
  """Returns the values of a variable, floats of at least 32 bits."""
  values = [_to_float32(np.asarray(arrays[name])) for name in source.names]
  if source.is_stacked:
    converted = source.convert(np.stack(values))
  else:
    converted = source.convert(values[0])
  if source.added:
    converted = converted + source.added
  return converted


def _to_float32(array: np.ndarray) -> np.ndarray:
  """Returns floats of at least 32 bits; integers unchanged."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def count_not_finite(values: np.ndarray) -> int:
  """Returns the number of nan or infinite values."""
  return values.size - int(np.count_nonzero(np.isfinite(values)))


def check_finite(origin: str, counts: Mapping[str, int]) -> None:
  """Raises BadInput with the names of arrays with non-finite values, and their number."""
  broken = [f'{name} ({count:,})' for name, count in counts.items() if count]
  if not broken:
    return
  shown = ', '.join(broken[:MAX_SHOWN])
  if len(broken) > MAX_SHOWN:
    shown += f' and {len(broken) - MAX_SHOWN:,} more arrays'
  raise errors.BadInput(
    f'{origin} has nan or infinite values, {sum(counts.values()):,} in all, in '
    f'{shown}: the source is damaged, or its training diverged; load an earlier checkpoint'
  )


def without_wrappers(
  arrays: Mapping[str, Any], expected: Collection[str], origin: str
) -> Mapping[str, Any]:
  """Returns arrays without wrapper prefixes such as `module.` if the names then match.

  Args:
    arrays: the arrays by name.
    expected: the required names.
    origin: description of the source model, for the log.
  """

  def has_all_with(prefix: str) -> bool:
    return all(prefix + name in arrays for name in expected)

  if has_all_with(''):
    return arrays
  first = next(iter(expected), '')
  prefixes = [name.removesuffix(first) for name in arrays if name.endswith(first)]
  for prefix in prefixes:
    parts = set(re.findall(r'[^.]*\.|[^.]+', prefix))
    if parts <= WRAPPERS and has_all_with(prefix):
      logging.info('%s: reading the arrays without %r before their names', origin, prefix)
      return {name.removeprefix(prefix): array for name, array in arrays.items()}
  return arrays


def restore(variables: Mapping[str, Any], sources: ArraySources, origin: str) -> dict[str, Any]:
  """Converts variables back to source arrays by name: the inverse of `convert`.

  Added constants are subtracted from float32 values up to rounding.

  Args:
    variables: nested variables of this package; the usage of codebooks is left out.
    sources: the source of each variable by its path.
    origin: description of the source model, for the error message.

  Raises:
    BadInput: lists missing and extra variables, and wrong shapes.
  """
  is_usage = re.compile(r'codebook/(.*/)?(usage|changed)').fullmatch
  leaves = traverse_util.flatten_dict(nn.unbox(dict(variables)), sep='/')
  leaves = {path: np.asarray(leaf) for path, leaf in leaves.items() if not is_usage(path)}
  expected = {path: source.variable_shape for path, source in sources.items()}
  check_shapes(expected, {path: leaf.shape for path, leaf in leaves.items()}, origin)
  arrays: dict[str, np.ndarray] = {}
  for path, source in sources.items():
    values = leaves[path]
    stacked = np.zeros(source.stacked_shape, values.dtype)
    if source.is_stacked:
      arrays.update(zip(source.name, stacked, strict=True))
    else:  # several variables may be parts of one array
      stacked = arrays.setdefault(source.name, stacked)
    source.convert(stacked)[...] = values - values.dtype.type(source.added)
  return arrays


def check_shapes(
  expected: Shapes, shapes: Shapes, origin: str, ignored: Collection[str] = ()
) -> None:
  """Raises BadInput with the number of missing and extra arrays, and of wrong shapes.

  It shows five of them, after their common prefix.

  Args:
    expected: shape of each required array, by name.
    shapes: shape of each present array, by name.
    origin: description of the source model, for the error message.
    ignored: names of optional, unused arrays.
  """
  accepted = {*expected, *ignored}
  missing = [f'{name} {shape}' for name, shape in expected.items() if name not in shapes]
  extra = [f'{name} {shape}' for name, shape in shapes.items() if name not in accepted]
  wrong_shape = [
    f'{name} is {shapes[name]}, expected {shape}'
    for name, shape in expected.items()
    if shapes.get(name, shape) != shape
  ]
  mismatches = {'missing': missing, 'extra': extra, 'wrong shape': wrong_shape}
  total = sum(len(texts) for texts in mismatches.values())
  if not total:
    return
  message = ''
  prefix = _common_prefix(expected, shapes)
  if prefix:
    message += f'names begin with the prefix {prefix!r}: remove it. '
  message += f'{total} {"arrays do" if total > 1 else "array does"} not match {origin}'
  if total > MAX_SHOWN:
    counts = ', '.join(f'{len(texts)} {kind}' for kind, texts in mismatches.items() if texts)
    message += f' ({counts}; {MAX_SHOWN} are shown)'
  message += '. Check the config against the arrays.'
  raise errors.BadInput(message + ''.join(_in_turn(mismatches)[:MAX_SHOWN]))


def _in_turn(mismatches: Mapping[str, list[str]]) -> list[str]:
  """Returns one line for each mismatch: the first of each kind, then the second, and so on."""
  columns = [[f'\n  {kind}: {text}' for text in texts] for kind, texts in mismatches.items()]
  rows = itertools.zip_longest(*columns)
  return [line for row in rows for line in row if line is not None]


def _common_prefix(expected: Collection[str], names: Collection[str]) -> str:
  """Returns the prefix of expected names in more than half of the names, or ''."""
  counts: collections.Counter[str] = collections.Counter()
  for name in names:
    for separator in re.finditer('[./]', name):
      if name[separator.end() :] in expected:
        counts[name[: separator.end()]] += 1
  for prefix, count in counts.most_common(1):
    if 2 * count > len(names):
      return prefix
  return ''
