"""Converts the config.json of a published model to values of `config.model`, and back.

Every field of config.json is used, or is in `config_fields.HARMLESS`, or has the only value in
`config_fields.NEUTRAL`; any other is an error, as it may change the numbers.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import operator
from typing import Any

from flax import traverse_util

from ngrammer_jax import errors
from ngrammer_jax.config import attention, conversion, fields, resume
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.interop import loader_options
from ngrammer_jax.interop.huggingface import config_fields, families, rotary_fields

LAYER_TYPES = ('full_attention', 'sliding_attention')
# Our types of layers, by whether they have rotary positions and a window.
OUR_LAYER_TYPES = {
  ('unrotated' not in name, 'window' in name): name for name in attention.LAYER_TYPE_NAMES
}
DEFAULT_LENGTH = 2048  # tokens of a segment in evaluation, if the model has that many positions


@dataclasses.dataclass(frozen=True)
class Description:
  """The content of a config.json.

  Attributes:
    family: the family of the model.
    model: values of `config.model`.
    vocabulary_size: V, rows of the embedding.
    positions: number of positions of the model.
  """

  family: families.Family
  model: dict[str, Any]
  vocabulary_size: int
  positions: int

  def config(self) -> ModelConfig:
    """Returns the checked config of the model. Raises BadInput for inconsistent values."""
    # The length of segments is not written.
    return conversion.resolve({'model': self.model, 'training': {'segment_length': 1}}).model


def read(config: Mapping[str, Any]) -> Description:
  """Returns the description of a model.

  Raises:
    BadInput: another family, or an unknown field or value.
  """
  family = _family(config)
  if config.get('auto_map'):
    logging.info(
      'auto_map of config.json is ignored, as no Python code is needed for model_type=%r',
      config['model_type'],
    )
  if config['model_type'] == 'gemma3' and isinstance(config.get('text_config'), Mapping):
    config = _text_config(config, family)
  values = _normalize(config, family)
  activation = values['hidden_act']
  if activation not in config_fields.ACTIVATIONS:
    supported = ', '.join(config_fields.ACTIVATIONS)
    raise errors.BadInput(f'hidden_act={activation!r} is not one of: {supported}')
  model = _model_values(values, family) | family.options
  return Description(
    family=family,
    model=traverse_util.unflatten_dict(model, sep='.'),
    vocabulary_size=values['vocab_size'],
    positions=values['max_position_embeddings'],
  )


def write(
  model: ModelConfig,
  vocabulary_size: int,
  positions: int,
  preferred: families.Family = families.LLAMA,
) -> tuple[families.Family, dict[str, Any]]:
  """Returns a compatible family, and the config.json of the model.

  Args:
    model: the config of our model.
    vocabulary_size: V.
    positions: number of positions of the model.
    preferred: the family if compatible; otherwise the first compatible one.

  Raises:
    BadInput: no family is compatible; names the differences from the nearest one.
  """
  model = comparable(model)
  differences = {}
  for family in (preferred, *families.FAMILIES.values()):
    config = _write(model, vocabulary_size, positions, family)
    differences[family.model_type] = _differences(config, model)
    if not differences[family.model_type]:
      return family, config
  nearest = min(differences, key=lambda name: len(differences[name]))
  raise errors.BadInput(
    f'no family of Hugging Face has such a model; {nearest}, the nearest, has '
    f'{", ".join(differences[nearest])}: --format=run keeps it, as safetensors with our config'
  )


def _family(config: Mapping[str, Any]) -> families.Family:
  """Returns the family of a config.json. Raises BadInput for another architecture."""
  model_type = config.get('model_type')
  supported = list(families.FAMILIES)
  if model_type == 'gemma3':
    model_type = 'gemma3_text'
  if model_type in supported:  # it may be of any type
    return families.FAMILIES[model_type]
  reason = ''
  if model_type is None:
    reason = '; add the model_type to the file'
  if config.get('auto_map'):
    reason = '; auto_map names Python code for it, which is never run'
  raise errors.BadInput(f'model_type={model_type!r} is not one of: {", ".join(supported)}{reason}')


def _text_config(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns the config of the text of a model with images."""
  outer = {n: value for n, value in config.items() if n not in config_fields.IMAGE_FIELDS}
  text_config = outer | {'model_type': family.model_type} | config['text_config']
  if _family(text_config) != family:
    raise errors.BadInput(f'text_config is of model_type={text_config["model_type"]!r}')
  return text_config


def _normalize(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns all fields of the family by the names of Llama, with defaults for absent ones."""
  own_names = {name: family.names.get(name, name) for name in family.fields}
  _check_names(config, family, own_names)
  values = {}
  for name, default in family.fields.items():
    value = config.get(own_names[name], default)
    if value is None and name not in config_fields.NULLABLE:
      value = default
    values[name] = value
  missing = [own_names[name] for name, value in values.items() if value is families.REQUIRED]
  if missing:
    raise errors.BadInput(f'there is no {", ".join(missing)}')
  for name, value in values.items():
    rules = _rules(name, family.fields[name])
    if value is not None and rules:
      key = fields.Key(family.fields[name], '', own_names[name], **rules)
      key.check_value(key.convert(value))
  return values


def _check_names(
  config: Mapping[str, Any], family: families.Family, own_names: Mapping[str, str]
) -> None:
  """Raises one BadInput for all unknown fields, unless they have their neutral value."""
  neutral = config_fields.NEUTRAL
  supported = {*own_names.values(), *config_fields.UNREAD.get(family.model_type, ())}
  supported |= config_fields.HARMLESS
  refused = {}
  for name, value in config.items():
    if name in supported or name.startswith(config_fields.HARMLESS_PREFIXES) or value is None:
      continue
    if name in neutral and value == neutral[name]:
      continue
    # Some files have a value twice, by the name of Llama or of an earlier version.
    own_name = own_names.get(config_fields.SYNONYMS.get(name, name))
    if own_name is not None and value == config.get(own_name):
      continue
    refused[name] = value
  if refused:
    raise errors.BadInput(_refusal(refused, family))


def _refusal(refused: Mapping[str, Any], family: families.Family) -> str:
  """Returns the reason and the remedy for refused fields."""
  listed = [f'{name}={fields.format_value(value)}' for name, value in refused.items()]
  neutral = config_fields.NEUTRAL
  required = [f'{name}={neutral[name]!r}' for name in refused if name in neutral]
  message = f'{", ".join(listed)} is not supported for {family.model_type}'
  if len(refused) > 1:
    message = f'{", ".join(listed)} are not supported for {family.model_type}'
  if required:
    message += f' (only {", ".join(required)})'
  if not refused.keys().isdisjoint(config_fields.QUANTIZATION):
    return f'{message}: the weights are quantised; use a model in bfloat16, float16 or float32'
  message += ': this may change what the model computes'
  if len(required) == len(refused):
    return message
  return f'{message}; remove from config.json what is known to be harmless'


def _rules(name: str, default: Any) -> dict[str, Any]:
  """Returns the rules of a field, see `fields.Key`."""
  if name in config_fields.COUNTS:
    return config_fields.COUNTS[name]
  if default is None:
    return {}
  if type(default) in (int, float):
    return {'types': (int, float)}
  return {'types': (type(default),)}


def _model_values(values: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns the values of `config.model` by key, without the shared values of the family.

  Args:
    values: all fields of the family, see `_normalize`.
    family: the family.
  """
  pattern, window = _layer_pattern(values, family)
  model = {key: values[name] for name, key in config_fields.SHARED.items() if name in values}
  if 'rope_theta' in family.fields:
    model['positional'] = rotary_fields.read(values, family, window)
  else:
    model['positional'] = {'max_length': values['max_position_embeddings']}
  N = model['heads']
  D = model['width']
  has_bias = values.get('attention_bias') or family.options.get('bias', False)
  inner_width = values['intermediate_size']
  if inner_width is None:
    inner_width = 4 * D
  return model | {
    'key_value_heads': values.get('num_key_value_heads') or N,
    'head_width': values.get('head_dim') or D // N,
    'feed_forward_bias': values.get('mlp_bias', False),
    'feed_forward_width': inner_width,
    'activation': config_fields.ACTIVATIONS[values['hidden_act']],
    'attention.scale': _attention_scale(values),
    'attention.query_key_value_bias': has_bias,
    'attention.output_bias': has_bias,
    'attention.window': window,
    'attention.layer_pattern': pattern,
  }


def _attention_scale(values: Mapping[str, Any]) -> float | None:
  """Returns the scale of scores; None: by the head width."""
  if not values.get('scale_attn_weights', True):
    return 1.0
  if 'query_pre_attn_scalar' in values:
    return values['query_pre_attn_scalar'] ** -0.5
  return None


def _layer_pattern(
  values: Mapping[str, Any], family: families.Family
) -> tuple[tuple[str, ...], int | None]:
  """Returns the repeated kinds of layers, and the window if a layer has one."""
  num_layers = values['num_hidden_layers']
  _check_layer_list('layer_types', values.get('layer_types'), LAYER_TYPES, num_layers)
  _check_layer_list('no_rope_layers', values.get('no_rope_layers'), (0, 1), num_layers)
  window = None
  if values.get('use_sliding_window', True):
    window = values.get('sliding_window')
  is_rotated = _rotated_layers(values)
  has_window = [
    is_windowed and bool(window) for is_windowed in _windowed_layers(values, family, is_rotated)
  ]
  kinds = [OUR_LAYER_TYPES[pair] for pair in zip(is_rotated, has_window, strict=True)]
  if not any(has_window):
    window = None
  return _repeated(kinds), window


def _check_layer_list(name: str, values: Any, choices: tuple[Any, Any], num_layers: int) -> None:
  """Raises BadInput unless a field has one of two values for each layer."""
  if values is None:
    return
  is_list = isinstance(values, list) and len(values) == num_layers
  if not (is_list and all(value in choices for value in values)):
    raise errors.BadInput(
      f'{name}={fields.format_value(values)} must be a list of {choices[0]} or {choices[1]} for '
      f'each of the {num_layers} layers'
    )


def _rotated_layers(values: Mapping[str, Any]) -> list[bool]:
  """Returns whether each layer has rotary positions."""
  if values.get('no_rope_layers'):  # it is named the wrong way round: 1 is rotary
    return values['no_rope_layers']
  interval = values.get('no_rope_layer_interval')
  layers = range(values['num_hidden_layers'])
  return [not interval or (i + 1) % interval != 0 for i in layers]


def _windowed_layers(
  values: Mapping[str, Any], family: families.Family, is_rotated: Sequence[bool]
) -> list[bool]:
  """Returns whether each layer has the window, given there is one."""
  layers = range(values['num_hidden_layers'])
  if values.get('layer_types') is not None:
    return [layer_type == LAYER_TYPES[1] for layer_type in values['layer_types']]
  if 'max_window_layers' in values:
    return [i >= values['max_window_layers'] for i in layers]
  if 'sliding_window_pattern' in values or family.model_type == 'gemma2':
    period = values.get('sliding_window_pattern', 2)
    return [(i + 1) % period != 0 for i in layers]
  if 'no_rope_layers' in values:  # SmolLM3: the layers without rotary positions
    return [not rotated for rotated in is_rotated]
  return [True for _ in layers]


def _repeated(kinds: Sequence[str]) -> tuple[str, ...]:
  """Returns the shortest repeated sequence of kinds."""
  for period in range(1, len(kinds)):
    if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
      return tuple(kinds[:period])
  return tuple(kinds)


def _write(
  model: ModelConfig, vocabulary_size: int, positions: int, family: families.Family
) -> dict[str, Any]:
  """Returns the nearest config.json of a family for a `comparable` model."""
  attention_options = model.attention
  positional = model.positional
  scaling = rotary_fields.write_scaling(positional.scaling, family)
  if scaling is not None and 'type' in scaling:  # the factor of a Phi-3 is a ratio of lengths
    positions = round(positional.scaling.factor * positional.scaling.original_length)
  kinds = model.layer_types()
  is_windowed = [kind.has_window for kind in kinds]
  values = {name: operator.attrgetter(key)(model) for name, key in config_fields.SHARED.items()}
  values |= {
    'vocab_size': vocabulary_size,
    'hidden_act': _activation_name(model.activation),
    'max_position_embeddings': positions,
    'query_pre_attn_scalar': _whole_if_near(attention_options.scale**-2),
    'scale_attn_weights': attention_options.scale != 1,
    'use_sliding_window': attention_options.window is not None,
    'max_window_layers': [*is_windowed, True].index(True),
    'sliding_window_pattern': 1 + [*is_windowed, False].index(False),
    'layer_types': [LAYER_TYPES[has_window] for has_window in is_windowed],
    'no_rope_layers': [int(kind.is_rotated) for kind in kinds],
    'rope_theta': positional.max_timescale,
    'rope_local_base_freq': positional.window_max_timescale or positional.max_timescale,
    'partial_rotary_factor': positional.rotary_fraction,
    'rope_scaling': scaling,
  }
  if model.position == 'absolute':
    values['max_position_embeddings'] = positional.max_length
  if family.model_type == 'phi3':
    original_length = positions
    if positional.scaling:
      original_length = positional.scaling.original_length
    values[rotary_fields.ORIGINAL_LENGTH] = original_length
  config = {'architectures': [family.architecture], 'model_type': family.model_type}
  for name in family.fields:
    if name in values:
      config[family.names.get(name, name)] = values[name]
  return config


def _activation_name(activation: str) -> str:
  """Returns the first name of an activation; silu for one unknown to all families."""
  for name, ours in config_fields.ACTIVATIONS.items():
    if ours == activation:
      return name
  return 'silu'


def _whole_if_near(value: float) -> int | float:
  """Returns a number rounded to 6 digits, as an int if whole."""
  rounded = round(value, 6)
  return int(rounded) if rounded == int(rounded) else rounded


def _differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
  """Returns the differences of a `comparable` model from a config.json, for an error."""
  try:
    official = comparable(read(config).config())
  except errors.BadInput as error:
    return [str(error)]
  return [
    f'{key.path}={fields.format_value(old)} instead of {fields.format_value(new)}'
    for key, old, new in resume.differences(official, model, 'model.', _may_differ)
  ]


def _may_differ(key: fields.Key) -> bool:
  """Whether a key changes no number of the model, or depends on the text (`is_long`)."""
  name = key.path.removeprefix('model.')
  return name in loader_options.MODEL_TRAINING_OPTIONS or name == 'positional.scaling.is_long'


def comparable(model: ModelConfig) -> ModelConfig:
  """Returns a config with explicit values for all derived ones."""
  options = model.attention_options()
  positional = model.positions()

  def explicit_bias(value: bool | None) -> bool:
    return model.bias if value is None else value

  H = model.head_features
  scale = options.scale
  if scale is None:
    scale = H**-0.5
  pattern = options.layer_pattern
  attention_options = dataclasses.replace(
    options,
    scale=scale,
    query_key_value_bias=explicit_bias(options.query_key_value_bias),
    output_bias=explicit_bias(options.output_bias),
    layer_pattern=tuple(pattern[i % len(pattern)] for i in range(model.layers)),
  )
  if options.window is None or positional.window_max_timescale == positional.max_timescale:
    positional = dataclasses.replace(positional, window_max_timescale=None)
  return dataclasses.replace(
    model,
    bias=False,
    feed_forward_bias=explicit_bias(model.feed_forward_bias),
    key_value_heads=model.context_key_heads,
    head_width=H,
    attention=attention_options,
    positional=positional,
  )
