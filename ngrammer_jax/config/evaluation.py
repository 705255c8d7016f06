"""How a model is evaluated: what defines a measurement."""

import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.config import memory as memory_config
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.model import ModelConfig

PROTOCOLS = ('streams', 'transformer_xl', 'adaptive_span', 'sliding_window')


@dataclasses.dataclass(frozen=True)
class EvaluationMemory:
  """How the memory of a model differs in evaluation; None: as in training."""

  length: int | None = field(None, 'tokens whose keys and values are kept', at_least=0)
  same_length: str | None = field(
    None, 'see model.memory.same_length', choices=memory_config.SAME_LENGTH
  )
  clamp_length: int | None = field(None, 'see model.positional.clamp_length', at_least=1)
  carry_memory: bool | None = field(None, 'see model.recurrent.carry_memory')

  def check(self, model: ModelConfig) -> None:
    """Raises BadInput, by the names of this block, for what the model does not have."""
    if model.memory is None and model.recurrent is None:
      raise errors.BadInput(
        'evaluation.memory is set, but the model has none: set model.memory, or '
        'evaluation.memory=None'
      )
    for key, value in dataclasses.asdict(self).items():
      is_recurrent = key == 'carry_memory'
      if value is not None and is_recurrent == (model.recurrent is None):
        kind = 'recurrent models' if is_recurrent else 'Transformers'
        raise errors.BadInput(f'evaluation.memory.{key}={value} is of {kind}: leave it at None')
    if self.clamp_length is not None and model.position not in ('relative', 'shaw'):
      raise errors.BadInput(
        f'evaluation.memory.clamp_length is not for model.position={model.position!r}'
      )

  def apply(self, model: ModelConfig) -> ModelConfig:
    """Returns the model with this memory."""
    changes = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
    if model.recurrent is not None:
      recurrent = dataclasses.replace(model.recurrent, **changes)
      return dataclasses.replace(model, recurrent=recurrent)
    clamp = {k: changes.pop(k) for k in ('clamp_length',) if k in changes}
    memory = dataclasses.replace(model.memory, **changes)
    positional = dataclasses.replace(model.positions(), **clamp) if clamp else model.positional
    return dataclasses.replace(model, memory=memory, positional=positional)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """What defines a measurement; devices and rows at a time do not."""

  streams: int = field(16, 'contiguous parts that a split is cut into', at_least=1)
  segment_length: int | None = field(None, 'tokens of a segment; None: as in training', at_least=1)
  max_tokens: int | None = field(
    None, 'maximum number of tokens of validation during training; None: all', at_least=1
  )
  memory: EvaluationMemory | None = field(None, 'how the memory differs; None: as in training')
  protocol: str = field(
    'streams', 'how a split is read, see `data.streams.EvaluationStreams`', choices=PROTOCOLS
  )
