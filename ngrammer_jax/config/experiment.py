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
    """Raises BadInput for an invalid combination. Touches no device."""
    fields.check_values(self)
    self.model.check()
    if self.evaluation.memory is not None:
      self.evaluation.memory.check(self.model)
      try:
        self.evaluation_model().check()
      except errors.BadInput as error:  # evaluation.memory is the cause: self.model is valid
        raise errors.BadInput(str(error).replace('model.memory', 'evaluation.memory')) from error
    self.data.check()
    self.training.xla_options()
    self._check_positions()
    self._check_width_rule()
    if self.finetune is None:  # in fine-tuning, the model is not known yet
      self.check_groups()
    self.mesh.check()

  def warnings(self) -> Iterator[str]:
    """Yields a warning for each implausible value."""
    o = self.optimizer
    steps = self.training.steps
    if o.warmup_steps >= steps:
      share = min(steps / o.warmup_steps, 1)
      yield (
        f'optimizer.warmup_steps={o.warmup_steps:,} do not end before training.steps={steps:,}: '
        f'the learning rate only rises, to {share:.2f} of optimizer.learning_rate'
      )
    if o.schedule == 'wsd':
      yield from self._decay_warnings()
    if o.drop is not None and o.drop.steps >= steps:
      yield (
        f'optimizer.drop.steps={o.drop.steps:,} are all of training.steps={steps:,}: no step has '
        f'the learning rate that was asked for'
      )
    is_tied = self.model.tie_embeddings and self.model.adaptive_softmax is None
    if is_tied and 'head' in o.train and not {'all', 'embedding'} & set(o.train):
      yield (
        'optimizer.train names the head, whose matrix is the embedding (model.tie_embeddings=True) '
        'and stays frozen: name embedding too to train it'
      )
    for index, rate in enumerate(o.rates):
      if not rate.factor:
        yield (
          f'optimizer.rates.{index}.factor=0: {rate.part} does not learn; leave it out of '
          f'optimizer.train, which also saves its gradient'
        )

  def _decay_warnings(self) -> Iterator[str]:
    """Yields a warning if the decay of schedule `wsd` does not end with the last step."""
    o = self.optimizer
    steps = self.training.steps
    start = o.decay_start(steps)
    end = start + o.decay_steps
    if start < o.warmup_steps:
      yield (
        f'optimizer.warmup_steps={o.warmup_steps:,} end after the decay began at step {start:,}: '
        f'the learning rate jumps there'
      )
    if end < steps or start < steps < end:
      yield (
        f'the decay ends at step {end:,}, not at training.steps={steps:,}: use '
        f'optimizer.decay_steps={steps - start:,}'
      )

  def check_groups(self) -> None:
    """Raises BadInput if `optimizer` names an unknown part of the model."""
    self.optimizer.check_groups(self.model.parameter_groups())

  def _check_width_rule(self) -> None:
    """Raises BadInput if no parameter of a tied model can hold the output scale."""
    model = self.model
    if self.optimizer.width_rule is not None and model.tie_embeddings and not model.final_norm:
      raise errors.BadInput(
        'optimizer.width_rule scales the logits by the final norm or by an output matrix, and this '
        'model has neither: use model.final_norm=True or model.tie_embeddings=False'
      )

  def _check_positions(self) -> None:
    """Raises BadInput if segments and their memories are longer than the positions of the model."""
    if self.model.position == 'rope':
      self._check_rotary_positions()
    if self.model.position in ('learned', 'absolute'):
      self._check_learned_positions()

  def _check_rotary_positions(self) -> None:
    limit = self.model.num_positions
    context = self.training.segment_length + _memory_length(self.model)
    if limit is not None and context > limit:
      raise errors.BadInput(
        f'training.segment_length={self.training.segment_length} with its memory is longer than '
        f'model.positional.scaling.original_length={limit}: use shorter segments, or '
        f'model.positional.scaling.is_long=True'
      )

  def _check_learned_positions(self) -> None:
    """Raises BadInput if two keys of a token have the same position, or a segment has no room."""
    training = (self.model, self.training.segment_length)
    evaluation = (self.evaluation_model(), self.evaluation_length())
    num_keys = max(_keys_of_a_token(*training), _keys_of_a_token(*evaluation))
    num_tokens = max(_tokens_of_a_context(*training), _tokens_of_a_context(*evaluation))
    max_length = self.model.positions().max_length
    if num_keys <= max_length:
      return
    segment_lengths = 'training.segment_length or evaluation.segment_length'
    memory_lengths = 'model.memory.length or evaluation.memory.length'
    if self.model.memory is None:
      needed = f'{num_keys} tokens of a segment'
      others = segment_lengths
    elif num_keys == num_tokens:
      needed = f'{num_keys} tokens of a segment and its memory'
      others = f'{segment_lengths} or {memory_lengths}'
    else:  # same_length
      needed = f'{num_keys} keys that a token attends to'
      others = memory_lengths
    raise errors.BadInput(
      f'model.positional.max_length={max_length} is less than the {needed}: raise it, or lower '
      f'{others}'
    )

  def evaluation_length(self) -> int:
    """Segment length of evaluation."""
    return self.evaluation.segment_length or self.training.segment_length

  def evaluation_context(self) -> int:
    """Maximum context of a prediction in evaluation, in tokens."""
    if self.model.recurrent is not None:
      return UNBOUNDED
    return self.evaluation_length() + _memory_length(self.evaluation_model())

  def evaluation_model(self) -> ModelConfig:
    """The model config with the memory and the positions of evaluation."""
    model = self.model
    if self.evaluation.memory is not None:
      model = self.evaluation.memory.apply(model)
    limit = model.num_positions
    context = self.evaluation_length() + _memory_length(model)
    if model.position == 'rope' and limit is not None and context > limit:
      scaling = dataclasses.replace(model.positional.scaling, is_long=True)
      positional = dataclasses.replace(model.positional, scaling=scaling)
      model = dataclasses.replace(model, positional=positional)
    return model


def _memory_length(model: ModelConfig) -> int:
  """Returns the length of the segment memory, 0 without one."""
  return 0 if model.memory is None else model.memory.length


def _tokens_of_a_context(model: ModelConfig, segment_length: int) -> int:
  """Returns the number of tokens of a segment and its memory."""
  return segment_length + _memory_length(model)


def _keys_of_a_token(model: ModelConfig, segment_length: int) -> int:
  """Returns the maximum number of keys of a token, including itself."""
  context = _tokens_of_a_context(model, segment_length)
  if model.memory is None or model.memory.window() is None:
    return context
  if model.position != 'absolute':  # only these positions repeat after the last one
    return context
  return min(context, model.memory.window())
