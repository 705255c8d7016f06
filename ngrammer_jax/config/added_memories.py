"""Memories that are added to a trained model: how large they are, and how they start.

A model may have more blocks of PARTS than the one that its training starts from, `init_from`. They
start neutral: the loss is that of the trained model, and every part has a gradient by the second
step (see docs/add_memory.md). Sizes that nobody sets follow the trained model.

D model width, H head width, G orders, I vectors of a token, E width of a vector, V vocabulary.
"""

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import dataclasses
import functools
import math
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import conversion, fields
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.ngram.memory import CLUSTER_KEYS, PER_HEAD_JOINS, NGramMemoryConfig
from ngrammer_jax.config.ngram.ngrammer import NGramConfig
from ngrammer_jax.config.persistent import PersistentConfig
from ngrammer_jax.config.positions import SEGMENT_POSITIONS
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.config.span import SpanConfig
from ngrammer_jax.config.training import TrainingConfig

PARTS = ('ngram', 'ngram_memories', 'memory', 'span', 'persistent')
SHARE = 5  # what is added has at most one in this many of the parameters of the trained model
FEATURES = 8  # one in this many features of a head is of n-grams, as in the N-Grammer paper
MIN_FEATURES = 2  # the norm of one feature is 0


def new_parts(source: ModelConfig, model: ModelConfig) -> dict[str, Any]:
  """Returns the blocks that a model has more, by path, such as `model.ngram_memories.0`."""
  differences = fields.differences(source, model, 'model.', lambda key: False)
  return {
    key.path: new
    for key, old, new in differences
    if old is None and dataclasses.is_dataclass(new) and key.path.split('.')[1] in PARTS
  }


def blocks(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields path and values of the blocks of PARTS in the values of a model."""
  for name in PARTS:
    value = model.get(name)
    if name == 'ngram_memories':
      for number, block in conversion.blocks_by_number(value or ()).items():
        yield f'model.{name}.{number}', block
    elif value is not None:
      yield f'model.{name}', value


def complete(
  values: dict[str, Any],
  overrides: Collection[str],
  present: Collection[str],
  source: ModelConfig,
  V: int,
  count: int,
) -> None:
  """Sets what is open in the blocks of PARTS: as in the trained model, or as suits an addition.

  Args:
    values: those of a config.
    overrides: paths that the command line sets.
    present: paths of the blocks that the config file has. Of these only the start is open.
    source: the trained model.
    V: its vocabulary size.
    count: its number of parameters.

  Raises:
    BadInput: the trained model cannot have a memory.
  """
  if values.get('finetune') is not None:  # which has the model that it starts from
    own = {path.split('.')[1] for path, _ in blocks(values['model'])}
    values['model'] = dataclasses.asdict(source) | {name: values['model'][name] for name in own}
  model = values.setdefault('model', {})
  model['ngram_memories'] = conversion.blocks_by_number(model.get('ngram_memories') or ())
  of_source, paths = dict(blocks(dataclasses.asdict(source))), [path for path, _ in blocks(model)]
  new, overrides = [path for path in paths if path not in of_source], set(overrides)
  _check_positions(source, new)
  if 'model.span' in new and 'model.memory' not in paths:
    model['memory'] = {'same_length': 'memory_and_self'}
    new.insert(0, 'model.memory')
    if 'model.span.limit' in overrides:
      span = _build('model.span', model['span'] | {'start': 'neutral'})
      model['memory']['length'] = math.floor(span.initial_span())
    overrides |= {f'model.memory.{name}' for name in model['memory']}
  tables = [path for path in new if path not in ('model.memory', 'model.span')]
  budget, memory = count // SHARE // max(1, len(tables)), source.memory
  for path, block in blocks(model):
    is_set = lambda name, path=path: path in present or f'{path}.{name}' in overrides
    set_open = functools.partial(_replace_open, is_set)
    if path in of_source:
      block |= {name: value for name, value in of_source[path].items() if not is_set(name)}
      continue
    if path != 'model.memory' and block.get('start') is None:
      block['start'] = 'neutral'
    match typed := _build(path, block):
      case NGramMemoryConfig():
        typed = _size_memory(typed, set_open, source, budget, V)
      case NGramConfig():
        typed = _size_ngrammer(typed, set_open, source, budget)
      case PersistentConfig():
        typed = set_open(typed, kind='attention_split')
        heads, H = source.layers * source.heads, source.head_features
        vectors = (budget - heads) // (2 * heads * H)
        typed = set_open(typed, vectors=max(1, min(typed.vectors, vectors)))
      case MemoryConfig():
        memory = typed = set_open(typed, length=_segment_length(values))
      case SpanConfig():
        typed = _size_span(typed, set_open, memory or MemoryConfig())
    block |= dataclasses.asdict(typed)


def _build(path, block):
  """Returns the block at a path with these values."""
  return conversion.build(conversion.find_key(path).block, block, f'{path}.')


def _replace_open(is_set: Callable[[str], bool], block: Any, **changes: Any) -> Any:
  """Returns a block with changes of values that nobody sets."""
  return dataclasses.replace(block, **{k: v for k, v in changes.items() if not is_set(k)})


def _segment_length(values):
  """Returns the length of the longest segment."""
  training, evaluation = (values.get(name) or {} for name in ('training', 'evaluation'))
  length = training.get('segment_length', TrainingConfig.segment_length)
  return max(length, evaluation.get('segment_length') or 0)


def _heads(model, width):
  """Returns the largest number of heads, up to that of the model, that divides a width."""
  return next(heads for heads in range(model.heads, 0, -1) if width % heads == 0)


def _size_memory(o, set_open, source, budget, V):
  """Returns an n-gram memory whose layers, heads, width and rows follow the trained model."""
  D, L, count = source.width_at(o.point), source.layers, len(o.layers) or (o.join == 'gate')
  first = min(1, L - 1)  # the layers of Engram are the second and the middle one
  o = set_open(o, layers=tuple(dict.fromkeys((first, max(first, L // 2))[:count])))
  if o.key in CLUSTER_KEYS:
    o = dataclasses.replace(set_open(o, heads=_heads(source, D)), initial=o.initial or 'hidden')
  H, num_vectors, places = D // o.heads, o.heads * len(o.orders), len(o.places(L))

  def dense(width):  # parameters without the tables
    matrices = 2 if o.join == 'gate' else int(o.projection)
    return places * (matrices * num_vectors * width + o.convolution + 8) * D

  if o.join in PER_HEAD_JOINS:
    o = set_open(o, width=H if o.join == 'add' else max(MIN_FEATURES, H // FEATURES))
  elif o.join == 'gate' or o.projection:
    widest = max(1, min(o.width, D // num_vectors))
    o = set_open(o, width=_largest(dense, widest, budget // 2))
  else:
    o = set_open(o, width=D)

  def table(rows):
    with contextlib.suppress(ValueError):  # too few rows for the hash
      return o.width * sum(dataclasses.replace(o, rows=(rows,)).table_rows(V))
    return 0

  return set_open(o, rows=(_largest(table, o.rows[0], budget - dense(o.width)),))


def _largest(size: Callable[[int], int], most: int, budget: int) -> int:
  """Returns the largest number from 1 to `most` whose size fits in a budget; 1 if none fits."""
  return max(1, bisect.bisect_right(range(1, most + 1), budget, key=size))


def _size_ngrammer(o, set_open, source, budget):
  """Returns the N-Grammer layer whose heads, width and rows follow the trained model."""
  D = source.width_at('after_attention' if o.layer == 'attention' else 'input')
  if o.heads is None and D % source.heads:
    o = set_open(o, heads=_heads(source, D))
  if o.clusters is not None:
    o = dataclasses.replace(o, initial=o.initial or 'hidden')
  heads = o.heads or source.heads
  H = D // heads
  o = set_open(o, dim=H if o.combine == 'add' else min(o.dim, max(MIN_FEATURES, H // FEATURES)))
  places, row = len(o.places(source.layers)), len(o.orders) * heads * o.dim
  rows = (budget // places - 3 * D - 2 * row) // row  # without the norms and the mix
  return set_open(o, vocabulary_size=max(1, min(o.vocabulary_size, rows)))


def _size_span(o, set_open, memory):
  """Returns spans that start beyond the memory, without an epsilon that changes the loss."""
  share = o.initial_span() / o.limit  # of the limit, 1 if adaptive
  o = set_open(o, limit=math.ceil(memory.length / share + (share < 1)), renormalize=False)
  return set_open(o, ramp=min(o.ramp, o.limit))


def _check_positions(source, new):
  """Raises BadInput for a segment memory of a model that cannot read beyond its segment."""
  path = next((path for path in ('model.memory', 'model.span') if path in new), None)
  if path and source.position in SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'{path} cannot be added to a model with model.position={source.position!r}, the position '
      f'in the segment: use model.ngram_memories, model.ngram or model.persistent, or another model'
    )


def check(source: ModelConfig, config: Config) -> None:
  """Raises BadInput for new parts that change the loss of the trained model at the start."""
  new, model = new_parts(source, config.model), config.model
  _check_positions(source, new)
  length, memory = max(config.training.segment_length, config.evaluation_length()), model.memory
  for path, block in new.items():
    if getattr(block, 'start', '') is None:
      raise errors.BadInput(
        f'{path} is new, init_from={config.init_from} has none: use {path}.start="neutral", which '
        f'leaves its loss as it is, or "published"'
      )
  if 'model.memory' in new:
    window = memory.window()
    needed = {'first': 'empty', 'across_documents': False}
    needed |= {} if memory.sees_itself() else {'same_length': 'memory_and_self'}
    needed |= {} if window is None or window >= length else {'length': length}
    for name, value in needed.items():
      if getattr(memory, name) != value:
        raise errors.BadInput(
          f'model.memory.{name}={getattr(memory, name)!r} changes the loss of the model of '
          f'init_from={config.init_from}, whose tokens attend to all of {length} tokens and to '
          f'themselves: use {value!r}'
        )
  if 'model.span' in new and model.span.start == 'neutral':
    farthest = memory.window() - 1 - (not memory.sees_itself())
    if model.span.initial_span() < farthest:
      raise errors.BadInput(
        f'model.span.limit={model.span.limit} with model.span.initial={model.span.initial_value()} '
        f'is a span of {model.span.initial_span():.0f} tokens at the start, but keys are up to '
        f'{farthest} tokens away: raise the limit, or use a shorter model.memory.length'
      )
