"""The config of the model of a praxis TransformerLm's hyperparameters.

A hyperparameter has the name of its template in praxis, joined by dots, such as
`stacked_transformer_tpl.num_layers`; mappings may be nested. The class of a template is its `cls`,
by name with or without a path. A template that is not given has the official defaults.

N heads, D model width.
"""

import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import settings

ORIGIN = 'a praxis TransformerLm'
ACTIVATIONS = {'ReLU': 'relu', 'SquaredReLU': 'squared_relu', 'SiLU': 'silu', 'Swish': 'silu'}
NORMS = {'pre': 'pre', 'post': 'post', 'post_skip': 'post_skip', 'primer_hybrid': 'hybrid'}

_STACK = 'stacked_transformer_tpl.'
_LAYER = f'{_STACK}transformer_layer_params_tpl.'
_ATTENTION, _FEED_FORWARD = f'{_LAYER}tr_atten_tpl.', f'{_LAYER}tr_fflayer_tpl.'
_ROTARY, _NGRAMMER = f'{_ATTENTION}rotary_position_emb_tpl.', 'ngrammer_tpl.'
_ACTIVATION = f'{_FEED_FORWARD}activation_tpl.'
_EPSILONS = ('final_ln_tpl.epsilon', f'{_LAYER}ln_tpl.epsilon', f'{_FEED_FORWARD}ln_tpl.epsilon')

# Official defaults of the hyperparameters that a config is made of. Optional templates have the
# name of their class, or None.
DEFAULTS = {
  **{'model_dims': 0, f'{_STACK}num_layers': 0, f'{_STACK}num_heads': 0, f'{_STACK}hidden_dims': 0},
  **{f'{_STACK}model_dims': None, f'{_STACK}dim_per_head': None, f'{_LAYER}norm_policy': 'pre'},
  **{f'{_ATTENTION}use_bias': True, f'{_ATTENTION}internal_enable_per_dim_scale': True},
  **{f'{_ATTENTION}dconv_qkv': False, f'{_ATTENTION}dconv_kernel_size': 3},
  **{f'{_ATTENTION}atten_logit_cap': 0.0, f'{_ATTENTION}use_rotary_position_emb': False},
  **{f'{_ROTARY}min_timescale': 1, f'{_ROTARY}max_timescale': 10_000},
  **{f'{_FEED_FORWARD}has_bias': True, f'{_FEED_FORWARD}use_gated_activation': False},
  **{f'{_ACTIVATION}cls': 'ReLU', f'{_ACTIVATION}approximate': True},
  **dict.fromkeys(_EPSILONS, 1e-6),
  **{'position_emb_tpl.cls': 'PositionalEmbedding', 'softmax_tpl.cls': 'SharedEmbeddingSoftmax'},
  **{'softmax_tpl.scale_sqrt_depth': False, 'separate_embedding_tpl.cls': None},
  **{'separate_embedding_tpl.scale_sqrt_depth': False, f'{_NGRAMMER}cls': None},
  **{f'{_NGRAMMER}ngram_vocab_size': 768 * 256, f'{_NGRAMMER}ngram_emb_dim': 8},
  **{f'{_NGRAMMER}num_clusters': 0, f'{_NGRAMMER}num_heads': 0, f'{_NGRAMMER}concat_ngrams': None},
  **{f'{_NGRAMMER}decay': 0.999, f'{_NGRAMMER}epsilon': 1e-6, f'{_NGRAMMER}prenormalize': False},
}
# The only value with which the model can be loaded, which is the official default.
FIXED = {
  **{'model_type': 'causal', 'post_attention_ngrammer_tpls': None},
  **{'position_emb_tpl.min_timescale': 1, 'position_emb_tpl.max_timescale': 10_000},
  **{'softmax_tpl.soft_cap_logits': 0.0, f'{_STACK}num_experts': 0, f'{_STACK}moe_layers': ()},
  **{f'{_STACK}local_window_size': None, f'{_STACK}use_cross_attention': False},
  **{f'{_STACK}ngrammer_tpls': None, f'{_LAYER}ngrammer_tpl': None},
  **{f'{_LAYER}use_cross_attention': False, f'{_LAYER}cls': 'Transformer'},
  **{f'{_ATTENTION}cls': 'DotProductAttention', f'{_ATTENTION}attention_extra_logit': None},
  **{f'{_ATTENTION}internal_enable_query_scale': True, f'{_ATTENTION}relative_bias_tpl': None},
  **{f'{_ATTENTION}scale_logits_by_head_dims': False, f'{_ATTENTION}zero_fully_masked': False},
  **{f'{_ATTENTION}combine_qkv': False, f'{_ATTENTION}output_proj_use_nhd_shape': False},
  **{f'{_ATTENTION}ln_tpl': None, f'{_ATTENTION}ngrammer_tpl': None},
  **{f'{_FEED_FORWARD}residual_weight': 1.0, f'{_FEED_FORWARD}add_skip_connection': True},
  **{f'{_FEED_FORWARD}apply_padding_first': False, f'{_STACK}cls': 'StackedTransformer'},
  **{f'{_NGRAMMER}ngram_using_attention_scores': False},
}
# Hyperparameters of every template: names, dtypes, initial weights and sharding.
BASE_LAYER = (
  *('name', 'dtype', 'fprop_dtype', 'params_init', 'skip_lp_regularization', 'ici_mesh_shape'),
  *('dcn_mesh_shape', 'contiguous_submeshes', 'mesh_axis_names', 'shared_weight_layer_id'),
  *('weight_split_dims_mapping', 'activation_split_dims_mapping'),
)
# Hyperparameters that do not change what a model computes in evaluation.
_NAMES = (
  *('cls', 'packed_input', 'skip_compute_loss'),
  *('skip_aux_loss', 'record_activations_in_xent_output', 'record_logits_in_xent_output'),
  *('entropy_loss_weight', 'vocab_size'),
)
_STACK_NAMES = (
  *('dropout_prob', 'atten_dropout_prob', 'residual_dropout_prob', 'relu_dropout_prob'),
  *('residual_droppath_prob', 'input_dropout_prob', 'packed_input', 'mask_self_attention'),
  *('fold_padding_with_segment_mask', 'remat', 'checkpoint_policy'),
)
_LAYER_NAMES = (
  *('input_dims', 'hidden_dims', 'num_heads', 'dim_per_head', 'packed_input'),
  *('atten_dropout_prob', 'residual_dropout_prob', 'relu_dropout_prob', 'residual_droppath_prob'),
)
IGNORED = (
  *_NAMES,
  *(f'{_STACK}{name}' for name in _STACK_NAMES),
  *(f'{_LAYER}{name}' for name in _LAYER_NAMES),
  *(f'{_ATTENTION}{name}' for name in ('input_dim', 'hidden_dim', 'num_heads', 'dim_per_head')),
  *(f'{_ATTENTION}{name}' for name in ('atten_dropout_prob', 'internal_gshard_gaussian_init')),
  *(f'{_ATTENTION}{name}' for name in ('scale_query_by_dim_per_head', 'cast_rotary_position_emb')),
  *(f'{_ATTENTION}{name}' for name in ('consolidate_rope_key_state', 'decode_cache')),
  *(f'{_FEED_FORWARD}{name}' for name in ('input_dims', 'output_dims', 'hidden_dims')),
  *(f'{_FEED_FORWARD}{name}' for name in ('residual_dropout_prob', 'relu_dropout_prob')),
  *('softmax_tpl.num_classes', 'softmax_tpl.input_dims', 'softmax_tpl.lookup_style'),
  *('separate_embedding_tpl.num_classes', 'separate_embedding_tpl.input_dims'),
  *('separate_embedding_tpl.lookup_style', 'position_emb_tpl.embedding_dims'),
  *(f'{_NGRAMMER}{name}' for name in ('unigram_vocab_size', 'dim_per_head')),
  *(f'{_NGRAMMER}{name}' for name in ('use_cached_input_ids_to_cluster_ids', 'causal_attention')),
  *(f'{_NGRAMMER}{name}' for name in ('enable_cache_updates', 'full_update_cache_frequency')),
  f'{_NGRAMMER}full_update_cache_steps',
)


def config_from_hyperparameters(hyperparameters: settings.Settings) -> model_config.ModelConfig:
  """Returns the config of the model of these hyperparameters of a praxis TransformerLm.

  Dropout, initial weights and optimizer are not part of it. N-grammers after attention are not
  supported: add `NGramConfig(layer='attention', pairing=...)` to the config of the other
  hyperparameters.

  Args:
    hyperparameters: see the module; a template that is absent in the model is None.

  Raises:
    BadInput: an unknown hyperparameter, a missing size, a missing class of an N-Grammer, or a value
      with which the model cannot be loaded.
  """
  h = settings.read(_with_classes(hyperparameters), DEFAULTS | FIXED, IGNORED, ORIGIN)
  D, N = h['model_dims'], h[f'{_STACK}num_heads']
  for name in ('model_dims', *(f'{_STACK}{size}' for size in ('num_layers', 'num_heads'))):
    if not h[name]:
      raise errors.BadInput(f'{name} is missing or {h[name]!r}: {ORIGIN} needs at least 1')
  settings.check(h, _supported(h, D, N), ORIGIN)
  is_rotary, untied = h[f'{_ATTENTION}use_rotary_position_emb'], h['separate_embedding_tpl.cls']
  embedding = 'separate_embedding_tpl' if untied else 'softmax_tpl'
  cap = float(h[f'{_ATTENTION}atten_logit_cap'])  # not positive: not capped
  absolute = 'none' if h['position_emb_tpl.cls'] is None else 'sinusoid'
  config = model_config.ModelConfig(
    layers=h[f'{_STACK}num_layers'],
    width=D,
    heads=N,
    feed_forward_width=h[f'{_STACK}hidden_dims'],
    activation=_activation(h),
    gated=h[f'{_FEED_FORWARD}use_gated_activation'],
    bias=h[f'{_ATTENTION}use_bias'],
    position='rope' if is_rotary else absolute,
    positional=_positional(h) if is_rotary else None,
    per_dim_scale=h[f'{_ATTENTION}internal_enable_per_dim_scale'],
    attention=model_config.AttentionConfig(cap) if cap > 0 else None,
    norm=NORMS[h[f'{_LAYER}norm_policy']],
    norm_epsilon=h[_EPSILONS[0]],
    convolution=h[f'{_ATTENTION}dconv_kernel_size'] if h[f'{_ATTENTION}dconv_qkv'] else None,
    tie_embeddings=not untied,
    scale_embeddings=h[f'{embedding}.scale_sqrt_depth'],
    ngram=None if h[f'{_NGRAMMER}cls'] is None else _ngram(h),
  )
  config.check()
  return config


def _with_classes(hyperparameters):
  """Returns the hyperparameters without those of BASE_LAYER; an absent template has the class None.

  Classes are by name, without their path.
  """
  templates = {name.removesuffix('.cls') for name in DEFAULTS if name.endswith('.cls')}
  result = {}
  for name, value in settings.flatten(hyperparameters):
    if not set(name.split('.')).isdisjoint(BASE_LAYER):
      continue
    if name in templates:
      name = f'{name}.cls'
    if name.endswith('.cls') and value is not None:
      value = re.split('[./]', str(getattr(value, '__name__', value)))[-1]
    result[name] = value
  has_ngrammer = any(name.startswith(_NGRAMMER) for name in result)
  if has_ngrammer and f'{_NGRAMMER}cls' not in result:
    raise errors.BadInput(f'{_NGRAMMER}cls is missing: expected VQNgrammer or Ngrammer')
  return result


def _supported(h: dict[str, Any], D: int, N: int) -> dict[str, tuple[Any, ...]]:
  """Returns the values of each hyperparameter with which the model can be loaded."""
  # Each of these is the same option of our model.
  same = {f'{_FEED_FORWARD}has_bias': (h[f'{_ATTENTION}use_bias'],)}
  same |= {name: (h[_EPSILONS[0]],) for name in _EPSILONS[1:]}
  positions = (None, 'PositionalEmbedding')
  return {
    **{name: (value,) for name, value in FIXED.items()},
    **same,
    'softmax_tpl.soft_cap_logits': (0.0, None),
    f'{_STACK}moe_layers': ((), [], None),
    f'{_STACK}model_dims': (None, 0, D),
    f'{_STACK}dim_per_head': (None, *((D // N,) if D % N == 0 else ())),
    f'{_LAYER}norm_policy': tuple(NORMS),
    f'{_ACTIVATION}cls': ('GELU', *ACTIVATIONS),
    'position_emb_tpl.cls': (None,) if h[f'{_ATTENTION}use_rotary_position_emb'] else positions,
    'softmax_tpl.cls': (
      ('FullSoftmax', 'SharedEmbeddingSoftmax')
      if h['separate_embedding_tpl.cls']
      else ('SharedEmbeddingSoftmax',)
    ),
    'separate_embedding_tpl.cls': (None, 'Embedding'),
    f'{_NGRAMMER}cls': (None, 'VQNgrammer', 'Ngrammer'),
  }


def _activation(h):
  if h[f'{_ACTIVATION}cls'] != 'GELU':
    return ACTIVATIONS[h[f'{_ACTIVATION}cls']]
  return 'gelu' if h[f'{_ACTIVATION}approximate'] else 'gelu_erf'


def _positional(h):
  return model_config.PositionalConfig(
    min_timescale=float(h[f'{_ROTARY}min_timescale']),
    max_timescale=float(h[f'{_ROTARY}max_timescale']),
  )


def _ngram(h):
  """Returns the config of an n-gram layer at the input."""
  has_clusters = h[f'{_NGRAMMER}cls'] == 'VQNgrammer'
  is_concat = h[f'{_NGRAMMER}concat_ngrams']
  if is_concat is None:  # the default of Ngrammer, but not of VQNgrammer
    is_concat = not has_clusters
  return model_config.NGramConfig(
    clusters=h[f'{_NGRAMMER}num_clusters'] if has_clusters else None,
    vocabulary_size=h[f'{_NGRAMMER}ngram_vocab_size'],
    dim=h[f'{_NGRAMMER}ngram_emb_dim'],
    heads=h[f'{_NGRAMMER}num_heads'] or None,
    combine='concat' if is_concat else 'add',
    decay=h[f'{_NGRAMMER}decay'],
    epsilon=h[f'{_NGRAMMER}epsilon'],
    prenormalize=h[f'{_NGRAMMER}prenormalize'],
  )
