"""The config.json of a published model becomes values of `config.model`, and back.

Every field of config.json is used, or is in HARMLESS, or has the only value in NEUTRAL; any other
is an error, as it may change the numbers. Both forms of rotary fields are read: `rope_theta` and
`rope_scaling`, and `rope_parameters`. The first is written, which all versions read.
"""

from collections.abc import Mapping
import dataclasses
import math
import operator
from typing import Any

from flax import traverse_util

from ngrammer_jax import errors
from ngrammer_jax.config import attention, conversion, fields
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.interop import loader_options
from ngrammer_jax.interop.huggingface import families

# Names and descriptions, training, generation, and heads for other tasks.
HARMLESS = frozenset(
  """
  architectures model_type transformers_version transformers.js_config _name_or_path name_or_path
  dtype torch_dtype use_cache bos_token_id eos_token_id pad_token_id sep_token_id tokenizer_class
  unk_token_id prefix initializer_range return_dict output_hidden_states output_attentions
  torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward cross_attention_hidden_size
  decoder_start_token_id tie_encoder_decoder problem_type id2label label2id num_labels _num_labels
  finetuning_task task_specific_params attn_implementation _attn_implementation
  _attn_implementation_autoset cache_implementation gradient_checkpointing custom_pipelines
  attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout classifier_dropout
  attention_probs_dropout_prob hidden_dropout_prob summary_type summary_use_proj summary_activation
  summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn pretraining_tp n_ctx
  is_decoder is_llama_config _sliding_window_pattern temperature top_k top_p typical_p max_length
  min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
  repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
  num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
  forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
  begin_suppress_tokens
  """.split()
)
# Fields that a family does not read, with the value of models that are as we compute them.
NEUTRAL = {
  **dict.fromkeys(('attention_bias', 'mlp_bias', 'lm_head_bias', 'qkv_bias'), False),
  **dict.fromkeys(('use_bidirectional_attention', 'use_mrope', 'rope_interleaved'), False),
  **dict.fromkeys(('add_cross_attention', 'is_encoder_decoder', 'use_sliding_window'), False),
  **dict.fromkeys(('full_attn_mod', 'interpolate_factor', 'partial_rotary_factor'), 1),
  'pruned_heads': {},
}
# Fields that a family has, but does not read.
UNREAD = {
  **dict.fromkeys(('gemma', 'gemma2', 'gemma3_text'), ('hidden_act',)),
  **dict.fromkeys(('mistral', 'phi3', 'llama', 'olmo2'), ('layer_types',)),
  'smollm3': ('max_window_layers',),
}
UNREAD['gemma3_text'] += ('attn_logit_softcapping',)
# Fields of a model with images that say nothing of its text; `text_config` says which head it has.
IMAGE_FIELDS = (
  *('text_config', 'vision_config', 'tie_word_embeddings', 'mm_tokens_per_image'),
  *(f'{name}_token_index' for name in ('boi', 'eoi', 'image')),
)
# Fields for which null is a value of its own; elsewhere it is an absent field.
NULLABLE = (
  *('num_key_value_heads', 'head_dim', 'intermediate_size', 'sliding_window'),
  *('attn_logit_softcapping', 'final_logit_softcapping'),
)
# The first name of an activation is written.
ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_new': 'gelu',
  'gelu_fast': 'gelu',
  'gelu': 'gelu_erf',
  'relu': 'relu',
}
LAYER_TYPES = ('full_attention', 'sliding_attention')
# Our kinds of layers, by whether they have rotary positions and a window.
LAYER_KINDS = {('unrotated' not in name, 'window' in name): name for name in attention.LAYER_KINDS}
# Fields of our config and of a rotary scaling, for each of its types.
ORIGINAL_LENGTH = 'original_max_position_embeddings'
_LENGTH = {'original_length': ORIGINAL_LENGTH}
_FACTORS = {'attention_factor': 'attention_factor', 'factor': 'factor'}
SCALINGS = {
  'default': {},
  'linear': {'factor': 'factor'},
  'llama3': _LENGTH
  | {'factor': 'factor', 'low_frequency_factor': 'low_freq_factor'}
  | {'high_frequency_factor': 'high_freq_factor'},
  'yarn': _LENGTH
  | _FACTORS
  | {'beta_fast': 'beta_fast', 'beta_slow': 'beta_slow', 'truncate': 'truncate'},
  'longrope': _LENGTH | _FACTORS | {'short_factors': 'short_factor', 'long_factors': 'long_factor'},
}
# Rules of integers above 0, see `fields.Key`.
COUNTS = {'num_hidden_layers': {'types': (int,), 'at_least': 1, 'at_most': 1000}} | dict.fromkeys(
  """
  vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
  max_position_embeddings original_max_position_embeddings sliding_window_pattern
  no_rope_layer_interval
  """.split(),
  {'types': (int,), 'at_least': 1},
)
# Fields with the same meaning as a key of `config.model`.
SHARED = {
  'num_hidden_layers': 'layers',
  'hidden_size': 'width',
  'num_attention_heads': 'heads',
  'num_key_value_heads': 'key_value_heads',
  'head_dim': 'head_width',
  'intermediate_size': 'feed_forward_width',
  'rms_norm_eps': 'norm_epsilon',
  'tie_word_embeddings': 'tie_embeddings',
  'use_parallel_residual': 'parallel_residual',
  'final_logit_softcapping': 'final_logit_cap',
  'mlp_bias': 'feed_forward_bias',
  'attn_logit_softcapping': 'attention.logit_cap',
  'scale_attn_by_inverse_layer_idx': 'attention.inverse_layer_scale',
  'attention_bias': 'attention.output_bias',
  'sliding_window': 'attention.window',
}
DEFAULT_LENGTH = 2048  # tokens of a segment in evaluation, if the model has that many positions


@dataclasses.dataclass(frozen=True)
class Description:
  """What a config.json says.

  Attributes:
    family: the family of the model.
    model: values of `config.model`.
    vocabulary_size: V, rows of the embedding.
    positions: number of positions that the model was made for.
  """

  family: families.Family
  model: dict[str, Any]
  vocabulary_size: int
  positions: int

  def config(self) -> ModelConfig:
    """Returns the checked config of the model. Raises BadInput for values that do not fit."""
    # The length of segments is not written.
    return conversion.resolve({'model': self.model, 'training': {'segment_length': 1}}).model


def read(config: Mapping[str, Any]) -> Description:
  """Returns the description of a model.

  Raises:
    BadInput: it is of another family, or has a field or a value that is not known.
  """
  family = _family(config)
  if config['model_type'] == 'gemma3' and isinstance(config.get('text_config'), Mapping):
    outer = {name: value for name, value in config.items() if name not in IMAGE_FIELDS}
    config = outer | {'model_type': family.model_type} | config['text_config']
    if _family(config) != family:
      raise errors.BadInput(f'text_config is of model_type={config["model_type"]!r}')
  c = _normalize(config, family)
  if c['hidden_act'] not in ACTIVATIONS:
    raise errors.BadInput(f'hidden_act={c["hidden_act"]!r} is not one of: {", ".join(ACTIVATIONS)}')
  pattern, window = _layer_kinds(c, family)
  values = {key: c[name] for name, key in SHARED.items() if name in c}
  values['positional'] = {'max_length': c['max_position_embeddings']}
  if 'rope_theta' in family.fields:
    values['positional'] = _positional(c, family, window)
  N, D = values['heads'], values['width']
  bias = c.get('attention_bias') or family.options.get('bias', False)
  scale = c['query_pre_attn_scalar'] ** -0.5 if 'query_pre_attn_scalar' in c else None
  values |= {
    'key_value_heads': c.get('num_key_value_heads') or N,
    'head_width': c.get('head_dim') or D // N,
    'feed_forward_bias': c.get('mlp_bias', False),
    'feed_forward_width': 4 * D if c['intermediate_size'] is None else c['intermediate_size'],
    'activation': ACTIVATIONS[c['hidden_act']],
    'attention.scale': scale if c.get('scale_attn_weights', True) else 1.0,
    'attention.query_key_value_bias': bias,
    'attention.output_bias': bias,
    'attention.window': window,
    'attention.layer_pattern': pattern,
  }
  model = traverse_util.unflatten_dict(values | family.options, sep='.')
  return Description(family, model, c['vocab_size'], c['max_position_embeddings'])


def write(
  model: ModelConfig,
  vocabulary_size: int,
  positions: int,
  preferred: families.Family = families.LLAMA,
) -> tuple[families.Family, dict[str, Any]]:
  """Returns a family that has such models, and the config.json of one.

  Args:
    model: the config of our model.
    vocabulary_size: V.
    positions: number of positions that the model was made for.
    preferred: the family if it has such models; otherwise it is the first.

  Raises:
    BadInput: no family has such a model; names what the nearest one lacks.
  """
  problems, model = {}, comparable(model)
  for family in (preferred, *families.FAMILIES.values()):
    config = _write(model, vocabulary_size, positions, family)
    problems[family.model_type] = _differences(config, model)
    if not problems[family.model_type]:
      return family, config
  nearest = min(problems, key=lambda name: len(problems[name]))
  raise errors.BadInput(
    f'no family of Hugging Face has such a model; {nearest}, the nearest, has '
    f'{", ".join(problems[nearest])}: --format=run keeps it, as safetensors with our config'
  )


def _family(config: Mapping[str, Any]) -> families.Family:
  """Returns the family of a config.json. Raises BadInput for another architecture."""
  kind, supported = config.get('model_type'), [*families.FAMILIES]
  if config.get('auto_map'):
    raise errors.BadInput(
      f'auto_map says that model_type={kind!r} is computed by Python code in the folder, which is '
      f'never run: use a model of {", ".join(supported)} without it'
    )
  if kind == 'gemma3':
    kind = 'gemma3_text'
  if kind not in supported:
    raise errors.BadInput(f'model_type={kind!r} is not one of: {", ".join(supported)}')
  return families.FAMILIES[kind]


def _normalize(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns all fields of the family by the names of Llama, with defaults for absent ones."""
  own = {name: family.names.get(name, name) for name in family.fields}
  ignored = {*own.values(), *UNREAD.get(family.model_type, ())} | HARMLESS
  for name, value in config.items():
    if name in ignored or value is None or (name in NEUTRAL and value == NEUTRAL[name]):
      continue
    # Some files say a value twice, also by the name of Llama or that of an earlier version.
    same = own.get({'sliding_window_size': 'sliding_window'}.get(name, name))
    if same is not None and value == config.get(same):
      continue
    supported = f' (only {name}={NEUTRAL[name]!r})' if name in NEUTRAL else ''
    raise errors.BadInput(
      f'{name}={fields.format_value(value)} is not supported for {family.model_type}{supported}: '
      f'it may change what the model computes'
    )
  values = {name: config.get(own[name], default) for name, default in family.fields.items()}
  absent = {name for name, value in values.items() if value is None and name not in NULLABLE}
  values |= {name: family.fields[name] for name in absent}
  if missing := [own[name] for name, value in values.items() if value is families.REQUIRED]:
    raise errors.BadInput(f'there is no {", ".join(missing)}')
  for name, value in values.items():
    default = family.fields[name]
    types = (int, float) if type(default) in (int, float) else (type(default),)
    rules = COUNTS.get(name, {} if default is None else {'types': types})
    if value is not None and rules:
      key = fields.Key(default, '', own[name], **rules)
      key.check(key.convert(value))
  return values


def _layer_kinds(c, family):
  """Returns the kinds of the layers, which are repeated, and the window if a layer has one."""
  layers, window = range(c['num_hidden_layers']), c.get('sliding_window')
  window = window if c.get('use_sliding_window', True) else None
  for name, choices in (('layer_types', LAYER_TYPES), ('no_rope_layers', (0, 1))):
    values = c.get(name)
    is_list = isinstance(values, list) and len(values) == len(layers)
    if values is not None and not (is_list and all(value in choices for value in values)):
      raise errors.BadInput(
        f'{name}={fields.format_value(values)} must be a list of {choices[0]} or {choices[1]} for '
        f'each of the {len(layers)} layers'
      )
  interval = c.get('no_rope_layer_interval')
  # `no_rope_layers` is named the wrong way round: 1 is rotary.
  is_rotated = c.get('no_rope_layers') or [not interval or (i + 1) % interval != 0 for i in layers]
  if c.get('layer_types') is not None:
    is_windowed = [name == LAYER_TYPES[1] for name in c['layer_types']]
  elif 'max_window_layers' in c:
    is_windowed = [i >= c['max_window_layers'] for i in layers]
  elif 'sliding_window_pattern' in c or family.model_type == 'gemma2':
    is_windowed = [(i + 1) % c.get('sliding_window_pattern', 2) != 0 for i in layers]
  else:  # of SmolLM3, the layers without rotary positions
    is_windowed = [not rotated or 'no_rope_layers' not in c for rotated in is_rotated]
  has_window = [windowed and bool(window) for windowed in is_windowed]
  kinds = tuple(map(LAYER_KINDS.get, zip(is_rotated, has_window, strict=True)))
  # The first kinds of which all others are repetitions.
  period = next(p for p in range(1, len(kinds) + 1) if all(map(operator.eq, kinds, kinds[p:])))
  return kinds[:period], window if any(has_window) else None


def _positional(c, family, window):
  """Returns the values of `model.positional` of a rotary model."""
  rotary, fraction = c['rope_scaling'] | c['rope_parameters'], c.get('partial_rotary_factor', 1.0)
  local = dict(rotary.pop('sliding_attention', None) or {})
  rotary |= rotary.pop('full_attention', None) or {}
  if 'rope_local_base_freq' not in c and local not in ({}, rotary):
    raise errors.BadInput('sliding_attention with other rotary positions is not supported')
  if 'partial_rotary_factor' in c or rotary.get('partial_rotary_factor') == 1:
    fraction = rotary.pop('partial_rotary_factor', fraction)
  positional = {
    'max_timescale': rotary.pop('rope_theta', c['rope_theta']),
    'rotary_fraction': fraction,
    'scaling': _scaling(rotary, c, family),
  }
  if 'rope_local_base_freq' in c:
    timescale = local.pop('rope_theta', c['rope_local_base_freq'])
    positional['window_max_timescale'] = timescale if window else None
    if scaling := _scaling(local, c, family):
      raise errors.BadInput(f'rope_type={scaling["kind"]!r} of sliding_attention is not supported')
  return positional


def _scaling(rotary, c, family):
  """Returns the values of `model.positional.scaling` of a dict of rotary parameters."""
  rotary = {name: value for name, value in rotary.items() if value is not None}
  kinds = [rotary.pop(name) for name in ('type', 'rope_type') if name in rotary] or ['default']
  kind = kinds[0] if kinds[0] == kinds[-1] else kinds
  if kind == 'su' or (kind == 'yarn' and family.model_type == 'phi3'):
    kind = 'longrope'
  if kind not in [*SCALINGS]:  # it may be a list
    raise errors.BadInput(f'rope_type={kind!r} is not one of: {", ".join(SCALINGS)}')
  names, scales = SCALINGS[kind], ()
  if kind == 'yarn':
    scales = [rotary.pop(name) for name in ('mscale', 'mscale_all_dim') if name in rotary]
  M = c[ORIGINAL_LENGTH] or rotary.get(ORIGINAL_LENGTH, c['max_position_embeddings'])
  rotary[ORIGINAL_LENGTH] = M
  if unsupported := rotary.keys() - {*names.values(), ORIGINAL_LENGTH}:
    raise errors.BadInput(f'{", ".join(sorted(unsupported))} is not supported for rope_type={kind}')
  if kind == 'default':
    return None
  if kind in ('yarn', 'longrope'):
    rotary.setdefault('factor', max(c['max_position_embeddings'] / M, 1))
  if len(scales) == 2 and all(scales):
    high, low = (0.1 * scale * math.log(rotary['factor']) + 1 for scale in scales)
    rotary.setdefault('attention_factor', high / low)
  optional = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')
  if missing := [n for n in names.values() if n not in rotary and n not in optional]:
    raise errors.BadInput(f'rope_type={kind!r} needs {", ".join(missing)}')
  return {'kind': kind} | {ours: rotary[name] for ours, name in names.items() if name in rotary}


def _write(model, vocabulary_size, positions, family):
  """Returns the config.json that is nearest to a `comparable` model in one family."""
  a, p = model.attention, model.positional
  rounded = round(a.scale**-2, 6)
  scaling = write_scaling(p.scaling, family)
  if 'type' in (scaling or {}):  # the factor of a Phi-3 is a ratio of lengths
    positions = round(p.scaling.factor * p.scaling.original_length)
  kinds = model.layer_kinds()
  is_windowed = [kind.has_window for kind in kinds]
  values = {name: operator.attrgetter(key)(model) for name, key in SHARED.items()} | {
    'vocab_size': vocabulary_size,
    'hidden_act': next((n for n, own in ACTIVATIONS.items() if own == model.activation), 'silu'),
    'max_position_embeddings': p.max_length if model.position == 'absolute' else positions,
    'query_pre_attn_scalar': int(rounded) if rounded == int(rounded) else rounded,
    'scale_attn_weights': a.scale != 1,
    'use_sliding_window': a.window is not None,
    'max_window_layers': [*is_windowed, True].index(True),
    'sliding_window_pattern': 1 + [*is_windowed, False].index(False),
    'layer_types': [LAYER_TYPES[has_window] for has_window in is_windowed],
    'no_rope_layers': [int(kind.is_rotated) for kind in kinds],
    'rope_theta': p.max_timescale,
    'rope_local_base_freq': p.window_max_timescale or p.max_timescale,
    'partial_rotary_factor': p.rotary_fraction,
    'rope_scaling': scaling,
  }
  if family.model_type == 'phi3':
    values[ORIGINAL_LENGTH] = p.scaling.original_length if p.scaling else positions
  own = {family.names.get(n, n): values[n] for n in family.fields if n in values}
  return {'architectures': [family.architecture], 'model_type': family.model_type} | own


def write_scaling(scaling: Any, family: families.Family) -> dict[str, Any] | None:
  """Returns `rope_scaling` of a `RotaryScalingConfig` or None."""
  if scaling is None:
    return None
  values = {name: getattr(scaling, ours) for ours, name in SCALINGS[scaling.kind].items()}
  values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}
  # Phi-3 has no other fields here, and knows the old name of the type only.
  if family.model_type == 'phi3':
    return {'type': scaling.kind} | {n: v for n, v in values.items() if n.endswith('_factor')}
  return {'rope_type': scaling.kind} | values


def _differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
  """Returns what a `comparable` model has otherwise than that of a config.json, for an error."""
  try:
    official = comparable(read(config).config())
  except errors.BadInput as error:
    return [str(error)]
  # The last depends on the text.
  ignored = *loader_options.MODEL_TRAINING_OPTIONS, 'positional.scaling.is_long'
  may_differ = lambda key: key.path.removeprefix('model.') in ignored
  return [
    f'{key.path}={fields.format_value(old)} instead of {fields.format_value(new)}'
    for key, old, new in fields.differences(official, model, 'model.', may_differ)
  ]


def comparable(model: ModelConfig) -> ModelConfig:
  """Returns a config in which every value that is derived from others is explicit."""
  a, p = model.attention_options(), model.positions()
  or_bias = lambda value: model.bias if value is None else value
  H = model.head_features
  pattern = tuple(a.layer_pattern[i % len(a.layer_pattern)] for i in range(model.layers))
  attention = dataclasses.replace(
    a,
    scale=H**-0.5 if a.scale is None else a.scale,
    query_key_value_bias=or_bias(a.query_key_value_bias),
    output_bias=or_bias(a.output_bias),
    layer_pattern=pattern,
  )
  if a.window is None or p.window_max_timescale == p.max_timescale:
    p = dataclasses.replace(p, window_max_timescale=None)
  return dataclasses.replace(
    model,
    bias=False,
    feed_forward_bias=or_bias(model.feed_forward_bias),
    key_value_heads=model.context_key_heads,
    head_width=H,
    attention=attention,
    positional=p,
  )
