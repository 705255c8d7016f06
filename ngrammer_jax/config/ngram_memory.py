"""N-gram memories: keys, hash, tables and join, and presets with the published values."""

import dataclasses

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.memory import Place
from ngrammer_jax.config.ngram import EMPTY, INITIAL

# Ids that n-grams are made of: token ids; ids of the normalised texts of tokens (Engram); byte + 4
# (BLT); cluster ids of the input of the memory; cluster ids of the embedding.
KEYS = ('tokens', 'compressed', 'bytes', 'clusters', 'embedding_clusters')
CLUSTER_KEYS = ('clusters', 'embedding_clusters')
# XOR of products in 64 bits (engram, ple: the multipliers differ); polynomials of the ids modulo
# the rows (polynomial) or 2^64 (blt); the hash of the N-Grammer layer (praxis).
HASHES = ('engram', 'ple', 'polynomial', 'blt', 'praxis')
JOINS_AT_INPUT = ('sum', 'mean', 'concat', 'add')
JOINS = ('gate', *JOINS_AT_INPUT)
ROW_RULES = ('prime', 'longcat', 'over_encoding', 'exact', 'multiple', 'multiple_plus_one')
BOUNDARIES = ('starts', 'eos_id', 'none')
GATES = ('learned', 'half')
ZERO_SCORES = ('half', 'positive')
AMPLIFICATIONS = ('none', 'sqrt_width', 'norm')
OPTIMIZERS = ('adagrad', 'lazy_adam', 'adam', 'sinkhorn', 'frozen')
TABLE_MEMORIES = ('device', 'host')
NUM_BYTES = 260  # ids of bytes: byte + 4

_GATE = ('join', ('gate',))
_SUM = ('join', ('sum', 'mean'))
_CLUSTERS = ('key', CLUSTER_KEYS)

_DEMO_VOCABULARY = 129_280  # of DeepSeek-V3
_LONGCAT_VOCABULARY = 131_072

# Values of the published codes and papers; other fields have their defaults. `rows` and `layers`
# are of large models: small models need other ones. See docs and configs/ngram_memories.py.
PRESETS = {
  # The demo, deepseek-ai/Engram. The optimizer is from the paper, arXiv 2601.07372.
  'engram': dict(
    key='compressed',
    hash='engram',
    join='gate',
    layers=(1, 15),
    orders=(2, 3),
    heads=8,
    rows=(5 * _DEMO_VOCABULARY,),
    width=64,
    boundary='none',
    fill_id=2,
    bias=True,
    convolution=4,
    optimizer='adam',
  ),
  # DeepSeek-V4.1-Flash.
  'engram_v41': dict(
    key='compressed',
    hash='engram',
    join='gate',
    layers=(1, 14),
    orders=(2, 3, 4),
    heads=8,
    rows=(16_000_000,),
    width=256,
    fill_id=2,
    norm_epsilon=1e-6,
    zero_score='positive',
    optimizer='sinkhorn',
  ),
  # Qwen3.8-Flash-Next. The id of the end of a document depends on the vocabulary.
  'ple': dict(
    key='tokens',
    hash='ple',
    join='gate',
    layers=(1,),
    orders=(2, 3),
    heads=8,
    rows=(20_000_000,),
    row_multiple=128,
    width=160,
    seed=1234,
    boundary='eos_id',
    fill_id=None,
    norm_epsilon=1e-6,
    norm_offset=True,
    convolution=4,
    convolution_epsilon=1e-6,
    optimizer='adam',
    learning_rate_factor=1.0,
  ),
  # Huang et al., arXiv 2501.16975: OE-12.8M with 4 tables for each order.
  'over_encoding': dict(
    key='tokens',
    hash='polynomial',
    join='mean',
    orders=(2, 3),
    heads=4,
    rows=(12_800_000,),
    row_rule='over_encoding',
    width=256,
    projection=True,
    optimizer='adam',
    learning_rate_factor=1.0,
  ),
  # LongCat-Flash-Lite, arXiv 2601.21204.
  'longcat': dict(
    key='tokens',
    hash='polynomial',
    join='mean',
    orders=(2, 3, 4),
    heads=4,
    rows=(78 * _LONGCAT_VOCABULARY,),
    row_rule='longcat',
    width=256,
    boundary='eos_id',
    eos_id=2,
    projection=True,
    optimizer='adam',
    learning_rate_factor=1.0,
  ),
  # Byte Latent Transformer, arXiv 2412.09871. The width must be that of the model.
  'blt': dict(
    key='bytes',
    hash='blt',
    join='sum',
    orders=(3, 4, 5, 6, 7, 8),
    heads=1,
    rows=(500_000,),
    row_rule='exact',
    width=1024,
    optimizer='adam',
    learning_rate_factor=1.0,
  ),
}


@dataclasses.dataclass(frozen=True)
class NGramMemoryConfig:
  """Tables of n-grams, looked up at the input or in blocks (see docs/ngram_memories.md)."""

  preset: str | None = field(
    None, 'published values that the other fields start from', choices=tuple(PRESETS)
  )
  key: str = field('tokens', 'ids that n-grams are made of', choices=KEYS)
  hash: str = field('engram', 'hash from an n-gram to a row', choices=HASHES)
  join: str = field('gate', 'how rows are joined with the hidden states', choices=JOINS)
  layers: tuple[int, ...] = field(
    (), 'numbers of the blocks with this memory, from 0; (): at the input', at_least=0
  )
  orders: tuple[int, ...] = field((2, 3), 'lengths of the n-grams', at_least=1)
  heads: int = field(8, 'hash heads of each order', at_least=1)
  rows: tuple[int, ...] = field(
    (16_384,), 'base number of rows of a head, one for each order or one for all', at_least=1
  )
  row_rule: str = field(
    'prime', 'how the rows of each head follow from the base number', choices=ROW_RULES
  )
  row_multiple: int = field(1, 'pad each table up to a multiple of this many rows', at_least=1)
  width: int = field(64, 'values of a row', at_least=1)
  seed: int = field(
    0,
    'seed of the multipliers of the hash',
    at_least=0,
    at_most=2**31 - 1,
    only_for=('hash', ('engram', 'ple')),
  )
  boundary: str = field(
    'starts', 'n-grams end at document starts, also after eos_id, or nowhere', choices=BOUNDARIES
  )
  eos_id: int | None = field(
    None, 'token id at the end of a document', at_least=0, only_for=('boundary', ('eos_id',))
  )
  fill_id: int | None = field(
    0, 'id (before compression) read in place of those before a boundary; None: eos_id', at_least=0
  )
  displacement: int = field(
    0, 'read predecessors this many tokens further back (a control)', at_least=0
  )

  clusters: int = field(256, 'clusters of each head', at_least=1, only_for=_CLUSTERS)
  decay: float = field(
    0.999, 'decay of the moving average of the centroids', at_least=0, at_most=1, only_for=_CLUSTERS
  )
  epsilon: float = field(
    1e-6, 'added to the number of tokens of a cluster', above=0, only_for=_CLUSTERS
  )
  prenormalize: bool = field(False, 'normalise the vectors before clustering', only_for=_CLUSTERS)
  empty: str = field(
    'shrink', 'centroids of clusters without tokens', choices=EMPTY, only_for=_CLUSTERS
  )
  initial: str | None = field(
    None, 'initial centroids; None: as for model.ngram.initial', choices=INITIAL, only_for=_CLUSTERS
  )

  bias: bool = field(False, 'biases of the projections to keys and values', only_for=_GATE)
  norm_epsilon: float | None = field(
    None, 'epsilon of the RMS norms; None: that of the dtype', above=0, only_for=_GATE
  )
  norm_offset: bool = field(
    False, 'RMS norms multiply by 1 + weight instead of weight', only_for=_GATE
  )
  convolution: int = field(
    0, 'width of the depthwise convolution after the gate; 0: none', at_least=0, only_for=_GATE
  )
  convolution_epsilon: float = field(
    1e-5, 'epsilon of the RMS norm before the convolution', above=0, only_for=_GATE
  )
  gate: str = field('learned', 'gate; half: fixed (a control)', choices=GATES, only_for=_GATE)
  zero_score: str = field(
    'half',
    'gate of a score of 0: one half, or that of a small positive score',
    choices=ZERO_SCORES,
    only_for=_GATE,
  )

  projection: bool = field(False, 'project the rows of each head to the model width', only_for=_SUM)
  amplification: str = field(
    'none',
    'multiply the joined embedding by the square root of the width, or normalise it',
    choices=AMPLIFICATIONS,
    only_for=_SUM,
  )

  optimizer: str = field('adagrad', 'optimizer of the tables', choices=OPTIMIZERS)
  # None: 1 for adagrad, which has a learning rate of its own; 5 for the others, as in Engram.
  learning_rate_factor: float | None = field(
    None, 'times optimizer.table.learning_rate (adagrad) or optimizer.learning_rate', above=0
  )
  table_memory: str = field('device', 'memory that holds the tables', choices=TABLE_MEMORIES)

  @classmethod
  def from_preset(cls, name: str) -> 'NGramMemoryConfig':
    """Returns the memory with the values of one of PRESETS."""
    return cls(preset=name, **PRESETS[name])

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the memory in a model with this number of blocks."""
    del layers
    return tuple(Place('before_attention', block) for block in self.layers) or (Place('input'),)
