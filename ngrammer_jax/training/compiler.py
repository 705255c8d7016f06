"""Options of the compiler for the training program."""

import jax
import jax.numpy as jnp

from ngrammer_jax import errors, sharding
from ngrammer_jax.config import training


def check_options(
  config: training.TrainingConfig, mesh: jax.sharding.Mesh
) -> dict[str, bool | str]:
  """Returns `training.compiler_options` by name.

  Args:
    config: training section of the config.
    mesh: the devices, possibly abstract.

  Raises:
    BadInput: the compiler of these devices rejects an option.
  """
  options = config.xla_options()
  platform = mesh.devices.flat[0].platform
  scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))
  # One at a time, so that the message names the option. Programs of one scalar compile at once.
  for text, (name, value) in zip(config.compiler_options, options.items(), strict=True):
    try:
      jax.jit(jnp.negative, compiler_options={name: value}).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
      raise errors.BadInput(
        f"training.compiler_options='{text}' is refused by the compiler for {platform} "
        f'({str(error).splitlines()[0]}): correct it, or leave it out'
      ) from error
  return options
