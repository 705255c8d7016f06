"""Muon: the momentum of each matrix of a block, orthogonalised (Jordan et al. 2024).

  m <- b m + (1 - b) g,  u = b m + (1 - b) g                     momentum, Nesterov
  X = u / (|u| + epsilon),  5 times X <- a X + (c A + d A^2) X,  A = X X^T
  W <- W - rate (scale X + decay W)

The singular values of X end between 0.7 and 1.2. There is no bias correction.

`optax.contrib.muon` is another algorithm. It corrects the bias of m and g, which changes the second
update by 1e-3; it sends attention kernels, which have three axes, to Adam, and embeddings and the
output matrix to Muon; and its Adam is NAdam. Its orthogonalisation is not public.

S matrices of one shape, R rows, C columns, R at most C.
"""

from collections.abc import Collection, Mapping, Sequence
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import errors, sharding
from ngrammer_jax.config.optimizer import MuonConfig
from ngrammer_jax.layers import axis_names, mesh_axes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, c, d


class MatrixAxes(NamedTuple):
  """The axes of the inputs and of the outputs of a kernel; the others stack several matrices."""

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]


# The matrices of blocks by the logical axis names of their kernels. All else has another optimizer:
# also gates of heads, persistent vectors, convolution taps and spans, which are no linear maps
# between hidden states.
MATRICES = {
  ('embed', 'heads', 'kv'): MatrixAxes((0,), (1, 2)),  # to queries, keys, values
  ('heads', 'kv', 'embed'): MatrixAxes((0, 1), (2,)),  # from the heads
  ('heads', 'kv', None): MatrixAxes((1,), (2,)),  # from shared keys to queries, one for each head
  ('embed', 'mlp'): MatrixAxes((0,), (1,)),
  ('mlp', 'embed'): MatrixAxes((0,), (1,)),
  (None, 'embed'): MatrixAxes((0,), (1,)),  # from the rows of a memory to values
  (None, 'branches', 'embed'): MatrixAxes((0,), (2,)),  # to keys, one for each branch
}


def find_matrices(params: Any, frozen: Collection[str] = ()) -> dict[str, MatrixAxes]:
  """Returns the axes of the matrices of blocks that are trained, by name.

  Args:
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
    frozen: names of the parameters that are not trained.

  Raises:
    BadInput: there is none.
  """
  matrices = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=sharding.is_boxed):
    name = sharding.leaf_name(path)
    if is_matrix(path, leaf) and name not in frozen:
      matrices[name] = MATRICES[axis_names.names_of(leaf)]
  if not matrices:
    raise errors.BadInput(
      "optimizer.algorithm='muon' is for the matrices of blocks, and this run trains none: use "
      "'adam', or name blocks in optimizer.train"
    )
  return matrices


def is_matrix(path: Any, leaf: Any) -> bool:
  """Whether a parameter in its box is a matrix of a block.

  Args:
    path: its path in the tree of parameters.
    leaf: the parameter.
  """
  name = sharding.leaf_name(path)
  is_kernel = name.startswith('layer_') and name.endswith('kernel')
  return is_kernel and axis_names.names_of(leaf) in MATRICES


class MuonState(NamedTuple):
  """The momentum of each matrix."""

  momentum: optax.Updates


def scale_by_muon(
  config: MuonConfig, matrices: Mapping[str, MatrixAxes]
) -> optax.GradientTransformation:
  """Returns the transformation from gradients to scaled orthogonal matrices.

  Args:
    config: `optimizer.muon`.
    matrices: axes of each parameter, by name.
  """

  def init(params):
    return MuonState(jax.tree.map(jnp.zeros_like, params))

  def mix(m, g):
    return config.momentum * m + (1 - config.momentum) * g

  def update(gradients, state, params=None):
    del params
    momentum = jax.tree.map(mix, state.momentum, gradients)
    updates = momentum
    if config.nesterov:
      updates = jax.tree.map(mix, momentum, gradients)
    with jax.named_scope('muon'):
      return _orthogonalize_kernels(updates, matrices, config), MuonState(momentum)

  return optax.GradientTransformation(init, update)


def _orthogonalize_kernels(
  kernels: Any, matrices: Mapping[str, MatrixAxes], config: MuonConfig
) -> Any:
  """Returns a tree of kernels with orthogonal, scaled matrices; those of a shape are one stack."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(kernels)
  axes = [matrices[sharding.leaf_name(path)] for path, _ in leaves]
  kernels_by_shape: dict[tuple[int, int], list[int]] = {}
  for index, (_, kernel) in enumerate(leaves):
    rows_and_columns = tuple(sorted(_input_and_output_size(kernel.shape, axes[index])))
    kernels_by_shape.setdefault(rows_and_columns, []).append(index)

  results = [None] * len(leaves)
  for indices in kernels_by_shape.values():
    stacks = [_to_matrices(leaves[i][1], axes[i]) for i in indices]
    x_SxRxC = orthogonalize(jnp.concatenate(stacks), config)
    ends = [sum(map(len, stacks[: n + 1])) for n in range(len(stacks))]
    for i, part_SxRxC in zip(indices, jnp.split(x_SxRxC, ends[:-1]), strict=True):
      kernel = leaves[i][1]
      scale = _scale(config.scale, *_input_and_output_size(kernel.shape, axes[i]))
      results[i] = scale * _from_matrices(part_SxRxC, kernel.shape, axes[i]).astype(kernel.dtype)
  return jax.tree_util.tree_unflatten(tree, results)


def orthogonalize(u_SxRxC: jax.Array, config: MuonConfig) -> jax.Array:
  """Returns matrices of the same singular vectors, with singular values near 1, by Newton-Schulz.

  Args:
    u_SxRxC: the matrices, R at most C.
    config: `optimizer.muon`.
  """
  a, c, d = COEFFICIENTS
  norm_Sx1x1 = jnp.linalg.norm(u_SxRxC, axis=(1, 2), keepdims=True)
  x_SxRxC = (u_SxRxC / (norm_Sx1x1 + config.epsilon)).astype(_dtype(config, u_SxRxC.dtype))
  precision = None
  if x_SxRxC.dtype != jnp.bfloat16:
    precision = jax.lax.Precision.HIGHEST
  for _ in range(config.steps):
    a_SxRxR = jnp.einsum('src,stc->srt', x_SxRxC, x_SxRxC, precision=precision)
    b_SxRxR = c * a_SxRxR + d * jnp.matmul(a_SxRxR, a_SxRxR, precision=precision)
    x_SxRxC = a * x_SxRxC + jnp.matmul(b_SxRxR, x_SxRxC, precision=precision)
  return x_SxRxC


def _dtype(config: MuonConfig, dtype: jnp.dtype) -> jnp.dtype:
  """Returns the dtype of the products: bfloat16 on accelerators unless the config has another."""
  if config.dtype is not None:
    return jnp.dtype(config.dtype)
  is_cpu = mesh_axes.device()[0] == 'cpu'
  return dtype if is_cpu else jnp.dtype(jnp.bfloat16)


def _scale(rule: str, inputs: int, outputs: int) -> float:
  """Returns the factor of an orthogonal matrix.

  `jordan`: a vector of root mean square 1 changes by about 1 times the rate. `moonlight` (Liu et
  al. 2025): the values have the root mean square of an update of Adam. `none`: 1.
  """
  if rule == 'jordan':
    return math.sqrt(max(1, outputs / inputs))
  if rule == 'moonlight':
    return 0.2 * math.sqrt(max(inputs, outputs))
  return 1.0


def _input_and_output_size(shape: Sequence[int], axes: MatrixAxes) -> tuple[int, int]:
  """Returns the sizes of the matrices of a kernel."""
  inputs, outputs = (math.prod(shape[axis] for axis in side) for side in axes)
  return inputs, outputs


def _order(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
  """Returns the axes of a kernel, those of the stack first."""
  stack = tuple(axis for axis in range(ndim) if axis not in axes.inputs + axes.outputs)
  return stack + axes.inputs + axes.outputs


def _to_matrices(kernel: jax.Array, axes: MatrixAxes) -> jax.Array:
  """Returns the matrices of a kernel, [S, R, C]."""
  inputs, outputs = _input_and_output_size(kernel.shape, axes)
  x_SxIxO = kernel.transpose(_order(kernel.ndim, axes)).reshape(-1, inputs, outputs)
  return x_SxIxO.swapaxes(1, 2) if inputs > outputs else x_SxIxO


def _from_matrices(x_SxRxC: jax.Array, shape: Sequence[int], axes: MatrixAxes) -> jax.Array:
  """Returns the kernel of matrices: the inverse of `_to_matrices`."""
  inputs, outputs = _input_and_output_size(shape, axes)
  if inputs > outputs:
    x_SxRxC = x_SxRxC.swapaxes(1, 2)
  order = _order(len(shape), axes)
  kernel = x_SxRxC.reshape([shape[axis] for axis in order])
  return kernel.transpose([order.index(axis) for axis in range(len(shape))])


def flops(params: Any, matrices: Mapping[str, MatrixAxes], steps: int) -> int:
  """Returns the FLOPs of orthogonalising all matrices once, a multiply-add as two.

  Args:
    params: the parameters, abstract or not.
    matrices: see `find_matrices`.
    steps: steps of the iteration.
  """
  total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(params)):
    axes = matrices.get(sharding.leaf_name(path))
    if axes is not None:
      R, C = sorted(_input_and_output_size(leaf.shape, axes))
      stack = math.prod(leaf.shape) // (R * C)
      total += stack * steps * (4 * R * R * C + 2 * R**3)
  return total
