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

from ngrammer_jax import errors
from ngrammer_jax.config import conversion, fields
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.interop import conversion as weights
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
  attention_probs_dropout_prob summary_type summary_use_proj summary_activation
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
  **dict.fromkeys(('gemma2', 'gemma3_text'), ('hidden_act',)),
  **dict.fromkeys(('mistral', 'phi3', 'llama', 'olmo2'), ('layer_types',)),
  'smollm3': ('max_window_layers',),
}
UNREAD['gemma3_text'] += ('attn_logit_softcapping',)
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
  'gelu': 'gelu_erf',
  'relu': 'relu',
}
KINDS = ('full_attention', 'sliding_attention')
# Fields of our config and of a rotary scaling, for each of its types.
_LENGTH = {'original_length': 'original_max_position_embeddings'}
_FACTORS = {'attention_factor': 'attention_factor', 'factor': 'factor'}
SCALINGS = {
  'linear': {'factor': 'factor'},
  'llama3': _LENGTH
  | {'factor': 'factor', 'low_frequency_factor': 'low_freq_factor'}
  | {'high_frequency_factor': 'high_freq_factor'},
  'yarn': _LENGTH
  | _FACTORS
  | {'beta_fast': 'beta_fast', 'beta_slow': 'beta_slow', 'truncate': 'truncate'},
  'longrope': _LENGTH | _FACTORS | {'short_factors': 'short_factor', 'long_factors': 'long_factor'},
}
LIMITS = dict.fromkeys(('num_attention_heads', 'hidden_size', 'vocab_size'), fields.MAX_INT)
LIMITS['max_position_embeddings'] = fields.MAX_INT
LIMITS['num_hidden_layers'] = 1000
# Fields with the same meaning as a key of `config.model`, and the value in families without one.
SHARED = {
  'num_hidden_layers': ('layers', None),
  'hidden_size': ('width', None),
  'num_attention_heads': ('heads', None),
  'num_key_value_heads': ('key_value_heads', None),
  'head_dim': ('head_width', None),
  'intermediate_size': ('feed_forward_width', None),
  'rms_norm_eps': ('norm_epsilon', None),
  'tie_word_embeddings': ('tie_embeddings', None),
  'use_parallel_residual': ('parallel_residual', False),
  'final_logit_softcapping': ('final_logit_cap', None),
  'mlp_bias': ('feed_forward_bias', False),
  'attn_logit_softcapping': ('attention.logit_cap', None),
  'scale_attn_by_inverse_layer_idx': ('attention.inverse_layer_scale', False),
  'attention_bias': ('attention.output_bias', False),
  'sliding_window': ('attention.window', None),
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


def read(config: Mapping[str, Any]) -> Description:
  """Returns the description of a model.

  Raises:
    BadInput: it is of another family, or has a field or a value that is not known.
  """
  family = _family(config)
  if isinstance(config.get('text_config'), Mapping):  # of a model with images
    config = config['text_config']
  c = _normalize(config, family)
  for name, most in LIMITS.items():
    if type(c[name]) is not int or not 1 <= c[name] <= most:
      raise errors.BadInput(f'{name}={c[name]!r} must be an integer from 1 to {most:,}')
  if c['hidden_act'] not in ACTIVATIONS:
    raise errors.BadInput(f'hidden_act={c["hidden_act"]!r} is not one of: {", ".join(ACTIVATIONS)}')
  pattern, window = _layer_kinds(c, family)
  model: dict[str, Any] = {'positional': {'max_length': c['max_position_embeddings']}}
  if 'rope_theta' in family.fields:
    model['positional'] = _positional(c, family)
  values = {key: c.get(name, absent) for name, (key, absent) in SHARED.items()}
  N, D = values['heads'], values['width']
  bias = values['attention.output_bias'] or family.options.get('bias', False)
  values |= {
    'key_value_heads': values['key_value_heads'] or N,
    'head_width': values['head_width'] or D // N,
    'feed_forward_width': 4 * D if c['intermediate_size'] is None else c['intermediate_size'],
    'activation': ACTIVATIONS[c['hidden_act']],
    'attention.scale': _attention_scale(c),
    'attention.query_key_value_bias': bias,
    'attention.output_bias': bias,
    'attention.window': window,
    'attention.layer_pattern': pattern,
  }
  for key, value in (values | family.options).items():
    section, _, name = key.rpartition('.')
    (model.setdefault(section, {}) if section else model)[name] = value
  return Description(family, model, c['vocab_size'], c['max_position_embeddings'])


def write(
  model: ModelConfig,
  vocabulary_size: int,
  positions: int,
  preferred: families.Family = families.FAMILIES['llama'],
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
  nearest = None
  for family in (preferred, *families.FAMILIES.values()):
    config = _write(model, vocabulary_size, positions, family)
    problems = _differences(config, model)
    if not problems:
      return family, config
    if nearest is None or len(problems) < len(nearest[1]):
      nearest = family, problems
  family, problems = nearest
  raise errors.BadInput(
    f'no family of Hugging Face has such a model; {family.model_type}, the nearest, has '
    f'{", ".join(problems)}: --format=run keeps it, as safetensors with our config'
  )


def _family(config: Mapping[str, Any]) -> families.Family:
  """Returns the family of a config.json. Raises BadInput for another architecture."""
  kind, known = config.get('model_type'), families.FAMILIES
  if config.get('auto_map'):
    raise errors.BadInput(
      f'auto_map says that model_type={kind!r} is computed by Python code in the folder, which is '
      f'never run: use a model of {", ".join(known)} without it'
    )
  if kind == 'gemma3':
    kind = 'gemma3_text'
  if kind not in known:
    raise errors.BadInput(f'model_type={kind!r} is not one of: {", ".join(known)}')
  return known[kind]


def _normalize(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns all fields of the family by the names of Llama, with defaults for absent ones."""
  own = {name: family.names.get(name, name) for name in family.fields}
  ignored = {*own.values(), *UNREAD.get(family.model_type, ())} | HARMLESS
  for name, value in config.items():
    if name in ignored or value is None or (name in NEUTRAL and value == NEUTRAL[name]):
      continue
    known = f', which has {name}={NEUTRAL[name]!r} alone' if name in NEUTRAL else ''
    raise errors.BadInput(
      f'{name}={fields.format_value(value)} is not known of the family {family.model_type}{known}: '
      f'it may change what the model computes'
    )
  values = {name: config.get(own[name], default) for name, default in family.fields.items()}
  for name, value in values.items():
    values[name] = family.fields[name] if value is None and name not in NULLABLE else value
  if missing := [own[name] for name, value in values.items() if value is families.REQUIRED]:
    raise errors.BadInput(f'there is no {", ".join(missing)}')
  return values


def _attention_scale(c: Mapping[str, Any]) -> float | None:
  """Returns the scale of the scores; None: that of the head width."""
  if not c.get('scale_attn_weights', True):
    return 1.0
  return c['query_pre_attn_scalar'] ** -0.5 if 'query_pre_attn_scalar' in c else None


def _layer_kinds(
  c: Mapping[str, Any], family: families.Family
) -> tuple[tuple[str, ...], int | None]:
  """Returns the kinds of the layers, which are repeated, and the window if a layer has one."""
  layers, window = range(c['num_hidden_layers']), c.get('sliding_window')
  if not c.get('use_sliding_window', True):
    window = None
  rotated, types = [True for _ in layers], c.get('layer_types')
  if 'no_rope_layers' in c:  # named the wrong way round: 1 in layers with rotary positions
    interval = c['no_rope_layer_interval']
    rotated = c['no_rope_layers'] or [(i + 1) % interval != 0 for i in layers]
  if types is not None:
    is_windowed = [kind == KINDS[1] for kind in types]
  elif 'max_window_layers' in c:
    is_windowed = [i >= c['max_window_layers'] for i in layers]
  elif 'sliding_window_pattern' in c:
    is_windowed = [(i + 1) % c['sliding_window_pattern'] != 0 for i in layers]
  elif family.model_type == 'gemma2':
    is_windowed = [i % 2 == 0 for i in layers]
  else:  # of SmolLM3, the layers without rotary positions
    is_windowed = [not is_rotated or 'no_rope_layers' not in c for is_rotated in rotated]
  if {len(layers)} != {len(rotated), len(is_windowed)} or not {*(types or ())} <= {*KINDS}:
    raise errors.BadInput(
      f'layer_types or no_rope_layers are not {" or ".join(KINDS)}, and 0 or 1, for each of the '
      f'{len(layers)} layers'
    )
  kinds = tuple(
    ('' if is_rotated else 'un') + 'rotated' + ('_window' if has_window and window else '')
    for is_rotated, has_window in zip(rotated, is_windowed, strict=True)
  )
  kinds = tuple({'rotated': 'full', 'rotated_window': 'window'}.get(kind, kind) for kind in kinds)
  # The first kinds of which all others are repetitions.
  is_period = lambda p: all(kind == kinds[i % p] for i, kind in enumerate(kinds))
  pattern = kinds[: next(p for p in range(1, len(kinds) + 1) if is_period(p))]
  return pattern, window if any('window' in kind for kind in kinds) else None


def _positional(c: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
  """Returns the values of `model.positional` of a rotary model."""
  given = (c['rope_scaling'] or {}) | (c['rope_parameters'] or {})
  local = dict(given.pop('sliding_attention', None) or {})
  given |= given.pop('full_attention', None) or {}
  if 'partial_rotary_factor' in c or given.get('partial_rotary_factor') == 1:
    c = {'partial_rotary_factor': 1.0} | c
    c['partial_rotary_factor'] = given.pop('partial_rotary_factor', c['partial_rotary_factor'])
  positional = {
    'max_timescale': given.pop('rope_theta', c['rope_theta']),
    'rotary_fraction': c.get('partial_rotary_factor', 1.0),
    'scaling': _scaling(given, c, family),
  }
  if 'rope_local_base_freq' in c:
    positional['window_max_timescale'] = local.pop('rope_theta', c['rope_local_base_freq'])
    if scaling := _scaling(local, c, family):
      raise errors.BadInput(f'rope_type={scaling["kind"]!r} of sliding_attention is not supported')
  return positional


def _scaling(
  given: Mapping[str, Any], c: Mapping[str, Any], family: families.Family
) -> dict[str, Any] | None:
  """Returns the values of `model.positional.scaling` of a dict of rotary parameters."""
  given = {name: value for name, value in given.items() if value is not None}
  kinds = {given.pop(name) for name in ('type', 'rope_type') if name in given}
  kind = next(iter(kinds), 'default') if len(kinds) < 2 else str(sorted(kinds))
  if kind == 'su' or (kind == 'yarn' and family.model_type == 'phi3'):
    kind = 'longrope'
  if kind == 'default':
    kind, names = None, {}
  elif kind not in SCALINGS:
    raise errors.BadInput(
      f'rope_type={kind!r} is not one of: default, {", ".join(SCALINGS)}; it changes the numbers'
    )
  else:
    names = SCALINGS[kind]
  scales = (
    [given.pop(name, None) for name in ('mscale', 'mscale_all_dim')] if kind == 'yarn' else []
  )
  given.setdefault('original_max_position_embeddings', c['max_position_embeddings'])
  if c['original_max_position_embeddings'] is not None:
    given['original_max_position_embeddings'] = c['original_max_position_embeddings']
  unknown = given.keys() - {*names.values(), 'original_max_position_embeddings'}
  if unknown:
    named = f'rope_type={kind or "default"!r}'
    raise errors.BadInput(f'{", ".join(sorted(unknown))} is not known of {named}')
  if kind is None:
    return None
  if kind in ('yarn', 'longrope'):
    M = given['original_max_position_embeddings']
    given.setdefault('factor', max(c['max_position_embeddings'] / M, 1))
  if all(scales) and scales and 'attention_factor' not in given:
    high, low = (0.1 * scale * math.log(given['factor']) + 1 for scale in scales)
    given['attention_factor'] = high / low
  optional = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')
  if missing := [n for n in names.values() if n not in given and n not in optional]:
    raise errors.BadInput(f'rope_type={kind!r} needs {", ".join(missing)}')
  return {'kind': kind} | {ours: given[name] for ours, name in names.items() if name in given}


def _write(
  model: ModelConfig, vocabulary_size: int, positions: int, family: families.Family
) -> dict[str, Any]:
  """Returns the config.json that is nearest to a model in one family."""
  model = comparable(model)
  a, p = model.attention, model.positional
  rounded = round(a.scale**-2, 6)
  scaling = _write_scaling(p.scaling, family)
  if 'type' in (scaling or {}):  # the factor of a Phi-3 is a ratio of lengths
    positions = round(p.scaling.factor * p.scaling.original_length)
  is_windowed = ['window' in kind for kind in a.layer_pattern]
  values = {name: operator.attrgetter(key)(model) for name, (key, _) in SHARED.items()} | {
    'vocab_size': vocabulary_size,
    'hidden_act': next((n for n, own in ACTIVATIONS.items() if own == model.activation), 'silu'),
    'max_position_embeddings': p.max_length if model.position == 'absolute' else positions,
    'query_pre_attn_scalar': int(rounded) if rounded == int(rounded) else rounded,
    'scale_attn_weights': a.scale != 1,
    'use_sliding_window': a.window is not None,
    'max_window_layers': [*is_windowed, True].index(True),
    'sliding_window_pattern': 1 + [*is_windowed, False].index(False),
    'layer_types': [KINDS[has_window] for has_window in is_windowed],
    'no_rope_layers': [int('unrotated' not in kind) for kind in a.layer_pattern],
    'rope_theta': p.max_timescale,
    'rope_local_base_freq': p.window_max_timescale or p.max_timescale,
    'partial_rotary_factor': p.rotary_fraction,
    'rope_scaling': scaling,
  }
  if family.model_type == 'phi3':
    values['original_max_position_embeddings'] = (
      positions if p.scaling is None else p.scaling.original_length
    )
  own = {family.names.get(n, n): values[n] for n in family.fields if n in values}
  return {'architectures': [family.architecture], 'model_type': family.model_type} | own


def _write_scaling(scaling: Any, family: families.Family) -> dict[str, Any] | None:
  """Returns `rope_scaling`."""
  if scaling is None:
    return None
  values = {name: getattr(scaling, ours) for ours, name in SCALINGS[scaling.kind].items()}
  values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}
  # Phi-3 has no other fields here, and knows the old name of the type only.
  if family.model_type == 'phi3':
    return {'type': scaling.kind} | {n: v for n, v in values.items() if n.endswith('_factor')}
  return {'rope_type': scaling.kind} | values


def _differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
  """Returns what a model has otherwise than that of a config.json, for an error message."""
  try:
    # The length of segments is not written.
    values = {'model': read(config).model, 'training': {'segment_length': 1}}
    official = conversion.resolve(values).model
  except errors.BadInput as error:
    return [str(error)]
  may_differ = lambda key: (
    key.path.removeprefix('model.') in weights.MODEL_TRAINING_OPTIONS or key.path == _IS_LONG
  )
  official, model = comparable(official), comparable(model)
  return [
    f'{key.path}={fields.format_value(old)} instead of {fields.format_value(new)}'
    for key, old, new in fields.differences(official, model, 'model.', may_differ)
  ]


_IS_LONG = 'model.positional.scaling.is_long'  # depends on the text


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
