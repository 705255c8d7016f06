"""What defines a measurement, as blocks of the config."""

import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.models import attention_config
from ngrammer_jax.models import config as model_config


@dataclasses.dataclass(frozen=True)
class EvaluationMemory:
  """What a model with a memory does otherwise in evaluation; None: as in training."""

  length: int | None = None  # tokens whose keys and values are kept
  same_length: str | None = None  # see `model.memory.same_length`
  clamp_length: int | None = None  # see `model.positional.clamp_length`
  carry_memory: bool | None = None  # see `model.recurrent.carry_memory`

  def check(self, model: model_config.ModelConfig) -> None:
    """Raises BadInput, by the names of this block, for what the model cannot have."""
    if model.memory is None and model.recurrent is None:
      raise errors.BadInput(
        'evaluation.memory is set, but the model has none: set model.memory, or '
        'evaluation.memory=None'
      )
    for key, value in dataclasses.asdict(self).items():
      of_recurrent = key == 'carry_memory'
      if value is not None and of_recurrent == (model.recurrent is None):
        kind = 'recurrent models' if of_recurrent else 'Transformers'
        raise errors.BadInput(f'evaluation.memory.{key}={value} is of {kind}: leave it at None')
    if self.length is not None:
      errors.check_at_least('evaluation.memory', 'length', self.length, 0)
    if self.clamp_length is not None:
      errors.check_at_least('evaluation.memory', 'clamp_length', self.clamp_length, 1)
      if model.position not in ('relative', 'shaw'):
        raise errors.BadInput(
          f'evaluation.memory.clamp_length is not for model.position={model.position!r}'
        )
    choices = attention_config.SAME_LENGTH
    if self.same_length is not None and self.same_length not in choices:
      raise errors.BadInput(
        f'evaluation.memory.same_length={self.same_length!r} is not one of: {", ".join(choices)}'
      )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """What defines a measurement; devices and rows at a time do not."""

  streams: int = 16  # a split is cut into so many contiguous parts
  segment_length: int | None = None  # None: as in training
  max_tokens: int | None = None  # of validation during training; None: all
  memory: EvaluationMemory | None = None
  protocol: str = 'streams'  # how a split is read, see `data.streams.EvaluationStreams`
