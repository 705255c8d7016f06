"""The optimizers of the dense weights and of the n-gram tables."""

import dataclasses
import difflib

from ngrammer_jax import errors
from ngrammer_jax.config.fields import ANY, field
from ngrammer_jax.config.relations import at_most

ALGORITHMS = ('adam', 'adamw', 'lamb', 'adagrad', 'muon')
DECAYING = ('matrices', 'matrices_and_embeddings', 'all')
DEFAULT_DECAYING = 'matrices'
OFFICIAL_SCHEDULES = ('transformer_xl', 'transformer_xl_tensorflow')  # of these implementations
SCHEDULES = ('cosine', 'linear', 'wsd', 'rsqrt', 'constant', *OFFICIAL_SCHEDULES)
MUON_SCALES = ('jordan', 'moonlight', 'none')
DECAY_SHAPES = ('linear', '1-sqrt', 'cosine')
# Keys that no step before the decay of schedule `wsd` depends on.
DECAY_KEYS = (
  'training.steps',
  'optimizer.decay_steps',
  'optimizer.decay_from',
  'optimizer.decay_shape',
  'optimizer.final_fraction',
)


@dataclasses.dataclass(frozen=True)
class TableConfig:
  """Adagrad for the n-gram tables, by value or by row; the defaults are PyTorch's.

  The accumulator must be small compared with squared gradients. Squared row gradients are 1e-6 or
  less, because the loss is a mean over all tokens: with 0.1, the default of Optax, tables hardly
  learn.
  """

  learning_rate: float = field(0.01, 'peak learning rate', above=0)
  accumulator: float = field(0.0, 'initial sum of squared gradients', at_least=0)
  epsilon: float = field(1e-20, 'added to the sum of squares; row_adagrad: to its root', above=0)


@dataclasses.dataclass(frozen=True)
class AdamConfig:
  """Decay rates of the moments of Adam and LAMB."""

  beta1: float = field(0.9, 'decay of the first moment', at_least=0, below=1)
  beta2: float = field(0.99, 'decay of the second moment', at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class MuonConfig:
  """Muon for the matrices of blocks; the defaults are Keller Jordan's."""

  learning_rate: float = field(0.02, 'peak learning rate of the matrices', above=0)
  momentum: float = field(0.95, 'decay of the momentum', at_least=0, below=1)
  nesterov: bool = field(True, 'Nesterov momentum')
  steps: int = field(5, 'steps of the orthogonalisation', at_least=1, at_most=100)
  epsilon: float = field(1e-7, 'added to the norm of a matrix', above=0)
  scale: str = field(
    'jordan',
    'factor: sqrt(max(1, outputs / inputs)); moonlight: 0.2 sqrt(max(inputs, outputs))',
    choices=MUON_SCALES,
  )
  weight_decay: float | None = field(
    None, 'decay of the matrices; None: optimizer.weight_decay', at_least=0
  )
  dtype: str | None = field(
    None,
    'dtype of the orthogonalisation; None: bfloat16 on accelerators, dtype of weights on CPUs',
    choices=('float32', 'bfloat16'),
  )


@dataclasses.dataclass(frozen=True)
class DropConfig:
  """A lower learning rate in the final steps."""

  steps: int = field(10_000, 'number of final steps with a lower learning rate', at_least=0)
  fraction: float = field(0.1, 'factor of the learning rate in those steps', at_least=0)


@dataclasses.dataclass(frozen=True)
class RateConfig:
  """The learning rate of a part of the model."""

  part: str = field('blocks', 'embedding, blocks, head, or the name of a memory')
  factor: float = field(1.0, 'factor of the learning rates of its parameters', at_least=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Optimizers of dense weights and n-gram tables, with schedules of the same shape."""

  algorithm: str = field(
    'adam',
    'optimizer of dense weights; adamw: same as adam; lamb: scaled Adam; muon: for matrices',
    choices=ALGORITHMS,
    needs={'muon': {'model.recurrent': (None,)}},
    remedy="use 'adam'",
    reason='muon is for the matrices of blocks',
  )
  learning_rate: float = field(1e-3, 'peak learning rate of the dense weights', above=0)
  schedule: str = field(
    'cosine',
    'learning rate after the warm-up; wsd: stable, then decay',
    choices=SCHEDULES,
    needs={'wsd': {'decay_steps': (ANY,)}},
  )
  warmup_steps: int = field(100, 'steps of linear warm-up', at_least=0)
  final_fraction: float = field(
    0.1, 'cosine, linear, wsd: final share of the learning rate', at_least=0
  )
  decay_steps: int | None = field(
    None,
    'wsd: number of steps of the decay',
    at_least=1,
    only_for={'schedule': ('wsd',)},
    relations=(at_most('training.steps'),),
  )
  decay_from: int | None = field(
    None,
    'wsd: first step of the decay; None: the decay ends with the last step',
    at_least=0,
    only_for={'schedule': ('wsd',)},
    relations=(at_most('training.steps'),),
  )
  decay_shape: str = field(
    'linear',
    'wsd: shape of the decay',
    choices=DECAY_SHAPES,
    only_for={'schedule': ('wsd',)},
  )
  epsilon: float = field(1e-6, 'added to the denominator of the update', above=0)
  weight_decay: float = field(
    0.0,
    'decay of the parameters in weight_decay_on, times the learning rate',
    at_least=0,
    only_for={'algorithm': ('adam', 'adamw', 'lamb', 'muon')},
  )
  # Biases, norms, gates and scales decay with `all` alone, n-gram tables and spans never.
  weight_decay_on: str | None = field(
    None,
    'decayed weights: matrices, also embeddings and the head, or all dense weights; None: matrices',
    choices=DECAYING,
    kept_on_resume=True,
    none_means=DEFAULT_DECAYING,
  )
  clip_norm: float | None = field(1.0, 'maximum dense gradient norm; adagrad: by array', at_least=0)
  adam: AdamConfig | None = field(None, 'decay rates of Adam and LAMB; None: the defaults')
  muon: MuonConfig | None = field(
    None, 'Muon of the matrices; None: the defaults', only_for={'algorithm': ('muon',)}
  )
  table: TableConfig | None = field(None, 'Adagrad of the n-gram tables; None: the defaults')
  drop: DropConfig | None = field(
    None,
    'lower learning rate in the final steps',
    only_for={'schedule': tuple(name for name in SCHEDULES if name != 'wsd')},
    reason='wsd has a decay of its own',
  )
  train: tuple[str, ...] = field(
    ('all',),
    'trained parameters: all; new: missing in init_from; embedding, blocks, head, a memory',
    needs={'new': {'init_from': (ANY,)}},
    reason='"new" means missing in init_from',
  )
  rates: tuple[RateConfig, ...] = field((), 'learning rates of parts of the model')
  width_rule: str | None = field(
    None,
    'scale initial values and rates by the width, see models.width_rule; None: unscaled',
    choices=('mup',),
    needs={
      'mup': {
        'base_width': (ANY,),
        'algorithm': ('adam', 'adamw', 'muon'),
        'model.recurrent': (None,),
        'model.adaptive_softmax': (None,),
        'model.initial': (None,),
      }
    },
  )
  base_width: int | None = field(
    None, 'model.width of the configured rates', at_least=1, only_for={'width_rule': ('mup',)}
  )

  def decay_start(self, steps: int) -> int:
    """Returns the first step of the decay of schedule `wsd`, in a run of `steps` steps."""
    if self.decay_from is not None:
      return self.decay_from
    return steps - self.decay_steps

  def check_groups(self, groups: tuple[str, ...]) -> None:
    """Raises BadInput for an unknown part of the model.

    Args:
      groups: see `ModelConfig.parameter_groups`.
    """
    valid = ('all', 'new', *groups)
    for name in self.train:
      _check_group('optimizer.train', name, valid)
    for index, rate in enumerate(self.rates):
      _check_group(f'optimizer.rates.{index}.part', rate.part, groups)
    if len(self.train) != 1 and ('all' in self.train or not self.train):
      raise errors.BadInput(
        f'optimizer.train={self.train} is not a list of parts: use "all" alone, or some of '
        f'{", ".join(valid[1:])}'
      )
    if len({rate.part for rate in self.rates}) < len(self.rates):
      raise errors.BadInput('optimizer.rates has a part twice: give each part one factor')


def _check_group(path: str, name: str, choices: tuple[str, ...]) -> None:
  """Raises BadInput with the nearest name for an unknown part of the model."""
  if name not in choices:
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
    raise errors.BadInput(
      f'{path}={name!r} is not a part of this model: did you mean {near!r}? Its parts are '
      f'{", ".join(choices)}'
    )
