"""LSTM and Elman layers whose state is reset at document starts.

LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000):

  i, f, g, o = x Wx + h Wh + b,  c = s(f) c + s(i) tanh(g),  h = s(o) tanh(c)

Elman network (Elman 1990):

  h = tanh(x Wx + h Wh + b)

B batch, T segment length, D input width, K hidden size, G gates.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.recurrent import CELLS
from ngrammer_jax.layers import axis_names, dense
from ngrammer_jax.layers.state import State

FORGET_GATE = 1  # index in the order i, f, g, o


def empty_state(batch: int, hidden: int, cell: str, dtype: jnp.dtype) -> State:
  """Returns the zero state: `h` [B, K] and, for an LSTM, `c` [B, K] in at least float32."""
  state = {'h': jnp.zeros((batch, hidden), dtype)}
  if cell == 'lstm':
    state['c'] = jnp.zeros((batch, hidden), jnp.promote_types(dtype, jnp.float32))
  return state


class Recurrence(nn.Module):
  """A recurrent layer, computed in one scan over time.

  Parameters: `input_kernel` [D, G, K], `recurrent_kernel` [K, G, K] and `bias` [G, K], with the
  gates in the order i, f, g, o.

  Attributes:
    hidden: K.
    cell: one of CELLS.
    forget_bias: initial bias of the forget gate.
    initializer: initializer of all other parameters.
    dtype: dtype of the computation; `c` is at least float32.
  """

  hidden: int
  cell: str = 'lstm'
  forget_bias: float = 1.0
  initializer: nn.initializers.Initializer = dense.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    state: State,
    *,
    starts_BxT: jax.Array,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Returns the outputs [B, T, K], and the state after the last token.

    Args:
      x_BxTxD: inputs.
      state: the state returned by the previous segment, or `empty_state`.
      starts_BxT: true where the state is reset before the token is read.
      valid_BxT: 0 at padding, where the state does not change.
    """
    wide = jnp.promote_types(self.dtype, jnp.float32)
    kernel_DxGxK, kernel_KxGxK, bias_GxK = self._parameters(x_BxTxD.shape[-1], wide)
    # One product before the scan computes the terms that do not depend on the state.
    x_TxBxD = x_BxTxD.swapaxes(0, 1).astype(self.dtype)
    gates_TxBxGxK = bias_GxK + jnp.einsum(
      'tbd,dgk->tbgk', x_TxBxD, kernel_DxGxK, preferred_element_type=wide
    )

    starts_TxBx1 = starts_BxT.astype(bool).T[..., None]
    valid_TxBx1 = None if valid_BxT is None else (valid_BxT > 0).T[..., None]
    h_TxBxK, state = _recur(
      self.cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1
    )
    return h_TxBxK.swapaxes(0, 1), state

  def _parameters(self, D: int, wide: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns both kernels [D, G, K] and [K, G, K], and the biases [G, K]."""
    G = CELLS[self.cell]
    K = self.hidden
    kernel_init = axis_names.with_axis_names(self.initializer, ('embed', 'gates', 'mlp'))
    bias_init = self.initializer
    if self.cell == 'lstm':
      bias_init = _with_forget_bias(self.initializer, self.forget_bias)
    bias_init = axis_names.with_axis_names(bias_init, ('gates', 'mlp'))
    kernel_DxGxK = self.param('input_kernel', kernel_init, (D, G, K), wide).astype(self.dtype)
    kernel_KxGxK = self.param('recurrent_kernel', kernel_init, (K, G, K), wide)
    bias_GxK = self.param('bias', bias_init, (G, K), wide)
    return kernel_DxGxK, kernel_KxGxK, bias_GxK


def _with_forget_bias(
  initializer: nn.initializers.Initializer, forget_bias: float
) -> nn.initializers.Initializer:
  """Returns an initializer of biases [G, K] with the given forget bias."""

  def initialize(key, shape, dtype):
    return initializer(key, shape, dtype).at[FORGET_GATE].set(forget_bias)

  return initialize


# Autodiff would store a dozen arrays per token, although gates and state suffice, and would sum the
# gradient of the kernel over the steps of the scan, with an all-reduce over the devices at every
# step. Here it is one product over all tokens.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recur(
  cell: str,
  kernel_KxGxK: jax.Array,
  gates_TxBxGxK: jax.Array,
  state: State,
  starts_TxBx1: jax.Array,
  valid_TxBx1: jax.Array | None,
) -> tuple[jax.Array, State]:
  """Returns outputs [T, B, K] and last state; h is not yet added to the gates."""
  outputs, _ = _scan(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1)
  return outputs


def _scan(
  cell: str,
  kernel_KxGxK: jax.Array,
  gates_TxBxGxK: jax.Array,
  state: State,
  starts_TxBx1: jax.Array,
  valid_TxBx1: jax.Array | None,
) -> tuple[tuple[jax.Array, State], tuple[jax.Array, State]]:
  """Returns outputs and last state, and the gates of each token and the state before it."""
  kernel_KxGxK = kernel_KxGxK.astype(state['h'].dtype)

  def step(state, token):
    gates_BxGxK, starts_Bx1, valid_Bx1 = token
    h_BxK = jnp.where(starts_Bx1, 0, state['h'])
    gates_BxGxK += jnp.einsum(
      'bk,kgj->bgj', h_BxK, kernel_KxGxK, preferred_element_type=gates_BxGxK.dtype
    )
    next_state = _next_state(cell, jnp.unstack(gates_BxGxK, axis=1), state, starts_Bx1, valid_Bx1)
    return next_state, (next_state['h'], (gates_BxGxK, state))

  tokens = gates_TxBxGxK, starts_TxBx1, valid_TxBx1
  state, (h_TxBxK, residuals) = jax.lax.scan(step, state, tokens)
  return (h_TxBxK, state), residuals


def _next_state(
  cell: str,
  gates: list[jax.Array],
  state: State,
  starts_Bx1: jax.Array,
  valid_Bx1: jax.Array | None,
) -> State:
  """Returns the state after a token, from its gates [B, K] and the state before it."""
  dtype = state['h'].dtype
  if cell == 'rnn':
    next_state = {'h': jnp.tanh(gates[0]).astype(dtype)}
  else:
    i_BxK, f_BxK, g_BxK, o_BxK = gates
    c_BxK = jnp.where(starts_Bx1, 0, state['c'])
    c_BxK = nn.sigmoid(f_BxK) * c_BxK + nn.sigmoid(i_BxK) * jnp.tanh(g_BxK)
    next_state = {'h': (nn.sigmoid(o_BxK) * jnp.tanh(c_BxK)).astype(dtype), 'c': c_BxK}
  if valid_Bx1 is None:
    return next_state
  return jax.tree.map(lambda new, old: jnp.where(valid_Bx1, new, old), next_state, state)


def _forward(
  cell: str,
  kernel_KxGxK: jax.Array,
  gates_TxBxGxK: jax.Array,
  state: State,
  starts_TxBx1: jax.Array,
  valid_TxBx1: jax.Array | None,
) -> tuple[tuple[jax.Array, State], tuple]:
  outputs, residuals = _scan(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1)
  return outputs, (kernel_KxGxK, *residuals, starts_TxBx1, valid_TxBx1)


def _backward(cell: str, residuals: tuple, cotangents: tuple[jax.Array, State]) -> tuple:
  """Returns the gradients of kernel, gates and first state."""
  kernel_KxGxK, gates_TxBxGxK, states, starts_TxBx1, valid_TxBx1 = residuals
  wide = gates_TxBxGxK.dtype
  dtype = states['h'].dtype
  # Without the barrier XLA would transpose the kernel at every step of the loop.
  kernel_GxKxK = jax.lax.optimization_barrier(kernel_KxGxK.astype(dtype).transpose(1, 2, 0))

  def step(d_state, token):
    d_h_BxK, gates_BxGxK, state, starts_Bx1, valid_Bx1 = token
    d_state = d_state | {'h': d_state['h'] + d_h_BxK}

    def next_state(gates, state):
      return _next_state(cell, gates, state, starts_Bx1, valid_Bx1)

    _, differentiate = jax.vjp(next_state, jnp.unstack(gates_BxGxK, axis=1), state)
    d_gates, d_state = differentiate(d_state)
    d_gates_BxGxK = jnp.stack(d_gates, axis=1)
    d_h_BxK = jnp.einsum(
      'bgj,gjk->bk', d_gates_BxGxK.astype(dtype), kernel_GxKxK, preferred_element_type=wide
    )
    d_h_BxK = jnp.where(starts_Bx1, 0, d_h_BxK).astype(dtype)
    return d_state | {'h': d_state['h'] + d_h_BxK}, d_gates_BxGxK

  d_h_TxBxK, d_state = cotangents
  tokens = d_h_TxBxK, gates_TxBxGxK, states, starts_TxBx1, valid_TxBx1
  d_state, d_gates_TxBxGxK = jax.lax.scan(step, d_state, tokens, reverse=True)
  d_kernel_KxGxK = jax.lax.dot_general(
    jnp.where(starts_TxBx1, 0, states['h']),
    d_gates_TxBxGxK.astype(dtype),
    (((0, 1), (0, 1)), ((), ())),
    preferred_element_type=wide,
  )
  return d_kernel_KxGxK.astype(kernel_KxGxK.dtype), d_gates_TxBxGxK, d_state, None, None


_recur.defvjp(_forward, _backward)
