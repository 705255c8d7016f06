"""The tensors of a published model become the parameters of ours, and back, a part at a time.

Only rows that a shard needs are read, in `row_files.blocks`, and copied into the shards.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
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
PLAIN = 'embedding', 'absolute_position', HEAD  # modules that are an array

Stored = Mapping[str, checkpoints.StoredTensor]  # by name


class TensorSlice(NamedTuple):
  """Where a parameter is in a file.

  Attributes:
    name: name of the tensor.
    shape: shape of the whole tensor.
    first_row: the first of its rows that is the parameter's.
    view: shape of these rows with an axis for each letter.
    index: index of the view that is the parameter; (): all of it.
    order: for each axis of ours, its axis in that.
  """

  name: str
  shape: tuple[int, ...]
  first_row: int
  view: tuple[int, ...]
  index: tuple[slice | int, ...]
  order: tuple[int, ...]

  def rows(self, rows: np.ndarray) -> np.ndarray:
    """Returns rows of the tensor with our axes, as a view."""
    return rows.reshape(-1, *self.view[1:])[self.index].transpose(self.order)

  def read(self, tensor: checkpoints.StoredTensor, start: int, stop: int) -> np.ndarray:
    """Returns indices of the first axis of `view`, with our axes, and reads no others."""
    first, step = self.first_row, self.num_rows // self.view[0]
    return self.rows(tensor.read(first + start * step, first + stop * step))

  @property
  def num_rows(self) -> int:
    """Rows of the parameter."""
    return math.prod(self.view) // math.prod(self.shape[1:])


Slices = Mapping[str, TensorSlice]  # by the path of the parameter


def find(family: families.Family, path: str, sizes: Mapping[str, int]) -> TensorSlice:
  """Returns where a parameter is in a file, such as `layer_0/attention/out/bias`."""
  layer, module, kind = PARAMETER.fullmatch(path).groups()
  tensor = family.tensors[module]
  groups = tensor.axes.split()
  # The width is the input of all maps but `out`, of which it is the output.
  is_input = lambda group: (group == 'D') != module.endswith('/out')
  inputs_first = sorted(groups, key=is_input, reverse=True)  # as in our kernels
  if kind == 'bias':  # of the outputs
    groups = inputs_first[-1:]
  axes = ''.join(inputs_first if kind == 'kernel' else groups).replace('q', '')
  count = lambda axes: math.prod(sizes[letter] for letter in axes)
  joined = [count(part) for part in tensor.parts]
  if groups[0][0] == 'q':  # then the parts of a vector are rows that are joined, too
    groups = [groups[0][1:]]
    joined = [count(groups[0])] * sizes['q']
  letters = ''.join(groups)
  before, has_parts, after = letters.partition('q')
  name = f'{tensor.name}.{"bias" if kind == "bias" else "weight"}'
  return TensorSlice(
    name=name if layer is None else f'{family.layers}{layer}.{name}',
    shape=(sum(joined) or count(groups[0]), *map(count, groups[1:])),
    first_row=sum(joined[: tensor.part]),
    view=tuple(sizes[letter] for letter in letters),
    index=(slice(None),) * len(before) + (tensor.part,) if has_parts else (),
    order=tuple(map((before + after).index, axes)),
  )


def canonical(tensors: Stored, family: families.Family, origin: str) -> Stored:
  """Returns the tensors by the names of the family, without buffers and the parts for images.

  Args:
    tensors: the tensors by the names of the file, which may have wrappers such as `module.`.
    family: the family.
    origin: the file, for the log.
  """
  may_have_images = family.model_type == 'gemma3_text'
  ignored = re.compile(families.BUFFERS_AND_IMAGES if may_have_images else families.BUFFERS)
  beside_images = 'language_model.' if may_have_images else ''
  tensors = {n.replace(beside_images, '', 1): tensors[n] for n in tensors if not ignored.search(n)}
  embedding, head = (f'{family.tensors[each].name}.weight' for each in ('embedding', HEAD))
  prefix = f'{family.layers.partition(".")[0]}.'
  # A model without its head may be saved without this prefix.
  for name, added in ((embedding, ''), (embedding.removeprefix(prefix), prefix)):
    bare = named_arrays.without_wrappers(tensors, (name,), origin)
    if name in bare:
      return {n if n == head else added + n: tensor for n, tensor in bare.items()}
  return tensors


def has_own_head(tensors: Stored, slices: Slices) -> bool:
  """Whether a file has an output matrix that differs from the embedding."""
  if slices[HEAD].name not in tensors:
    return False
  head, embedding = (tensors[slices[each].name] for each in (HEAD, 'embedding'))
  blocks = row_files.blocks(0, head.shape[0], math.prod(head.shape[1:]) * 8)
  return any(not np.array_equal(head.read(*b), embedding.read(*b)) for b in blocks)


def parameter_paths(family: families.Family, config: ModelConfig) -> Iterator[str]:
  """Yields the paths of the parameters of a published model, which is not built.

  The output matrix is one of them, also if it is the embedding. The biases of `config` are not
  None, see `configs.read`.
  """
  for module in family.tensors:
    if module in PLAIN:
      yield module
      continue
    kind, has_bias = 'kernel', config.attention.query_key_value_bias
    if module.endswith('norm'):
      kind, has_bias = 'scale', config.norm_kind == 'layer'
    elif module.startswith('feed_forward'):
      has_bias = config.feed_forward_bias
    elif module == 'attention/out':
      has_bias = config.attention.output_bias
    layers = [f'layer_{i}/' for i in range(config.layers)] if module != 'final_norm' else ['']
    kinds = [kind, 'bias'] if has_bias else [kind]
    yield from (f'{layer}{module}/{kind}' for layer in layers for kind in kinds)


def find_all(
  family: families.Family, config: ModelConfig, vocabulary_size: int, paths: Iterable[str]
) -> dict[str, TensorSlice]:
  """Returns where each parameter is in a file, by its path."""
  sizes = {
    **{'D': config.width, 'N': config.heads, 'K': config.context_key_heads, 'V': vocabulary_size},
    **{'H': config.head_features, 'F': config.feed_forward_width, 'q': 3},
    'P': config.positions().max_length,
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
    BadInput: values are not finite; or a file is changed meanwhile.
  """
  broken: collections.Counter[str] = collections.Counter()
  leaves = traverse_util.flatten_dict(abstract, sep='/').items()
  try:
    loaded = {path: _load(checkpoint, slices[path], leaf, broken) for path, leaf in leaves}
  except errors.BadInput:
    checkpoint.check_unchanged()  # a change is also a reason for damage
    raise
  checkpoint.check_unchanged()
  named_arrays.check_finite(str(checkpoint.path), broken)
  return traverse_util.unflatten_dict(loaded, sep='/')


def _load(checkpoint, selected, leaf, broken) -> jax.Array:
  """Returns a parameter in the shards of `leaf`, and counts values that are not finite.

  Each row is read once.
  """
  tensor = checkpoint.tensors[selected.name]
  # First and last of each axis, by shard; devices may have the same.
  range_of = lambda index: tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
  indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
  shape_of = lambda key: [stop - start for start, stop in key]
  shards = {key: np.empty(shape_of(key), leaf.dtype) for key in map(range_of, indices)}
  axis = selected.order.index(0)  # the one of ours that the rows of the file run along
  row_bytes = math.prod(selected.view[1:]) * tensor.dtype.itemsize
  for first, last in sorted({key[axis] for key in shards}):
    for start, stop in row_files.blocks(first, last, row_bytes):
      with file_errors.translate_damage(
        f'{selected.name} in {checkpoint.path}', 'download it again'
      ):
        block = selected.read(tensor, start, stop)
      broken[selected.name] += named_arrays.count_not_finite(block)
      for key, shard in shards.items():
        if key[axis] == (first, last):
          target, source = [slice(None)] * shard.ndim, [slice(*pair) for pair in key]
          target[axis], source[axis] = slice(start - first, stop - first), slice(None)
          shard[tuple(target)] = block[tuple(source)]
  shard_of = lambda index: shards[range_of(index)]
  array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard_of)
  return array.block_until_ready()  # or tensors would queue up in the memory of the host


def check(
  checkpoint: checkpoints.Checkpoint, family: families.Family, slices: Slices, is_tied: bool
) -> None:
  """Raises BadInput for tensors of the wrong name, shape or dtype, by the headers of the files.

  Args:
    checkpoint: the model, with the `canonical` names of its tensors.
    family: its family.
    slices: see `find_all`.
    is_tied: whether the output matrix may be absent.
  """
  path, stored = checkpoint.path, checkpoint.tensors
  expected = {each.name: each.shape for each in slices.values()}
  if (head := slices[HEAD].name) not in stored:
    if not is_tied:
      raise errors.BadInput(
        f'{path} has no {head}, but tie_word_embeddings=false: the file is incomplete'
      )
    del expected[head]
  shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
  named_arrays.check_shapes(expected, shapes, f'{family.model_type} in {path}')
  for name in expected:
    code = getattr(stored[name], 'code', 'F32')  # those of GGUF are converted
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
    dtype: dtype of the tensors; None: those of the parameters.
  """
  leaves = traverse_util.flatten_dict(params, sep='/')
  slices = find_all(family, config, vocabulary_size, leaves)
  described = {each.name: (each.shape, dtype or leaves[p].dtype) for p, each in slices.items()}
  with row_files.new_file(path, described, {'format': 'pt'}) as write:
    for name, (shape, kind) in described.items():
      values = np.empty(shape, kind)
      for p, each in slices.items():
        if each.name == name:
          rows = values[each.first_row : each.first_row + each.num_rows]
          each.rows(rows)[...] = np.asarray(leaves[p])
      write(name, 0, values)
  return str(np.dtype(dtype or leaves['embedding'].dtype))
