"""Rows of tokens in the values of attention: value embeddings, and n-grams in values.

A token has a value v_h in each key head h. With its row e and the normed input x of its layer:

  g_h = s sigmoid(W_h [x_1 ... x_c; e_1 ... e_r] + b_h)     one gate for each head, or for all

  v_h <- v_h + g_h e_h                   `sum`
  v_h <- (1 - l) v_h + l g_h e_h         `interpolation`
  v_h <- l_0 v_h + l_1 g_h e_h           `weighted_sum`

The rows of all orders and hash heads stand side by side in e, or U e if they are projected; e_h are
the features of head h. Tokens read a row by attending to its token. Without a gate g = 1.

| published | join | c, r | s | b | other |
|---|---|---|---|---|---|
| modded-nanogpt, record 14; 15 and 17; 54 | interpolation; weighted_sum; sum | no gate | | | |
| the same, record 55; 70 | sum | 12, 0; 6, 6 | 2 | no | |
| nanochat | sum | 12, 0 | 3 | no | W from 0 to 0.02 |
| nanochat, pull request 854 | sum | 12, 0 | 1 | no | W / c, one gate, U |
| modded-nanogpt, pull request 366 | sum | 12, 0 | 1 | -3 | W / c, one head |

B batch, P tokens, D model width, C key heads, H head width, F = C H, M values of the rows of a
token, G gates.
"""

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.config.ngram.value_gate import ValueGateConfig
from ngrammer_jax.layers import axis_names

MIX = 0.5  # initial value of l, l_0 and l_1


class ValueJoin(nn.Module):
  """Returns the values of all key heads with the rows of their tokens, [B, P, F].

  Attributes:
    heads: C.
    kind: `sum`, `interpolation` or `weighted_sum`.
    gate: with c = `channels`, r = `row_channels` and s = `factor`; W is divided by c + r with
      `mean`. None: no gate.
    is_projected: whether the rows are multiplied by U, orthogonal at the start.
    head: add the rows to this head only. None: all heads.
    is_neutral: whether values are unchanged at the start. Then rows must start at 0 unless `kind`
      is `interpolation`.
    dtype: dtype of the output; gates are in at least float32.
  """

  heads: int
  kind: str = 'sum'
  gate: ValueGateConfig | None = None
  is_projected: bool = False
  head: int | None = None
  is_neutral: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, v_BxPxF: jax.Array, x_BxPxD: jax.Array, e_BxPxM: jax.Array) -> jax.Array:
    """Returns [B, P, F]. sigmoid, the gates without their factor, is the intermediate `gate`.

    Args:
      v_BxPxF: values.
      x_BxPxD: normed inputs of the layer.
      e_BxPxM: rows, zeros for a token without one.
    """
    v_BxPxCxH = v_BxPxF.reshape(*v_BxPxF.shape[:2], self.heads, -1)
    e_BxPxCxH = self._by_head(e_BxPxM, v_BxPxCxH.shape[-1])
    if self.gate is not None:
      gate_BxPxG = self._gate(x_BxPxD, e_BxPxM)
      e_BxPxCxH = gate_BxPxG[..., None].astype(self.dtype) * e_BxPxCxH
    return self._mix(v_BxPxCxH, e_BxPxCxH).reshape(v_BxPxF.shape)

  def _by_head(self, e_BxPxM: jax.Array, H: int) -> jax.Array:
    """Returns the rows as features of the heads, [B, P, C, H]."""
    B, P, M = e_BxPxM.shape
    features = H
    if self.head is None:
      features = self.heads * H
    if self.is_projected:
      init = axis_names.with_axis_names(nn.initializers.orthogonal(), (None, 'embed'))
      u_MxF = self.param('projection', init, (M, features), self._wide_dtype)
      e_BxPxM = checkpoint_name(e_BxPxM @ u_MxF.astype(self.dtype), 'memory')
    elif M != features:
      raise ValueError(f'rows of {M} values do not fit {features} features: add a projection')
    if self.head is None:
      return e_BxPxM.reshape(B, P, self.heads, H)
    is_head_Cx1 = (jnp.arange(self.heads) == self.head)[:, None]
    return jnp.where(is_head_Cx1, e_BxPxM[:, :, None], 0)

  def _gate(self, x_BxPxD: jax.Array, e_BxPxM: jax.Array) -> jax.Array:
    """Returns the gates [B, P, C or 1]."""
    o = self.gate
    parts = [x_BxPxD[..., : o.channels], e_BxPxM[..., : o.row_channels]]
    channels_BxPxI = jnp.concatenate([part.astype(self._wide_dtype) for part in parts], axis=-1)
    inputs = o.channels + o.row_channels
    G = 1
    if o.per_head and self.head is None:
      G = self.heads
    init = axis_names.with_axis_names(nn.initializers.uniform(o.initial), (None, 'gates'))
    w_IxG = self.param('gate_weights', init, (inputs, G), self._wide_dtype)
    score_BxPxG = channels_BxPxI @ w_IxG
    if o.mean:
      score_BxPxG = score_BxPxG / inputs
    if o.bias is not None:
      init = axis_names.with_axis_names(nn.initializers.constant(o.bias), ('gates',))
      score_BxPxG += self.param('gate_bias', init, (G,), self._wide_dtype)
    open_BxPxG = jax.nn.sigmoid(score_BxPxG)
    self.sow('intermediates', 'gate', open_BxPxG)
    return o.factor * open_BxPxG

  def _mix(self, v_BxPxCxH: jax.Array, e_BxPxCxH: jax.Array) -> jax.Array:
    """Returns the values with the gated rows."""
    match self.kind:
      case 'sum':
        return v_BxPxCxH + e_BxPxCxH
      case 'interpolation':
        weight_of_rows = MIX
        if self.is_neutral:
          weight_of_rows = 0.0
        (mix,) = self._mixing_numbers([weight_of_rows])
        return (1 - mix) * v_BxPxCxH + mix * e_BxPxCxH
      case 'weighted_sum':
        weight_of_values = MIX
        if self.is_neutral:
          weight_of_values = 1.0
        of_values, of_rows = self._mixing_numbers([weight_of_values, MIX])
        return of_values * v_BxPxCxH + of_rows * e_BxPxCxH
    raise ValueError(f'kind={self.kind!r} is not one of sum, interpolation, weighted_sum')

  def _mixing_numbers(self, initial: list[float]) -> list[jax.Array]:
    """Returns the learned numbers of this layer."""

    def init(key, shape, dtype):
      del key, shape
      return jnp.array(initial, dtype)

    init = axis_names.with_axis_names(init, (None,))
    numbers = self.param('mix', init, (len(initial),), self._wide_dtype)
    return [number.astype(self.dtype) for number in numbers]

  @property
  def _wide_dtype(self) -> jnp.dtype:
    return jnp.promote_types(self.dtype, jnp.float32)
