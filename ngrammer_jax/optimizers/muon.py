"""Muon: the momentum of each matrix of a block, orthogonalised (Jordan et al. 2024).

  m <- b m + (1 - b) g,  u = b m + (1 - b) g                     momentum, Nesterov
  W <- W - rate (scale X + decay W),  X the orthogonalised u     see `orthogonalization`

There is no bias correction. All other weights have another optimizer.

`optax.contrib.muon` is another algorithm. Its bias correction of m and g changes the second update
by 1e-3. It trains attention kernels (three axes) by Adam, and embeddings and the output matrix by
Muon. Its Adam is NAdam. Its orthogonalisation is not public.

S matrices of one shape, R rows, C columns, R at most C.
"""

from collections.abc import Collection, Mapping
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.config.optimizer import MuonConfig
from ngrammer_jax.layers import axis_names, mesh_axes, parameter_kinds
from ngrammer_jax.optimizers import orthogonalization
from ngrammer_jax.optimizers.orthogonalization import StackSharding


class Kernel(NamedTuple):
  """The layout of the kernel of one or several matrices.

  Attributes:
    names: its logical axis names, of a linear map.
    shape: its shape.
  """

  names: tuple[str | None, ...]
  shape: tuple[int, ...]

  @property
  def axes(self) -> parameter_kinds.MapAxes:
    """The axes of its inputs and outputs."""
    return parameter_kinds.of(self.names).axes

  @property
  def inputs(self) -> int:
    """Number of inputs of a matrix."""
    return math.prod(self.shape[axis] for axis in self.axes.inputs)

  @property
  def outputs(self) -> int:
    """Number of outputs of a matrix."""
    return math.prod(self.shape[axis] for axis in self.axes.outputs)

  @property
  def stack_shape(self) -> tuple[int, int, int]:
    """S, R and C of its matrices."""
    R, C = sorted((self.inputs, self.outputs))
    return math.prod(self.shape) // (R * C), R, C

  def sharding(self) -> StackSharding:
    """Returns the sharding of its matrices under the current mesh."""
    sides = []
    for side in self.axes:
      # Of several axes, the first one is sharded.
      sides.append(mesh_axes.axes(self.names[side[0]], self.shape[side[0]]) or ())
    if self.inputs > self.outputs:
      sides.reverse()
    return StackSharding(*sides)

  def to_matrices(self, kernel: jax.Array) -> jax.Array:
    """Returns the matrices of an array of this layout, [S, R, C]."""
    x_SxIxO = kernel.transpose(self._order()).reshape(-1, self.inputs, self.outputs)
    if self.inputs > self.outputs:
      return x_SxIxO.swapaxes(1, 2)
    return x_SxIxO

  def from_matrices(self, x_SxRxC: jax.Array) -> jax.Array:
    """Returns the array of matrices: the inverse of `to_matrices`."""
    if self.inputs > self.outputs:
      x_SxRxC = x_SxRxC.swapaxes(1, 2)
    order = self._order()
    kernel = x_SxRxC.reshape([self.shape[axis] for axis in order])
    return kernel.transpose([order.index(axis) for axis in range(len(order))])

  def _order(self) -> tuple[int, ...]:
    """Returns the axes, stack axes first."""
    inputs, outputs = self.axes
    stack = tuple(axis for axis in range(len(self.shape)) if axis not in inputs + outputs)
    return stack + inputs + outputs


def find_matrices(params: Any, frozen: Collection[str] = ()) -> dict[str, Kernel]:
  """Returns the kernels of the trained matrices of blocks, by name.

  Args:
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
    frozen: names of the frozen parameters.
  """
  matrices = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=sharding.is_boxed):
    name = sharding.leaf_name(path)
    if is_matrix(path, leaf) and name not in frozen:
      matrices[name] = Kernel(axis_names.names_of(leaf), nn.unbox(leaf).shape)
  return matrices


def is_matrix(path: Any, leaf: Any) -> bool:
  """Whether a parameter in its box is a matrix of a block: a linear map between features.

  Gates, spans, persistent vectors, convolution taps and sub-keys are excluded.

  Args:
    path: its path in the tree of parameters.
    leaf: the parameter.
  """
  is_in_block = sharding.leaf_name(path).startswith('layer_')
  return is_in_block and parameter_kinds.of(axis_names.names_of(leaf)).has_features


class MuonState(NamedTuple):
  """The momentum of each matrix."""

  momentum: optax.Updates


def scale_by_muon(
  config: MuonConfig, matrices: Mapping[str, Kernel]
) -> optax.GradientTransformation:
  """Returns the transformation from gradients to scaled orthogonal matrices.

  Args:
    config: `optimizer.muon`.
    matrices: the kernel of each parameter, by name.
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
      return _orthogonalize_tree(updates, matrices, config), MuonState(momentum)

  return optax.GradientTransformation(init, update)


def _orthogonalize_tree(updates: Any, matrices: Mapping[str, Kernel], config: MuonConfig) -> Any:
  """Returns a tree of orthogonal, scaled matrices."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
  arrays = {sharding.leaf_name(path): leaf for path, leaf in leaves}
  for (_, stack_sharding), names in _stacks({name: matrices[name] for name in arrays}).items():
    parts = [matrices[name].to_matrices(arrays[name]) for name in names]
    u_SxRxC = jnp.concatenate(parts)
    x_SxRxC = orthogonalization.orthogonalize(u_SxRxC, config, stack_sharding)
    first = 0
    for name, part in zip(names, parts, strict=True):
      x = matrices[name].from_matrices(x_SxRxC[first : first + len(part)])
      arrays[name] = scale_of(matrices[name], config.scale) * x.astype(arrays[name].dtype)
      first += len(part)
  return jax.tree_util.tree_unflatten(tree, arrays.values())


def _stacks(
  matrices: Mapping[str, Kernel],
) -> dict[tuple[tuple[int, int], StackSharding], list[str]]:
  """Returns the names of kernels grouped by matrix shape [R, C] and sharding."""
  stacks: dict[Any, list[str]] = {}
  for name, kernel in matrices.items():
    stacks.setdefault((kernel.stack_shape[1:], kernel.sharding()), []).append(name)
  return stacks


def scale_of(kernel: Kernel, rule: str) -> float:
  """Returns the factor of the orthogonal matrices of a kernel.

  `jordan`: the output for an input of root mean square 1 changes by about the learning rate.
  `moonlight` (Liu et al. 2025): the values have the root mean square of an update of Adam. `none`:
  1.
  """
  if rule == 'jordan':
    return math.sqrt(max(1, kernel.outputs / kernel.inputs))
  if rule == 'moonlight':
    return 0.2 * math.sqrt(max(kernel.inputs, kernel.outputs))
  return 1.0


def flops(matrices: Mapping[str, Kernel], steps: int) -> int:
  """Returns the FLOPs of a device of the current mesh in the orthogonalisation of all matrices.

  Args:
    matrices: see `find_matrices`.
    steps: steps of the iteration.
  """
  devices = max(1, jax.sharding.get_abstract_mesh().size)
  total = 0
  for ((R, C), _), names in _stacks(matrices).items():
    S = sum(matrices[name].stack_shape[0] for name in names)
    total += orthogonalization.flops(math.ceil(S / devices), R, C, steps)
  return total
