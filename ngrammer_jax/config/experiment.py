"""Experiment config: all sections, and checks across sections."""

from collections.abc import Iterator
import dataclasses

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config.data import DataConfig
from ngrammer_jax.config.evaluation import EvaluationConfig
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.finetune import FinetuneConfig
from ngrammer_jax.config.mesh import MeshConfig
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.optimizer import OptimizerConfig
from ngrammer_jax.config.recurrent import UNBOUNDED
from ngrammer_jax.config.training import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Config:
  """An experiment config."""

  model: ModelConfig = field(ModelConfig(), 'the model')
  data: DataConfig = field(DataConfig(), 'corpus and vocabulary')
  optimizer: OptimizerConfig = field(OptimizerConfig(), 'optimizers and learning rate schedule')
  training: TrainingConfig = field(TrainingConfig(), 'steps, batch size and intervals')
  evaluation: EvaluationConfig = field(EvaluationConfig(), 'evaluation', free_on_resume=True)
  mesh: MeshConfig = field(MeshConfig(), 'devices along each axis', free_on_resume=True)
  seed: int = field(0, 'random seed', at_least=0, at_most=2**32 - 1)
  init_from: str | None = field(None, 'run directory to start from, pretrained:NAME or hf:FOLDER')
  finetune: FinetuneConfig | None = field(None, 'fine-tuning of a trained model')

  def check(self) -> None:
    """Raises BadInput for a combination that cannot work. Touches no device."""
    fields.check_values(self)
    self.model.check()
    if self.evaluation.memory is not None:
      self.evaluation.memory.check(self.model)
      try:
        self.evaluation_model().check()
      except errors.BadInput as error:  # evaluation.memory is the cause: self.model is valid
        raise errors.BadInput(str(error).replace('model.memory', 'evaluation.memory')) from error
    self.data.check()
    self._check_positions()
    if self.finetune is None:  # in fine-tuning, the model is not known yet
      self.check_groups()
    self.mesh.check()

  def warnings(self) -> Iterator[str]:
    """Yields a sentence about each number that is unlikely to be meant."""
    o, steps = self.optimizer, self.training.steps
    if o.warmup_steps >= steps:
      share = min(steps / o.warmup_steps, 1)
      yield (
        f'optimizer.warmup_steps={o.warmup_steps:,} do not end before training.steps={steps:,}: '
        f'the learning rate only rises, to {share:.2f} of optimizer.learning_rate'
      )
    if o.drop is not None and o.drop.steps >= steps:
      yield (
        f'optimizer.drop.steps={o.drop.steps:,} are all of training.steps={steps:,}: no step has '
        f'the learning rate that was asked for'
      )
    for index, rate in enumerate(o.rates):
      if not rate.factor:
        yield (
          f'optimizer.rates.{index}.factor=0: {rate.part} does not learn; leave it out of '
          f'optimizer.train, which also saves its gradient'
        )

  def check_groups(self) -> None:
    """Raises BadInput if `optimizer` names a part that the model does not have."""
    self.optimizer.check_groups(self.model.parameter_groups())

  def _check_positions(self) -> None:
    positions, limit = self.model.positions(), self.model.num_positions
    memory = self.model.memory.length if self.model.memory else 0
    context = self.training.segment_length + memory
    if self.model.position == 'rope' and limit and context > limit:
      raise errors.BadInput(
        f'training.segment_length={self.training.segment_length} with its memory is longer than '
        f'model.positional.scaling.original_length={limit}: use shorter segments, or '
        f'model.positional.scaling.is_long=True'
      )
    context = max(context, self.evaluation_context())
    if self.model.position in ('learned', 'absolute') and context > positions.max_length:
      names = 'training.segment_length', 'evaluation.segment_length'
      if self.model.memory:
        names += 'model.memory.length', 'evaluation.memory.length'
      raise errors.BadInput(
        f'model.positional.max_length={positions.max_length} is less than the {context} tokens of '
        f'a segment{" and its memory" * (len(names) > 2)}: raise it, or lower {" or ".join(names)}'
      )

  def evaluation_length(self) -> int:
    """Segment length of evaluation."""
    return self.evaluation.segment_length or self.training.segment_length

  def evaluation_context(self) -> int:
    """Maximum number of tokens that a token is predicted from in evaluation."""
    if self.model.recurrent is not None:
      return UNBOUNDED
    memory = self.evaluation_model().memory
    return self.evaluation_length() + (memory.length if memory else 0)

  def evaluation_model(self) -> ModelConfig:
    """The model config with the memory and the positions of evaluation."""
    memory = self.evaluation.memory
    model = self.model if memory is None else memory.apply(self.model)
    context = self.evaluation_length() + (model.memory.length if model.memory else 0)
    if model.position == 'rope' and model.num_positions and context > model.num_positions:
      scaling = dataclasses.replace(model.positional.scaling, is_long=True)
      positional = dataclasses.replace(model.positional, scaling=scaling)
      model = dataclasses.replace(model, positional=positional)
    return model
