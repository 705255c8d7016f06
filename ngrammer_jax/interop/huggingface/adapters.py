"""LoRA adapters of peft, merged into the tensors of a published model: W + scale B A, in float32.

A merged tensor reads the requested rows and adds their rows of B A, so readers of a checkpoint need
not handle adapters. Whole tensors of the adapter (`modules_to_save`, biases) replace tensors of the
model.
"""

import collections
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import logging
import pathlib
import re
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import published
from ngrammer_jax.interop import row_files
from ngrammer_jax.interop.huggingface import adapter_config, families, tensors
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints

WEIGHTS = 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # before the names of the model in the file of an adapter
HEAD_MODULE = 'lm_head'  # of all families in transformers 5, also where files name it otherwise
FACTOR_NAME = re.compile(
  r'(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB])(\.default)?(\.weight)?'
)
UNADAPTED_NAME = re.compile(r'(?P<module>.+)\.base_layer\.(?P<ending>weight|bias)')
# What a tensor of an adapter is, see `_Part`.
A, B, WHOLE, UNADAPTED = 'A', 'B', 'whole', 'unadapted'


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A LoRA adapter; only its headers are read.

  Attributes:
    path: its folder.
    config: the content of adapter_config.json.
    arrays: its tensors by name.
    versions: see `checkpoint.Checkpoint`.
  """

  path: pathlib.Path
  config: adapter_config.AdapterConfig
  arrays: Mapping[str, row_files.StoredArray]
  versions: Mapping[pathlib.Path, tuple[int, int]]


class MergedTensor(NamedTuple):
  """W + scale B A: a `checkpoint.StoredTensor`.

  Attributes:
    shape: the shape of W.
    dtype: the dtype of W in the file of the model; `read` returns at least float32.
    base: W, [out, in], or [in, out] if `inputs_first`.
    a: A, [r, in].
    b: B, [out, r].
    scale: the factor.
    inputs_first: whether the rows of W are its inputs, as for embeddings and in GPT-2.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  base: checkpoints.StoredTensor
  a: row_files.StoredArray
  b: row_files.StoredArray
  scale: float
  inputs_first: bool

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`, and reads no other rows of W."""
    rows = self.base.read(start, stop)
    dtype = np.promote_types(rows.dtype, np.float32)
    a = self.a.read(0, self.a.shape[0]).astype(dtype)
    if self.inputs_first:
      b = self.b.read(0, self.b.shape[0]).astype(dtype)
      product = (b @ a[:, start:stop]).T
    else:
      product = self.b.read(start, stop).astype(dtype) @ a
    if not np.isfinite(product).all():
      raise errors.BadInput(
        f'{self.a.path} has nan or infinite values: the adapter is damaged, or its '
        f'training diverged'
      )
    return rows.astype(dtype) + product * dtype.type(self.scale)


class ReplacedTensor(NamedTuple):
  """A tensor of an adapter in place of one of the model: a `checkpoint.StoredTensor`.

  Attributes:
    shape: the shape.
    dtype: the dtype in the file of the model; `read` returns the dtype of the adapter.
    stored: the tensor of the adapter.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  stored: row_files.StoredArray

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`."""
    return self.stored.read(start, stop)


def open_folder(folder: pathlib.Path) -> Adapter:
  """Returns the adapter in a folder.

  Raises:
    BadInput: a missing or damaged adapter, or one of an unsupported kind.
  """
  config = adapter_config.read(folder)
  path = folder / WEIGHTS
  if not path.exists():
    reason = 'get it too'
    pickles = sorted(folder.glob('*.bin'))
    if pickles:
      reason = f'{pickles[0].name} is a pickle, which can run code and is never read: convert it'
    raise errors.BadInput(f'{folder} has no {WEIGHTS}: {reason}')
  version = checkpoints.version(path)
  arrays, _ = row_files.stored_arrays(path)
  for name, array in arrays.items():
    if array.code not in row_files.FLOATS:
      raise errors.BadInput(
        f'{name} in {path} has the dtype {array.code}, expected one of '
        f'{", ".join(row_files.FLOATS)}'
      )
  return Adapter(folder, config, arrays, {path: version})


def merge(
  adapter: Adapter,
  checkpoint: checkpoints.Checkpoint,
  family: families.Family,
  slices: tensors.Slices,
) -> checkpoints.Checkpoint:
  """Returns a model with an adapter.

  If embedding and output matrix are tied and the adapter changes one of them, they become two
  matrices, as in adapter training.

  Args:
    adapter: the adapter.
    checkpoint: the model, with the `canonical` names of its tensors.
    family: its family.
    slices: see `tensors.find_all`.

  Raises:
    BadInput: a tensor of the adapter is not in the model, or does not fit it.
  """
  head = slices[tensors.HEAD].name
  embedding = slices['embedding'].name
  stored = dict(checkpoint.tensors)
  tied = ()
  if head not in stored:
    tied = (head, embedding)
    stored[head] = stored[embedding]
  parts = _find_parts(adapter, family, stored, checkpoint.path)
  inputs_first = _matrices_with_inputs_first(slices)
  _check_shapes(adapter, stored, parts, inputs_first, checkpoint.path)
  pairs = _pairs(adapter, parts)
  merged = _replace(stored, parts, tied)
  for name, (a, b) in pairs.items():
    base = merged[name]
    merged[name] = MergedTensor(
      shape=base.shape,
      dtype=base.dtype,
      base=base,
      a=a.array,
      b=b.array,
      scale=adapter.config.scale_of(a.module),
      inputs_first=name in inputs_first,
    )
  if tied and not any(part.tensor in tied for part in parts):
    del merged[head]
  logging.info(
    'the adapter %s, trained on %s: %s matrices are merged, %s tensors are replaced',
    adapter.path,
    adapter.config.base,
    f'{len(pairs):,}',
    f'{len(parts) - 2 * len(pairs):,}',
  )
  if published.has_tokenizer(adapter.path):
    logging.info('the tokenizer in %s is not read: that of the model is used', adapter.path)
  versions = {**checkpoint.versions, **adapter.versions}
  return dataclasses.replace(checkpoint, tensors=merged, versions=versions)


class _Part(NamedTuple):
  """A tensor of an adapter.

  Attributes:
    name: its name in the file.
    module: its module, by the name of the adapter.
    kind: A or B; WHOLE, or UNADAPTED for a replacement of W before B A is added.
    tensor: the name of the changed tensor of the model.
    array: the tensor.
  """

  name: str
  module: str
  kind: str
  tensor: str
  array: row_files.StoredArray


def _find_parts(
  adapter: Adapter, family: families.Family, stored: tensors.Stored, base: pathlib.Path
) -> list[_Part]:
  """Returns the tensors of an adapter, without image tensors.

  Raises BadInput for a tensor without a counterpart in the model.
  """
  parts = []
  unknown = []
  for name, array in adapter.arrays.items():
    module, kind, ending = _parse(name.removeprefix(PREFIX))
    text_module = tensors.text_name(module, family)
    if text_module is None:
      continue
    if text_module == HEAD_MODULE:
      text_module = family.tensors[tensors.HEAD].name
    tensor = f'{text_module}.{ending}'
    if tensor not in stored:  # an adapter of the model without its head lacks this word
      tensor = f'{family.layers.partition(".")[0]}.{tensor}'
    if tensor in stored:
      parts.append(_Part(name, module, kind, tensor, array))
    else:
      unknown.append(name)
  if unknown:
    raise errors.BadInput(
      f'{adapter.path} has {unknown[0]}{errors.and_more(unknown)}, which {base} does not have: '
      f'name the model that the adapter was trained on ({adapter.config.base})'
    )
  return parts


def _parse(name: str) -> tuple[str, str, str]:
  """Returns the module of an adapter tensor, its kind, and the changed parameter."""
  if match := FACTOR_NAME.fullmatch(name):
    return match['module'], match['factor'], 'weight'
  if match := UNADAPTED_NAME.fullmatch(name):
    return match['module'], UNADAPTED, match['ending']
  module, _, ending = name.rpartition('.')
  return module, WHOLE, ending


def _matrices_with_inputs_first(slices: tensors.Slices) -> set[str]:
  """Returns the names of matrices with inputs as rows."""
  names = set()
  for path, each in slices.items():
    is_table = path in tensors.PLAIN and path != tensors.HEAD
    is_kernel = path.endswith('/kernel')  # ours have their inputs first
    if is_table or (is_kernel and each.order[0] == 0):
      names.add(each.name)
  return names


def _check_shapes(
  adapter: Adapter,
  stored: tensors.Stored,
  parts: Sequence[_Part],
  inputs_first: Collection[str],
  base: pathlib.Path,
) -> None:
  """Raises BadInput for a tensor with a shape or rank other than the model's or config's."""
  wrong = []
  for part in parts:
    expected = tuple(stored[part.tensor].shape)
    reason = ''
    if part.kind in (A, B):
      rank = adapter.config.rank_of(part.module)
      reason = f' with r={rank} of {adapter_config.FILE}'
      if part.tensor in inputs_first:
        expected = expected[::-1]
      if part.kind == A:
        expected = (rank, *expected[1:])
      else:
        expected = (*expected[:1], rank)
    if part.array.shape != expected:
      wrong.append(f'{part.name} is {part.array.shape}, expected {expected}{reason}')
  if wrong:
    raise errors.BadInput(f'{adapter.path} does not fit {base}: {wrong[0]}{errors.and_more(wrong)}')


def _pairs(adapter: Adapter, parts: Sequence[_Part]) -> dict[str, tuple[_Part, _Part]]:
  """Returns A and B of each changed matrix. Raises BadInput if one of them is missing."""
  factors: dict[str, dict[str, _Part]] = collections.defaultdict(dict)
  for part in parts:
    if part.kind in (A, B):
      factors[part.tensor][part.kind] = part
  for pair in factors.values():
    if len(pair) == 1:
      (part,) = pair.values()
      other = B if part.kind == A else A
      raise errors.BadInput(
        f'{adapter.path} has {part.name}, but not its factor lora_{other}: get the adapter again'
      )
  return {name: (pair[A], pair[B]) for name, pair in factors.items()}


def _replace(
  stored: tensors.Stored, parts: Sequence[_Part], tied: Collection[str]
) -> dict[str, checkpoints.StoredTensor]:
  """Returns the tensors of a model with the whole tensors of an adapter.

  Args:
    stored: the tensors of the model.
    parts: the tensors of the adapter.
    tied: names of one tensor of the model.
  """
  replaced = dict(stored)
  for part in parts:
    names: Collection[str] = ()
    if part.kind == WHOLE:
      names = (part.tensor,)
    elif part.kind == UNADAPTED:
      names = {part.tensor}
      if part.tensor in tied:
        names = tied
    for name in names:
      dtype = stored[name].dtype
      replaced[name] = ReplacedTensor(part.array.shape, dtype, part.array)
  return replaced
