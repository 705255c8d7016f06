"""The gate of rows in the values of attention."""

import dataclasses

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.relations import at_most


@dataclasses.dataclass(frozen=True)
class ValueGateConfig:
  """A gate from the first channels of the layer input (see layers/ngram/value_join.py)."""

  channels: int = field(
    12,
    'number of leading channels of the normed layer input in the gate',
    at_least=1,
    relations=(at_most('model.width'),),
  )
  row_channels: int = field(0, 'number of leading channels of the row in the gate', at_least=0)
  factor: float = field(2.0, 'factor of the sigmoid', above=0)
  bias: float | None = field(None, 'initial bias; None: no bias')
  initial: float = field(0.0, 'upper bound of the uniform initial weights', at_least=0)
  mean: bool = field(False, 'divide the weights by the number of channels')
  per_head: bool = field(True, 'a gate for each key and value head, or one')
