"""Converts tensors of a published model to our parameters and back, a part at a time.

Reads only the rows of a shard, in `row_files.blocks`, and copies them into the shard.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import math
import pathlib
import re
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.interop import named_arrays, row_files
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints
from ngrammer_jax.interop.huggingface import families
from ngrammer_jax.system import file_errors

PARAMETER = re.compile(r'(?:layer_(\d+)/)?(.+?)(?:/(kernel|scale|bias))?')
HEAD = 'softmax_weight'
PLAIN = ('embedding', 'absolute_position', HEAD)  # modules of a single array

Stored = Mapping[str, checkpoints.StoredTensor]  # by name


class TensorSlice(NamedTuple):
  """The location of a parameter in a file.

  Attributes:
    name: name of the tensor.
    shape: shape of the whole tensor.
    first_row: first row of the parameter.
    view: shape of these rows with an axis for each letter.
    index: index of the parameter in the view; (): all of it.
    order: for each of our axes, its axis there.
  """

  name: str
  shape: tuple[int, ...]
  first_row: int
  view: tuple[int, ...]
  index: tuple[slice | int, ...]
  order: tuple[int, ...]

  def with_our_axes(self, rows: np.ndarray) -> np.ndarray:
    """Returns rows of the tensor with our axes, as a view."""
    return rows.reshape(-1, *self.view[1:])[self.index].transpose(self.order)

  def read(self, tensor: checkpoints.StoredTensor, start: int, stop: int) -> np.ndarray:
    """Returns indices of the first axis of `view`, with our axes, and reads no others."""
    rows_per_index = self.num_rows // self.view[0]
    first = self.first_row + start * rows_per_index
    last = self.first_row + stop * rows_per_index
    return self.with_our_axes(tensor.read(first, last))

  @property
  def num_rows(self) -> int:
    """Rows of the parameter."""
    return math.prod(self.view) // math.prod(self.shape[1:])


Slices = Mapping[str, TensorSlice]  # by the path of the parameter


def find(family: families.Family, path: str, sizes: Mapping[str, int]) -> TensorSlice:
  """Returns the location of a parameter, such as `layer_0/attention/out/bias`, in a file.

  Args:
    family: the family.
    path: the path of the parameter.
    sizes: the size of each letter of the axes, see `families`.
  """
  layer, module, suffix = PARAMETER.fullmatch(path).groups()
  tensor = family.tensors[module]
  axis_groups = tensor.axes.split()
  inputs_first = _inputs_first(axis_groups, module)
  if suffix == 'bias':  # of the outputs
    axis_groups = inputs_first[-1:]
  our_axes = inputs_first if suffix == 'kernel' else axis_groups

  def size(axes: str) -> int:
    return math.prod(sizes[letter] for letter in axes)

  joined_sizes = [size(part) for part in tensor.parts]
  if axis_groups[0].startswith('q'):  # then the parts of a vector are joined rows, too
    axis_groups = [axis_groups[0].removeprefix('q')]
    joined_sizes = [size(axis_groups[0])] * sizes['q']
  letters = ''.join(axis_groups)
  index = ()
  if 'q' in letters:
    index = (slice(None),) * letters.index('q') + (tensor.part,)
  stored_axes = letters.replace('q', '')
  name = f'{tensor.name}.bias' if suffix == 'bias' else f'{tensor.name}.weight'
  if layer is not None:
    name = f'{family.layers}{layer}.{name}'
  return TensorSlice(
    name=name,
    shape=(sum(joined_sizes) or size(axis_groups[0]), *[size(axes) for axes in axis_groups[1:]]),
    first_row=sum(joined_sizes[: tensor.part]),
    view=tuple(sizes[letter] for letter in letters),
    index=index,
    order=tuple(stored_axes.index(letter) for letter in ''.join(our_axes).replace('q', '')),
  )


def _inputs_first(axis_groups: Sequence[str], module: str) -> list[str]:
  """Returns the axes with inputs before outputs, as in our kernels.

  The width is the input of all maps except `out`, where it is the output.
  """
  is_output_map = module.endswith('/out')
  inputs = [axes for axes in axis_groups if (axes == 'D') != is_output_map]
  outputs = [axes for axes in axis_groups if (axes == 'D') == is_output_map]
  return inputs + outputs


def canonical(tensors: Stored, family: families.Family, origin: str) -> Stored:
  """Returns the tensors by the names of the family, without buffers and image parts.

  Args:
    tensors: the tensors by the names of the file, possibly with wrappers such as `module.`.
    family: the family.
    origin: the file, for the log.
  """
  tensors = _text_tensors(tensors, family)
  embedding = f'{family.tensors["embedding"].name}.weight'
  head = f'{family.tensors[HEAD].name}.weight'
  unwrapped = named_arrays.without_wrappers(tensors, (embedding,), origin)
  if embedding in unwrapped:
    return unwrapped
  # A model without its head may be saved without this prefix.
  prefix = f'{family.layers.partition(".")[0]}.'
  short_name = embedding.removeprefix(prefix)
  unwrapped = named_arrays.without_wrappers(tensors, (short_name,), origin)
  if short_name in unwrapped:
    return {n if n == head else prefix + n: tensor for n, tensor in unwrapped.items()}
  return tensors


def _text_tensors(tensors: Stored, family: families.Family) -> Stored:
  """Returns the tensors of the parameters of a model of text, by the names without images."""
  names = {name: text_name(name, family) for name in tensors}
  return {names[name]: tensor for name, tensor in tensors.items() if names[name] is not None}


def text_name(name: str, family: families.Family) -> str | None:
  """Returns the name of a tensor in a text-only model; None: not one of its parameters."""
  if family.model_type != 'gemma3_text':  # all others are without images
    return None if re.search(families.BUFFERS, name) else name
  if re.search(families.BUFFERS_AND_IMAGES, name):
    return None
  return name.replace('language_model.', '', 1)


def has_own_head(tensors: Stored, slices: Slices) -> bool:
  """Whether a file has an output matrix that differs from the embedding."""
  if slices[HEAD].name not in tensors:
    return False
  head = tensors[slices[HEAD].name]
  embedding = tensors[slices['embedding'].name]
  for start, stop in row_files.blocks(0, head.shape[0], math.prod(head.shape[1:]) * 8):
    if not np.array_equal(head.read(start, stop), embedding.read(start, stop)):
      return True
  return False


def parameter_paths(family: families.Family, config: ModelConfig) -> Iterator[str]:
  """Yields the paths of the parameters of a published model, without building it.

  They include the output matrix, even if tied. The biases of `config` are not None, see
  `configs.read`.
  """
  for module in family.tensors:
    if module in PLAIN:
      yield module
      continue
    suffixes = ['kernel']
    if module.endswith('norm'):
      suffixes = ['scale']
    if _has_bias(module, config):
      suffixes.append('bias')
    prefixes = [f'layer_{i}/' for i in range(config.layers)]
    if module == 'final_norm':
      prefixes = ['']
    for prefix in prefixes:
      for suffix in suffixes:
        yield f'{prefix}{module}/{suffix}'


def _has_bias(module: str, config: ModelConfig) -> bool:
  """Returns whether a module has a bias."""
  if module.endswith('norm'):
    return config.norm_kind == 'layer'
  if module.startswith('feed_forward'):
    return config.feed_forward_bias
  if module == 'attention/out':
    return config.attention.output_bias
  return config.attention.query_key_value_bias


def find_all(
  family: families.Family, config: ModelConfig, vocabulary_size: int, paths: Iterable[str]
) -> dict[str, TensorSlice]:
  """Returns the location of each parameter in a file, by path."""
  sizes = {
    'D': config.width,
    'N': config.heads,
    'K': config.context_key_heads,
    'H': config.head_features,
    'F': config.feed_forward_width,
    'V': vocabulary_size,
    'P': config.positions().max_length,
    'q': 3,
  }
  return {path: find(family, path, sizes) for path in paths}


def load(checkpoint: checkpoints.Checkpoint, slices: Slices, abstract: Any) -> dict[str, Any]:
  """Loads the parameters straight into their shards, and returns them as a nested dict.

  Each process reads the rows of its own devices.

  Args:
    checkpoint: the model, with the `canonical` names of its tensors.
    slices: see `find_all`.
    abstract: shapes, dtypes and shardings of the parameters.

  Raises:
    BadInput: non-finite values, or a file that changed meanwhile.
  """
  not_finite: collections.Counter[str] = collections.Counter()
  loaded = {}
  try:
    for path, leaf in traverse_util.flatten_dict(abstract, sep='/').items():
      loaded[path] = _load(checkpoint, slices[path], leaf, not_finite)
  except errors.BadInput:
    checkpoint.check_unchanged()  # a change is also a reason for damage
    raise
  checkpoint.check_unchanged()
  named_arrays.check_finite(str(checkpoint.path), not_finite)
  return traverse_util.unflatten_dict(loaded, sep='/')


Range = tuple[int, int]  # first and last index of an axis


def _load(
  checkpoint: checkpoints.Checkpoint,
  selected: TensorSlice,
  leaf: jax.ShapeDtypeStruct,
  not_finite: collections.Counter[str],
) -> jax.Array:
  """Returns a parameter in the shards of `leaf`, and counts non-finite values.

  Each row is read once.
  """
  tensor = checkpoint.tensors[selected.name]
  shards: dict[tuple[Range, ...], np.ndarray] = {}  # devices may have the same ranges
  for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
    ranges = _ranges(index, leaf.shape)
    shards[ranges] = np.empty([stop - start for start, stop in ranges], leaf.dtype)
  axis = selected.order.index(0)  # our axis of the rows of the file
  row_bytes = math.prod(selected.view[1:]) * tensor.dtype.itemsize
  for rows in sorted({ranges[axis] for ranges in shards}):
    for start, stop in row_files.blocks(*rows, row_bytes):
      with file_errors.translate_damage(
        f'{selected.name} in {checkpoint.path}', 'download it again'
      ):
        block = selected.read(tensor, start, stop)
      not_finite[selected.name] += named_arrays.count_not_finite(block)
      for ranges, shard in shards.items():
        if ranges[axis] == rows:
          first = rows[0]
          target = [slice(None)] * shard.ndim
          target[axis] = slice(start - first, stop - first)
          source = [slice(*each) for each in ranges]
          source[axis] = slice(None)
          shard[tuple(target)] = block[tuple(source)]
  array = jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: shards[_ranges(index, leaf.shape)]
  )
  return array.block_until_ready()  # or tensors would queue up in the memory of the host


def _ranges(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[Range, ...]:
  """Returns the first and the last index of each axis of a shard."""
  return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def check_tensors(
  checkpoint: checkpoints.Checkpoint, family: families.Family, slices: Slices, is_tied: bool
) -> None:
  """Raises BadInput for tensors of the wrong name, shape or dtype, by the headers of the files.

  Args:
    checkpoint: the model, with the `canonical` names of its tensors.
    family: its family.
    slices: see `find_all`.
    is_tied: whether the output matrix may be absent.
  """
  path = checkpoint.path
  stored = checkpoint.tensors
  expected = {each.name: each.shape for each in slices.values()}
  head = slices[HEAD].name
  if head not in stored:
    if not is_tied:
      raise errors.BadInput(
        f'{path} has no {head}, but tie_word_embeddings=false: the file is incomplete'
      )
    del expected[head]
  shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
  named_arrays.check_shapes(expected, shapes, f'{family.model_type} in {path}')
  for name in expected:
    code = getattr(stored[name], 'code', 'F32')  # GGUF tensors are converted
    if code not in row_files.FLOATS:
      raise errors.BadInput(
        f'{name} in {path} has the dtype {code}, expected one of {", ".join(row_files.FLOATS)}'
      )


def save(
  params: Any,
  family: families.Family,
  config: ModelConfig,
  vocabulary_size: int,
  path: pathlib.Path,
  dtype: Any = None,
) -> str:
  """Writes parameters as the tensors of a family, one after the other; returns their dtype.

  Args:
    params: the parameters of our model.
    family: the family.
    config: the config of our model.
    vocabulary_size: V.
    path: the file.
    dtype: dtype of the tensors; None: dtypes of the parameters.
  """
  leaves = traverse_util.flatten_dict(params, sep='/')
  slices = find_all(family, config, vocabulary_size, leaves)
  described = {}
  for parameter, each in slices.items():
    described[each.name] = (each.shape, dtype or leaves[parameter].dtype)
  with row_files.new_file(path, described, {'format': 'pt'}) as write:
    for name, (_, stored_dtype) in described.items():
      write(name, 0, _assemble(name, leaves, slices, stored_dtype))
  return str(np.dtype(dtype or leaves['embedding'].dtype))


def by_name(params: Any, slices: Slices) -> dict[str, np.ndarray]:
  """Returns the tensors of parameters, or of arrays of their shapes, by the names of the file.

  Args:
    params: parameters of our model, or their gradients.
    slices: see `find_all`.
  """
  leaves = traverse_util.flatten_dict(params, sep='/')
  dtypes = {each.name: leaves[parameter].dtype for parameter, each in slices.items()}
  return {name: _assemble(name, leaves, slices, dtype) for name, dtype in dtypes.items()}


def _assemble(name: str, leaves: Mapping[str, Any], slices: Slices, dtype: Any) -> np.ndarray:
  """Returns a tensor from its parameters."""
  parts = {parameter: each for parameter, each in slices.items() if each.name == name}
  shape = next(iter(parts.values())).shape
  values = np.empty(shape, dtype)
  for parameter, each in parts.items():
    rows = values[each.first_row : each.first_row + each.num_rows]
    each.with_our_axes(rows)[...] = np.asarray(leaves[parameter])
  return values
