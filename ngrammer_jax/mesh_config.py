"""How many devices lie along each axis of the mesh, and names for the usual choices."""

import dataclasses

from ngrammer_jax import errors


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; -1 takes all that are left."""

  data: int = -1
  fsdp: int = 1
  model: int = 1

  @classmethod
  def named(cls, name: str) -> 'MeshConfig':
    """One of PRESETS. Raises BadInput for another name."""
    if name not in PRESETS:
      raise errors.BadInput(
        f'mesh={name}: the names are {", ".join(PRESETS)}; or set mesh.data, mesh.fsdp and '
        f'mesh.model'
      )
    return PRESETS[name]

  def check(self) -> None:
    """Raises BadInput for sizes that no devices have."""
    sizes = dataclasses.asdict(self)
    for key, size in sizes.items():
      if size < 1 and size != -1:
        raise errors.BadInput(f'mesh.{key}={size} must be at least 1, or -1')
    if list(sizes.values()).count(-1) > 1:
      raise errors.BadInput('mesh: only one of data, fsdp and model may be -1')


# --config.mesh=NAME
PRESETS = {
  'data': MeshConfig(),  # every device has all parameters, and some rows of the batch
  'fsdp': MeshConfig(data=1, fsdp=-1),  # and each only its share of parameters and optimizer
  'fsdp_8': MeshConfig(fsdp=8),  # shared among eight, as many as a host of GPUs has
  'model_8': MeshConfig(model=8),  # eight share heads, feed-forward, vocabulary and tables
  'fsdp_model_4': MeshConfig(data=1, fsdp=-1, model=4),  # both, for what is too large otherwise
}
