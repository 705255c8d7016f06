"""The tensors of a published model become the parameters of ours, and back, a part at a time.

Only rows that a shard needs are read, in blocks of at most BLOCK_BYTES, and copied into the shards.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
import re
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.interop import conversion, row_files
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints
from ngrammer_jax.interop.huggingface import families

BLOCK_BYTES = 2**25
LAYER = re.compile(r'layer_(\d+)/')
# Axes of our kernels; other parameters have those of the file.
KERNELS = {
  'attention/query/kernel': 'DNH',
  'attention/key/kernel': 'DKH',
  'attention/value/kernel': 'DKH',
  'attention/out/kernel': 'NHD',
  'feed_forward/in/kernel': 'DF',
  'feed_forward/gate/kernel': 'DF',
  'feed_forward/out/kernel': 'FD',
}
HEAD = 'softmax_weight'


Stored = Mapping[str, checkpoints.StoredTensor]  # by name


class TensorSlice(NamedTuple):
  """Where a parameter is in a file.

  Attributes:
    name: name of the tensor.
    shape: shape of the whole tensor.
    first_row: the first of its rows that is the parameter's.
    view: shape of these rows with an axis for each letter.
    part: the index on the axis `part_axis` that is the parameter.
    part_axis: None: the parameter is all of the rows.
    order: for each axis of ours, its axis in the rows without `part_axis`.
  """

  name: str
  shape: tuple[int, ...]
  first_row: int
  view: tuple[int, ...]
  part: int
  part_axis: int | None
  order: tuple[int, ...]

  def rows(self, rows: np.ndarray) -> np.ndarray:
    """Returns rows of the tensor with our axes, as a view."""
    rows = rows.reshape(-1, *self.view[1:])
    if self.part_axis is not None:
      rows = rows[(slice(None),) * self.part_axis + (self.part,)]
    return rows.transpose(self.order)

  @property
  def step(self) -> int:
    """Rows of the tensor for each index of the first axis of `view`."""
    return self.num_rows // self.view[0]

  @property
  def num_rows(self) -> int:
    """Rows of the parameter."""
    return math.prod(self.view) // math.prod(self.shape[1:])


Slices = Mapping[str, TensorSlice]  # by the path of the parameter


def find(family: families.Family, path: str, sizes: Mapping[str, int]) -> TensorSlice:
  """Returns where a parameter is in a file, such as `layer_0/attention/out/bias`.

  Raises BadInput if the family has no such parameter.
  """
  layer = LAYER.match(path)
  key = path[layer.end() :] if layer else path
  if key not in family.tensors:
    raise errors.BadInput(f'{family.model_type} has no tensor for the parameter {path}')
  tensor = family.tensors[key]
  groups = tensor.axes.split()
  letters = ''.join(groups)
  count = lambda axes: math.prod(sizes[letter] for letter in axes)
  joined = [count(axes) for axes in tensor.parts]
  shape = (sum(joined) or count(groups[0]), *map(count, groups[1:]))
  part_axis = letters.index('q') if 'q' in letters else None
  stored = letters.replace('q', '')
  order = tuple(map(stored.index, KERNELS.get(key, stored)))
  name = tensor.name.format(i=layer and layer[1])
  view, first_row = tuple(sizes[letter] for letter in letters), sum(joined[: tensor.part])
  return TensorSlice(name, shape, first_row if joined else 0, view, tensor.part, part_axis, order)


def canonical(tensors: Stored, family: families.Family) -> Stored:
  """Returns the tensors by the names of the family, without buffers and the parts for images."""
  wrappers = re.compile(f'^({"|".join(map(re.escape, conversion.WRAPPERS))})+')
  names = {name: wrappers.sub('', name) for name in tensors if not name.endswith(family.buffers)}
  if family.model_type == 'gemma3_text':
    names = {
      name: new.removeprefix('language_model.').replace('model.language_model.', 'model.', 1)
      for name, new in names.items()
      if not re.match(r'(model\.)?(vision|multi_modal)_', new)
    }
  head = family.tensors[HEAD].name
  if not any(name.startswith(family.prefix) for name in names.values()):
    names = {old: new if new == head else family.prefix + new for old, new in names.items()}
  return {new: tensors[old] for old, new in names.items()}


def has_own_head(tensors: Stored, family: families.Family) -> bool:
  """Whether a file has an output matrix that differs from the embedding."""
  head, embedding = (tensors.get(family.tensors[p].name) for p in (HEAD, 'embedding'))
  if head is None or embedding is None:
    return head is not None
  if head.shape != embedding.shape or not head.shape:
    return True
  rows, size = head.shape[0], _rows_at_once(math.prod(head.shape[1:]) * 8)
  blocks = ((start, min(start + size, rows)) for start in range(0, rows, size))
  return any(not np.array_equal(head.read(*b), embedding.read(*b)) for b in blocks)


def find_all(
  family: families.Family, config: ModelConfig, vocabulary_size: int, params: Any
) -> dict[str, TensorSlice]:
  """Returns where each parameter is in a file, by its path; the parameters may be abstract."""
  sizes = {
    **{'D': config.width, 'N': config.heads, 'K': config.context_key_heads, 'V': vocabulary_size},
    **{'H': config.head_features, 'F': config.feed_forward_width, 'q': 3},
    'P': config.positions().max_length,
  }
  return {path: find(family, path, sizes) for path in traverse_util.flatten_dict(params, sep='/')}


def load(
  checkpoint: checkpoints.Checkpoint, stored: Stored, slices: Slices, abstract: Any
) -> dict[str, Any]:
  """Loads the parameters straight into their shards, and returns them as a nested dict.

  Each process reads the rows of its own devices.

  Args:
    checkpoint: the model.
    stored: its tensors by the names of its family.
    slices: see `find_all`.
    abstract: shapes, dtypes and shardings of the parameters.

  Raises:
    BadInput: values are not finite; or a file is changed meanwhile.
  """
  loader = _Loader(checkpoint, stored)
  leaves = traverse_util.flatten_dict(abstract, sep='/').items()
  loaded = {path: loader.load(slices[path], leaf) for path, leaf in leaves}
  checkpoint.check_unchanged()
  conversion.check_finite(str(checkpoint.path), loader.broken)
  return traverse_util.unflatten_dict(loaded, sep='/')


def check(path: pathlib.Path, stored: Stored, family: families.Family, slices: Slices) -> None:
  """Raises BadInput for tensors of the wrong name, shape or dtype, by the headers of the files."""
  expected = {each.name: each.shape for each in slices.values()}
  head = family.tensors[HEAD].name
  if head in expected and head not in stored:
    raise errors.BadInput(
      f'{path} has no {head}, but tie_word_embeddings=false: the file is incomplete'
    )
  shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
  # An output matrix that equals the embedding is tied, see `has_own_head`.
  conversion.check_shapes(expected, shapes, f'{family.model_type} in {path}', (head,))
  for name in expected:
    code = getattr(stored[name], 'code', 'F32')  # those of GGUF are converted
    if code not in checkpoints.DTYPES:
      raise errors.BadInput(
        f'{name} in {path} has the dtype {code}, expected one of {", ".join(checkpoints.DTYPES)}'
      )


@dataclasses.dataclass
class _Loader:
  """Loads parameters, and counts the values of each tensor that are not finite."""

  checkpoint: checkpoints.Checkpoint
  stored: Stored
  broken: dict[str, int] = dataclasses.field(default_factory=dict)

  def load(self, selected: TensorSlice, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a parameter in the shards of `leaf`; each row is read once."""
    tensor = self.stored[selected.name]
    # First and last of each axis, by shard; devices may have the same.
    range_of = lambda index: tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    shape_of = lambda key: [stop - start for start, stop in key]
    shards = {key: np.empty(shape_of(key), leaf.dtype) for key in map(range_of, indices)}
    # The axis of ours that the rows of the file run along, if they are not cut into parts there.
    axis = None if selected.part_axis == 0 else selected.order.index(0)
    rows = [(0, selected.view[0])] if axis is None else sorted({key[axis] for key in shards})
    size = selected.view[0]
    if axis is not None:
      size = _rows_at_once(math.prod(selected.view[1:]) * tensor.dtype.itemsize)
    for first, last in rows:
      for start in range(first, last, size):
        stop = min(start + size, last)
        block = selected.rows(self._read(selected, tensor, start, stop))
        count = conversion.count_not_finite(block)
        self.broken[selected.name] = self.broken.get(selected.name, 0) + count
        for key, shard in shards.items():
          target, source = [slice(None)] * shard.ndim, [slice(*pair) for pair in key]
          if axis is not None:
            if key[axis] != (first, last):
              continue
            target[axis], source[axis] = slice(start - first, stop - first), slice(None)
          shard[tuple(target)] = block[tuple(source)]
    shard_of = lambda index: shards[range_of(index)]
    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard_of)
    return array.block_until_ready()  # or tensors would queue up in the memory of the host

  def _read(self, selected, tensor, start, stop):
    """Returns the rows of indices of the first axis of the view."""
    first, step = selected.first_row, selected.step
    try:
      return tensor.read(first + start * step, first + stop * step)
    except (OSError, ValueError) as error:
      self.checkpoint.check_unchanged()
      raise errors.BadInput(
        f'{self.checkpoint.path}: {selected.name} cannot be read: {error}'
      ) from error


def _rows_at_once(row_bytes: int) -> int:
  """Returns the number of rows of a block."""
  return max(BLOCK_BYTES // max(row_bytes, 1), 1)


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

  Raises:
    BadInput: the family has no tensor for a parameter.
  """
  leaves = traverse_util.flatten_dict(params, sep='/')
  slices = find_all(family, config, vocabulary_size, params)
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
