"""Memories added to a trained model: their sizes and initial values.

A model may have more memories than its source, `init_from`. Added memories start neutral: the loss
of the trained model is unchanged, and all their parameters have a gradient by the second step (see
docs/add_memory.md). Unset sizes follow the trained model.

D model width, H head width, L layers, V vocabulary.
"""

import bisect
from collections.abc import Callable, Collection, Iterable
import dataclasses
import math
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config import conversion, memory_blocks
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.ngram.memory import CLUSTER_KEYS, NGramMemoryConfig
from ngrammer_jax.config.ngram.ngrammer import NGramConfig
from ngrammer_jax.config.persistent import PersistentConfig
from ngrammer_jax.config.place import INSIDE_FEED_FORWARD
from ngrammer_jax.config.positions import SEGMENT_POSITIONS
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.config.span import SpanConfig
from ngrammer_jax.config.training import TrainingConfig

SHARE = 5  # what is added has at most one in this many of the parameters of the trained model
FEATURES = 8  # one in this many features of a head is of n-grams, as in the N-Grammer paper
MIN_FEATURES = 2  # the norm of one feature is 0


class OpenKeys(NamedTuple):
  """The unset keys of a block.

  Attributes:
    path: dotted path of the block.
    overrides: paths set on the command line.
    is_in_file: whether the config file has the block; then all its keys are set.
  """

  path: str
  overrides: Collection[str]
  is_in_file: bool

  def has(self, name: str) -> bool:
    """Whether a key of the block, including keys inside it, is unset."""
    key = f'{self.path}.{name}'
    is_set = any(path == key or path.startswith(f'{key}.') for path in self.overrides)
    return not self.is_in_file and not is_set

  def replace(self, block: Any, **changes: Any) -> Any:
    """Returns the block with changes of unset keys."""
    changes = {name: value for name, value in changes.items() if self.has(name)}
    return dataclasses.replace(block, **changes)


def complete(
  values: dict[str, Any],
  overrides: Collection[str],
  present: Collection[str],
  base: ModelConfig,
  V: int,
  count: int,
) -> None:
  """Fills unset fields of added memories from the trained model.

  Args:
    values: values of a config; the section `model` is changed in place.
    overrides: paths set on the command line.
    present: paths of the memories in the config file; only their `start` may be unset.
    base: the trained model.
    V: its vocabulary size.
    count: its number of parameters.

  Raises:
    BadInput: the trained model does not support a memory.
  """
  if values.get('finetune') is not None:
    values['model'] = _with_memories(base, values['model'])
  model = values.setdefault('model', {})
  model['ngram_memories'] = conversion.blocks_by_number(model.get('ngram_memories') or ())
  base_blocks = dict(memory_blocks.blocks(dataclasses.asdict(base)))
  paths = [path for path, _ in memory_blocks.blocks(model)]
  added = [path for path in paths if path not in base_blocks]
  overrides = set(overrides)
  _check_positions(base, added)
  if 'model.span' in added and 'model.memory' not in paths:
    model['memory'] = _memory_of_spans(model['span'], 'model.span.limit' in overrides)
    overrides |= {f'model.memory.{name}' for name in model['memory']}
    added.append('model.memory')
  sized = ('model.ngram', 'model.product_memory', 'model.persistent')
  with_parameters = [path for path in added if path.startswith(sized)]
  budget = count // SHARE // max(1, len(with_parameters))
  for path, block in memory_blocks.blocks(model):
    keys = OpenKeys(path, overrides, path in present)
    if path in base_blocks:
      for name, value in base_blocks[path].items():
        if keys.has(name):
          block[name] = value
    else:
      memory = _build(path, block)
      if getattr(memory, 'start', '') is None:
        memory = dataclasses.replace(memory, start='neutral')
      block |= dataclasses.asdict(_sized(memory, keys, values, base, budget, V))


def _with_memories(base: ModelConfig, model: dict[str, Any]) -> dict[str, Any]:
  """Returns the values of the trained model with the memories of another one, for fine-tuning."""
  names = {path.split('.')[1] for path, _ in memory_blocks.blocks(model)}
  return dataclasses.asdict(base) | {name: model[name] for name in names}


def _memory_of_spans(span: dict[str, Any], has_limit: bool) -> dict[str, Any]:
  """Returns the values of the segment memory required by spans, with their length if set."""
  memory = {'same_length': 'memory_and_self'}
  if has_limit:
    neutral = _build('model.span', span | {'start': 'neutral'})
    memory['length'] = math.floor(neutral.initial_span())
  return memory


def _build(path: str, block: dict[str, Any]) -> Any:
  """Returns the block at a path with these values."""
  return conversion.build(conversion.find_key(path).block, block, f'{path}.')


def _sized(
  block: Any, keys: OpenKeys, values: dict[str, Any], base: ModelConfig, budget: int, V: int
) -> Any:
  """Returns an added memory with unset sizes from the trained model.

  Args:
    block: the memory.
    keys: its unset keys.
    values: values of the config.
    base: the trained model.
    budget: its maximum number of parameters.
    V: vocabulary size.
  """
  match block:
    case NGramMemoryConfig():
      return _size_ngram_memory(block, keys, base, budget, V)
    case NGramConfig():
      return _size_ngrammer(block, keys, base, budget)
    case ProductMemoryConfig():
      return _size_product_memory(block, keys, base, budget)
    case PersistentConfig():
      return _size_persistent(block, keys, base, budget)
    case MemoryConfig():
      return keys.replace(block, length=_segment_length(values))
    case SpanConfig():
      return _size_span(block, keys, _build('model.memory', values['model']['memory']))
  return block


def _segment_length(values: dict[str, Any]) -> int:
  """Returns the length of the longest segment, in training or evaluation."""
  training = values.get('training') or {}
  evaluation = values.get('evaluation') or {}
  length = training.get('segment_length', TrainingConfig.segment_length)
  return max(length, evaluation.get('segment_length') or 0)


def _size_ngram_memory(
  memory: NGramMemoryConfig, keys: OpenKeys, base: ModelConfig, budget: int, V: int
) -> NGramMemoryConfig:
  """Returns an n-gram memory with layers, heads, width and rows from the trained model."""
  D = base.width_at(memory.point)
  memory = keys.replace(memory, layers=_layers(memory, base.layers))
  if memory.value_gate is not None and keys.has('value_gate.channels'):
    channels = min(memory.value_gate.channels, base.width)
    gate = dataclasses.replace(memory.value_gate, channels=channels)
    memory = dataclasses.replace(memory, value_gate=gate)
  if memory.key in CLUSTER_KEYS:
    memory = keys.replace(memory, heads=_largest_heads(base.heads, D))
    memory = dataclasses.replace(memory, initial=memory.initial or 'hidden')
  num_places = len(memory.places(base.layers))
  num_vectors = memory.heads * len(memory.orders)  # of a token

  def dense_size(width: int) -> int:
    """Returns the number of parameters outside of the tables, for a width of the rows."""
    num_matrices = int(memory.projection)
    if memory.join in ('gate', 'product'):
      num_matrices = 2 + memory.embedding_part
    by_feature = num_matrices * num_vectors * width + memory.convolution + 8
    return num_places * by_feature * D

  match memory.join:
    case 'add':
      width = D // memory.heads
    case 'concat':
      width = max(MIN_FEATURES, D // memory.heads // FEATURES)
    case 'sum' | 'multiply' if memory.point in INSIDE_FEED_FORWARD and memory.width is None:
      width = None
    case _ if memory.point == 'values' and not memory.projection:
      width = None
    case _ if memory.join in ('gate', 'product') or memory.projection:
      widest = max(1, min(memory.width, D // num_vectors))
      width = _largest(dense_size, widest, budget // 2)
    case _:  # rows that are added as they are
      width = D
  memory = keys.replace(memory, width=width)
  if memory.row_rule == 'vocabulary':
    return memory

  def table_size(rows: int) -> int:
    """Returns the number of parameters of the tables, for a base number of rows."""
    sized = dataclasses.replace(memory, rows=(rows,)).resolved(base)
    try:
      return sized.table_width(D) * sum(sized.table_rows(V))
    except ValueError:  # too few rows for the hash
      return 0

  rows = _largest(table_size, memory.rows[0], budget - dense_size(memory.width or D))
  return keys.replace(memory, rows=(rows,))


def _layers(memory: NGramMemoryConfig, L: int) -> tuple[int, ...]:
  """Returns the blocks of an n-gram memory, at most two.

  They are the second and the middle one of the trained model, as in Engram. A gate is in at least
  one block; other memories without blocks are at the input, or in every block.
  """
  if memory.every_block:
    return ()
  second = min(1, L - 1)
  middle = max(second, L // 2)
  count = len(memory.layers)
  if count == 0 and memory.join == 'gate':
    count = 1
  blocks = (second, middle)[:count]
  return tuple(dict.fromkeys(blocks))


def _largest_heads(heads: int, width: int) -> int:
  """Returns the largest divisor of a width up to the model's number of heads."""
  while width % heads:
    heads -= 1
  return heads


def _largest(size: Callable[[int], int], most: int, budget: int) -> int:
  """Returns the largest number from 1 to `most` with a size within a budget; 1 if none fits."""
  return max(1, bisect.bisect_right(range(1, most + 1), budget, key=size))


def _size_ngrammer(
  ngram: NGramConfig, keys: OpenKeys, base: ModelConfig, budget: int
) -> NGramConfig:
  """Returns the N-Grammer layer with heads, width and rows from the trained model."""
  point = 'input'
  if ngram.layer == 'attention':
    point = 'after_attention'
  D = base.width_at(point)
  if ngram.heads is None and D % base.heads:
    ngram = keys.replace(ngram, heads=_largest_heads(base.heads, D))
  if ngram.clusters is not None:
    ngram = dataclasses.replace(ngram, initial=ngram.initial or 'hidden')
  heads = ngram.heads or base.heads
  H = D // heads
  dim = min(ngram.dim, max(MIN_FEATURES, H // FEATURES))
  if ngram.combine == 'add':
    dim = H
  ngram = keys.replace(ngram, dim=dim)
  row_size = len(ngram.orders) * heads * ngram.dim  # of all tables
  norms_and_mix = 3 * D + 2 * row_size
  rows = (budget // len(ngram.places(base.layers)) - norms_and_mix) // row_size
  return keys.replace(ngram, vocabulary_size=max(1, min(ngram.vocabulary_size, rows)))


def _size_product_memory(
  memory: ProductMemoryConfig, keys: OpenKeys, base: ModelConfig, budget: int
) -> ProductMemoryConfig:
  """Returns a product-key memory beside the feed-forward, with as many values as fit."""
  D = base.width
  E = memory.value_width or D
  memory = keys.replace(memory, point='beside_feed_forward', layers=(base.layers // 2,))

  def size(key_width: int, sub_keys: int) -> int:
    """Returns the number of parameters of the layers and of the table."""
    by_layer = memory.heads * key_width * (D + 1 + sub_keys) + 3 * D
    if memory.has_projection:
      by_layer += (1 + memory.swilu) * D * E + E
    return len(memory.layers) * by_layer + sub_keys**2 * (E + memory.experts * D)

  def size_of_half_width(half: int) -> int:
    return size(2 * half, 1)

  def size_of_sub_keys(sub_keys: int) -> int:
    return size(memory.key_width, sub_keys)

  half_width = _largest(size_of_half_width, memory.key_width // 2, budget // 2)
  memory = keys.replace(memory, key_width=2 * half_width)
  memory = keys.replace(memory, sub_keys=_largest(size_of_sub_keys, memory.sub_keys, budget))
  return keys.replace(memory, top=min(memory.top, memory.sub_keys**2))


def _size_persistent(
  persistent: PersistentConfig, keys: OpenKeys, base: ModelConfig, budget: int
) -> PersistentConfig:
  """Returns persistent vectors with a separate softmax, as many as fit."""
  persistent = keys.replace(persistent, kind='attention_split')
  heads = base.layers * base.heads
  vectors = (budget - heads) // (2 * heads * base.head_features)
  return keys.replace(persistent, vectors=max(1, min(persistent.vectors, vectors)))


def _size_span(span: SpanConfig, keys: OpenKeys, memory: MemoryConfig) -> SpanConfig:
  """Returns spans that start beyond the memory, with an epsilon that does not change the loss."""
  share = span.initial_span() / span.limit  # of the limit, 1 if adaptive
  slack = 1 if share < 1 else 0
  limit = math.ceil(memory.length / share + slack)
  span = keys.replace(span, limit=limit, renormalize=False)
  return keys.replace(span, ramp=min(span.ramp, span.limit))


def _check_positions(base: ModelConfig, added: Iterable[str]) -> None:
  """Raises BadInput for a segment memory in a model limited to its segment."""
  if base.position not in SEGMENT_POSITIONS:
    return
  for path in ('model.memory', 'model.span'):
    if path in added:
      raise errors.BadInput(
        f'{path} cannot be added to a model with model.position={base.position!r}, a position '
        f'in the segment: use model.ngram_memories, model.ngram or model.persistent, or another '
        f'model'
      )


def check_neutral(base: ModelConfig, config: Config) -> None:
  """Raises BadInput for added memories that change the loss of the trained model at the start."""
  added = memory_blocks.added(base, config.model)
  _check_positions(base, added)
  for path, block in added.items():
    if getattr(block, 'join', '') == 'replace':
      raise errors.BadInput(
        f'{path}.join="replace" would lose the up projection of init_from={config.init_from}: use '
        f'"sum", which adds rows to it'
      )
    if getattr(block, 'start', '') is None:
      raise errors.BadInput(
        f'{path} is not in init_from={config.init_from}: use {path}.start="neutral" to keep '
        f'its loss, or "published"'
      )
  if 'model.memory' in added:
    _check_neutral_memory(config)
  if 'model.span' in added and config.model.span.start == 'neutral':
    _check_neutral_span(config.model.span, config.model.memory)


def _check_neutral_memory(config: Config) -> None:
  """Raises BadInput if a segment memory restricts attention within the segment."""
  memory = config.model.memory
  window = memory.window()
  length = max(config.training.segment_length, config.evaluation_length())
  needed = {'first': 'empty', 'across_documents': False}
  if not memory.sees_itself():
    needed['same_length'] = 'memory_and_self'
  if window is not None and window < length:
    needed['length'] = length
  for name, value in needed.items():
    if getattr(memory, name) != value:
      raise errors.BadInput(
        f'model.memory.{name}={getattr(memory, name)!r} changes the loss of the model of '
        f'init_from={config.init_from}, where tokens attend to all of {length} tokens and to '
        f'themselves: use {value!r}'
      )


def _check_neutral_span(span: SpanConfig, memory: MemoryConfig) -> None:
  """Raises BadInput for spans that do not reach all keys at the start."""
  farthest = memory.window() - 1 - (not memory.sees_itself())
  if span.initial_span() < farthest:
    raise errors.BadInput(
      f'model.span.limit={span.limit} with model.span.initial={span.initial_value()} '
      f'is a span of {span.initial_span():.0f} tokens at the start, but keys are up to '
      f'{farthest} tokens away: raise the limit, or use a shorter model.memory.length'
    )
