"""A recurrent layer, reset where a document starts.

LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000):

  i, f, g, o = x Wx + h Wh + b,  c = s(f) c + s(i) tanh(g),  h = s(o) tanh(c)

or, without gates, h = tanh(x Wx + h Wh + b) (Elman 1990).

B batch, T segment length, D input width, K hidden size, G gates.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

CELLS = {'lstm': 4, 'rnn': 1}  # and their gates
FORGET = 1  # the place of the forget gate

State = dict[str, jax.Array]


def symmetric(bound: float) -> nn.initializers.Initializer:
  """Uniform in [-bound, bound]; what JAX calls uniform begins at 0."""

  def init(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return init


def empty_state(batch: int, hidden: int, cell: str, dtype: jnp.dtype) -> State:
  """The state before the first token: `h` [B, K], and `c` [B, K] of an LSTM, at least float32."""
  wide = jnp.promote_types(dtype, jnp.float32)
  parts = {'h': dtype, 'c': wide} if cell == 'lstm' else {'h': dtype}
  return {name: jnp.zeros((batch, hidden), kind) for name, kind in parts.items()}


class Recurrence(nn.Module):
  """The outputs of all tokens, in one scan over time.

  Parameters: `input_kernel` [D, G, K], `recurrent_kernel` [K, G, K] and `bias` [G, K], the gates in
  the order i, f, g, o.

  Attributes:
    hidden: K.
    cell: one of CELLS.
    forget_bias: what the bias of the forget gate begins with.
    initializer: of everything else.
    dtype: of the computation; `c` is at least float32.
  """

  hidden: int
  cell: str = 'lstm'
  forget_bias: float = 1.0
  initializer: nn.initializers.Initializer = symmetric(0.1)
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
    """The outputs [B, T, K], and the state after the last token.

    Args:
      x_BxTxD: inputs.
      state: what the previous segment returned, or `empty_state`.
      starts_BxT: true where the state is forgotten before the token is read.
      valid_BxT: 0 at padding, which leaves the state as it is.
    """
    G, wide = CELLS[self.cell], jnp.promote_types(self.dtype, jnp.float32)
    kernel_DxGxK, kernel_KxGxK, bias_GxK = self._parameters(x_BxTxD.shape[-1], G, wide)
    # All that does not depend on the state, in one product before the scan.
    x_TxBxD = x_BxTxD.swapaxes(0, 1).astype(self.dtype)
    gates_TxBxGxK = bias_GxK + jnp.einsum(
      'tbd,dgk->tbgk', x_TxBxD, kernel_DxGxK, preferred_element_type=wide
    )

    by_time = lambda array_BxT: array_BxT.T[..., None]
    starts_TxBx1 = by_time(starts_BxT.astype(bool))
    valid = None if valid_BxT is None else by_time(valid_BxT > 0)
    h_TxBxK, state = _outputs(self.cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid)
    return h_TxBxK.swapaxes(0, 1), state

  def _parameters(self, D, G, wide):
    K = self.hidden

    def biases(key, shape, dtype):
      bias_GxK = self.initializer(key, shape, dtype)
      return bias_GxK.at[FORGET].set(self.forget_bias) if self.cell == 'lstm' else bias_GxK

    names = ('embed', None, 'mlp')
    of = lambda init, names: nn.with_logical_partitioning(init, names)
    return (
      self.param('input_kernel', of(self.initializer, names), (D, G, K), wide).astype(self.dtype),
      self.param('recurrent_kernel', of(self.initializer, names), (K, G, K), wide),
      self.param('bias', of(biases, names[1:]), (G, K), wide),
    )


def _scan(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1):
  """All outputs [T, B, K] and the last state, from the gates without what comes of h."""
  (h_TxBxK, state), _ = _kept_scan(
    cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1
  )
  return h_TxBxK, state


def _kept_scan(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1):
  """As `_scan`, and of each token its gates and the state before it."""
  kernel_KxGxK = kernel_KxGxK.astype(state['h'].dtype)

  def step(state, token):
    gates_BxGxK, starts_Bx1, valid_Bx1 = token
    h_BxK = jnp.where(starts_Bx1, 0, state['h'])
    gates_BxGxK += jnp.einsum(
      'bk,kgj->bgj', h_BxK, kernel_KxGxK, preferred_element_type=gates_BxGxK.dtype
    )
    after = _after(cell, _gates(gates_BxGxK), state, starts_Bx1, valid_Bx1)
    return after, (after['h'], (gates_BxGxK, state))

  state, (h_TxBxK, kept) = jax.lax.scan(step, state, (gates_TxBxGxK, starts_TxBx1, valid_TxBx1))
  return (h_TxBxK, state), kept


def _gates(gates_BxGxK):
  """[B, K] of each."""
  return [gates_BxGxK[:, gate] for gate in range(gates_BxGxK.shape[1])]


def _after(cell, gates, state, starts_Bx1, valid_Bx1):
  """The state after a token, from its gates and the state before."""
  dtype = state['h'].dtype
  if cell == 'rnn':
    after = {'h': jnp.tanh(gates[0]).astype(dtype)}
  else:
    i_BxK, f_BxK, g_BxK, o_BxK = gates
    c_BxK = jnp.where(starts_Bx1, 0, state['c'])
    c_BxK = nn.sigmoid(f_BxK) * c_BxK + nn.sigmoid(i_BxK) * jnp.tanh(g_BxK)
    after = {'h': (nn.sigmoid(o_BxK) * jnp.tanh(c_BxK)).astype(dtype), 'c': c_BxK}
  if valid_Bx1 is None:
    return after
  return jax.tree.map(lambda new, old: jnp.where(valid_Bx1, new, old), after, state)


# Autodiff would keep a dozen arrays of each token, where its gates and state are enough, and would
# sum the gradient of the kernel over the steps of a scan, where devices that share a batch would
# exchange it at every one: here it is one product of all tokens.
_outputs = jax.custom_vjp(_scan, nondiff_argnums=(0,))


def _forward(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1):
  outputs, kept = _kept_scan(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1)
  return outputs, (kernel_KxGxK, *kept, starts_TxBx1, valid_TxBx1)


def _backward(cell, kept, cotangents):
  kernel_KxGxK, gates_TxBxGxK, before, starts_TxBx1, valid_TxBx1 = kept
  wide, dtype = gates_TxBxGxK.dtype, before['h'].dtype
  # Before the loop, in which XLA would otherwise transpose it at every step.
  kernel_GxKxK = jax.lax.optimization_barrier(kernel_KxGxK.astype(dtype).transpose(1, 2, 0))

  def step(d_after, token):
    d_h_BxK, gates_BxGxK, before, starts_Bx1, valid_Bx1 = token
    d_after = d_after | {'h': d_after['h'] + d_h_BxK}
    of = lambda gates, state: _after(cell, gates, state, starts_Bx1, valid_Bx1)
    d_gates, d_before = jax.vjp(of, _gates(gates_BxGxK), before)[1](d_after)
    d_gates_BxGxK = jnp.stack(d_gates, axis=1)
    d_h_BxK = jnp.einsum(
      'bgj,gjk->bk', d_gates_BxGxK.astype(dtype), kernel_GxKxK, preferred_element_type=wide
    )
    d_h_BxK = jnp.where(starts_Bx1, 0, d_h_BxK).astype(dtype)
    return d_before | {'h': d_before['h'] + d_h_BxK}, d_gates_BxGxK

  d_h_TxBxK, d_state = cotangents
  tokens = d_h_TxBxK, gates_TxBxGxK, before, starts_TxBx1, valid_TxBx1
  d_state, d_gates_TxBxGxK = jax.lax.scan(step, d_state, tokens, reverse=True)
  d_kernel_KxGxK = jax.lax.dot_general(
    jnp.where(starts_TxBx1, 0, before['h']),
    d_gates_TxBxGxK.astype(dtype),
    (((0, 1), (0, 1)), ((), ())),
    preferred_element_type=wide,
  )
  return d_kernel_KxGxK.astype(kernel_KxGxK.dtype), d_gates_TxBxGxK, d_state, None, None


_outputs.defvjp(_forward, _backward)
