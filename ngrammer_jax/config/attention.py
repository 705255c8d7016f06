"""Options of attention."""

import dataclasses
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config.fields import ANY, field

_ROPE = {'position': ('rope',)}
LAYER_TYPES = ('full', 'window', 'unrotated', 'unrotated_window')
WINDOWED = ('window', 'unrotated_window')


class LayerType(NamedTuple):
  """What attention of one layer has.

  Attributes:
    has_window: whether tokens attend to `window` keys only.
    is_rotated: whether queries and keys are rotated by their positions.
    score_divisor: divides the scores.
  """

  has_window: bool = False
  is_rotated: bool = True
  score_divisor: int = 1


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """Options of attention (see `layers.Attention`)."""

  logit_cap: float | None = field(None, 'c of capped logits c tanh(s / c); None: no cap', above=0)
  scale: float | None = field(
    None, 'factor of the scores; None: H^(-1/2)', above=0, only_for={'per_dim_scale': (False,)}
  )
  inverse_layer_scale: bool = field(
    False, 'divide scores of layer i by i + 1 (GPT-2)', only_for={'per_dim_scale': (False,)}
  )
  query_key_norm: str | None = field(
    None,
    'RMS norm of queries and keys before they are rotated, of each head or of all heads together',
    choices=('head', 'full'),
    only_for={'shared_query_key': (False,)},
  )
  query_key_value_bias: bool | None = field(None, 'biases of queries, keys, values; None: `bias`')
  output_bias: bool | None = field(None, 'bias of the output; None: same as `model.bias`')
  window: int | None = field(
    None,
    'keys that a token attends to, its own too',
    at_least=1,
    only_for={'layer_pattern': WINDOWED},
  )
  layer_pattern: tuple[str, ...] = field(
    ('full',),
    'kinds of layers, repeated; unrotated: without rotary positions',
    choices=LAYER_TYPES,
    needs={
      'window': {'window': (ANY,)},
      'unrotated': _ROPE,
      'unrotated_window': {'window': (ANY,)} | _ROPE,
    },
    reason='layers with a window need `window`, and layers without rotation rotary positions',
  )

  def layer_types(self, layers: int) -> tuple[LayerType, ...]:
    """Returns the kind of each layer."""
    kinds = []
    for layer in range(layers):
      name = self.layer_pattern[layer % len(self.layer_pattern)]
      kinds.append(
        LayerType(
          has_window='window' in name,
          is_rotated='unrotated' not in name,
          score_divisor=layer + 1 if self.inverse_layer_scale else 1,
        )
      )
    return tuple(kinds)

  def check(self, model: Any) -> None:
    """Raises BadInput for options that are invalid for the model."""
    if not self.layer_pattern:
      raise errors.BadInput('model.attention.layer_pattern=() has no layer: use ("full",)')
