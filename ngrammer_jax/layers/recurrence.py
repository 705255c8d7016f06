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
    gates_TxBxGxK = bias_GxK + jnp.einsum(
      'btd,dgk->tbgk', x_BxTxD.astype(self.dtype), kernel_DxGxK, preferred_element_type=wide
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
  kernel_KxGxK = kernel_KxGxK.astype(state['h'].dtype)

  def step(state, token):
    gates_BxGxK, starts_Bx1, valid_Bx1 = token
    before = _kept(starts_Bx1, state)
    gates_BxGxK += jnp.einsum(
      'bk,kgj->bgj', before['h'], kernel_KxGxK, preferred_element_type=gates_BxGxK.dtype
    )
    after = _after(cell, gates_BxGxK, before)
    if valid_Bx1 is not None:
      after = jax.tree.map(lambda new, old: jnp.where(valid_Bx1, new, old), after, state)
    return after, after['h']

  state, h_TxBxK = jax.lax.scan(step, state, (gates_TxBxGxK, starts_TxBx1, valid_TxBx1))
  return h_TxBxK, state


def _kept(starts, state):
  """The state, forgotten where a document starts."""
  return jax.tree.map(lambda part: jnp.where(starts, 0, part), state)


def _after(cell, gates_BxGxK, before):
  """The state after a token, from its gates and the state before."""
  dtype = before['h'].dtype
  if cell == 'rnn':
    return {'h': jnp.tanh(gates_BxGxK[:, 0]).astype(dtype)}
  i_BxK, f_BxK, g_BxK, o_BxK = gates_BxGxK.swapaxes(0, 1)
  c_BxK = nn.sigmoid(f_BxK) * before['c'] + nn.sigmoid(i_BxK) * jnp.tanh(g_BxK)
  return {'h': (nn.sigmoid(o_BxK) * jnp.tanh(c_BxK)).astype(dtype), 'c': c_BxK}


# The gradient of the kernel is one product of all tokens, and not a sum over the steps of a scan,
# which devices that share a batch would exchange at every one of them.
_outputs = jax.custom_vjp(_scan, nondiff_argnums=(0,))


def _forward(cell, kernel_KxGxK, gates_TxBxGxK, state, starts_TxBx1, valid_TxBx1):
  of_tokens = lambda gates, state: _scan(
    cell, kernel_KxGxK, gates, state, starts_TxBx1, valid_TxBx1
  )
  (h_TxBxK, after), backward = jax.vjp(of_tokens, gates_TxBxGxK, state)
  before_TxBxK = jnp.concatenate([state['h'][None], h_TxBxK[:-1]])
  before_TxBxK = _kept(starts_TxBx1, before_TxBxK)
  return (h_TxBxK, after), (backward, before_TxBxK, kernel_KxGxK)


def _backward(cell, kept, cotangents):
  backward, before_TxBxK, kernel_KxGxK = kept
  gates_TxBxGxK, state = backward(cotangents)
  wide = gates_TxBxGxK.dtype
  kernel = jnp.einsum(
    'tbk,tbgj->kgj',
    before_TxBxK,
    gates_TxBxGxK.astype(before_TxBxK.dtype),
    preferred_element_type=wide,
  )
  return kernel.astype(kernel_KxGxK.dtype), gates_TxBxGxK, state, None, None


_outputs.defvjp(_forward, _backward)
