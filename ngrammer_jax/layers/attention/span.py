"""Learned attention spans (Sukhbaatar et al. 2019, section 2.2).

The attention weight of a key is multiplied by the soft mask

  m(d) = clip((z - d) / R + 1, 0, 1)

where the span z of a head is learned and the ramp R is fixed. As in the official code, d is the
distance from the nearest visible key. There no token attends to itself, so this key is the previous
token.

B batch, T queries, S keys, N heads, D model width.
"""

from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names


class Spans(NamedTuple):
  """Mean and longest span of the heads in a segment, in tokens without the ramp."""

  mean: jax.Array
  longest_BxN: jax.Array


EPSILON = 1e-8  # added to the masked mass, as in the official code


@jax.custom_jvp
def unit_clip(x: jax.Array) -> jax.Array:
  """Clips to [0, 1]; the slope is 1 also at both ends, as in torch.clamp.

  Initial spans are exactly 0, and with integer spans the mask reaches 0 and 1 exactly at keys.
  There jnp.clip has half the slope and lax.clamp none, so the first gradient would differ.
  """
  return jnp.clip(x, 0, 1)


@unit_clip.defjvp
def _unit_clip_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  return unit_clip(x), jnp.where((x >= 0) & (x <= 1), dx, 0)


def soft_mask(z: jax.Array, distance: jax.Array, ramp: int) -> jax.Array:
  """Returns the mask m in [0, 1]; spans and distances from the nearest key are broadcast."""
  return unit_clip(unclipped_mask(z, distance, ramp))


def unclipped_mask(z: jax.Array, distance: jax.Array, ramp: int) -> jax.Array:
  """Returns the mask m before it is clipped; below 0 a key is beyond the span and its ramp."""
  return (z - distance + ramp) / ramp  # exactly 0 at the end of an integer span


def masked_weights(
  exp: jax.Array, unclipped: jax.Array | None, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights of the values, and their terms of the mass of the softmax.

  Args:
    exp: exponentials of the scores.
    unclipped: see `unclipped_mask`. None: no spans.
    renormalize: whether the softmax is over the masked weights.
  """
  if unclipped is None:
    return exp, exp
  weights = exp * unit_clip(unclipped)
  masses = weights + EPSILON * exp if renormalize else exp
  return weights, masses


def _check_sizes(limit: int, ramp: int, width: int) -> None:
  for name, size in (('limit', limit), ('ramp', ramp), ('width of the inputs', width)):
    if size < 1:
      raise ValueError(f'the {name} of a span must be at least 1, not {size}')


class AdaptiveSpan(nn.Module):
  """One learned span for each head, the same for all tokens.

  Attributes:
    heads: N.
    limit: maximum span in tokens; the parameter `span` is z / limit.
    ramp: R.
    initial: initial value of the parameter.
    dtype: dtype of the computation.
    is_neutral: for `DynamicSpan`, whether v starts at 0.
    renormalize: whether attention scales the masked weights to add up to 1.
    epsilon_keys: see `full.SpanMask`.
  """

  heads: int
  limit: int
  ramp: int
  initial: float = 0.0
  dtype: jnp.dtype = jnp.float32
  renormalize: bool = True
  epsilon_keys: str = 'all'
  is_neutral: bool = False

  def __call__(
    self, x_BxTxD: jax.Array, distance_BxTxS: jax.Array, valid_BxT: jax.Array | None = None
  ) -> tuple[jax.Array, Spans]:
    """Returns the mask [B or 1, N, T, S], and the spans.

    Args:
      x_BxTxD: inputs of the queries.
      distance_BxTxS: from query to key, 0 for the nearest key that may be visible.
      valid_BxT: 0 at padding.
    """
    z_BxTxN, spans = self.spans(x_BxTxD, valid_BxT)
    z_BxNxTx1 = z_BxTxN.swapaxes(1, 2)[..., None]
    return soft_mask(z_BxNxTx1, distance_BxTxS[:, None], self.ramp), spans

  @nn.compact
  def spans(
    self, x_BxTxD: jax.Array, valid_BxT: jax.Array | None = None
  ) -> tuple[jax.Array, Spans]:
    """Returns the spans in tokens [1, 1, N], and their mean and maximum in the segment."""
    del valid_BxT
    _check_sizes(self.limit, self.ramp, x_BxTxD.shape[-1])
    init = axis_names.with_axis_names(nn.initializers.constant(self.initial), ('heads',))
    z_N = self.limit * self.param('span', init, (self.heads,), self.dtype)
    longest_BxN = jnp.broadcast_to(z_N, (len(x_BxTxD), self.heads))
    return z_N[None, None], Spans(z_N.mean(), longest_BxN)


class DynamicSpan(AdaptiveSpan):
  """A span for each head and token, z = limit * sigmoid(v . x + b); 0 at padding.

  See `AdaptiveSpan`; `initial` is the initial b.
  """

  initial: float = -4.0

  @nn.compact
  def spans(
    self, x_BxTxD: jax.Array, valid_BxT: jax.Array | None = None
  ) -> tuple[jax.Array, Spans]:
    """Returns the spans in tokens [B, T, N], and their mean and maximum in the segment."""
    D = x_BxTxD.shape[-1]
    N = self.heads
    _check_sizes(self.limit, self.ramp, D)
    deviation = D**-0.5
    if self.is_neutral:
      deviation = 0.0
    normal = nn.initializers.normal(deviation)
    normal = axis_names.with_axis_names(normal, ('embed', 'heads'))
    constant = axis_names.with_axis_names(nn.initializers.constant(self.initial), ('heads',))
    v_DxN = self.param('span_kernel', normal, (D, N), self.dtype)
    b_N = self.param('span_bias', constant, (N,), self.dtype)
    z_BxTxN = self.limit * jax.nn.sigmoid(x_BxTxD.astype(v_DxN.dtype) @ v_DxN + b_N)
    if valid_BxT is None:
      valid_BxT = jnp.ones(x_BxTxD.shape[:2])
    else:
      valid_BxT = valid_BxT > 0
    z_BxTxN *= valid_BxT[..., None]
    self.sow('intermediates', 'spans', z_BxTxN)
    mean = z_BxTxN.mean(axis=-1).sum() / jnp.maximum(valid_BxT.sum(), 1)
    return z_BxTxN, Spans(mean, z_BxTxN.max(axis=1))
