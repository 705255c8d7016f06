"""Evaluation: the options that determine its result."""

import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.config import fields, segment_memory
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.positions import SEGMENT_POSITIONS
from ngrammer_jax.config.relations import at_most

_TRANSFORMER = {'model.recurrent': (None,)}
PROTOCOLS = ('streams', 'transformer_xl', 'adaptive_span', 'sliding_window')


@dataclasses.dataclass(frozen=True)
class EvaluationMemory:
  """Memory options of evaluation; None: as in training.

  A Transformer with rotary positions can have a memory in evaluation alone.
  """

  length: int | None = field(
    None,
    'number of cached tokens',
    at_least=0,
    only_for=_TRANSFORMER,
    relations=(
      at_most(
        0,
        where={'model.position': SEGMENT_POSITIONS},
        remedy='use evaluation.memory=None',
        reason='positions in the segment exclude a memory',
      ),
    ),
  )
  same_length: str | None = field(
    None, 'see model.memory.same_length', choices=segment_memory.SAME_LENGTH, only_for=_TRANSFORMER
  )
  sinks: int | None = field(None, 'see model.memory.sinks', at_least=0, only_for=_TRANSFORMER)
  clamp_length: int | None = field(
    None,
    'see model.positional.clamp_length',
    at_least=1,
    only_for=_TRANSFORMER | {'model.position': ('relative', 'shaw')},
  )
  carry_memory: bool | None = field(
    None, 'see model.recurrent.carry_memory', only_for={'model.recurrent': (fields.ANY,)}
  )

  def check(self, model: ModelConfig) -> None:
    """Raises BadInput if the model does not support a memory in evaluation alone."""
    if model.memory is None and model.recurrent is None and model.position not in ('rope', 'none'):
      raise errors.BadInput(
        f'evaluation.memory is set, but the model has no memory in training, and supports none '
        f'in evaluation alone with model.position={model.position!r}: use evaluation.memory=None'
      )

  def apply(self, model: ModelConfig) -> ModelConfig:
    """Returns the model with this memory."""
    changes = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
    if model.recurrent is not None:
      recurrent = dataclasses.replace(model.recurrent, **changes)
      return dataclasses.replace(model, recurrent=recurrent)
    positional = model.positional
    if (clamp_length := changes.pop('clamp_length', None)) is not None:
      positional = dataclasses.replace(model.positions(), clamp_length=clamp_length)
    memory = model.memory or segment_memory.MemoryConfig(length=0)
    memory = dataclasses.replace(memory, **changes)
    return dataclasses.replace(model, memory=memory, positional=positional)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Options that determine the result; devices and batch size do not."""

  streams: int = field(16, 'number of contiguous streams per split', at_least=1)
  segment_length: int | None = field(None, 'segment length; None: as in training', at_least=1)
  max_tokens: int | None = field(None, 'maximum tokens of a validation; None: all', at_least=1)
  max_examples: int | None = field(
    None,
    'fine-tuning: validate on the first examples of each task during training; None: all',
    at_least=1,
    only_for={'finetune': (fields.ANY,)},
  )
  memory: EvaluationMemory | None = field(None, 'memory options; None: as in training')
  protocol: str = field(
    'streams', 'see `data.rows.evaluation_streams.EvaluationStreams`', choices=PROTOCOLS
  )
