"""Options of attention."""

import dataclasses
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

LAYER_TYPE_NAMES = ('full', 'window', 'unrotated', 'unrotated_window')


class LayerType(NamedTuple):
  """The type of attention in one layer.

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
  window: int | None = field(None, 'number of keys per token, including itself', at_least=1)
  layer_pattern: tuple[str, ...] = field(
    ('full',),
    'types of layers, repeated; unrotated: without rotary positions',
    choices=LAYER_TYPE_NAMES,
    may_be_empty=False,
  )

  def layer_types(self, layers: int) -> tuple[LayerType, ...]:
    """Returns the type of each layer."""
    types = []
    for layer in range(layers):
      name = self.layer_pattern[layer % len(self.layer_pattern)]
      divisor = 1
      if self.inverse_layer_scale:
        divisor = layer + 1
      types.append(
        LayerType(
          has_window='window' in name,
          is_rotated='unrotated' not in name,
          score_divisor=divisor,
        )
      )
    return tuple(types)

  def check(self, model: Any) -> None:
    """Raises BadInput for options that are invalid for the model."""
    # If the pattern is longer than the model, only the first entries count.
    layer_types = self.layer_types(model.layers)
    has_window = any(layer_type.has_window for layer_type in layer_types)
    if has_window and self.window is None:
      raise errors.BadInput(
        f'model.attention.layer_pattern={self.layer_pattern} has layers with a window, but '
        f'model.attention.window=None: set model.attention.window, or use "full"'
      )
    if self.window is not None and not has_window:
      raise errors.BadInput(
        f'model.attention.window={self.window} needs a layer with a window, but '
        f'model.attention.layer_pattern={self.layer_pattern} has none in model.layers='
        f'{model.layers}: use None, or "window" in the pattern'
      )
    if model.position != 'rope' and not all(layer_type.is_rotated for layer_type in layer_types):
      raise errors.BadInput(
        f'model.attention.layer_pattern={self.layer_pattern} has layers without rotation, which '
        f'model.position={model.position!r} does not have: use "full" and "window"'
      )
