"""How the next token is drawn: greedily, by temperature, from the top k, from the top p."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax import errors


@dataclasses.dataclass(frozen=True)
class Sampling:
  """What is drawn from, in this order.

  Attributes:
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: only so many most likely tokens. None: all.
    top_p: only the most likely tokens whose probabilities first sum to so much (nucleus
      sampling, Holtzman et al. 2020). None: all.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def check(self) -> None:
    """Raises BadInput for what cannot be drawn from."""
    if not 0 <= self.temperature < float('inf'):
      raise errors.BadInput(
        f'temperature={self.temperature} must be at least 0 (0 takes the most likely token)'
      )
    if self.top_k is not None and self.top_k < 1:
      raise errors.BadInput(f'top_k={self.top_k} must be at least 1; leave it out for all tokens')
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise errors.BadInput(f'top_p={self.top_p} must be above 0 and at most 1')


class Limits(NamedTuple):
  """The same as arrays, so that another temperature compiles nothing anew."""

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array

  @classmethod
  def of(cls, sampling: Sampling, V: int) -> 'Limits':
    """The limits of a vocabulary of V tokens."""
    k = V if sampling.top_k is None else min(sampling.top_k, V)
    p = 1.0 if sampling.top_p is None else sampling.top_p
    return cls(jnp.float32(sampling.temperature), jnp.int32(k), jnp.float32(p))


def draw(log_probs_BxV: jax.Array, limits: Limits, keys_B: jax.Array) -> jax.Array:
  """A token for each row, int32 [B], each with the random key of its row."""

  def limited(scaled_BxV):
    inside_BxV = leading(scaled_BxV, jnp.ones_like(scaled_BxV), limits.top_k)
    scaled_BxV = jnp.where(inside_BxV, scaled_BxV, -jnp.inf)
    inside_BxV = leading(scaled_BxV, jax.nn.softmax(scaled_BxV), limits.top_p)
    return jnp.where(inside_BxV | (limits.top_p >= 1), scaled_BxV, -jnp.inf)

  def random():
    relative_BxV = log_probs_BxV - log_probs_BxV.max(axis=-1, keepdims=True)
    scaled_BxV = relative_BxV.astype(jnp.float32) / limits.temperature
    everything = (limits.top_k >= scaled_BxV.shape[-1]) & (limits.top_p >= 1)
    scaled_BxV = jax.lax.cond(everything, lambda x: x, limited, scaled_BxV)
    return jax.vmap(jax.random.categorical)(keys_B, scaled_BxV).astype(jnp.int32)

  def greedy():
    return jnp.argmax(log_probs_BxV, axis=-1).astype(jnp.int32)

  return jax.lax.cond(limits.temperature > 0, random, greedy)


def leading(x_BxV: jax.Array, weight_BxV: jax.Array, limit: jax.Array) -> jax.Array:
  """The fewest of the largest x whose weights sum to the limit, bool [B, V].

  Of equal x the first come first. There is no sort, which on CPU takes 20 times as long: the
  smallest x that belongs to them is found by bisection, bit by bit.
  """
  bits_BxV = jax.lax.bitcast_convert_type(x_BxV, jnp.int32)
  order_BxV = jnp.where(bits_BxV < 0, bits_BxV ^ jnp.int32(2**31 - 1), bits_BxV)  # as floats are

  def halve(_, bounds):
    low_Bx1, high_Bx1 = bounds
    middle_Bx1 = (low_Bx1 >> 1) + (high_Bx1 >> 1) + (low_Bx1 & high_Bx1 & 1)
    sum_Bx1 = jnp.where(order_BxV >= middle_Bx1, weight_BxV, 0).sum(axis=-1, keepdims=True)
    enough_Bx1 = sum_Bx1 >= limit
    return jnp.where(enough_Bx1, middle_Bx1, low_Bx1), jnp.where(enough_Bx1, high_Bx1, middle_Bx1)

  rows = (x_BxV.shape[0], 1)
  bounds = jnp.full(rows, -(2**31), jnp.int32), jnp.full(rows, 2**31 - 1, jnp.int32)
  smallest_Bx1, _ = jax.lax.fori_loop(0, 32, halve, bounds)
  above_BxV, equal_BxV = order_BxV > smallest_Bx1, order_BxV == smallest_Bx1
  weight_of_equal_BxV = jnp.where(equal_BxV, weight_BxV, 0)
  before_BxV = jnp.cumsum(weight_of_equal_BxV, axis=-1) - weight_of_equal_BxV
  before_BxV += jnp.where(above_BxV, weight_BxV, 0).sum(axis=-1, keepdims=True)
  return above_BxV | (equal_BxV & (before_BxV < limit))
