"""N-gram memories: keys, hash, tables and join."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import activations, presets
from ngrammer_jax.config.fields import ANY, field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.ngram import hashes as ngram_hashes
from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.config.ngram.presets import PRESETS
from ngrammer_jax.config.ngram.value_gate import ValueGateConfig
from ngrammer_jax.config.place import INSIDE_FEED_FORWARD, Place
from ngrammer_jax.config.positions import ENCODINGS
from ngrammer_jax.config.relations import DIVIDES, equals, less_than

# Ids that n-grams are made of: token ids; ids of the normalised texts of tokens (Engram); byte + 4
# (BLT); cluster ids of the input of the memory; cluster ids of the embedding.
KEYS = ('tokens', 'compressed', 'bytes', 'clusters', 'embedding_clusters')
TOKEN_KEYS = ('tokens', 'compressed')
CLUSTER_KEYS = ('clusters', 'embedding_clusters')
# XOR of products in 64 bits (engram, ple: the multipliers differ); polynomials of the ids modulo
# the rows (polynomial) or 2^64 (blt); the hash of the N-Grammer layer (praxis); XOR of products in
# 32 bits (speedrun); the id itself.
HASHES = ngram_hashes.KINDS
EMPTY = ('shrink', 'keep', 'revive')
INITIAL = ('uniform', 'normal', 'data', 'hidden')
EXCHANGE = ('auto', 'rows', 'table', 'table_bfloat16')
PER_HEAD_JOINS = ('concat', 'add')  # of the N-Grammer layer
FEED_FORWARD_JOINS = ('sum', 'multiply', 'replace')
VALUE_JOINS = ('sum', 'interpolation', 'weighted_sum')  # of the values of attention
JOINS = (
  'gate',
  'product',
  'sum',
  'mean',
  'multiply',
  'replace',
  'interpolation',
  'weighted_sum',
  *PER_HEAD_JOINS,
)
BOUNDARIES = ('starts', 'eos_id', 'none')
GATES = ('learned', 'half')
ZERO_SCORES = ('half', 'positive')
AMPLIFICATIONS = ('none', 'sqrt_width', 'norm')
OPTIMIZERS = ('adagrad', 'row_adagrad', 'lazy_adam', 'adam', 'sinkhorn', 'frozen')
TABLE_MEMORIES = ('device', 'host')
# Those that touch only visited rows.
HOST_OPTIMIZERS = ('adagrad', 'row_adagrad', 'lazy_adam', 'frozen')
BYTE_IDS = 260  # 4 special ids, then the bytes

POINTS_IN_MODEL = (
  'before_attention',
  'values',
  'after_attention',
  'feed_forward',
  'after_feed_forward',
  'after_block',
)
PREFIX = 'ngram_memory_'  # of the name of a memory
TABLE_PREFIX = 'ngram_table_'  # of the name of a shared table

_GATE = {'join': ('gate',)}
_SUM = {'join': ('sum', 'mean')}
_PROJECTED = {'join': (*VALUE_JOINS, 'mean')}
_CLUSTERS = {'key': CLUSTER_KEYS}
_FILLED = tuple(kind for kind in HASHES if kind != 'speedrun')  # which knows of boundaries
_TEXT_KEYS = (*TOKEN_KEYS, 'bytes')
_VALUES = {'point': ('values',)}
_PER_HEAD = {'join': PER_HEAD_JOINS}
_IN_BLOCKS = 'a gate is in blocks, such as layers=(1,); a mean is at the input, layers=()'
_PRODUCT = {'join': ('product',)}
_NORMS = {'join': ('gate', 'product')}
_IN_FEED_FORWARD = {'key': _TEXT_KEYS, 'amplification': ('none',)}


def exchange_field() -> Any:
  """Declares the field `exchange` of an n-gram memory."""
  comment = 'how devices exchange table gradients; auto: rows or table, by size'
  return field('auto', comment, choices=EXCHANGE, free_on_resume=True)


@presets.applied_by_constructor(PRESETS, 'model.ngram_memories')
@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramMemoryConfig:
  """Tables of n-grams, looked up at the input or in blocks (see docs/ngram_memories.md).

  `NGramMemoryConfig(preset='engram', layers=1, rows=1000)` has the published values of the preset
  and the values named here, like a config file.

  Raises:
    BadInput: an unknown preset, or a value of another type.
  """

  preset: str | None = field(
    None, 'preset of published values; resets the block', choices=tuple(PRESETS)
  )
  key: str = field(
    'tokens',
    'ids of the n-grams',
    choices=KEYS,
    needs={
      'bytes': {'data.vocabulary': ('bytes',)},
      'embedding_clusters': {'adaptive_softmax': (None,)},  # several tables
    },
  )
  hash: str = field('engram', 'hash from an n-gram to a row', choices=HASHES)
  join: str = field(
    'gate',
    'how rows are joined with the hidden states',
    choices=JOINS,
    needs={
      'product': {'point': ('before_attention', 'after_block')},
      'mean': {'layers': ((),), 'every_block': (False,)},
      'multiply': {'point': INSIDE_FEED_FORWARD, 'table': (None,)},
      'replace': {'point': ('feed_forward',)},
      'interpolation': _VALUES,
      'weighted_sum': _VALUES,
    },
    reason=_IN_BLOCKS,
  )
  layers: tuple[int, ...] = field(
    (),
    'blocks with this memory from 0; (): the input',
    at_least=0,
    only_for={'recurrent': (None,)},
    relations=(less_than('model.layers'),),
  )
  every_block: bool = field(
    False,
    'in all blocks, in place of `layers`',
    only_for={'layers': ((),), 'recurrent': (None,)},
  )
  block_stride: int = field(
    1,
    'with `every_block`: every N-th block, counted from the last one',
    at_least=1,
    only_for={'every_block': (True,)},
  )
  point: str = field(
    'before_attention',
    'place in these blocks',
    choices=POINTS_IN_MODEL,
    needs={
      'values': {
        'recurrent': (None,),
        'join': VALUE_JOINS,
        'key': _TEXT_KEYS,
        'amplification': ('none',),
        'factor': (None,),
      },
      'after_attention': _PER_HEAD,
      'feed_forward': _IN_FEED_FORWARD | {'join': FEED_FORWARD_JOINS, 'gated': (True,)},
      'after_feed_forward': _IN_FEED_FORWARD | {'join': ('sum', 'multiply')},
      'after_block': {'join': ('product', *PER_HEAD_JOINS)},
    },
  )
  table: str | None = field(
    None,
    'name of a table shared by all layers and memories with this name; None: one for each layer',
    may_be_empty=False,
    only_for={'key': _TEXT_KEYS, 'recurrent': (None,)},
  )
  sliced: bool = field(
    False,
    'each layer reads its own `width` values of the rows of a shared table',
    needs={True: {'table': (ANY,), 'layers': (ANY,)}},
  )
  orders: tuple[int, ...] = field((2, 3), 'n of n-grams', at_least=1, at_most=ngram_sizes.MAX_ORDER)
  heads: int = field(
    8,
    'hash heads of each order',
    at_least=1,
    at_most=ngram_sizes.MAX_HEADS,
    relations=(equals('model.heads', where={'pairing': ('attended',)}),),
  )
  rows: tuple[int, ...] = field(
    (16_384,),
    'base rows of a head, by order or for all',
    at_least=1,
    only_for={'row_rule': tuple(rule for rule in ngram_sizes.ROW_RULES if rule != 'vocabulary')},
  )
  row_rule: str = field(
    'prime', 'rule from the base number to the rows of each head', choices=ngram_sizes.ROW_RULES
  )
  row_multiple: int = field(1, 'pad each table up to a multiple of this many rows', at_least=1)
  width: int | None = field(
    64,
    'values of a row; None: as needed in the feed-forward or the values of attention',
    at_least=1,
    needs={None: {'point': ('values', *INSIDE_FEED_FORWARD), 'projection': (False,)}},
    relations=(
      equals(
        'model.width',
        where=_SUM | {'projection': (False,), 'point': ('before_attention',)},
        reason='with projection=True rows may have any width',
      ),
      equals(
        'model.feed_forward_width',
        where={'point': ('feed_forward',), 'projection': (False,)},
        remedy='use None',
      ),
      equals(
        'model.width',
        where={'point': ('after_feed_forward',), 'projection': (False,)},
        remedy='use None',
      ),
    ),
  )
  deviation: float | None = field(
    0.02,
    # None: cut at three deviations (BLT); of a uniform table, of the model width (nanochat).
    'initial standard deviation of the tables; None: width^(-1/2)',
    at_least=0,
    free_on_resume=True,
    only_for={'table_initial': ('normal', 'uniform')},
  )
  table_initial: str = field(
    'normal',
    'initial tables: with `deviation`, or by rows of a head: xavier (praxis), xavier_normal',
    choices=('normal', 'uniform', 'xavier', 'xavier_normal'),
    free_on_init=True,
  )
  untrained_row: int | None = field(None, 'untrained row of each head', at_least=0)
  seed: int = field(
    0, 'seed of multipliers', at_least=0, at_most=2**31 - 1, only_for={'hash': ('engram', 'ple')}
  )
  boundary: str = field(
    'starts',
    'boundaries of n-grams: document starts, also eos_id, or none',
    choices=BOUNDARIES,
    needs={'eos_id': {'eos_id': (ANY,)}},
  )
  eos_id: int | None = field(
    None, 'token id at the end of a document', at_least=0, only_for={'boundary': ('eos_id',)}
  )
  fill_id: int | None = field(
    0,
    'id (before compression) in place of ids before a boundary; None: eos_id',
    at_least=0,
    only_for={'distinct_start': (False,), 'hash': _FILLED},
    needs={None: {'boundary': ('eos_id',), 'key': TOKEN_KEYS}},
  )
  distinct_start: bool = field(
    False,
    'use a separate id before a boundary',
    only_for={'key': ('tokens', *CLUSTER_KEYS), 'hash': _FILLED},
  )
  displacement: int = field(
    0, 'extra distance of the predecessors, in tokens (a control)', at_least=0, at_most=2**16
  )
  pairing: str = field(
    'previous',
    'partner of each token: the previous token, or the most attended one',
    choices=('previous', 'attended'),
    only_for={'point': ('after_attention',)},
    needs={
      'attended': {
        'orders': ((2,),),
        'key': ('clusters',),
        'boundary': ('starts',),
        'displacement': (0,),
        'position': ENCODINGS,
        'persistent.kind': (None, 'all_attention', 'attention_split', 'single_head'),
      }
    },
  )

  clusters: int = field(256, 'clusters of each head', at_least=1, only_for=_CLUSTERS)
  decay: float = field(0.999, 'decay of the centroids', at_least=0, at_most=1, only_for=_CLUSTERS)
  epsilon: float = field(1e-6, 'added to the size of a cluster', above=0, only_for=_CLUSTERS)
  prenormalize: bool = field(False, 'normalise the vectors before clustering', only_for=_CLUSTERS)
  empty: str = field('shrink', 'centroids of unused clusters', choices=EMPTY, only_for=_CLUSTERS)
  initial: str | None = field(
    None,
    'initial centroids; hidden: inputs in the first batches; None: uniform',
    choices=INITIAL,
    only_for=_CLUSTERS,
    needs={'data': {'key': ('embedding_clusters',)}},
  )
  padding_trains: bool = field(False, 'padding updates centroids, as in praxis', only_for=_CLUSTERS)

  bias: bool = field(False, 'biases of the projections to keys and values', only_for=_GATE)
  norm_epsilon: float | None = field(None, 'norm epsilon; None: by dtype', above=0, only_for=_NORMS)
  norm_offset: bool = field(False, 'RMS norms multiply by 1 + weight, not weight', only_for=_NORMS)
  convolution: int = field(
    0, 'width of the convolution; 0: no convolution', at_least=0, at_most=128, only_for=_GATE
  )
  convolution_epsilon: float = field(
    1e-5, 'epsilon of the norm before the convolution', above=0, only_for=_GATE
  )
  gate: str = field('learned', 'gate; half: fixed (a control)', choices=GATES, only_for=_GATE)
  zero_score: str = field('half', 'gate of a score of 0', choices=ZERO_SCORES, only_for=_GATE)

  activation: str = field(
    'gelu',
    'activation of the hidden states in a product',
    choices=activations.NAMES,
    only_for=_PRODUCT,
  )
  embedding_part: bool = field(
    False, 'add a projection of the token embedding to the rows (Gemma 3n)', only_for=_PRODUCT
  )

  projection: bool = field(False, 'project rows to the width of the join', only_for=_PROJECTED)
  amplification: str = field(
    'none', 'multiply the result by D^(1/2), or normalise it', choices=AMPLIFICATIONS, only_for=_SUM
  )

  signs: int | None = field(
    None,
    'rows of random signs that multiply the rows of the table; None: no signs',
    at_least=1,
    at_most=2**24,
    only_for={'key': _TEXT_KEYS},
  )
  sign_hash: str = field(
    'xor',
    'hash from an n-gram to a row of signs: XOR of the ids, or of their products with constants',
    choices=('xor', 'products'),
    needs={'products': {'signs': (ANY,)}},
  )
  factor: float | None = field(
    None,
    'initial value of a learned factor of the sum in each layer; None: no factor',
    only_for={'join': ('sum',)},
  )

  value_gate: ValueGateConfig | None = field(
    None, 'gate of rows in values; None: no gate', only_for=_VALUES
  )
  one_head: bool = field(False, 'add rows to one head per layer, in turn', only_for=_VALUES)

  start: str | None = start_field(
    needs={'neutral': {'join': tuple(join for join in JOINS if join != 'replace')}},
    reason='rows cannot replace the up projection of a trained model; join="sum" adds to it',
  )
  optimizer: str = field('adagrad', 'optimizer of the tables', choices=OPTIMIZERS)
  # None: 1 for both Adagrads with their own learning rate; 5 for the others, as in Engram.
  learning_rate_factor: float | None = field(
    None, 'times optimizer.table.learning_rate (both Adagrads) or optimizer.learning_rate', above=0
  )
  exchange: str = exchange_field()
  table_memory: str = field(
    'device',
    'memory space of the tables',
    choices=TABLE_MEMORIES,
    free_on_resume=True,
    only_for={'key': _TEXT_KEYS, 'optimizer': HOST_OPTIMIZERS},
    reason='only the rows looked up before the step are updated',
  )
  table_dtype: str = field('float32', 'dtype of the tables', choices=('float32', 'bfloat16'))

  @classmethod
  def from_preset(cls, preset: str, **values: Any) -> 'NGramMemoryConfig':
    """Returns the memory of one of PRESETS, with other values of some fields.

    Raises BadInput for another name.
    """
    return cls(preset=preset, **values)

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the memory in a model with this number of blocks."""
    blocks = self.layers
    if self.every_block:
      first = (layers - 1) % self.block_stride
      blocks = range(first, layers, self.block_stride)
    point = self.point
    # The parameters of the earliest memories, after one block, are beside the blocks.
    is_beside = self.join in PER_HEAD_JOINS and len(blocks) == 1
    if point == 'after_block' and not is_beside:
      point = 'block_end'
    return tuple(Place(point, block) for block in blocks) or (Place('input'),)

  @property
  def is_in_blocks(self) -> bool:
    """Whether it acts in blocks, rather than at the input."""
    return bool(self.layers) or self.every_block

  def resolved(self, model: Any) -> 'NGramMemoryConfig':
    """Returns the memory with its blocks and width filled in from the model."""
    layers = self.layers
    if self.every_block:
      layers = tuple(place.block for place in self.places(model.layers))
    width = self.width
    if width is None and self.point == 'values':
      width = max(1, self._value_features(model) // self.num_rows)
    elif width is None:
      width = model.width_at(self.point)
    return dataclasses.replace(self, layers=layers, every_block=False, block_stride=1, width=width)

  @property
  def num_rows(self) -> int:
    """Number of rows looked up per token."""
    return len(self.orders) * self.heads

  def _value_features(self, model: Any) -> int:
    """Returns the number of value features changed by the rows of a token."""
    if self.one_head:
      return model.head_features
    return model.width_at('values')

  def start_id(self, vocabulary_size: int | None) -> int | None:
    """Returns the id read in place of ids before a boundary."""
    if self.hash == 'speedrun':
      return ngram_hashes.NO_TOKEN
    if self.distinct_start:
      return self.num_ids(vocabulary_size)
    if self.fill_id is None:
      return self.eos_id
    return self.fill_id

  @property
  def starts_with_equal_rows(self) -> bool:
    """Whether all rows are equal at the start: 0, or 1 if they multiply."""
    if self.point == 'values' and self.start == 'neutral' and self.join != 'interpolation':
      return True
    return self.deviation == 0 and self.table_initial in ('normal', 'uniform')

  def table_width(self, features: int) -> int:
    """Returns the width of a table row, including all layers if it is sliced.

    Args:
      features: number of features to join the rows to.
    """
    if self.sliced:
      return self.width * len(self.layers)
    if self.width is None:
      return features
    return self.width

  def table_index(self, block: int) -> int:
    """Returns the index of the table read in a block, from 0."""
    if self.table is not None:
      return 0
    return self.index(block)

  def index(self, block: int) -> int:
    """Returns the index of a block among the memory's layers, from 0; 0 at the input.

    Raises:
      ValueError: the memory is not in this block.
    """
    if not self.layers:
      return 0
    if block not in self.layers:
      raise ValueError(f'block {block} is not among the layers {self.layers} of the memory')
    return self.layers.index(block)

  def num_ids(self, vocabulary_size: int | None) -> int | None:
    """Returns the number of distinct ids of the key, before compression."""
    if self.key in CLUSTER_KEYS:
      return self.clusters
    if self.key == 'bytes':
      return BYTE_IDS
    return vocabulary_size

  def hashes(self, vocabulary_size: int) -> tuple[ngram_hashes.NumpyHash, ...]:
    """Returns the hash of each table, with the rows of each head, see `sizes.table_sizes`.

    Each layer has its own table, or all share one.

    Raises:
      ValueError: invalid sizes for a table, or for this kind of hash.
    """
    num_ids = self.num_ids(vocabulary_size) + self.distinct_start
    layers = self.layers
    if self.table is not None or not layers:
      layers = (0,)
    sizes = ngram_sizes.table_sizes(
      self.row_rule, self.rows, self.orders, self.heads, num_ids, len(layers)
    )
    hashes = []
    for index, layer in enumerate(layers):
      hashes.append(
        ngram_hashes.NumpyHash(
          self.hash, self.orders, sizes[index], num_ids, self.seed, layer, index
        )
      )
    return tuple(hashes)

  def table_rows(self, vocabulary_size: int) -> tuple[int, ...]:
    """Returns the rows of each table, a multiple of `row_multiple`."""
    padded_rows = []
    for ngram_hash in self.hashes(vocabulary_size):
      rows = ngram_sizes.first_rows(self.row_rule, ngram_hash.sizes)[-1]
      rows += -rows % self.row_multiple
      padded_rows.append(rows)
    return tuple(padded_rows)

  def check(self, model: Any, path: str) -> None:
    """Raises BadInput for a memory that is invalid for the model.

    Args:
      model: the config of the model.
      path: dotted path of this block, such as model.ngram_memories.0.
    """
    self._check_places(path)
    self._check_learns(path)
    if self.point == 'values':
      self._check_values(model, path)
    D = model.width_at(self.point)
    if self.point in INSIDE_FEED_FORWARD and not model.feed_forward_width:
      raise errors.BadInput(
        f'{path}.point={self.point!r} needs a feed-forward, but model.feed_forward_width=0: use '
        f'another width, or another point'
      )
    if self.key in CLUSTER_KEYS and D % self.heads:
      width = f'model.width={D}'
      if D != model.width:
        width = f'model.heads x model.head_width = {D}'
      nearest = DIVIDES.nearest(self.heads, D)
      raise errors.BadInput(f'{path}.heads={self.heads} must divide {width}: use {nearest}')
    if self.table_initial == 'xavier' and len(set(self.rows)) > 1:
      raise errors.BadInput(
        f'{path}.table_initial="xavier" needs the same number of rows for all orders, not '
        f'{path}.rows={self.rows}: use one number, or "normal"'
      )
    self.resolved(model)._check_tables(D, 1, path)  # the rest in `check_vocabulary`

  def check_vocabulary(self, size: int, model: Any, path: str) -> None:
    """Raises BadInput for ids outside a vocabulary, or sizes that do not fit it."""
    for name, num_ids in (('eos_id', size), ('fill_id', self.num_ids(size))):
      value = getattr(self, name)
      if value is not None and value >= num_ids:
        raise errors.BadInput(
          f'{path}.{name}={value} is not below the number of ids {num_ids:,} of '
          f'{path}.key={self.key!r}: use an id of the vocabulary of this run'
        )
    self.resolved(model)._check_tables(model.width_at(self.point), size, path)

  def _check_places(self, path: str) -> None:
    """Raises BadInput for blocks unsupported by the memory."""
    if not self.is_in_blocks and self.join in ('gate', 'product'):
      raise errors.BadInput(
        f'{path}.join={self.join!r} needs {path}.layers, but it is (): set {path}.layers; '
        f'{_IN_BLOCKS}'
      )
    if not self.is_in_blocks and self.point != 'before_attention':
      raise errors.BadInput(
        f'{path}.point={self.point!r} needs {path}.layers, but it is (): set {path}.layers, or use '
        f"'before_attention'"
      )
    if len(set(self.layers)) < len(self.layers):
      raise errors.BadInput(f'{path}.layers={self.layers} has a block twice: use it once')

  def _check_values(self, model: Any, path: str) -> None:
    """Raises BadInput for rows that do not fit the values of attention, or the gate."""
    row_width = self.resolved(model).width
    width = self.num_rows * row_width
    features = self._value_features(model)
    if width != features and not self.projection:
      raise errors.BadInput(
        f'{path}.width={self.width}: the rows of a token have {self.num_rows} x {row_width} = '
        f'{width} values, but {path}.point="values" with {path}.one_head={self.one_head} has '
        f'{features} features: use None if {self.num_rows} rows divide them, or '
        f'{path}.projection=True'
      )
    gate = self.value_gate
    if gate is not None and gate.row_channels > width:
      raise errors.BadInput(
        f'{path}.value_gate.row_channels={gate.row_channels} is more than the {width} values of '
        f'the rows of a token: use {width}'
      )

  def _check_learns(self, path: str) -> None:
    """Raises BadInput if rows and factor are both 0, and neither has a gradient."""
    if self.factor == 0 and (self.starts_with_equal_rows or self.start == 'neutral'):
      raise errors.BadInput(
        f'{path}.factor=0 would learn nothing, because the rows start at 0 too: use '
        f'another factor, or {path}.deviation=0.02'
      )
    if self.join == 'interpolation' and self.start == 'neutral' and self.starts_with_equal_rows:
      raise errors.BadInput(
        f'{path}.deviation=0 with {path}.join="interpolation" and {path}.start="neutral" would '
        f'learn nothing, because the rows and their weight are 0: use {path}.deviation=0.02'
      )

  def check_sizes(self, width: int, vocabulary_size: int = 1) -> None:
    """Raises ValueError for invalid sizes, or sizes that do not fit inputs of this width."""
    if self.join in PER_HEAD_JOINS:
      ngram_sizes.check_widths(width, self.heads, self.width, self.join, len(self.orders))
    unknown = set(self.orders) - set(ngram_hashes.SIGN_FACTORS)
    if self.sign_hash == 'products' and unknown:
      raise ValueError(
        f'sign_hash="products" has constants for 2- and 3-grams, not for orders={self.orders}: use '
        f'"xor"'
      )
    self.hashes(vocabulary_size)

  def _check_tables(self, width: int, vocabulary_size: int, path: str) -> None:
    """Raises BadInput for invalid tables (see `check_sizes`) or missing rows."""
    try:
      self.check_sizes(width, vocabulary_size)
      sizes = self.hashes(vocabulary_size)[0].sizes
      largest = max(self.table_rows(vocabulary_size))
    except ValueError as error:
      raise errors.BadInput(f'{path}: {error}') from error
    smallest = min(map(min, sizes))
    has_rows = self.row_rule != 'vocabulary' or vocabulary_size > 1  # else they are not known yet
    if has_rows and self.untrained_row is not None and self.untrained_row >= smallest:
      raise errors.BadInput(
        f'{path}.untrained_row={self.untrained_row} is not below the {smallest:,} rows of the '
        f'smallest head: use None, or more rows'
      )
    if largest >= 2**31:
      raise errors.BadInput(
        f'{path}.row_multiple={self.row_multiple} gives a table of {largest:,} rows, which must be '
        f'less than 2^31: use a smaller multiple'
      )


def name(number: int) -> str:
  """Returns the name of memory `number` of a model, for its parameters and optimizer."""
  return f'{PREFIX}{number}'


def table_module(number: int, memory: NGramMemoryConfig) -> str:
  """Returns the name of the module with the tables of memory `number`, and of their optimizer.

  It is the name of the memory, or the name of its shared table.
  """
  if memory.table is None:
    return name(number)
  return TABLE_PREFIX + memory.table
