"""What a memory of a model is.

A memory is a Linen module with

  empty_state(batch, slots) -> state                       before the first segment
  __call__(x_BxTxD, context, state) -> (y_BxTxD, state)    one segment

A state is a pytree of arrays, or None. Each array has the batch as its first axis and keeps its
shape and dtype. It is detached (`stop_gradient`), and padding (`context.valid_BxT`) changes nothing
in it: any split of a stream into segments gives the same result as one pass. `slots` is the number
of earlier tokens that the layers keep, None if they keep none.

B batch, T segment length, D model width.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.memory import BETWEEN_BLOCKS, Place
from ngrammer_jax.layers.context import Context

States = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PlacedMemory:
  """A memory at one of its places in a model.

  Attributes:
    name: of its parameters, different for all memories between blocks, and in each block.
    place: where it acts.
    make: makes its module, with the arguments `name` and `parent` of Linen.
    state_name: key of its state in the memory of the model or of the block. None: `name`.
    needs_pairs: after attention, it reads `context.pair_BxNxT`.
  """

  name: str
  place: Place
  make: Callable[..., nn.Module]
  state_name: str | None = None
  needs_pairs: bool = False

  @property
  def state_key(self) -> str:
    """Key of its state in the memory of the model or of the block."""
    return self.state_name or self.name

  @property
  def path(self) -> tuple[str, ...]:
    """Path of its module in the collections of the model."""
    block = () if self.is_between_blocks else (f'layer_{self.place.block}',)
    return *block, self.name

  @property
  def is_between_blocks(self) -> bool:
    """Whether the model applies it, rather than a block."""
    return self.place.point in BETWEEN_BLOCKS

  def empty_state(self, batch: int, slots: int | None) -> States:
    """Returns its state before the first segment by name, empty if it has none."""
    state = self.make(parent=None).empty_state(batch, slots)
    return {} if state is None else {self.state_key: state}

  def apply(
    self, module: nn.Module, x_BxTxD: jax.Array, context: Context, states: States
  ) -> tuple[jax.Array, States]:
    """Returns the output of its module [B, T, D], and the next state by name.

    Raises:
      ValueError: the state changed its structure, shapes or dtypes.
    """
    state = states.get(self.state_key)
    y_BxTxD, next_state = module(x_BxTxD, context, state)
    before, after = (
      jax.tree.map(lambda x: f'{jnp.result_type(x)}{list(jnp.shape(x))}', each)
      for each in (state, next_state)
    )
    if before != after:
      raise ValueError(f'memory {self.name}: its state {before} became {after} in a segment')
    return y_BxTxD, {} if next_state is None else {self.state_key: next_state}
