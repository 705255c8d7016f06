"""The N-Grammer layer."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.ngram import memory, sizes
from ngrammer_jax.config.place import Place
from ngrammer_jax.config.positions import ENCODINGS
from ngrammer_jax.config.relations import equals

# After the embedding; after the first, the middle or the last block; or after attention in blocks.
OUTSIDE_OF_BLOCKS = ('input', 'begin', 'middle', 'end')
LAYERS = (*OUTSIDE_OF_BLOCKS, 'attention')
# The previous token; the previous token with the most attention of the head; no layer in the block.
PAIRING = ('previous', 'attended', 'none')
_BLOCKS = {'layer': ('attention',)}
# Fields that mean the same in an n-gram memory.
_MEMORY_FIELDS = (
  'orders',
  'heads',
  'distinct_start',
  'decay',
  'epsilon',
  'prenormalize',
  'empty',
  'initial',
  'padding_trains',
  'exchange',
)


@dataclasses.dataclass(frozen=True)
class NGramConfig:
  """The N-Grammer layer (see `layers.NGrammer`)."""

  clusters: int | None = field(
    256,
    'clusters of each head; None: n-grams of token ids',
    at_least=1,
    needs={None: {'layer': OUTSIDE_OF_BLOCKS}},  # attended values have no token ids
  )
  vocabulary_size: int = field(16_384, 'rows by head and order', at_least=1, at_most=sizes.MAX_ROWS)
  dim: int = field(8, 'width of an n-gram vector', at_least=1)
  heads: int | None = field(
    None,
    'heads of the layer; None: model.heads',
    at_least=1,
    at_most=sizes.MAX_HEADS,
    relations=(equals('model.heads', where={'pairing': ('attended',)}),),
  )
  combine: str = field(
    'concat', 'combination with the token vectors', choices=memory.PER_HEAD_JOINS
  )
  orders: tuple[int, ...] = field((2,), 'lengths of n-grams', at_least=2, at_most=sizes.MAX_ORDER)
  distinct_start: bool = field(False, 'a separate id before a document, instead of cluster 0')
  layer: str = field('input', 'place of the layer', choices=LAYERS, only_for={'recurrent': (None,)})
  pairing: tuple[str, ...] = field(
    ('previous',),
    'partner of each token, by block or one entry for all',
    choices=PAIRING,
    only_for=_BLOCKS,
    needs={'attended': {'orders': ((2,),), 'position': ENCODINGS}},
  )
  decay: float = field(0.999, 'decay of the centroids', at_least=0, at_most=1, free_on_init=True)
  epsilon: float = field(1e-6, 'added to the number of tokens of a cluster', above=0)
  prenormalize: bool = field(False, 'normalise the vectors before clustering')
  empty: str = field('shrink', 'centroids of clusters without tokens', choices=memory.EMPTY)
  initial: str | None = field(
    None,
    'initial centroids; None: data at the input if tokens outnumber clusters, else uniform',
    choices=memory.INITIAL,
    needs={'data': {'layer': ('input',), 'adaptive_softmax': (None,)}},  # it samples the embedding
  )
  padding_trains: bool = field(False, 'padding updates centroids, as in praxis', only_for=_BLOCKS)
  start: str | None = start_field()
  exchange: str = memory.exchange_field()

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the layer in a model with this number of blocks."""
    if self.layer == 'attention':
      blocks = [block for block in range(layers) if self.pairing_of(block) != 'none']
      return tuple(Place('after_attention', block) for block in blocks)
    blocks_before = {'input': 0, 'begin': 1, 'middle': layers // 2, 'end': layers}[self.layer]
    if blocks_before == 0:
      return (Place('input'),)
    return (Place('after_block', blocks_before - 1),)

  def as_memory(
    self, model: Any, place: Place, vocabulary_size: int | None = None
  ) -> memory.NGramMemoryConfig:
    """Returns the layer at a place as an n-gram memory.

    Args:
      model: the config of the model.
      place: one of `places`.
      vocabulary_size: V. Centroids start from rows of the embedding if there are more rows than
        clusters.
    """
    layers = (place.block,)
    point = place.point
    if place.point == 'input':
      layers = ()
      point = 'before_attention'
    pairing = 'previous'
    if self.pairing_of(place.block) == 'attended':
      pairing = 'attended'
    return memory_options(
      self,
      layers=layers,
      point=point,
      pairing=pairing,
      heads=self.heads or model.heads,
      initial=self._initial_centroids(model, vocabulary_size),
      start=self.start,
    )

  def _initial_centroids(self, model: Any, vocabulary_size: int | None) -> str | None:
    """Returns the field `initial` of the memory: rows of the embedding if there are enough."""
    if self.initial is not None:
      return self.initial
    reads_embedding = self.layer == 'input' and model.adaptive_softmax is None
    if not reads_embedding or self.clusters is None or vocabulary_size is None:
      return None
    return 'data' if self.clusters < vocabulary_size else None

  def pairing_of(self, block: int) -> str:
    """Returns the pairing after the attention of a block."""
    if self.layer != 'attention':
      return 'none'
    if len(self.pairing) == 1:
      return self.pairing[0]
    return self.pairing[block]

  def check(self, model: Any) -> None:
    """Raises BadInput for a layer that is invalid for the model."""
    if len(self.pairing) not in (1, model.layers):
      raise errors.BadInput(
        f'model.ngram.pairing has {len(self.pairing)} entries for model.layers={model.layers}: '
        f'expected one for each layer, or one for all'
      )
    places = self.places(model.layers)
    if not places:
      raise errors.BadInput(
        'model.ngram.pairing is "none" for all layers: use model.ngram=None, or another pairing'
      )
    for place in places:
      options = self.as_memory(model, place)
      dataclasses.replace(options, initial=None).check(model, 'model.ngram')


def memory_options(layer: Any, **fields: Any) -> memory.NGramMemoryConfig:
  """Returns an N-Grammer layer as an n-gram memory.

  Args:
    layer: a `layers.NGrammer`, or a `NGramConfig`.
    **fields: fields of the memory in place of the layer's.
  """
  options = {name: getattr(layer, name) for name in _MEMORY_FIELDS}
  options['key'] = 'tokens' if layer.clusters is None else 'clusters'
  options['hash'] = 'praxis'
  options['join'] = layer.combine
  options['rows'] = (layer.vocabulary_size,)
  options['row_rule'] = 'exact'
  options['width'] = layer.dim
  options['table_initial'] = 'xavier'
  options['clusters'] = layer.clusters or memory.NGramMemoryConfig.clusters
  return memory.NGramMemoryConfig(**options | fields)
