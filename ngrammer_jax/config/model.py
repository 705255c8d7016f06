"""The model: a Transformer or a recurrent model, and its memories."""

import dataclasses
import functools
import logging

from ngrammer_jax import errors
from ngrammer_jax.config import activations, fields, kernels
from ngrammer_jax.config.attention import AttentionConfig, LayerType
from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import InitialConfig
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.config.ngram import shared_tables
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.ngrammer import NGramConfig
from ngrammer_jax.config.persistent import PersistentConfig
from ngrammer_jax.config.positions import (
  BACKWARD_POSITIONS,
  POSITIONS,
  SEGMENT_POSITIONS,
  PositionalConfig,
)
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.config.recurrent import RecurrentConfig
from ngrammer_jax.config.relations import divides, divisible_by, equals
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.config.softmax import DROPOUT, AdaptiveSoftmaxConfig
from ngrammer_jax.config.span import SpanConfig
from ngrammer_jax.config.token_shift import TokenShiftConfig

# Values of some keys.
DTYPES = ('auto', 'bfloat16', 'float32', 'float64')
# Norm N and residual of a sub-layer F. pre: x + F(N x); post: x + N(F x); post_skip: N(x + F x);
# hybrid: x + N(F(N x)); primer: pre for attention, post for the feed-forward.
NORMS = ('pre', 'post', 'post_skip', 'hybrid', 'primer')
NORM_KINDS = ('layer', 'rms')
REMAT = ('auto', 'none', 'minimal', 'full')  # `auto`: the first of the others that fits


# Where the heads divide the width.
_HEADS_OF_WIDTH = {'head_width': (None,), 'recurrent': (None,)}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only Transformer and the memories added to it, or a recurrent model."""

  layers: int = field(4, 'number of blocks', at_least=1, at_most=1000)  # each is traced
  width: int = field(
    256,
    'model width D',
    at_least=1,
    relations=(
      divisible_by(2, where={'position': ('sinusoid', 'segment_sinusoid', 'relative')}),
      divisible_by(
        'heads',
        times=2,
        where=_HEADS_OF_WIDTH | {'position': ('rope',), 'positional': (None,)},
        reason='rope needs an even head width',
      ),
      divisible_by('heads', where=_HEADS_OF_WIDTH),
    ),
  )
  heads: int = field(
    4,
    'attention heads',
    at_least=1,
    relations=(divisible_by(2, where={'persistent.kind': ('head_split',)}),),
  )
  key_value_heads: int | None = field(
    None,
    'heads of keys and values; None: `heads`',
    at_least=1,
    relations=(
      divides('heads'),
      equals('heads', where={'persistent.kind': ('head_split',)}),
      equals('heads', where={'shared_query_key': (True,)}, reason='each query needs a key'),
    ),
  )
  head_width: int | None = field(None, 'features of a head; None: `width` / `heads`', at_least=1)
  feed_forward_width: int = field(
    688,
    'inner width, about 8/3 of `width` if gated, else 4 times; 0: none',
    at_least=1,
    also=(0,),
  )
  activation: str = field(
    'gelu', 'gelu: tanh form, gelu_erf: the exact one', choices=activations.NAMES
  )
  gated: bool = field(True, 'gated feed-forward')
  bias: bool = field(False, 'biases of the linear layers')
  feed_forward_bias: bool | None = field(None, 'biases of the feed-forward; None: same as `bias`')
  position: str = field(
    'rope',
    'position encoding',
    choices=POSITIONS,
    needs=dict.fromkeys(SEGMENT_POSITIONS, {'memory.length': (None, 0)}),
    reason='positions in the segment exclude a memory, also in evaluation; "relative" takes one',
  )
  positional: PositionalConfig | None = field(None, 'options of the encoding; None: the defaults')
  per_dim_scale: bool = field(False, 'learned scale of each dimension of the queries')
  norm: str = field('pre', 'placement of the norms', choices=NORMS)
  norm_kind: str = field('layer', 'layer norm, or RMS norm without a bias', choices=NORM_KINDS)
  norm_offset: bool = field(
    False, 'norms store their scale minus 1', only_for={'norm_kind': ('rms',)}
  )
  norm_epsilon: float = field(1e-6, 'epsilon of the norms', above=0)
  final_norm: bool = field(True, 'norm before the softmax')
  parallel_residual: bool = field(
    False, 'attention and feed-forward have the same input (GPT-NeoX)', only_for={'norm': ('pre',)}
  )
  convolution: int | None = field(
    None, 'width of the convolutions of q, k and v (Primer: 3)', at_least=1, at_most=256
  )
  shared_query_key: bool = field(False, 'compute queries from the convolved keys (full Primer)')
  tie_embeddings: bool = field(True, 'input and output share the embedding')
  scale_embeddings: bool = field(True, 'multiply embeddings by the square root of the width')
  softmax_bias: bool = field(True, 'biases of the output', only_for={'adaptive_softmax': (None,)})
  final_logit_cap: float | None = field(
    None, 'c of c tanh(s / c); None: no cap', above=0, only_for={'adaptive_softmax': (None,)}
  )
  logits_dtype: str | None = field(
    None,
    'dtype in which scoring stores logits; None: float32 at least',
    choices=('bfloat16',),
    free_on_init=True,
    only_for={'adaptive_softmax': (None,)},
  )
  loss_dtype: str = field(
    'float32',
    'dtype of the logits in the loss of training; sums have at least float32',
    choices=('float32', 'bfloat16'),
    free_on_init=True,
    only_for={'adaptive_softmax': (None,)},
  )
  vocabulary_chunk: int | None = field(
    None, 'vocabulary entries with logits at a time; None: all', at_least=1, free_on_resume=True
  )
  # Applied to embeddings, the output of each sub-layer, relative position encodings, and the final
  # output if it has no norm.
  dropout: float = field(0.0, 'dropout of embeddings and sub-layers', **DROPOUT)
  attention_dropout: float = field(0.0, 'dropout of attention weights', **DROPOUT)
  inner_dropout: float = field(0.0, 'dropout inside the feed-forward', **DROPOUT)
  dtype: str = field('auto', 'auto: bfloat16 on accelerators', choices=DTYPES, free_on_init=True)
  scan_layers: bool | int | None = field(
    None,
    'compile one block (or N) and scan over blocks; None: see docs/devices.md',
    at_least=0,
    free_on_resume=True,
    kept_on_resume=True,
  )
  remat: str = field(
    'auto',
    'rematerialised values; auto: only as much as device memory requires, on a CPU none',
    choices=REMAT,
    free_on_resume=True,
    kept_on_resume=True,
  )
  kernel: str | None = field(
    None, 'see docs/devices.md; None: automatic', choices=kernels.NAMES, free_on_resume=True
  )
  attention: AttentionConfig | None = field(None, 'options of attention; None: the defaults')
  ngram: NGramConfig | None = field(None, 'N-Grammer layer')
  ngram_memories: tuple[NGramMemoryConfig, ...] = field((), 'n-gram memories')
  product_memory: ProductMemoryConfig | None = field(None, 'memory of product keys')
  copy_memory: CopyMemoryConfig | None = field(
    None,
    'token after the longest earlier match',
    only_for={'adaptive_softmax': (None,), 'memory.across_documents': (None, False)},
    reason='a match is in the document, and the next token is a row of one embedding',
  )
  token_shift: TokenShiftConfig | None = field(None, 'short convolutions in blocks (Canon)')
  memory: MemoryConfig | None = field(None, 'segment memory (Transformer-XL)')
  adaptive_softmax: AdaptiveSoftmaxConfig | None = field(None, 'adaptive input and softmax')
  span: SpanConfig | None = field(
    None,
    'adaptive attention span',
    only_for={'memory.same_length': ('memory', 'memory_and_self', 'memory_alone')},
    remedy='use model.memory.length={value.limit} and model.memory.same_length="memory_alone" (as '
    'in the paper), or model.span=None',
    reason='every token needs the same number of keys',
  )
  persistent: PersistentConfig | None = field(None, 'persistent vectors (all-attention)')
  initial: InitialConfig | None = field(
    None, 'initial weights; None: defaults of each layer', free_on_init=True
  )
  recurrent: RecurrentConfig | None = field(None, 'recurrent model instead of the Transformer')

  def __post_init__(self):
    if self.kernel == 'pallas':  # of an earlier version; its spans were computed in blocks
      kernel = 'blocks' if self.span else None
      object.__setattr__(self, 'kernel', kernel)
      _warn_of_removed_kernel(kernel)

  def positions(self) -> PositionalConfig:
    """Options of the position encoding."""
    return self.positional or PositionalConfig()

  @property
  def num_positions(self) -> int | None:
    """Maximum context of a prediction, in tokens; None: no limit."""
    if self.position == 'absolute':
      return self.positions().max_length
    scaling = self.positions().scaling
    if scaling is not None and scaling.kind == 'longrope' and not scaling.is_long:
      return scaling.original_length
    return None

  @property
  def longest_document(self) -> int | None:
    """Maximum length of a document, in tokens; None: no limit."""
    if self.position == 'absolute' and self.memory is not None:  # positions repeat
      return None
    return self.num_positions

  def attention_options(self) -> AttentionConfig:
    """Options of attention."""
    return self.attention or AttentionConfig()

  def layer_types(self) -> tuple[LayerType, ...]:
    """The type of each layer."""
    return self.attention_options().layer_types(self.layers)

  @property
  def head_features(self) -> int:
    """H, features of a head."""
    return self.head_width or self.width // self.heads

  def width_at(self, point: str) -> int:
    """Returns the number of features at a place; at `values`, the features of all key heads."""
    if point == 'values':
      return self.context_key_heads * self.head_features
    if point == 'after_attention':
      return self.heads * self.head_features
    if point == 'feed_forward':
      return self.feed_forward_width
    return self.width

  @property
  def outer_dropout(self) -> float:
    """Dropout of the embeddings, and of a final output without norm."""
    if self.adaptive_softmax is None or self.adaptive_softmax.dropout is None:
      return self.dropout
    return self.adaptive_softmax.dropout

  @property
  def sees_later_tokens(self) -> bool:
    """Whether the model supports attention to later tokens, as in a bidirectional prefix."""
    return self.recurrent is None and self.position not in BACKWARD_POSITIONS

  @property
  def context_heads(self) -> int:
    """Number of heads that attend to the context."""
    if self.persistent is not None and self.persistent.kind == 'head_split':
      return self.heads // 2
    return self.heads

  @property
  def context_key_heads(self) -> int:
    """Number of heads of keys and values of the context."""
    if self.key_value_heads in (None, self.heads):
      return self.context_heads
    return self.key_value_heads

  def table_memories(self) -> tuple[NGramMemoryConfig | ProductMemoryConfig, ...]:
    """Memories whose tables have their own optimizers; n-gram memories come first."""
    if self.product_memory is None:
      return self.ngram_memories
    return *self.ngram_memories, self.product_memory

  def parameter_groups(self) -> tuple[str, ...]:
    """Names of the groups of the parameters, see `models.parameter_groups`."""
    names = ['embedding', 'blocks', 'head']
    for name in (*placed_blocks(), 'persistent', 'span'):
      if getattr(self, name) and name != 'ngram_memories':
        names.append(name)
    for number, memory in enumerate(self.ngram_memories):
      names.append(ngram_memory.name(number))
      names.append(ngram_memory.table_module(number, memory))
    return tuple(dict.fromkeys(names))

  def check(self) -> None:
    """Raises BadInput for an invalid combination. Touches no device."""
    fields.check_values(self, 'model.')
    if self.attention is not None:
      self.attention.check(self)  # first: positions depend on the types of the layers
    if self.recurrent is None and self.positional is None:
      self.positions().check(self)
    blocks = [getattr(self, field.name) for field in dataclasses.fields(self)]
    for block in (self.recurrent, *blocks):
      if hasattr(block, 'check'):
        block.check(self)
    for index, memory in enumerate(self.ngram_memories):
      memory.check(self, f'model.ngram_memories.{index}')
    shared_tables.check(self.ngram_memories)
    self._check_replaced()
    if self.position == 'table':
      self._check_table()
    if self.kernel is not None:
      self._check_kernel()

  def check_vocabulary(self, size: int) -> None:
    """Raises BadInput if the adaptive softmax or an n-gram memory does not fit the vocabulary."""
    if self.adaptive_softmax is not None:
      self.adaptive_softmax.check_vocabulary(size)
    for index, memory in enumerate(self.ngram_memories):
      memory.check_vocabulary(size, self, f'model.ngram_memories.{index}')

  def attention_needs(self) -> dict[str, str]:
    """Returns the features required of attention (see `kernels.NEEDS`), each with its option."""
    options = self.attention_options()
    needs = {}
    if self.position in BACKWARD_POSITIONS:
      needs['distances'] = f'position={self.position!r}'
    if options.window is not None:
      needs['window'] = f'attention.window={options.window}'
    if self.memory is not None:
      needs['mask'] = 'memory'
    if self.context_key_heads != self.context_heads:
      needs['grouped'] = 'key_value_heads'
    if self.memory is not None and options.query_key_norm == 'full':
      needs['joint_norm'] = 'attention.query_key_norm="full"'
    in_values = self._memories_with('point', 'values')
    if self.memory is not None and in_values:
      needs['value_rows'] = f'{in_values[0]}="values"'
    if self.span is not None:
      needs['spans'] = 'span'
      if self.span.counts_all_keys(self.kernel):
        needs['all_keys'] = 'span.epsilon_keys="all"'
    if self.persistent is not None and self.persistent.vectors > 0:
      needs['persistent'] = 'persistent'
    if self.attention_dropout > 0:
      needs['dropout'] = f'attention_dropout={self.attention_dropout}'
    attended = self._attended_pairings()
    if attended:
      needs['pairs'] = f'{attended[0]}="attended"'
    if options.logit_cap is not None:
      needs['cap'] = f'attention.logit_cap={options.logit_cap}'
    return needs

  def _attended_pairings(self) -> list[str]:
    """Returns the config keys that pair tokens with their most attended token."""
    paths = self._memories_with('pairing', 'attended')
    if self.ngram is not None and self.ngram.layer == 'attention':
      if 'attended' in self.ngram.pairing:
        paths.append('ngram.pairing')
    return paths

  def _check_replaced(self) -> None:
    """Raises BadInput for rows that replace the change of an earlier memory."""
    changed: set[int] = set()  # blocks
    for index, memory in enumerate(self.ngram_memories):
      if memory.point != 'feed_forward':
        continue
      blocks = {place.block for place in memory.places(self.layers)}
      again = changed & blocks
      if memory.join == 'replace' and again:
        path = f'model.ngram_memories.{index}'
        raise errors.BadInput(
          f'{path}.join="replace" overwrites an earlier memory in block {min(again)}: '
          f'use it as the first memory, or {path}.join="sum"'
        )
      changed |= blocks

  def _memories_with(self, name: str, value: str) -> list[str]:
    """Returns the key `name` of each n-gram memory that sets it."""
    paths = []
    for index, memory in enumerate(self.ngram_memories):
      if getattr(memory, name) == value:
        paths.append(f'ngram_memories.{index}.{name}')
    return paths

  def _check_kernel(self) -> None:
    """Raises BadInput if the kernel cannot compute the attention of the model."""
    for need, option in self.attention_needs().items():
      if need not in kernels.KERNELS[self.kernel]:
        raise errors.BadInput(
          f'model.kernel={self.kernel!r} does not support model.{option}: use model.kernel=None, '
          f'for automatic selection'
        )

  def _check_table(self) -> None:
    """Raises BadInput if a token attends to more distant keys than the table covers."""
    max_length = self.positions().max_length
    window = None if self.memory is None else self.memory.window()
    if window is None:
      raise errors.BadInput(
        f'model.position="table" has vectors for model.positional.max_length={max_length} '
        f'distances, but a token attends to all keys of the segment and the memory: set '
        f'model.memory.length and model.memory.same_length'
      )
    num_keys = window if self.memory.sees_itself() else window - 1
    if num_keys > max_length:
      raise errors.BadInput(
        f'model.position="table" has vectors for model.positional.max_length={max_length} '
        f'distances, but a token attends to {num_keys} keys: use a smaller model.memory.length, '
        f'or model.positional.max_length={num_keys}'
      )


@functools.cache
def placed_blocks() -> tuple[str, ...]:
  """Returns the names of the optional memory blocks with their own places."""
  keys = fields.keys(ModelConfig, 'model.')
  return tuple(name for name, key in keys.items() if hasattr(key.block, 'places'))


@functools.cache  # one warning per process, which may read a config several times
def _warn_of_removed_kernel(kernel: str | None) -> None:
  logging.warning("model.kernel='pallas' was removed: it is read as model.kernel=%r", kernel)
