"""What a model is made of, as frozen dataclasses. Every switch is a field here."""

import dataclasses

import jax
import jax.numpy as jnp

from ngrammer_jax import errors
from ngrammer_jax.layers import feed_forward, flash, ngrammer, quantizer, table
from ngrammer_jax.models.attention_config import MemoryConfig, PersistentConfig, SpanConfig
from ngrammer_jax.models.initialization import InitialConfig
from ngrammer_jax.models.recurrent_config import RecurrentConfig

LAYERS = ('input', 'begin', 'middle', 'end', 'attention')
PAIRING = ('previous', 'attended', 'none')
# `segment_sinusoid` and `learned`, one in every layer, count from the end of the segment: the
# baselines of Transformer-XL, which know no other segment.
SEGMENT_POSITIONS = ('segment_sinusoid', 'learned')
# Those that count distances to earlier tokens, and have none for later ones.
BACKWARD_POSITIONS = ('relative', 'shaw', 'table')
POSITIONS = ('rope', 'sinusoid', 'relative', 'shaw', 'table', *SEGMENT_POSITIONS, 'none')
DTYPES = ('auto', 'bfloat16', 'float32', 'float64')
# A sub-layer F with residual: pre x + F(LN x), post x + LN(F x), post_skip LN(x + F x), hybrid
# x + LN(F(LN x)); primer: pre for attention, post for the feed-forward.
NORMS = ('pre', 'post', 'post_skip', 'hybrid', 'primer')
REMAT = ('none', 'minimal', 'full')


@dataclasses.dataclass(frozen=True)
class NGramConfig:
  """The N-Grammer layer (see `layers.NGrammer`)."""

  clusters: int | None = 256  # None: n-grams of the raw token ids, no quantiser
  vocabulary_size: int = 16_384  # n-grams of each head and order
  dim: int = 8  # width of an n-gram vector
  heads: int | None = None  # None: as many as the attention has
  combine: str = 'concat'
  orders: tuple[int, ...] = (2,)  # lengths of the n-grams
  distinct_start: bool = False  # what is before a document is not cluster 0
  # After the embedding; or the first, the middle or the last block; or attention in every block.
  layer: str = 'input'
  # What a token pairs with in each block, after attention: the token before, the one that the
  # head attends to most among those before, or no layer there. One entry: the same for all.
  pairing: tuple[str, ...] = ('previous',)
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False
  empty: str = 'shrink'  # what clusters without tokens do
  # Where centroids begin; None: data at the input of more tokens than clusters, else uniform.
  initial: str | None = None
  padding_trains: bool = False  # after attention: padding moves the centroids too, as in praxis
  # What devices exchange of the tables' gradient: rows, the table, or what takes less (auto).
  exchange: str = 'auto'

  def after_block(self, layers: int) -> int | None:
    """The number of blocks that come before the layer; None where it stands in blocks."""
    return {'input': 0, 'begin': 1, 'middle': layers // 2, 'end': layers}.get(self.layer)

  def pairing_of(self, block: int) -> str:
    """The pairing after the attention of a block."""
    if self.layer != 'attention':
      return 'none'
    return self.pairing[block if len(self.pairing) > 1 else 0]

  def check(self, model: 'ModelConfig') -> None:
    """Raises BadInput for a layer that the model cannot have."""
    heads = model.heads if self.heads is None else self.heads
    for key in ('clusters', 'heads'):
      value = getattr(self, key)
      if value is not None and value < 1:
        raise errors.BadInput(f'model.ngram.{key}={value} must be at least 1, or None')
    choices = {'layer': LAYERS, 'empty': quantizer.EMPTY, 'exchange': table.EXCHANGE}
    errors.check_choices('model.ngram', self, choices)
    if self.initial is not None:
      errors.check_choices('model.ngram', self, {'initial': quantizer.INITIAL})
    self._check_pairing(model)
    if not 0 <= self.decay <= 1:
      raise errors.BadInput(f'model.ngram.decay={self.decay} must be from 0 to 1')
    if not self.epsilon > 0:
      raise errors.BadInput(f'model.ngram.epsilon={self.epsilon} must be above 0')
    if self.initial == 'data' and (self.layer != 'input' or model.adaptive_softmax is not None):
      raise errors.BadInput(
        f'model.ngram.initial="data" draws from the embedding, but the layer is at '
        f'model.ngram.layer={self.layer!r}, or there is an adaptive softmax: use "uniform" or '
        f'"normal"'
      )
    try:
      ngrammer.check_shape(
        model.width, heads, self.vocabulary_size, self.dim, self.combine, self.orders
      )
    except ValueError as error:
      raise errors.BadInput(f'model.ngram: {error}') from error

  def _check_pairing(self, model: 'ModelConfig') -> None:
    for pairing in self.pairing:
      if pairing not in PAIRING:
        raise errors.BadInput(
          f'model.ngram.pairing: {pairing!r} is not one of: {", ".join(PAIRING)}'
        )
    if len(self.pairing) not in (1, model.layers):
      raise errors.BadInput(
        f'model.ngram.pairing has {len(self.pairing)} entries for model.layers={model.layers}: '
        f'give one for each layer, or a single one for all'
      )
    if self.layer != 'attention':
      if self.padding_trains:
        raise errors.BadInput(
          f'model.ngram.padding_trains=True needs model.ngram.layer="attention", not {self.layer!r}'
        )
      if self.pairing != ('previous',):
        raise errors.BadInput(
          f'model.ngram.pairing={self.pairing} needs model.ngram.layer="attention": elsewhere '
          f'a token pairs with the one before'
        )
      return
    if self.clusters is None:
      raise errors.BadInput(
        'model.ngram.clusters=None after attention: what it finds has no token id, give clusters'
      )
    if set(self.pairing) == {'none'}:
      raise errors.BadInput(
        'model.ngram.pairing is "none" for all layers: use model.ngram=None, or pair in some'
      )
    if 'attended' in self.pairing and model.position == 'none':
      raise errors.BadInput(
        'model.ngram.pairing has "attended", but with model.position="none" equal tokens are '
        'attended to alike, and chance decides which one a token pairs with: use "rope"'
      )
    if self.heads not in (None, model.heads):
      raise errors.BadInput(
        f'model.ngram.heads={self.heads} after attention, whose model.heads={model.heads} '
        f'are those of the layer: leave model.ngram.heads=None'
      )
    if 'attended' in self.pairing and self.orders != (2,):
      raise errors.BadInput(
        f'model.ngram.orders={self.orders}: what is attended to makes pairs, orders=(2,)'
      )


@dataclasses.dataclass(frozen=True)
class AdaptiveSoftmaxConfig:
  """Adaptive input and softmax (see `layers.adaptive_softmax`)."""

  cutoffs: tuple[int, ...] = ()  # the first word of every tail
  divisor: int = 1  # each tail is so many times narrower
  embedding_width: int | None = None  # None: that of the model
  tied_projections: tuple[bool, ...] = (True,)  # one for all clusters, or one for each
  project_same_width: bool = True  # where the divisor is above 1, from the width to itself too
  dropout: float | None = None  # of the embeddings and of the result; None: that of the model

  def check(self, model: 'ModelConfig') -> None:
    """Raises BadInput for clusters that cannot be."""
    borders = (0, *self.cutoffs)
    if any(b <= a for a, b in zip(borders, borders[1:], strict=False)):
      raise errors.BadInput(
        f'model.adaptive_softmax.cutoffs={self.cutoffs} must increase, the first above 0'
      )
    if self.divisor < 1:
      raise errors.BadInput(f'model.adaptive_softmax.divisor={self.divisor} must be at least 1')
    clusters, width = len(borders), self.embedding_width or model.width
    if width < 1:
      raise errors.BadInput(f'model.adaptive_softmax.embedding_width={width} must be at least 1')
    if width // self.divisor ** (clusters - 1) < 1:
      raise errors.BadInput(
        f'model.adaptive_softmax.divisor={self.divisor}: width {width} leaves nothing for the last '
        f'of {clusters} clusters'
      )
    if len(self.tied_projections) not in (1, clusters):
      raise errors.BadInput(
        f'model.adaptive_softmax.tied_projections has {len(self.tied_projections)} entries for '
        f'{clusters} clusters: give one for each, the head first, or a single one for all'
      )
    if self.dropout is not None and not 0 <= self.dropout < 1:
      raise errors.BadInput(
        f'model.adaptive_softmax.dropout={self.dropout} must be at least 0 and below 1'
      )
    if not model.softmax_bias:
      raise errors.BadInput('model.softmax_bias=False: an adaptive softmax has biases')

  def products(self, width: int, size: int) -> int:
    """Multiplications of the output layer for one token, of `width` features and `size` words."""
    borders, count = (0, *self.cutoffs, size), 0
    for i in range(len(borders) - 1):
      J = (self.embedding_width or width) // self.divisor**i
      projected = J != width or (self.divisor > 1 and self.project_same_width)
      count += J * (borders[i + 1] - borders[i]) + J * width * projected
    return count

  def check_vocabulary(self, size: int) -> None:
    """Raises BadInput where a tail would be empty."""
    if self.cutoffs and self.cutoffs[-1] >= size:
      raise errors.BadInput(
        f'model.adaptive_softmax.cutoffs={self.cutoffs}: the vocabulary has only {size:,} words'
      )


@dataclasses.dataclass(frozen=True)
class PositionalConfig:
  """More about `model.position`."""

  min_timescale: float = 1.0  # of rope
  max_timescale: float = 10_000.0
  shared_biases: bool = True  # of relative: u and v are the same in all layers
  # Distances that count as one: of relative, those beyond it; of shaw, those from it on.
  clamp_length: int | None = None
  # Of shaw and table: distances that are learned; of learned: positions.
  max_length: int = 512

  def check(self, model: 'ModelConfig') -> None:
    """Raises BadInput for an impossible value, or one that is not for this model."""
    if not (self.min_timescale > 0 and self.max_timescale > 0):
      raise errors.BadInput(
        f'model.positional.min_timescale={self.min_timescale} and max_timescale='
        f'{self.max_timescale} must be above 0'
      )
    if self.clamp_length is not None and self.clamp_length < 1:
      raise errors.BadInput(f'model.positional.clamp_length={self.clamp_length} must be at least 1')
    if self.max_length < 1:
      raise errors.BadInput(f'model.positional.max_length={self.max_length} must be at least 1')
    of = {
      'rope': {'min_timescale', 'max_timescale'},
      'relative': {'shared_biases', 'clamp_length'},
      'shaw': {'max_length', 'clamp_length'},
      'table': {'max_length'},
      'learned': {'max_length'},
    }
    for field in dataclasses.fields(self):
      if field.name not in of.get(model.position, set()):
        if getattr(self, field.name) != field.default:
          raise errors.BadInput(
            f'model.positional.{field.name} is not for model.position={model.position!r}'
          )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only Transformer and the memories added to it, or a recurrent model."""

  layers: int = 4
  width: int = 256
  heads: int = 4
  # About 8/3 of the width when gated, 4 of it when not; 0: no feed-forward.
  feed_forward_width: int = 688
  activation: str = 'gelu'
  gated: bool = True
  bias: bool = False  # of the linear maps
  feed_forward_bias: bool | None = None  # of those of the feed-forward; None: as the others
  position: str = 'rope'
  positional: PositionalConfig | None = None  # None: its defaults
  per_dim_scale: bool = False
  norm: str = 'pre'  # where the layer norms stand, see NORMS
  norm_epsilon: float = 1e-6
  final_norm: bool = True  # one more, before the softmax
  convolution: int | None = None  # taps on q, k and v (Primer: 3)
  shared_query_key: bool = False  # q from the convolved k (full Primer)
  tie_embeddings: bool = True
  scale_embeddings: bool = True  # by the square root of the width
  softmax_bias: bool = True
  vocabulary_chunk: int | None = None  # logits that exist at one time; None: all
  # Of the embeddings, of what each sub-layer adds, of the encodings of distances (relative), and
  # of the result where it has no norm.
  dropout: float = 0.0
  attention_dropout: float = 0.0  # of the probabilities
  inner_dropout: float = 0.0  # of the inner layer of the feed-forward
  dtype: str = 'auto'  # of the computation; auto: bfloat16 on accelerators, float32 on CPU
  scan_layers: bool = True  # one compiled layer, instead of all of them in a row
  remat: str = 'none'  # what the backward pass computes again
  # Of attention, see `layers.flash`. None: that there is for the device, where it can do it.
  kernel: str | None = None
  ngram: NGramConfig | None = None
  memory: MemoryConfig | None = None
  adaptive_softmax: AdaptiveSoftmaxConfig | None = None
  span: SpanConfig | None = None
  persistent: PersistentConfig | None = None
  initial: InitialConfig | None = None  # None: every layer's own initial weights
  recurrent: RecurrentConfig | None = None

  def positions(self) -> PositionalConfig:
    """More about positions, the defaults where nothing is said."""
    return self.positional or PositionalConfig()

  @property
  def outer_dropout(self) -> float:
    """Of the embeddings, and of the result where it has no norm."""
    own = None if self.adaptive_softmax is None else self.adaptive_softmax.dropout
    return self.dropout if own is None else own

  @property
  def sees_later_tokens(self) -> bool:
    """Whether a prefix can be bidirectional."""
    return self.recurrent is None and self.position not in BACKWARD_POSITIONS

  @property
  def context_heads(self) -> int:
    """Heads that attend to the context."""
    split = self.persistent is not None and self.persistent.kind == 'head_split'
    return self.heads // 2 if split else self.heads

  def compute_dtype(self) -> jnp.dtype:
    """The dtype of activations on the default backend."""
    if self.dtype == 'auto':
      return jnp.dtype('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
    if self.dtype == 'float64' and not jax.config.jax_enable_x64:
      raise errors.BadInput('model.dtype="float64" needs the environment variable JAX_ENABLE_X64=1')
    return jnp.dtype(self.dtype)

  def check(self) -> None:
    """Raises BadInput for a combination that cannot work. Touches no device."""
    choices = {
      'activation': tuple(feed_forward.ACTIVATIONS),
      'position': POSITIONS,
      'norm': NORMS,
      'dtype': DTYPES,
      'remat': REMAT,
    }
    errors.check_choices('model', self, choices)
    for key in ('layers', 'width', 'heads', 'vocabulary_chunk', 'convolution'):
      value = getattr(self, key)
      if value is not None and value < 1:
        raise errors.BadInput(f'model.{key}={value} must be at least 1')
    if self.feed_forward_width < 0:
      raise errors.BadInput(
        f'model.feed_forward_width={self.feed_forward_width} must be at least 1, or 0 for none'
      )
    if self.recurrent is None:
      self._check_heads()
    for key in ('dropout', 'attention_dropout', 'inner_dropout'):
      if not 0 <= getattr(self, key) < 1:
        raise errors.BadInput(f'model.{key}={getattr(self, key)} must be at least 0 and below 1')
    if not self.norm_epsilon > 0:
      raise errors.BadInput(f'model.norm_epsilon={self.norm_epsilon} must be above 0')
    if self.position in SEGMENT_POSITIONS and self.memory is not None and self.memory.length:
      raise errors.BadInput(
        f'model.position={self.position!r} counts from the end of a segment, and knows no memory: '
        f'use model.memory=None (and evaluation.memory=None), or model.position="relative"'
      )
    blocks = (self.ngram, self.memory, self.positional, self.adaptive_softmax)
    for block in (self.recurrent, *blocks, self.span, self.persistent, self.initial):
      if block is not None:
        block.check(self)
    if self.position == 'table':
      self._check_table()
    if self.kernel is not None:
      self._check_kernel()

  def _check_kernel(self) -> None:
    errors.check_choices('model', self, {'kernel': flash.KERNELS})
    more = {
      f'position={self.position!r}': self.position in BACKWARD_POSITIONS,
      'memory': self.memory is not None,
      'span': self.span is not None,
      'persistent': self.persistent is not None and self.persistent.vectors > 0,
      f'attention_dropout={self.attention_dropout}': self.attention_dropout > 0,
      'ngram.layer="attention"': self.ngram is not None and self.ngram.layer == 'attention',
    }
    if self.kernel not in ('xla', 'blocks') and any(more.values()):
      which = next(key for key, there in more.items() if there)
      raise errors.BadInput(
        f'model.kernel={self.kernel!r} knows no model.{which}: use model.kernel=None, which takes '
        f'what there is'
      )

  def _check_table(self) -> None:
    window = None if self.memory is None else self.memory.window()
    reach = None if window is None else window - (not self.memory.sees_itself())
    if reach is None or reach > self.positions().max_length:
      raise errors.BadInput(
        f'model.position="table" has a vector for each of model.positional.max_length='
        f'{self.positions().max_length} distances, but a token sees '
        f'{"any number" if reach is None else reach} of them: bound it with model.memory.length '
        f'and model.memory.same_length, in evaluation too, or learn more'
      )

  def _check_heads(self) -> None:
    if self.position in ('sinusoid', 'segment_sinusoid', 'relative') and self.width % 2:
      raise errors.BadInput(
        f'model.position={self.position!r} needs an even width, not model.width={self.width}'
      )
    even = self.position == 'rope'
    fits = lambda n: self.width % n == 0 and not (even and self.width // n % 2)
    if fits(self.heads):
      return
    heads = [n for n in range(1, self.width + 1) if fits(n)]
    mend = (
      f'use model.heads={min(heads, key=lambda n: abs(n - self.heads))}, or' if heads else 'use'
    )
    if self.width % self.heads:
      raise errors.BadInput(
        f'model.heads={self.heads} does not divide model.width={self.width}: '
        f'{mend} a width that is a multiple of {self.heads * (1 + even)}'
      )
    raise errors.BadInput(
      f'model.position="rope" needs an even head width, not {self.width // self.heads} '
      f'(model.width={self.width} / model.heads={self.heads}): '
      f'{mend} a width that is a multiple of {2 * self.heads}'
    )
