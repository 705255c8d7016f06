"""Sampling of the next token: greedy, or random with a temperature, top-k, top-p and min-p.

B batch, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.config import fields
from ngrammer_jax.config.fields import field


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Options of sampling. They are applied in the order of transformers.

  1. The repetition penalty, also for greedy decoding (see `penalize`).
  2. The temperature.
  3. Top-k: only the k most likely tokens are sampled.
  4. Top-p, or nucleus sampling (Holtzman et al. 2020): only the most likely tokens are sampled
     whose probabilities sum to at least this.
  5. Min-p (Nguyen et al. 2024): only tokens are sampled whose probability is at least this share of
     the highest one.
  """

  temperature: float = field(
    1.0, 'divisor of the logits', at_least=0, reason='0 selects greedy decoding'
  )
  top_k: int | None = field(
    None, 'number of most likely tokens to sample from', at_least=0, reason='0 is no limit'
  )
  top_p: float | None = field(None, 'probability mass to sample from', above=0, at_most=1)
  repetition_penalty: float = field(
    1.0, 'penalty of the tokens of the text so far', at_least=1, reason='1 is no penalty'
  )
  min_p: float | None = field(
    None, 'least probability of a token to sample, over the highest one', at_least=0, at_most=1
  )

  def check_values(self) -> None:
    """Raises BadInput for values out of range."""
    fields.check_values(self)


class SamplerParams(NamedTuple):
  """A `SamplingConfig` as arrays: other values do not recompile a program.

  `repetition_penalty` is None without a penalty, since a penalty needs more state. A first token
  with the id `document_start` is not part of the text.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  repetition_penalty: jax.Array | None = None
  document_start: jax.Array | None = None

  @classmethod
  def from_config(
    cls, config: SamplingConfig, V: int, document_start: int | None = None
  ) -> 'SamplerParams':
    """Returns the parameters for a vocabulary of V tokens."""
    top_k = V
    if config.top_k:
      top_k = min(config.top_k, V)
    top_p = 1.0
    if config.top_p is not None:
      top_p = config.top_p
    min_p = 0.0
    if config.min_p is not None:
      min_p = config.min_p
    params = cls(
      jnp.float32(config.temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
    )
    if config.repetition_penalty == 1:
      return params
    if document_start is None:
      document_start = -1  # no token has it
    return params._replace(
      repetition_penalty=jnp.float32(config.repetition_penalty),
      document_start=jnp.int32(document_start),
    )


def mark_tokens(is_used_BxV: jax.Array, tokens_BxT: jax.Array, counts_BxT: jax.Array) -> jax.Array:
  """Returns the token marks of each row, with the counted new tokens added."""
  rows_Bx1 = jnp.arange(len(tokens_BxT))[:, None]
  return is_used_BxV.at[rows_Bx1, tokens_BxT].max(counts_BxT)


def penalize(logits_BxV: jax.Array, is_used_BxV: jax.Array, penalty: jax.Array) -> jax.Array:
  """Lowers the logits of used tokens: x / penalty if x > 0, else x * penalty.

  The repetition penalty of CTRL (Keskar et al. 2019, section 4.1), for negative logits too.
  """
  penalty = penalty.astype(logits_BxV.dtype)
  lowered_BxV = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
  return jnp.where(is_used_BxV, lowered_BxV, logits_BxV)


def sample_tokens(log_probs_BxV: jax.Array, sampler: SamplerParams, keys_B: jax.Array) -> jax.Array:
  """Samples a token for each row, int32 [B], with the random key of that row."""
  truncate = functools.partial(_truncate, sampler=sampler)

  def sample_randomly() -> jax.Array:
    shifted_BxV = log_probs_BxV - log_probs_BxV.max(axis=-1, keepdims=True)
    logits_BxV = shifted_BxV.astype(jnp.float32) / sampler.temperature
    keep_all = (sampler.top_k >= logits_BxV.shape[-1]) & (sampler.top_p >= 1)
    logits_BxV = jax.lax.cond(keep_all, lambda x: x, truncate, logits_BxV)
    # The highest logit is 0. Without min-p, no logit is below log(0).
    logits_BxV = jnp.where(logits_BxV < jnp.log(sampler.min_p), -jnp.inf, logits_BxV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BxV).astype(jnp.int32)

  def take_most_likely() -> jax.Array:
    # As jnp.argmax, which takes nine times as long on CPU: it is not vectorised.
    V = log_probs_BxV.shape[-1]
    is_best_BxV = log_probs_BxV == log_probs_BxV.max(axis=-1, keepdims=True)
    return jnp.where(is_best_BxV, jnp.arange(V), V - 1).min(axis=-1).astype(jnp.int32)

  return jax.lax.cond(sampler.temperature > 0, sample_randomly, take_most_likely)


def _truncate(logits_BxV: jax.Array, sampler: SamplerParams) -> jax.Array:
  """Returns the logits after top-k, then top-p; others are -inf."""
  keep_BxV = top_mass_mask(logits_BxV, jnp.ones_like(logits_BxV), sampler.top_k)
  logits_BxV = jnp.where(keep_BxV, logits_BxV, -jnp.inf)
  keep_BxV = top_mass_mask(logits_BxV, jax.nn.softmax(logits_BxV), sampler.top_p)
  return jnp.where(keep_BxV | (sampler.top_p >= 1), logits_BxV, -jnp.inf)


def top_mass_mask(scores_BxV: jax.Array, mass_BxV: jax.Array, min_mass: jax.Array) -> jax.Array:
  """Masks the fewest highest scores whose masses sum to at least `min_mass`, bool [B, V].

  Among equal scores, lower indices are selected first.
  """
  order_BxV = _ordered_bits(scores_BxV)
  threshold_Bx1 = _lowest_selected(order_BxV, mass_BxV, min_mass)
  is_above_BxV = order_BxV > threshold_Bx1
  is_equal_BxV = order_BxV == threshold_Bx1
  equal_mass_BxV = jnp.where(is_equal_BxV, mass_BxV, 0)
  mass_before_BxV = jnp.cumsum(equal_mass_BxV, axis=-1) - equal_mass_BxV
  mass_before_BxV += jnp.where(is_above_BxV, mass_BxV, 0).sum(axis=-1, keepdims=True)
  return is_above_BxV | (is_equal_BxV & (mass_before_BxV < min_mass))


def _ordered_bits(scores_BxV: jax.Array) -> jax.Array:
  """Returns integers in the same order as the floats, int32 [B, V]."""
  bits_BxV = jax.lax.bitcast_convert_type(scores_BxV, jnp.int32)
  return jnp.where(bits_BxV < 0, bits_BxV ^ jnp.int32(2**31 - 1), bits_BxV)


def _lowest_selected(order_BxV: jax.Array, mass_BxV: jax.Array, min_mass: jax.Array) -> jax.Array:
  """Returns the lowest integer needed to reach `min_mass`, int32 [B, 1].

  Bisects over its bits; a sort takes 20 times as long on CPU.
  """

  def bisect(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low_Bx1, high_Bx1 = bounds
    middle_Bx1 = (low_Bx1 >> 1) + (high_Bx1 >> 1) + (low_Bx1 & high_Bx1 & 1)
    sum_Bx1 = jnp.where(order_BxV >= middle_Bx1, mass_BxV, 0).sum(axis=-1, keepdims=True)
    is_enough_Bx1 = sum_Bx1 >= min_mass
    low_Bx1 = jnp.where(is_enough_Bx1, middle_Bx1, low_Bx1)
    return low_Bx1, jnp.where(is_enough_Bx1, high_Bx1, middle_Bx1)

  shape = (order_BxV.shape[0], 1)
  lowest_Bx1 = jnp.full(shape, -(2**31), jnp.int32)
  highest_Bx1 = jnp.full(shape, 2**31 - 1, jnp.int32)
  threshold_Bx1, _ = jax.lax.fori_loop(0, 32, bisect, (lowest_Bx1, highest_Bx1))
  return threshold_Bx1
