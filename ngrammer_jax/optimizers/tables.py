"""The optimizers of n-gram tables.

Gradients are arrays or `RowGradient`s, with the same result. A visited row has a non-zero gradient.

  adagrad     changes visited rows only (exactly Adagrad)
  row_adagrad Adagrad with one sum a row, of its mean squares: 1/E of the state of adagrad
  lazy_adam   Adam that changes moments and rows only when the row is visited
  adam        changes every row in every step
  sinkhorn    changes every row in every step
  frozen      changes nothing

Tables have no weight decay. An optimizer that changes every row reads and writes the whole table
and its moments in every step, and needs a gradient and an update as large as the table.

V rows, E width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax.optimizers import row_gradient
from ngrammer_jax.optimizers.row_gradient import RowGradient
from ngrammer_jax.optimizers.schedule import Schedule

LEARNING_RATE_FACTOR = 5.0  # of all but the two Adagrads (Cheng et al. 2026)
SINKHORN_SCALE = 0.18  # of the learning rate
NORMALIZATIONS = 11  # of rows and columns in turn


def make(
  name: str,
  config: experiment.OptimizerConfig,
  fraction: Schedule,
  learning_rate_factor: float | None = None,
) -> optax.GradientTransformation:
  """Returns an optimizer of tables.

  Args:
    name: see above.
    config: the optimizer config; Adam has the decay rates and epsilon of the dense weights.
    fraction: the fraction of the learning rate at a step.
    learning_rate_factor: of `optimizer.table.learning_rate` for adagrad and row_adagrad, 1 by
      default; of `optimizer.learning_rate` for the others, 5 by default.
  """
  if name == 'frozen':
    return on_visited_rows(optax.set_to_zero())

  def scale_by_rate(learning_rate, default_factor):
    factor = default_factor if learning_rate_factor is None else learning_rate_factor

    def rate(step):
      return factor * learning_rate * fraction(step)

    return optax.scale_by_learning_rate(rate)

  if name in ('adagrad', 'row_adagrad'):
    table = config.table or experiment.TableConfig()
    scale_by_sums = optax.scale_by_rss(table.accumulator, table.epsilon)
    if name == 'row_adagrad':
      scale_by_sums = scale_by_row_sums(table.accumulator, table.epsilon)
    return on_visited_rows(optax.chain(scale_by_sums, scale_by_rate(table.learning_rate, 1)))

  scale = scale_by_rate(config.learning_rate, LEARNING_RATE_FACTOR)
  if name == 'sinkhorn':
    return on_all_rows(optax.chain(scale_by_sinkhorn(), optax.scale(SINKHORN_SCALE), scale))
  adam = config.adam or experiment.AdamConfig()
  scale_by_adam = optax.scale_by_adam(adam.beta1, adam.beta2, config.epsilon)
  if name == 'lazy_adam':
    return on_visited_rows(optax.chain(scale_by_adam, scale))
  return on_all_rows(optax.chain(scale_by_adam, scale))


def on_visited_rows(transform: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns a transformation of only the visited rows of gradients and state.

  Other rows of the state are unchanged, with updates of 0. Adam becomes lazy Adam, a different
  algorithm: moments of an unvisited row do not decay, and momentum does not move it. Scalars in the
  state, such as the count of the bias correction, change in every step.

  Args:
    transform: a transformation of independent rows, with the same initial state for all rows and
      without parameters.
  """

  def gradient_of(array, gradient):
    del array
    return gradient

  def no_gradient(number):
    del number

  def update(gradients, state, params=None):
    del params
    visited_state = optax.tree.map_params(transform, _take_visited, state, gradients)
    updates, next_visited = transform.update(row_gradient.values(gradients), visited_state)
    # The gradient beside each array of the state; None beside its numbers.
    state_gradients = optax.tree.map_params(
      transform, gradient_of, state, gradients, transform_non_params=no_gradient
    )
    state = jax.tree.map(_put_visited, state, next_visited, state_gradients)
    return row_gradient.map_leaves(_put_update, gradients, updates), state

  def init(params):
    return transform.init(jax.tree.map(_zeros_like, params))

  return optax.GradientTransformation(init, update)


def _take_visited(state_VxE: jax.Array, gradient: jax.Array | RowGradient) -> jax.Array:
  """Returns the visited rows of the state of a table; all rows for an array gradient."""
  if row_gradient.is_row_gradient(gradient):
    return gradient.take(state_VxE)
  return state_VxE


def _put_visited(
  state_VxE: jax.Array, new: jax.Array, gradient: jax.Array | RowGradient | None
) -> jax.Array:
  """Returns the state of a table with new values in the visited rows."""
  if gradient is None:  # a number, such as the count of steps
    return new
  if row_gradient.is_row_gradient(gradient):
    return gradient.put(state_VxE, new)
  return jnp.where(_is_visited(gradient), new, state_VxE)


def _put_update(gradient: jax.Array | RowGradient, update: jax.Array) -> jax.Array | RowGradient:
  """Returns the update of a table from the updates of its visited rows."""
  if row_gradient.is_row_gradient(gradient):
    return gradient.replace(values=update)
  return jnp.where(_is_visited(gradient), update, 0)


def _is_visited(gradient_VxE: jax.Array) -> jax.Array:
  return (gradient_VxE != 0).any(axis=-1, keepdims=True)


def _zeros_like(param: jax.Array) -> jax.Array:
  """Returns zeros like a table, in the dtype of its state."""
  return jnp.zeros(param.shape, _state_dtype(param))


def _state_dtype(param: jax.Array) -> jnp.dtype:
  """Returns the dtype of the state: averages and sums would stall in bfloat16."""
  return jnp.promote_types(param.dtype, jnp.float32)


def on_all_rows(transform: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns a transformation of whole-table gradients, in at least float32."""

  def to_dense(gradient, param):
    if row_gradient.is_row_gradient(gradient):
      return gradient.dense(_zeros_like(param))
    return gradient.astype(_state_dtype(param))

  def init(params):
    return transform.init(jax.tree.map(_zeros_like, params))

  def update(gradients, state, params):
    return transform.update(row_gradient.map_leaves(to_dense, gradients, params), state)

  return optax.GradientTransformation(init, update)


class RowSumsState(NamedTuple):
  """The sum of the mean squares of each row of a table, [V, 1]; [V, P] if P rows are packed."""

  sums: optax.Updates


def scale_by_row_sums(accumulator: float, epsilon: float) -> optax.GradientTransformation:
  """Row-wise Adagrad, `EXACT_ROWWISE_ADAGRAD` of FBGEMM, `RowWiseAdagrad` of TorchRec.

  s <- s + mean of g^2 over a row, g / (sqrt(s) + epsilon). With the same gradient for all values of
  a row, it equals Adagrad; with a gradient for only one of E values, steps are sqrt(E) times as
  large.

  Args:
    accumulator: s before the first step.
    epsilon: added to the root, not under it.
  """

  def init(params):
    def first_sums(param):
      return jnp.full((len(param), 1), accumulator, param.dtype)

    return RowSumsState(jax.tree.map(first_sums, params))

  def by_row(gradient, sums_VxP):
    return gradient.reshape(*sums_VxP.shape, -1)

  def add_mean_square(sums_VxP, gradient):
    return sums_VxP + jnp.square(by_row(gradient, sums_VxP)).mean(axis=-1)

  def scale(gradient, sums_VxP):
    scaled_VxPxE = by_row(gradient, sums_VxP) / (jnp.sqrt(sums_VxP) + epsilon)[..., None]
    return scaled_VxPxE.reshape(gradient.shape)

  def update(gradients, state, params=None):
    del params
    sums = jax.tree.map(add_mean_square, state.sums, gradients)
    return jax.tree.map(scale, gradients, sums), RowSumsState(sums)

  return optax.GradientTransformation(init, update)


class SinkhornState(NamedTuple):
  """The momentum of each table."""

  momentum: optax.Updates


def scale_by_sinkhorn(
  decay: float = 0.95, threshold: float = 1e-3, epsilon: float = 1e-20
) -> optax.GradientTransformation:
  """Momentum with Sinkhorn normalisation, Algorithm 1 of the report of DeepSeek-V4.1.

  m <- d m + (1 - d) g, u = d m + (1 - d) g (Nesterov). Rows of u of at most `threshold` times the
  mean row norm become 0; then rows and columns are divided by their norms in turn, and the result
  is multiplied by the root of the number of columns.

  Args:
    decay: d.
    threshold: see above.
    epsilon: added to norms.
  """

  def init(params):
    return SinkhornState(jax.tree.map(jnp.zeros_like, params))

  def normalize(update_VxE):
    norm_Vx1 = jnp.linalg.norm(update_VxE, axis=1, keepdims=True)
    update_VxE = jnp.where(norm_Vx1 <= threshold * norm_Vx1.mean(), 0, update_VxE)
    for i in range(NORMALIZATIONS):  # of rows first and last
      axis = 1 if i % 2 == 0 else 0
      norm = jnp.linalg.norm(update_VxE, axis=axis, keepdims=True)
      update_VxE = update_VxE / (norm + epsilon)
    return update_VxE * update_VxE.shape[1] ** 0.5

  def mix(m, g):
    return decay * m + (1 - decay) * g

  def update(gradients, state, params=None):
    del params
    momentum = jax.tree.map(mix, state.momentum, gradients)
    updates = jax.tree.map(mix, momentum, gradients)
    return jax.tree.map(normalize, updates), SinkhornState(momentum)

  return optax.GradientTransformation(init, update)
