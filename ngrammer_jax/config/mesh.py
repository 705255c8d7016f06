"""The device mesh: number of devices along each axis, and presets."""

import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Number of devices along each axis; -1: all remaining devices."""

  data: int = field(-1, 'devices sharding the batch', at_least=1, also=(-1,))
  fsdp: int = field(1, 'devices sharding batch, parameters and optimizer', at_least=1, also=(-1,))
  model: int = field(1, 'devices sharding heads, features, vocabulary', at_least=1, also=(-1,))
  zero: int = field(
    0, '1: shard optimizer state and update over `data`, except for tables', at_least=0, at_most=1
  )

  @classmethod
  def from_preset(cls, name: str) -> 'MeshConfig':
    """Returns one of PRESETS. Raises BadInput for another name."""
    if name not in PRESETS:
      raise errors.BadInput(
        f'mesh={name}: expected one of {", ".join(PRESETS)}; or set data, fsdp and model of mesh'
      )
    return PRESETS[name]

  def check(self) -> None:
    """Raises BadInput if more than one axis is -1."""
    if [self.data, self.fsdp, self.model].count(-1) > 1:
      raise errors.BadInput('mesh: only one of data, fsdp and model may be -1')


# --config.mesh=NAME
PRESETS = {
  'data': MeshConfig(),  # data parallel: parameters are replicated
  'fsdp': MeshConfig(data=1, fsdp=-1),  # parameters and optimizer state are sharded
  'fsdp_8': MeshConfig(fsdp=8),  # sharded over the 8 GPUs of a host, replicated over hosts
  'model_8': MeshConfig(model=8),  # tensor parallel: heads, feed-forward, vocabulary, tables
  'fsdp_model_4': MeshConfig(data=1, fsdp=-1, model=4),  # both, for the largest models
}
