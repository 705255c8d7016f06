"""Product keys: hidden states select rows of a table (Lample et al. 2019, Berges et al. 2024).

A key is the pair of two sub-keys, so that n sub-keys of each half make n^2 keys. For every head h

  q = W_q x + b, as two halves;  s1 = C1 q1, s2 = C2 q2          the scores of n sub-keys each
  the `top` pairs (i, j) with the largest s1_i + s2_j, of all n^2  row i n + j of the values U
  y = sum over heads and pairs of softmax(s1_i + s2_j) U[i n + j]

The largest sums only contain the `top` largest scores of each half. The values are one table for
all layers, and all heads. With `experts` (PEER, He 2024) there is a second table X of the width of
the model, and row r is a feed-forward of one inner feature: U[r] has the factor gelu(x . X[r]).
Then, by options,

  y <- W_v y + b_v,  or with swilu  y <- W_v (y * silu(W_s x + b_s)) + b_v
  y <- sigmoid(w x + b) y

B batch, T segment length, D model width, H heads, n sub-keys, K pairs of each head, J = H K rows of
a token, V rows of the values, E their width.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.product_memory import NAME, ProductMemoryConfig
from ngrammer_jax.layers import axis_names, dense, normalization
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.product_keys import weighted_rows
from ngrammer_jax.layers.state import State

TABLES = f'model.{NAME}'  # key of `Tables` in `context.shared`


def find_pairs(scores_BxTxHx2xn: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
  """Returns the K largest sums of a score of each half, and their rows i n + j, [B, T, H, K].

  Ties are broken arbitrarily.

  Raises:
    ValueError: there are fewer than K pairs.
  """
  n = scores_BxTxHx2xn.shape[-1]
  if n**2 < K:
    raise ValueError(
      f'{n} sub-keys make {n**2} pairs, fewer than {K}: use more sub-keys or a smaller top'
    )
  half = min(n, K)
  top_BxTxHx2xk, number_BxTxHx2xk = jax.lax.top_k(scores_BxTxHx2xn, half)
  sums_BxTxHxkxk = top_BxTxHx2xk[..., 0, :, None] + top_BxTxHx2xk[..., 1, None, :]
  sums_BxTxHxk2 = sums_BxTxHxkxk.reshape(*sums_BxTxHxkxk.shape[:-2], half**2)
  scores_BxTxHxK, pair_BxTxHxK = jax.lax.top_k(sums_BxTxHxk2, K)
  first_BxTxHxK = jnp.take_along_axis(number_BxTxHx2xk[..., 0, :], pair_BxTxHxK // half, axis=-1)
  second_BxTxHxK = jnp.take_along_axis(number_BxTxHx2xk[..., 1, :], pair_BxTxHxK % half, axis=-1)
  return scores_BxTxHxK, first_BxTxHxK * n + second_BxTxHxK


class Tables(NamedTuple):
  """The tables shared by the layers.

  Attributes:
    values_VxE: U.
    inputs_VxD: X, of experts. None: no experts.
  """

  values_VxE: jax.Array
  inputs_VxD: jax.Array | None = None


class ProductTables(nn.Module):
  """The tables shared by the layers, `table` and `input_table`, sharded like n-gram tables.

  Attributes:
    options: of the memory.
    width: of the model.
    dtype: of the activations.
  """

  options: ProductMemoryConfig
  width: int
  dtype: jnp.dtype = jnp.float32

  def empty_state(self, batch: int, slots: int | None = None) -> None:
    """Returns None: there is no state."""
    del batch, slots

  @nn.compact
  def __call__(
    self, x_BxTxD: jax.Array, context: Context, state: State | None = None
  ) -> tuple[Tables, None]:
    """Returns the tables, and no state."""
    del x_BxTxD, context, state
    o = self.options
    is_zero = o.start == 'neutral' and not o.has_projection
    values_VxE = self._table('table', o.value_width or self.width, is_zero)
    inputs_VxD = None
    if o.experts:
      inputs_VxD = self._table('input_table', self.width)
    return Tables(values_VxE, inputs_VxD), None

  def _table(self, name: str, width: int, is_zero: bool = False) -> jax.Array:
    """Returns a table parameter [V, width]; in a train state it may be packed (see `table`)."""
    o = self.options
    stored = nn.unbox(self.get_variable('params', name))
    if stored is not None and stored.shape == table.packed_shape(o.rows, width):
      return stored.reshape(o.rows, width)
    init = nn.initializers.normal(width**-0.5)
    if is_zero:
      init = nn.initializers.zeros
    dtype = jnp.dtype(o.table_dtype)
    if o.table_dtype == 'float32':
      dtype = jnp.promote_types(self.dtype, jnp.float32)
    return self.param(name, axis_names.with_axis_names(init, table.AXES), (o.rows, width), dtype)


class ProductMemory(nn.Module):
  """A layer that reads values by product keys, see the top of this file.

  Its parameters are `query`, `sub_keys`, and by options `query_norm`, `sub_key_norm`, `swilu`,
  `value` and `gate`.

  Attributes:
    options: of the memory.
    dtype: of the activations.
  """

  options: ProductMemoryConfig
  dtype: jnp.dtype = jnp.float32

  def empty_state(self, batch: int, slots: int | None = None) -> None:
    """Returns None: there is no state."""
    del batch, slots

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, state: State | None = None
  ) -> tuple[jax.Array, None]:
    """Returns the output of the memory [B, T, D], zeros at padding, and no state.

    Args:
      x_BxTxD: the input, after the norm of the sub-layer.
      context: of the segment, with the tables in `shared`.
      state: None.
    """
    del state
    y_BxTxD = self.read(x_BxTxD, context.shared[TABLES])
    if context.valid_BxT is not None:
      y_BxTxD = jnp.where(context.valid_BxT[..., None] > 0, y_BxTxD, 0)
    return y_BxTxD, None

  @nn.compact
  def read(self, x_BxTxD: jax.Array, tables: Tables) -> jax.Array:
    """Returns the values read from the tables, [B, T, D].

    The intermediate `lookup` has the `rows` and the `weights` of the heads [B, T, H, K].
    """
    o = self.options
    D = x_BxTxD.shape[-1]
    x_BxTxD = x_BxTxD.astype(self.dtype)
    scores_BxTxHxK, rows_BxTxHxK = find_pairs(self._scores(x_BxTxD), o.top)
    weights_BxTxHxK = jax.nn.softmax(scores_BxTxHxK)
    self.sow('intermediates', 'lookup', {'rows': rows_BxTxHxK, 'weights': weights_BxTxHxK})
    rows_BxTxJ = rows_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1)
    w_BxTxJ = weights_BxTxHxK.reshape(rows_BxTxJ.shape).astype(self.dtype)
    if o.experts:
      p_BxTxJ = weighted_rows.products(tables.inputs_VxD, rows_BxTxJ, x_BxTxD)
      w_BxTxJ *= jax.nn.gelu(p_BxTxJ, approximate=False)
    y_BxTxE = weighted_rows.weighted_sums(tables.values_VxE, rows_BxTxJ, w_BxTxJ)
    if o.swilu:
      y_BxTxE *= jax.nn.silu(self._linear('swilu', x_BxTxD, y_BxTxE.shape[-1], ('embed', 'mlp')))
    y_BxTxD = y_BxTxE
    if o.has_projection:
      y_BxTxD = self._linear('value', y_BxTxE, D, ('mlp', 'embed'), o.start == 'neutral')
    if o.gated:
      y_BxTxD *= jax.nn.sigmoid(self._linear('gate', x_BxTxD, 1, ('embed', 'gates')))
    return y_BxTxD

  def _scores(self, x_BxTxD: jax.Array) -> jax.Array:
    """Returns the scores of all sub-keys, [B, T, H, 2, n], in at least float32."""
    o = self.options
    D = x_BxTxD.shape[-1]
    wide = jnp.promote_types(self.dtype, jnp.float32)
    project = dense.dense_general(
      (D,),
      (o.heads, o.key_width),
      ('embed', 'heads', 'kv'),
      kernel_init=nn.initializers.xavier_uniform(),
      bias_init=dense.symmetric(D**-0.5),
      dtype=self.dtype,
      name='query',
    )
    q_BxTxHx2xF = project(x_BxTxD).reshape(*x_BxTxD.shape[:2], o.heads, 2, o.key_width // 2)
    init = dense.symmetric(o.key_width**-0.5)
    init = axis_names.with_axis_names(init, ('heads', None, None, 'kv'))
    shape = o.heads, 2, o.sub_keys, o.key_width // 2
    keys_Hx2xnxF = self.param('sub_keys', init, shape, wide)
    if o.norm == 'query':
      square_BxTxHx2x1 = jnp.square(q_BxTxHx2xF.astype(wide)).sum(-1, keepdims=True)
      # A query of zeros has no direction and stays 0, with a finite gradient.
      square_BxTxHx2x1 = jnp.where(square_BxTxHx2x1 > 0, square_BxTxHx2x1, 1)
      q_BxTxHx2xF = (q_BxTxHx2xF * jax.lax.rsqrt(square_BxTxHx2x1)).astype(self.dtype)
    elif o.norm == 'query_key':
      q_BxTxHx2xF = normalization.RMSNorm(dtype=self.dtype, name='query_norm')(q_BxTxHx2xF)
      keys_Hx2xnxF = normalization.RMSNorm(dtype=wide, name='sub_key_norm')(keys_Hx2xnxF)
    return jnp.einsum(
      'bthsf,hsnf->bthsn',
      q_BxTxHx2xF,
      keys_Hx2xnxF.astype(self.dtype),
      preferred_element_type=wide,
    )

  def _linear(
    self,
    name: str,
    x: jax.Array,
    features: int,
    names: Sequence[str],
    is_neutral: bool = False,
  ) -> jax.Array:
    """Returns a linear map of x with a bias, initialised as in the official code."""
    kernel_init = nn.initializers.normal(x.shape[-1] ** -0.5)
    bias_init = dense.symmetric(x.shape[-1] ** -0.5)
    if is_neutral:
      kernel_init = nn.initializers.zeros
      bias_init = nn.initializers.zeros
    return dense.project(
      x,
      features,
      tuple(names),
      kernel_init=kernel_init,
      bias_init=bias_init,
      dtype=self.dtype,
      name=name,
    )
