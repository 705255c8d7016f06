"""`nn.DenseGeneral` whose parameters carry logical axis names."""

from typing import Any

from flax import linen as nn
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names

KERNEL_INIT = nn.initializers.lecun_normal()  # truncated, of variance 1 / inputs


def dense_general(
  inputs: tuple[int, ...],
  features: tuple[int, ...],
  names: tuple[str, ...],
  *,
  kernel_init: nn.initializers.Initializer = KERNEL_INIT,
  bias_init: nn.initializers.Initializer = nn.initializers.zeros,
  dtype: jnp.dtype = jnp.float32,
  **fields: Any,
) -> nn.DenseGeneral:
  """Returns a linear map y = x kernel + bias from the last axes of x to new ones.

  Args:
    inputs: sizes of the trailing axes of x that are summed over.
    features: sizes of the axes of y that replace them.
    names: logical names of the kernel's axes, inputs first; the bias has those of the features.
    kernel_init, bias_init: initializers; inputs and features are flattened to one axis each.
    dtype: dtype of the computation; parameters have at least float32.
    **fields: other fields of `nn.DenseGeneral`, such as `use_bias` and `name`.
  """

  def with_axis_names(init, names, shape):
    # DenseGeneral initialises flattened axes, but the names are those of the original axes.
    unflattened = lambda key, flat, dtype: init(key, flat, dtype).reshape(shape)
    return axis_names.with_axis_names(unflattened, names)

  return nn.DenseGeneral(
    features,
    axis=tuple(range(-len(inputs), 0)),
    dtype=dtype,
    param_dtype=jnp.promote_types(dtype, jnp.float32),
    kernel_init=with_axis_names(kernel_init, names, (*inputs, *features)),
    bias_init=with_axis_names(bias_init, names[len(inputs) :], features),
    **fields,
  )
