"""Queries, keys and values of the heads: linear maps, causal convolutions and rotations.

  q, k, v = conv(x W)                 convolutions: Primer
  q, k <- rms(q), rms(k)              query-key norm, of each head or of all heads
  q, k <- rotate(q), rotate(k)        rotary positions

Attention projects a whole segment. Blocks project the keys of a memory when they visit them, one
head and one block of tokens at a time. Both call the functions of this file.

B batch, P inputs, D model width, N heads, H head width.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import convolution, dense, normalization
from ngrammer_jax.layers.attention import position

# Returns a submodule to call, from a function that makes it and its name.
Bind = Callable[[Callable[..., nn.Module], str], Callable[..., jax.Array]]


@dataclasses.dataclass(frozen=True)
class Projections:
  """Options of the query, key and value projections.

  Attributes:
    bias: queries, keys and values have biases.
    output_bias: the output projection has a bias. None: same as `bias`.
    per_dim_scale: learn the query scale of each feature (praxis), shared by the heads: log2(e) /
      sqrt(H) * softplus(s), or 1 / sqrt(H) at the initial s = 0.
    taps: number of taps of the causal convolutions on the projected q, k and v (Primer). None: no
      convolutions.
    shared_query_key: q is a linear map, head by head, of the convolved k (full Primer).
    norm: RMS norm of q and k, of each head (`head`) or of all heads together (`full`).
    norm_epsilon, norm_offset: see `normalization.RMSNorm`.
  """

  bias: bool = False
  output_bias: bool | None = None
  per_dim_scale: bool = False
  taps: int | None = None
  shared_query_key: bool = False
  norm: str | None = None
  norm_epsilon: float = 1e-6
  norm_offset: bool = False

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the input projections; convolutions apply to each of them."""
    return ('key', 'value') if self.shared_query_key else ('query', 'key', 'value')

  @property
  def lookback(self) -> int:
    """Number of earlier inputs read by a projection."""
    return (self.taps or 1) - 1


def new_submodule(make: Callable[..., nn.Module], name: str) -> Callable[..., jax.Array]:
  """Makes a submodule of the calling module. See `Bind`."""
  return make(name=name)


def with_params(params: Mapping[str, Any]) -> Bind:
  """Returns a `Bind` of submodules with these parameters, by name, outside of any module."""

  def bind(make: Callable[..., nn.Module], name: str) -> Callable[..., jax.Array]:
    return functools.partial(make(parent=None).apply, {'params': params[name]})

  return bind


@dataclasses.dataclass(frozen=True)
class HeadProjection:
  """Projects inputs to queries, keys or values.

  Attributes:
    options: options of the projections.
    dtype: of the result.
    bind: makes the submodules, or applies them with the parameters of some heads.
  """

  options: Projections
  dtype: jnp.dtype
  bind: Bind = new_submodule

  def __call__(
    self,
    name: str,
    x_BxPxD: jax.Array,
    features: tuple[int, int],
    position_BxT: jax.Array | None,
    before: int = 0,
    earlier: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns [B, T, N, H] before any rotation, and the inputs of the convolution if there is one.

    Args:
      name: `query`, `key` or `value`.
      x_BxPxD: inputs; only the convolution reads the first `before` of them.
      features: N and H.
      position_BxT: position of each token in its document, for the convolution. None: no
        convolution.
      before: P - T.
      earlier: inputs of the convolution before these, [B, R, N, H], if `before` is 0. None: zeros.
    """
    make = functools.partial(
      dense.dense_general,
      x_BxPxD.shape[-1:],
      features,
      ('embed', 'heads', 'kv'),
      use_bias=self.options.bias,
      dtype=self.dtype,
    )
    project = self.bind(make, name)
    y_BxPxNxH = checkpoint_name(project(x_BxPxD), 'projected')
    if self.options.taps is None:
      return self._normalize(name, y_BxPxNxH), None
    if before:
      earlier = y_BxPxNxH[:, :before]
    make = functools.partial(convolution.CausalConvolution, self.options.taps, self.dtype)
    inputs_BxTxNxH = y_BxPxNxH[:, before:]
    convolve = self.bind(make, f'{name}_convolution')
    y_BxTxNxH = convolve(inputs_BxTxNxH, position_BxT, earlier)
    return self._normalize(name, y_BxTxNxH), inputs_BxTxNxH

  def _normalize(self, name: str, x_BxTxNxH: jax.Array) -> jax.Array:
    """Normalises queries and keys."""
    o = self.options
    if o.norm is None or name == 'value':
      return x_BxTxNxH
    is_joint = o.norm == 'full'
    make = functools.partial(
      normalization.RMSNorm,
      axes=2 if is_joint else 1,
      epsilon=o.norm_epsilon,
      is_offset=o.norm_offset,
      dtype=self.dtype,
      joint=is_joint,
    )
    normalize = self.bind(make, f'{name}_norm')
    return normalize(x_BxTxNxH)


def rotate_last(x_BxTxNxH: jax.Array, rotation: position.Rotation | None) -> jax.Array:
  """Rotates queries or keys by the last T of the angles. None: no rotation."""
  if rotation is None:
    return x_BxTxNxH
  return position.rotate(x_BxTxNxH, rotation.between(-x_BxTxNxH.shape[1], None))
