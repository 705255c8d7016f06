"""Product-key memories: a large table of values, addressed by hidden states."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import presets
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.ngram.memory import OPTIMIZERS
from ngrammer_jax.config.place import AT_FEED_FORWARD, INSIDE_FEED_FORWARD, Place
from ngrammer_jax.config.relations import divisible_by, less_than

NAME = 'product_memory'  # of its modules, its parameters and its optimizer
# query: the halves of a query have the length 1 (XLM); query_key: RMS norms of the halves of
# queries and of sub-keys.
NORMS = ('none', 'query', 'query_key')
MAX_SUB_KEYS = 46_340  # their square is a number of rows, below 2^31

# Published sizes; `layers` are of large models.
PRESETS = {
  # Lample et al. 2019, arXiv 1907.05242, without their batch norm of queries.
  'lample2019': dict(layers=(4,), sub_keys=512, key_width=256),
  # Berges et al. 2024, arXiv 2412.09764: Memory+.
  'memory_layers': dict(
    layers=(4, 12, 20),
    sub_keys=1024,
    key_width=512,
    swilu=True,
    learning_rate_factor=10.0,
  ),
}


@presets.applied_by_constructor(PRESETS, 'model.product_memory')
@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductMemoryConfig:
  """A table of values addressed by product keys (see docs/ngram_memories.md).

  `ProductMemoryConfig(preset='memory_layers', layers=1)` has the published values of the preset
  and the values named here, like a config file.

  Raises:
    BadInput: an unknown preset, or a value of another type.
  """

  preset: str | None = field(
    None, 'preset of published values; resets the block', choices=tuple(PRESETS)
  )
  layers: tuple[int, ...] = field(
    (1,),
    'blocks that read the values, from 0',
    at_least=0,
    may_be_empty=False,
    relations=(less_than('model.layers'),),
  )
  point: str = field(
    'in_place_of_feed_forward',
    'replace the feed-forward of these blocks, or add to it',
    choices=AT_FEED_FORWARD,
  )
  sub_keys: int = field(
    128, 'number n of sub-keys of each half; there are n^2 values', at_least=1, at_most=MAX_SUB_KEYS
  )
  heads: int = field(4, 'queries of a token', at_least=1, at_most=1024)
  top: int = field(32, 'number of values per query', at_least=1)
  key_width: int = field(
    128, 'features of a query, of both halves together', at_least=2, relations=(divisible_by(2),)
  )
  norm: str = field('none', 'norms of queries and sub-keys', choices=NORMS)
  value_width: int | None = field(
    None, 'features of a value, projected to the model width; None: the model width', at_least=1
  )
  experts: bool = field(False, 'multiply a value by gelu of x times a row of a second table (PEER)')
  swilu: bool = field(False, 'multiply the sum of values by silu(W x), then project it (Memory+)')
  gated: bool = field(False, 'multiply the result by sigmoid(w x)')
  start: str | None = start_field(
    needs={'neutral': {'point': ('beside_feed_forward',)}},
    reason='in place of the feed-forward, it changes the trained model',
  )
  optimizer: str = field('adam', 'optimizer of the values', choices=OPTIMIZERS)
  learning_rate_factor: float | None = field(
    None,
    'times optimizer.table.learning_rate (both Adagrads; None: 1) or optimizer.learning_rate (5)',
    above=0,
  )
  table_dtype: str = field('float32', 'dtype of the values', choices=('float32', 'bfloat16'))

  @classmethod
  def from_preset(cls, preset: str, **values: Any) -> 'ProductMemoryConfig':
    """Returns the memory of one of PRESETS, with other values of some fields.

    Raises BadInput for another name.
    """
    return cls(preset=preset, **values)

  @property
  def rows(self) -> int:
    """Number of values."""
    return self.sub_keys**2

  @property
  def has_projection(self) -> bool:
    """Whether the sum of values is projected."""
    return self.swilu or self.value_width is not None

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the memory in a model with this number of blocks."""
    del layers
    return tuple(Place(self.point, block) for block in self.layers)

  def check(self, model: Any) -> None:
    """Raises BadInput for a memory that is invalid for the model."""
    if len(set(self.layers)) < len(self.layers):
      raise errors.BadInput(
        f'model.product_memory.layers={self.layers} has a block twice: use it once'
      )
    if self.rows < self.top:
      raise errors.BadInput(
        f'model.product_memory.top={self.top} is more than the {self.rows:,} values of '
        f'model.product_memory.sub_keys={self.sub_keys}: use {self.rows}, or more sub-keys'
      )
    if self.point == 'in_place_of_feed_forward':
      self._check_replaced(model)

  def _check_replaced(self, model: Any) -> None:
    """Raises BadInput for a memory in a replaced feed-forward."""
    for number, memory in enumerate(model.ngram_memories):
      for place in memory.places(model.layers):
        if place.point in INSIDE_FEED_FORWARD and place.block in self.layers:
          raise errors.BadInput(
            f'model.product_memory.layers={self.layers} replaces the feed-forward of block '
            f'{place.block}, used by model.ngram_memories.{number}: use other layers, or '
            f'model.product_memory.point="beside_feed_forward"'
          )
