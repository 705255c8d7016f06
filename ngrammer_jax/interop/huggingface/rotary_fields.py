"""Rotary positions of config.json: `rope_theta`, `rope_scaling` and `rope_parameters`.

Reads both forms: `rope_theta` and `rope_scaling`, or `rope_parameters`. Writes the first, supported
by all versions of transformers.
"""

from collections.abc import Mapping
import math
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.interop.huggingface import families

ORIGINAL_LENGTH = 'original_max_position_embeddings'
# For each type of scaling, our fields and their names in config.json.
SCALINGS = {
  'default': {},
  'linear': {'factor': 'factor'},
  'llama3': {
    'original_length': ORIGINAL_LENGTH,
    'factor': 'factor',
    'low_frequency_factor': 'low_freq_factor',
    'high_frequency_factor': 'high_freq_factor',
  },
  'yarn': {
    'original_length': ORIGINAL_LENGTH,
    'attention_factor': 'attention_factor',
    'factor': 'factor',
    'beta_fast': 'beta_fast',
    'beta_slow': 'beta_slow',
    'truncate': 'truncate',
  },
  'longrope': {
    'original_length': ORIGINAL_LENGTH,
    'attention_factor': 'attention_factor',
    'factor': 'factor',
    'short_factors': 'short_factor',
    'long_factors': 'long_factor',
  },
}
OPTIONAL = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')


def read(config: Mapping[str, Any], family: families.Family, window: int | None) -> dict[str, Any]:
  """Returns the values of `model.positional` of a rotary model.

  Args:
    config: all fields of the family by the names of Llama.
    family: the family.
    window: the window of windowed layers.

  Raises:
    BadInput: a type or a parameter is not supported.
  """
  parameters = config['rope_scaling'] | config['rope_parameters']
  # Files of newer versions have the parameters of each type of layers.
  windowed = dict(parameters.pop('sliding_attention', None) or {})
  parameters |= parameters.pop('full_attention', None) or {}
  has_own_base = 'rope_local_base_freq' in config
  if not has_own_base and windowed not in ({}, parameters):
    raise errors.BadInput('sliding_attention with other rotary positions is not supported')
  rotary_fraction = config.get('partial_rotary_factor', 1.0)
  if 'partial_rotary_factor' in config or parameters.get('partial_rotary_factor') == 1:
    rotary_fraction = parameters.pop('partial_rotary_factor', rotary_fraction)
  positional = {
    'max_timescale': parameters.pop('rope_theta', config['rope_theta']),
    'rotary_fraction': rotary_fraction,
    'scaling': _read_scaling(parameters, config, family),
  }
  if has_own_base:
    timescale = windowed.pop('rope_theta', config['rope_local_base_freq'])
    positional['window_max_timescale'] = timescale if window else None
    scaling = _read_scaling(windowed, config, family)
    if scaling:
      raise errors.BadInput(f'rope_type={scaling["kind"]!r} of sliding_attention is not supported')
  return positional


def _read_scaling(
  parameters: Mapping[str, Any], config: Mapping[str, Any], family: families.Family
) -> dict[str, Any] | None:
  """Returns the values of `model.positional.scaling`; None without scaling."""
  values = {name: value for name, value in parameters.items() if value is not None}
  scaling_type = _pop_type(values, family)
  names = SCALINGS[scaling_type]
  attention_scales = []  # their ratio is the attention factor
  if scaling_type == 'yarn':
    attention_scales = [values.pop(name) for name in ('mscale', 'mscale_all_dim') if name in values]
  max_length = config['max_position_embeddings']
  original_length = config[ORIGINAL_LENGTH] or values.get(ORIGINAL_LENGTH, max_length)
  values[ORIGINAL_LENGTH] = original_length
  unsupported = values.keys() - {*names.values(), ORIGINAL_LENGTH}
  if unsupported:
    raise errors.BadInput(
      f'{", ".join(sorted(unsupported))} is not supported for rope_type={scaling_type}: it may '
      f'change the rotary positions'
    )
  if scaling_type == 'default':
    return None
  if scaling_type in ('yarn', 'longrope'):
    values.setdefault('factor', max(max_length / original_length, 1))
  if len(attention_scales) == 2 and all(attention_scales):
    high, low = (0.1 * scale * math.log(values['factor']) + 1 for scale in attention_scales)
    values.setdefault('attention_factor', high / low)
  missing = [name for name in names.values() if name not in values and name not in OPTIONAL]
  if missing:
    raise errors.BadInput(f'rope_type={scaling_type!r} needs {", ".join(missing)}')
  scaling = {'kind': scaling_type}
  for field, name in names.items():
    if name in values:
      scaling[field] = values[name]
  return scaling


def _pop_type(values: dict[str, Any], family: families.Family) -> str:
  """Removes and returns the type of a scaling; the field has two names."""
  stated = [values.pop(name) for name in ('type', 'rope_type') if name in values]
  scaling_type = stated[0] if stated else 'default'
  if stated and stated[-1] != scaling_type:
    scaling_type = stated
  if scaling_type == 'su' or (scaling_type == 'yarn' and family.model_type == 'phi3'):
    scaling_type = 'longrope'
  if scaling_type not in list(SCALINGS):  # it may be a list
    raise errors.BadInput(f'rope_type={scaling_type!r} is not one of: {", ".join(SCALINGS)}')
  return scaling_type


def write_scaling(
  scaling: RotaryScalingConfig | None, family: families.Family
) -> dict[str, Any] | None:
  """Returns `rope_scaling` of config.json."""
  if scaling is None:
    return None
  values = {}
  for field, name in SCALINGS[scaling.kind].items():
    value = getattr(scaling, field)
    if value is not None:
      values[name] = list(value) if isinstance(value, tuple) else value
  # Phi-3 has no other fields here, and knows the old name of the type only.
  if family.model_type == 'phi3':
    factors = {name: value for name, value in values.items() if name.endswith('_factor')}
    return {'type': scaling.kind} | factors
  return {'rope_type': scaling.kind} | values
