"""The position-wise feed-forward layer.

  y = act(x W_in) W_out,  or gated (GLU, Shazeer 2020)  y = (act(x W_gate) * (x W_in)) W_out

Memories may change x W_in, the up features of a gated layer, or replace them.

B batch, T segment length, D model width, F inner width.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import activations, dense, dropout, mesh_axes

# XLA:TPU stores other inner widths transposed, and cuBLAS multiplies them in kernels for any width,
# which took 38 % of a training step of ngrammer_c4.py:transformer on an H100.
MULTIPLES = {'tpu': 128, 'gpu': 8}


class FeedForward(nn.Module):
  """A feed-forward layer with parameters `in` if it has up features, `gate` if gated, and `out`.

  Attributes:
    width: F.
    activation: a key of `activations.ACTIVATIONS`.
    gated: whether the inner layer is multiplied by an activated gate.
    bias: whether linear maps have biases.
    dropout: dropout rate of the inner layer.
    dtype: dtype of the computation. None: dtype of the input.
    change_up: for a gated layer, a function from the up features [B, T, F] to new ones.
    has_up: whether there is W_in. If not, `change_up` receives zeros.
  """

  width: int
  activation: str = 'gelu'
  gated: bool = True
  bias: bool = False
  dropout: float = 0.0
  dtype: jnp.dtype | None = jnp.float32
  change_up: Callable[[jax.Array], jax.Array] | None = None
  has_up: bool = True

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    valid_BxT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, T, D], zeros where valid is 0. There is no dropout without a key."""
    D = x_BxTxD.shape[-1]
    activate = activations.ACTIVATIONS[self.activation]
    dtype = x_BxTxD.dtype if self.dtype is None else self.dtype
    padding = self._padding(dropout_key)
    if padding:
      project = functools.partial(self._project_padded, padding, dtype)
    else:
      project = functools.partial(dense.project, use_bias=self.bias, dtype=dtype)
    x_BxTxD = mesh_axes.shard_rows(x_BxTxD)

    def project_in(name):
      y_BxTxF = project(x_BxTxD, self.width, ('embed', 'mlp'), name=name)
      return checkpoint_name(y_BxTxF, 'inner_features')

    if self.has_up:
      inner_BxTxF = project_in('in')
    else:
      inner_BxTxF = jnp.zeros((*x_BxTxD.shape[:2], self.width), dtype)
    if self.change_up is not None:
      inner_BxTxF = self.change_up(inner_BxTxF)
    if self.gated:
      inner_BxTxF *= activate(project_in('gate'))
    else:
      inner_BxTxF = activate(inner_BxTxF)
    inner_BxTxF = dropout.drop(inner_BxTxF, self.dropout, dropout_key)
    y_BxTxD = project(inner_BxTxF, D, ('mlp', 'embed'), name='out')
    y_BxTxD = checkpoint_name(y_BxTxD, 'feed_forward_output')
    if valid_BxT is not None:
      y_BxTxD = jnp.where(valid_BxT[..., None] > 0, y_BxTxD, 0)
    return y_BxTxD

  def _padding(self, dropout_key: jax.Array | None) -> int:
    """Padding of the inner width in the program."""
    is_dropped = self.dropout > 0 and dropout_key is not None
    is_summed = self.bias or self.activation == 'softmax'  # zeros would count
    if (
      is_dropped
      or is_summed
      or self.change_up is not None
      or self.is_initializing()
      or mesh_axes.shards('mlp') > 1
    ):
      return 0
    return -self.width % MULTIPLES.get(mesh_axes.device()[0], 1)

  def _project_padded(
    self,
    padding: int,
    dtype: jnp.dtype,
    x_BxTx: jax.Array,
    features: int,
    names: tuple[str, str],
    name: str,
  ) -> jax.Array:
    """`dense.project` with zeros beside the kernel, whose inner features `out` multiplies by 0."""
    del features
    kernel = nn.unbox(self.variables['params'][name]['kernel']).astype(dtype)
    if names[0] == 'mlp':
      kernel = jnp.pad(kernel, ((0, padding), (0, 0)))
    else:
      kernel = jnp.pad(kernel, ((0, 0), (0, padding)))
    return x_BxTx.astype(dtype) @ kernel
