"""How many devices lie along each axis of the mesh, and presets."""

import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; -1 takes all that are left."""

  data: int = field(-1, 'devices that split the batch', at_least=1, also=(-1,))
  fsdp: int = field(
    1, 'devices that split the batch, parameters and optimizer state', at_least=1, also=(-1,)
  )
  model: int = field(
    1, 'devices that split heads, feed-forward, vocabulary and tables', at_least=1, also=(-1,)
  )

  @classmethod
  def from_preset(cls, name: str) -> 'MeshConfig':
    """Returns one of PRESETS. Raises BadInput for another name."""
    if name not in PRESETS:
      raise errors.BadInput(
        f'mesh={name}: the names are {", ".join(PRESETS)}; or set mesh.data, mesh.fsdp and '
        f'mesh.model'
      )
    return PRESETS[name]

  def check(self) -> None:
    """Raises BadInput where more than one axis takes all devices that are left."""
    if list(dataclasses.asdict(self).values()).count(-1) > 1:
      raise errors.BadInput('mesh: only one of data, fsdp and model may be -1')


# --config.mesh=NAME
PRESETS = {
  'data': MeshConfig(),  # every device has all parameters, and some rows of the batch
  'fsdp': MeshConfig(data=1, fsdp=-1),  # and only its share of parameters and optimizer state
  'fsdp_8': MeshConfig(fsdp=8),  # shared among eight, as many as a host of GPUs has
  'model_8': MeshConfig(model=8),  # eight share heads, feed-forward, vocabulary and tables
  'fsdp_model_4': MeshConfig(data=1, fsdp=-1, model=4),  # both, for what is too large otherwise
}
