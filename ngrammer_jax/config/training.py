"""Training: steps, batch size, and intervals of logging, evaluation and checkpoints."""

from collections.abc import Iterator
import dataclasses
import re

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config.fields import field

LOGS = ('tensorboard', 'wandb')


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
  """Gradient accumulation: the batch is processed in sequential parts, then updates once."""

  parts: int = field(2, 'number of sequential parts of a batch', at_least=1)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """Steps, batch size and intervals."""

  steps: int = field(1000, 'number of optimizer updates', at_least=1)
  batch_size: int = field(16, 'rows per step, over all devices', at_least=1)
  segment_length: int = field(128, 'tokens per row and step', at_least=1)
  half_loss: bool = field(False, 'compute the loss only on the second half of each segment')
  label_smoothing: float = field(
    0.0,
    'share of the target distributed uniformly over the vocabulary, only in training',
    at_least=0,
    below=1,
    only_for={'model.vocabulary_chunk': (None,), 'model.loss_dtype': ('float32',)},
    reason='the mean over the vocabulary needs all log-probabilities of a token at once',
  )
  loss: str | None = field(
    None, 'name of the loss, set by the task; None: not set yet', free_on_resume=True
  )
  segments_per_call: int = field(10, 'steps per compiled call', at_least=1, free_on_resume=True)
  log_every: int = field(10, 'steps between log lines', at_least=1, free_on_resume=True)
  evaluate_every: int = field(
    500, 'steps between validations; 0: only at the last step', at_least=0, free_on_resume=True
  )
  checkpoint_every: int = field(500, 'steps between checkpoints', at_least=1, free_on_resume=True)
  keep_checkpoints: int = field(3, 'newest checkpoints to keep', at_least=1, free_on_resume=True)
  log_to: tuple[str, ...] = field(
    ('tensorboard',),
    'other outputs for the values of metrics.jsonl',
    choices=LOGS,
    free_on_resume=True,
  )
  accumulation: AccumulationConfig | None = field(None, 'gradient accumulation, to save memory')
  compiler_options: tuple[str, ...] = field(
    (), "options of XLA for the training program, each 'name=value'", free_on_resume=True
  )

  @property
  def microbatches(self) -> int:
    """Number of microbatches of a batch."""
    if self.accumulation is None:
      return 1
    return self.accumulation.parts

  def xla_options(self) -> dict[str, bool | str]:
    """Returns `compiler_options` by name. Raises BadInput unless each is 'name=value'."""
    options: dict[str, bool | str] = {}
    for option in self.compiler_options:
      name, _, value = option.partition('=')
      path = f'training.compiler_options={fields.format_entry(self.compiler_options, option)}'
      if not re.fullmatch(r'[a-z]\w*', name) or not value:
        raise errors.BadInput(
          f"{path} is not 'name=value': use for example 'xla_tpu_scoped_vmem_limit_kib=32768'"
        )
      if name in options:
        raise errors.BadInput(f'{path} sets {name} a second time: remove one of them')
      options[name] = {'true': True, 'false': False}.get(value, value)  # XLA:CPU parses no bool
    return options

  @property
  def tokens_per_step(self) -> int:
    """Number of tokens per step, over all devices."""
    return self.batch_size * self.segment_length

  def count_due(self, first_step: int, every: int) -> int:
    """Returns the number of events from a step on: one every `every` steps, and one at the last.

    Args:
      first_step: the first step that counts, at most the last one.
      every: the interval; 0: the last step alone.
    """
    if not every:
      return 1
    last_multiple = (self.steps - 1) // every
    return last_multiple - (first_step - 1) // every + 1

  def calls(self, first_step: int) -> Iterator[tuple[int, int]]:
    """Yields the range [first, end) of steps of every call, from `first_step` on.

    A call ends at the last step and at every event, so call boundaries do not depend on
    `first_step`.
    """
    intervals = (
      self.segments_per_call,
      self.log_every,
      self.evaluate_every,
      self.checkpoint_every,
    )
    while first_step < self.steps:
      ends = [(first_step // steps + 1) * steps for steps in intervals if steps]
      end = min(*ends, self.steps)
      yield first_step, end
      first_step = end
