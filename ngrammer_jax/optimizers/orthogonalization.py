"""Stacks of matrices, orthogonalised by the Newton-Schulz iteration of Muon.

  X <- X / (|X| + epsilon);  5 times X <- a X + (c A + d A^2) X,  A = X X^T

The singular vectors are unchanged; the singular values end between 0.7 and 1.2.

Each device orthogonalises its share of the stack, in whole matrices. Sharded matrices would
exchange partial products in every iteration; replicated ones would be computed on every device.

S matrices of one shape, R rows, C columns, R at most C.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.config.optimizer import MuonConfig
from ngrammer_jax.layers import mesh_axes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, c, d


class StackSharding(NamedTuple):
  """The mesh axes of the rows and columns of the matrices of a stack."""

  rows: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()


def orthogonalize(
  u_SxRxC: jax.Array, config: MuonConfig, stack_sharding: StackSharding
) -> jax.Array:
  """Returns matrices with the same singular vectors and singular values near 1.

  Args:
    u_SxRxC: the matrices, R at most C.
    config: `optimizer.muon`.
    stack_sharding: their sharding, under a mesh.
  """
  norm_Sx1x1 = jnp.linalg.norm(u_SxRxC, axis=(1, 2), keepdims=True)
  x_SxRxC = (u_SxRxC / (norm_Sx1x1 + config.epsilon)).astype(_dtype(config, u_SxRxC.dtype))
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size <= 1:
    return iterate(x_SxRxC, config.steps)

  spec = jax.P(None, stack_sharding.rows, stack_sharding.columns)

  def iterate_share(own_SxRxC: jax.Array) -> jax.Array:
    return _iterate_share(own_SxRxC, config.steps, mesh, stack_sharding)

  distributed = jax.shard_map(
    iterate_share,
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    check_vma=False,
  )
  S = len(x_SxRxC)
  padded_SxRxC = jnp.pad(x_SxRxC, [(0, -S % mesh.size), (0, 0), (0, 0)])
  return distributed(padded_SxRxC)[:S]


def _iterate_share(
  x_SxRxC: jax.Array, steps: int, mesh: jax.sharding.AbstractMesh, stack_sharding: StackSharding
) -> jax.Array:
  """Iterates on the share of this device: its part of the rows and columns of all matrices.

  Devices exchange parts of matrices for whole ones, and back.
  """
  sharded = [(axes, 1 + i) for i, axes in enumerate(stack_sharding) if axes]
  for axes, array_axis in sharded:
    x_SxRxC = jax.lax.all_to_all(x_SxRxC, axes, 0, array_axis, tiled=True)
  repeated = tuple(
    axis for axis in mesh.axis_names if axis not in stack_sharding.rows + stack_sharding.columns
  )
  share = len(x_SxRxC) // math.prod(mesh.shape[axis] for axis in repeated)
  first = share * jax.lax.axis_index(repeated)
  x_SxRxC = iterate(jax.lax.dynamic_slice_in_dim(x_SxRxC, first, share), steps)
  x_SxRxC = jax.lax.all_gather(x_SxRxC, repeated, tiled=True)
  for axes, array_axis in reversed(sharded):
    x_SxRxC = jax.lax.all_to_all(x_SxRxC, axes, array_axis, 0, tiled=True)
  return x_SxRxC


def iterate(x_SxRxC: jax.Array, steps: int) -> jax.Array:
  """Returns matrices after some steps of the iteration, which needs norms of at most 1."""
  a, c, d = COEFFICIENTS
  precision = None
  if x_SxRxC.dtype != jnp.bfloat16:
    precision = jax.lax.Precision.HIGHEST
  for _ in range(steps):
    a_SxRxR = jnp.einsum('src,stc->srt', x_SxRxC, x_SxRxC, precision=precision)
    b_SxRxR = c * a_SxRxR + d * jnp.matmul(a_SxRxR, a_SxRxR, precision=precision)
    x_SxRxC = a * x_SxRxC + jnp.matmul(b_SxRxR, x_SxRxC, precision=precision)
  return x_SxRxC


def flops(S: int, R: int, C: int, steps: int) -> int:
  """Returns the FLOPs of `iterate`, a multiply-add as two."""
  return S * steps * (4 * R * R * C + 2 * R**3)


def _dtype(config: MuonConfig, dtype: jnp.dtype) -> jnp.dtype:
  """Returns the dtype of the products: bfloat16 on accelerators unless the config has another."""
  if config.dtype is not None:
    return jnp.dtype(config.dtype)
  if mesh_axes.device()[0] == 'cpu':
    return dtype
  return jnp.dtype(jnp.bfloat16)
