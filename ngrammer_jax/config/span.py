"""Learned attention spans."""

import dataclasses
import math

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.relations import at_least, at_most

KINDS = ('adaptive', 'dynamic')
# Keys within the span and its ramp, as in the official code, which trims its cache; or all keys, as
# in its formula. Kernels that skip the keys beyond a span support `span` alone.
EPSILON_KEYS = ('span', 'all')
# Initial values by kind, and whether the start is neutral.
INITIAL = {
  ('adaptive', False): 0.0,
  ('adaptive', True): 1.0,
  ('dynamic', False): -4.0,
  ('dynamic', True): 4.0,
}
MIN_LIMIT = 64  # below it, unless such a kernel is named, there is little to skip: `all`


@dataclasses.dataclass(frozen=True)
class SpanConfig:
  """Learned attention span of each head (see `layers.attention.span`)."""

  kind: str = field('adaptive', 'one parameter per head, or a function of the token', choices=KINDS)
  limit: int = field(
    1024,
    'maximum span S, in tokens',
    at_least=1,
    relations=(at_least('ramp', reason='a span is at least its ramp'),),
  )
  ramp: int = field(
    32,
    'length R of the soft end of a span, in tokens',
    at_least=1,
    reason='a span without a ramp has no gradient (the papers use 32)',
  )
  penalty: float = field(
    2e-6, 'loss per token of span: mean over heads, sum over layers', at_least=0, free_on_init=True
  )
  initial: float | None = field(
    None,
    'initial value; None: 0 (neutral 1) for adaptive, -4 (4) for dynamic',
    free_on_init=True,
    relations=(
      at_least(0, where={'kind': ('adaptive',)}),
      at_most(1, where={'kind': ('adaptive',)}),
      # Beyond, the sigmoid is saturated, and its gradient vanishes.
      at_least(-20, where={'kind': ('dynamic',)}),
      at_most(20, where={'kind': ('dynamic',)}),
    ),
  )
  start: str | None = start_field()
  renormalize: bool = field(True, 'rescale masked attention weights to a sum of 1')
  epsilon_keys: str | None = field(
    None,
    'keys counted by the 1e-8 of the rescaling; None: span, or all for a limit below 64',
    choices=EPSILON_KEYS,
    only_for={'renormalize': (True,)},
  )
  reserve: int = field(16, 'no longer used', at_least=1, free_on_resume=True, is_used=False)
  check_every: int = field(100, 'no longer used', at_least=1, free_on_resume=True, is_used=False)

  def initial_value(self) -> float:
    """Returns the initial parameter."""
    if self.initial is not None:
      return self.initial
    return INITIAL[self.kind, self.start == 'neutral']

  def initial_span(self) -> float:
    """Returns the initial span of a neutral start, in tokens."""
    z = self.initial_value()
    if self.kind == 'adaptive':
      return self.limit * z
    return self.limit * (1 / (1 + math.exp(-z)))

  def counts_all_keys(self, kernel: str | None) -> bool:
    """Whether keys beyond the span count in the normaliser, with `model.kernel`."""
    is_short = self.limit < MIN_LIMIT and kernel in (None, 'xla')
    default = 'all' if is_short else 'span'
    return counts_all_keys(self.renormalize, self.epsilon_keys or default)


def counts_all_keys(renormalize: bool, epsilon_keys: str) -> bool:
  """Whether keys beyond the span count in the normaliser: in the epsilon of the rescaling."""
  return renormalize and epsilon_keys == 'all'
