"""The memories of a model with their own layers: interface and places.

A memory is a Linen module with

  empty_state(batch, slots) -> state                       before the first segment
  __call__(x_BxTxD, context, state) -> (y_BxTxD, state)    one segment

A state is a pytree of arrays, or None. Each array has the batch as its first axis and keeps its
shape and dtype. It is detached (`stop_gradient`), and padding (`context.valid_BxT`) does not change
it: any segmentation of a stream gives the same result as one pass. `slots` is the number of earlier
tokens stored by attention; None without any, and for a memory between blocks. In the values of
attention, it is the number of earlier tokens with recomputed values: x then has P rows, the earlier
tokens and the segment.

A shared table has the same interface. Its y is the looked-up rows, [B, P, I, E], available to
memories in `context.shared`. The model applies it before the memories at the input. For product
keys y is the table itself, [V, E], because hidden states in blocks select the rows. For
`model.copy_memory`, read at two places, y is the vectors of the copies, [B, T, D].

Beside or in place of the feed-forward of a block, y is added to the input of the sub-layer.

The config of a memory is a field of `ModelConfig` with `places(layers)` (see `config.place.Place`),
or a tuple of such configs. MEMORIES maps it to the module.

B batch, T segment length, P tokens of attention, I rows per token, E width of a row, D model width.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import copy_memory, product_memory
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.place import BETWEEN_BLOCKS, POINTS, Place
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.copy_memory import VECTORS, CopyMemory, CopySum
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.product_keys.memory import TABLES, ProductMemory, ProductTables
from ngrammer_jax.layers.state import Memory, State
from ngrammer_jax.layers.token_shift import TokenShift
from ngrammer_jax.models import precision

# Other keys of the memories of models and blocks.
RESERVED = ('cache', 'document', 'hidden', 'layers', 'recent', 'spans', 'state', 'window')


@dataclasses.dataclass(frozen=True)
class PlacedMemory:
  """A memory at one of its places in a model.

  Attributes:
    name: name of its parameters, unique between blocks and within each block.
    place: its place.
    make: constructor of its module, with the arguments `name` and `parent` of Linen.
    state_name: key of its state in the memory of the model or of the block. None: `name`.
    state_field: the only field of its state, stored without this name. None: the state is stored
      unchanged.
    needs_pairs: after attention, it reads `context.pair_BxNxT`.
    needs_embedding: its input must be the embedding; it must be the first memory at the input.
    shared_name: name in `context.shared` of its shared result, or of its input. None: neither.
    keeps_rows: whether a memory in the values of attention reads this shared table. The table then
      keeps the rows of the segment memory.
    alike: equal for memories in blocks that only differ in their parameters; a scan may apply their
      blocks. None: unique.
    replaces_input: in the feed-forward, its output does not depend on the up projection. The block
      then has none.
  """

  name: str
  place: Place
  make: Callable[..., nn.Module]
  state_name: str | None = None
  state_field: str | None = None
  needs_pairs: bool = False
  needs_embedding: bool = False
  shared_name: str | None = None
  keeps_rows: bool = False
  alike: Hashable = None
  replaces_input: bool = False

  @property
  def state_key(self) -> str:
    """Key of its state in the memory of the model or of the block."""
    return self.state_name or self.name

  @property
  def path(self) -> tuple[str, ...]:
    """Path of its module in the collections of the model."""
    if self.is_between_blocks:
      return (self.name,)
    return f'layer_{self.place.block}', self.name

  @property
  def is_between_blocks(self) -> bool:
    """Whether the model applies it, rather than a block."""
    return self.place.point in BETWEEN_BLOCKS

  def empty_state(self, batch: int, slots: int | None) -> Memory:
    """Returns its state before the first segment by name; empty without state."""
    return self._store(self.make(parent=None).empty_state(batch, slots))

  def apply(
    self, module: nn.Module, x_BxTxD: jax.Array, context: Context, states: Memory
  ) -> tuple[jax.Array, Memory]:
    """Returns the output of its module [B, T, D], and the next state by name.

    Raises:
      ValueError: the state changes its structure, shapes or dtypes.
    """
    state = states.get(self.state_key)
    if state is not None and self.state_field is not None:
      state = {self.state_field: state}
    y_BxTxD, next_state = module(x_BxTxD, context, state)
    before = jax.tree.map(_describe, state)
    after = jax.tree.map(_describe, next_state)
    if before != after:
      raise ValueError(
        f'memory {self.name} changes its state from {before} to {after}: keep shapes and dtypes'
      )
    return y_BxTxD, self._store(next_state)

  def _store(self, state: State | None) -> Memory:
    """Returns the state of the module by name; empty without state."""
    if state is None:
      return {}
    if self.state_field is not None:
      state = state[self.state_field]
    return {self.state_key: state}


def _describe(array: jax.Array) -> str:
  """Returns dtype and shape."""
  return f'{jnp.result_type(array)}{list(jnp.shape(array))}'


def _ngrammer(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None
) -> PlacedMemory:
  """Makes the N-Grammer layer of `model.ngram`."""
  options = config.ngram.as_memory(config, place, vocabulary_size)
  is_attended = options.pairing == 'attended'
  is_at_input = place.point == 'input'
  make = _maker(options, config, place, dtype, vocabulary_size)
  # Old workdirs depend on these names of the state.
  if is_attended:
    state_name = 'ids'
    state_field = 'ids'
  else:
    state_name = 'ngram'
    state_field = 'window'
  return PlacedMemory(
    name='ngrammer',
    place=place,
    make=functools.partial(make, id_columns=options.heads, is_at_embedding=is_at_input),
    state_name=state_name,
    state_field=state_field,
    needs_pairs=is_attended,
    needs_embedding=is_at_input,
  )


def _ngram_memory(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None, number: int
) -> PlacedMemory:
  """Makes memory `number` of `model.ngram_memories`."""
  options = config.ngram_memories[number].resolved(config)
  alike = None
  if options.table is not None and not options.sliced and not options.one_head:
    alike = number
  return PlacedMemory(
    name=ngram_memory.name(number),
    place=place,
    make=_maker(options, config, place, dtype, vocabulary_size),
    needs_pairs=options.pairing == 'attended',
    shared_name=options.table,
    alike=alike,
    replaces_input=options.join == 'replace',
  )


def _shared_tables(
  config: ModelConfig, dtype: jnp.dtype, vocabulary_size: int | None
) -> tuple[PlacedMemory, ...]:
  """Makes the shared tables of n-gram memories and of product keys."""
  tables = {}
  for number, options in enumerate(config.ngram_memories):
    if options.table is None or options.table in tables:
      continue
    options = options.resolved(config)
    place = Place('input')
    in_values = [
      m for m in config.ngram_memories if m.table == options.table and m.point == 'values'
    ]
    make = _maker(options, config, place, dtype, vocabulary_size)
    tables[options.table] = PlacedMemory(
      name=ngram_memory.table_module(number, options),
      place=place,
      make=functools.partial(make, is_table=True),
      shared_name=options.table,
      keeps_rows=bool(in_values),
    )
  if config.product_memory is not None:
    make = functools.partial(
      ProductTables, options=config.product_memory, width=config.width, dtype=dtype
    )
    tables[TABLES] = PlacedMemory(product_memory.NAME, Place('input'), make, shared_name=TABLES)
  return tuple(tables.values())


def _product_memory(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None
) -> PlacedMemory:
  """Makes the memory of `model.product_memory` in a block, with the shared table."""
  del vocabulary_size
  make = functools.partial(ProductMemory, options=config.product_memory, dtype=dtype)
  name = product_memory.NAME
  return PlacedMemory(name, place, make, shared_name=TABLES, alike=name)


def _maker(
  options: NGramMemoryConfig,
  config: ModelConfig,
  place: Place,
  dtype: jnp.dtype,
  vocabulary_size: int | None,
) -> Callable[..., NGramMemory]:
  """Returns the constructor of an n-gram memory."""
  fields = {}
  if options.point == 'values':
    fields = {'key_heads': config.context_key_heads, 'model_width': config.width}
  return functools.partial(
    NGramMemory,
    options=options,
    vocabulary_size=vocabulary_size,
    width=config.width_at(place.point),
    block=place.block,
    dtype=dtype,
    **fields,
  )


def _copy_sum(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None
) -> PlacedMemory:
  """Makes a place of `model.copy_memory`."""
  del vocabulary_size
  options = config.copy_memory
  initial = options.input_gate
  if place.point == 'before_head':
    initial = options.head_gate
  return PlacedMemory(
    name=f'{copy_memory.NAME}_{place.point}',
    place=place,
    make=functools.partial(CopySum, initial=initial, dtype=dtype),
    shared_name=VECTORS,
  )


def _copies(
  config: ModelConfig, dtype: jnp.dtype, vocabulary_size: int | None
) -> tuple[PlacedMemory, ...]:
  """Makes the shared copies of `model.copy_memory`."""
  if config.copy_memory is None:
    return ()
  make = functools.partial(
    CopyMemory,
    options=config.copy_memory,
    vocabulary_size=vocabulary_size,
    width=config.width,
    dtype=dtype,
  )
  return (PlacedMemory(copy_memory.NAME, Place('input'), make, shared_name=VECTORS),)


def _token_shift(
  config: ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None
) -> PlacedMemory:
  """Makes `model.token_shift` at one of its places in a block."""
  del vocabulary_size
  name = f'token_shift_{place.point}'
  make = functools.partial(TokenShift, config.token_shift.tokens, config.width, dtype)
  return PlacedMemory(name, place, make, alike=name)


# For each field of `ModelConfig`, a function that makes the memory at a place from the config of
# the model, the place, the dtype of activations and the vocabulary size. If the field is a tuple,
# `number` is the index of the memory in it. Memories at one place act in this order.
MEMORIES = {
  'ngram': _ngrammer,  # first: at the input, its clusters are of the embedding
  'ngram_memories': _ngram_memory,
  'product_memory': _product_memory,
  'copy_memory': _copy_sum,
  'token_shift': _token_shift,
}


class Memories(NamedTuple):
  """The memories of a model.

  Attributes:
    shared: memories read by others; the model applies them first.
    between_blocks: memories at the input and between blocks, applied by the model.
    in_blocks: memories in each block.
  """

  shared: tuple[PlacedMemory, ...]
  between_blocks: tuple[PlacedMemory, ...]
  in_blocks: tuple[tuple[PlacedMemory, ...], ...]

  def flatten(self) -> Iterator[PlacedMemory]:
    """Yields all memories."""
    yield from self.shared
    yield from self.between_blocks
    for block_memories in self.in_blocks:
      yield from block_memories


def make(config: ModelConfig, vocabulary_size: int | None = None) -> Memories:
  """Returns the memories of a model.

  Args:
    config: of the model.
    vocabulary_size: V, needed to apply some modules.

  Raises:
    ValueError: an unknown place, two memories of one name, or another memory before one that needs
      the embedding.
  """
  dtype = precision.compute_dtype(config)
  memories = []
  for key, memory_config, make_at in _configured(config):
    for place in memory_config.places(config.layers):
      if place.point not in POINTS or place.block not in range(config.layers):
        raise ValueError(f'{key}: {place} does not exist in a model of {config.layers} blocks')
      memories.append(make_at(config, place, dtype, vocabulary_size))
  shared = _shared_tables(config, dtype, vocabulary_size)
  shared += _copies(config, dtype, vocabulary_size)
  _check_names([*shared, *memories])
  _check_embedding(memories)
  between_blocks = tuple(memory for memory in memories if memory.is_between_blocks)
  in_blocks = [[] for _ in range(config.layers)]
  for memory in memories:
    if not memory.is_between_blocks:
      in_blocks[memory.place.block].append(memory)
  return Memories(shared, between_blocks, tuple(tuple(block) for block in in_blocks))


def are_alike(memories: Sequence[PlacedMemory], others: Sequence[PlacedMemory]) -> bool:
  """Whether the memories of two blocks only differ in their parameters.

  A block matches itself if its memories only have parameters.
  """
  kinds = [memory.alike for memory in memories]
  return None not in kinds and kinds == [memory.alike for memory in others]


def _check_names(memories: list[PlacedMemory]) -> None:
  """Raises ValueError for a name used by another memory of the block, or between blocks."""
  used = set()
  for memory in memories:
    block = None if memory.is_between_blocks else memory.place.block
    for field, name in (('name', memory.name), ('state_name', memory.state_key)):
      problem = None
      if field == 'state_name' and name in RESERVED:
        problem = 'reserved'
      elif (block, field, name) in used:
        problem = 'already used'
      if problem is not None:
        raise ValueError(f'memory at {memory.place}: {field}={name!r} is {problem}')
      used.add((block, field, name))


def _check_embedding(memories: list[PlacedMemory]) -> None:
  """Raises ValueError for a memory that needs the embedding but is not the first at the input."""
  at_input = [memory for memory in memories if memory.place.point == 'input']
  for memory in at_input[1:]:
    if memory.needs_embedding:
      raise ValueError(
        f'memory {memory.name} needs the embedding, but {at_input[0].name} changes it first: '
        f'its entry in MEMORIES must be the first at the input'
      )


def _configured(
  config: ModelConfig,
) -> Iterator[tuple[str, Any, Callable[..., PlacedMemory]]]:
  """Yields the key, the config and the constructor of every memory."""
  for name, make_at in MEMORIES.items():
    field = getattr(config, name)
    if isinstance(field, tuple):
      for number, memory_config in enumerate(field):
        yield f'model.{name}.{number}', memory_config, functools.partial(make_at, number=number)
    elif field is not None:
      yield f'model.{name}', field, make_at


def empty_states(memories: Iterable[PlacedMemory], batch: int) -> Memory:
  """Returns the states of memories between blocks before the first segment, by name."""
  states = {}
  for memory in memories:
    states |= memory.empty_state(batch, None)
  return states


def ngram_modules(
  config: ModelConfig, vocabulary_size: int | None = None
) -> Iterator[tuple[tuple[str, ...], NGramMemory]]:
  """Yields the path of every n-gram memory in the collections, and its module without variables.

  A shared table comes before its memories; these have no own table.
  """
  for memory in make(config, vocabulary_size).flatten():
    module = memory.make(parent=None)
    if isinstance(module, NGramMemory):
      yield memory.path, module
