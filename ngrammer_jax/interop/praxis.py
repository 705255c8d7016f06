"""Loads and exports variables of praxis layers and language models as arrays by name.

Names are paths joined by '/', with or without the collection as a prefix: `param/` or `params/`
for trained variables, `state/` or `non_trainable/` for the others; exported names have `params/`
and `non_trainable/`. Praxis itself is not needed.

N heads, H head width, D model width, F inner width, V vocabulary, K clusters.
"""

from collections.abc import Mapping
import re
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import loader_options, named_arrays
from ngrammer_jax.interop.named_arrays import ArraySource
from ngrammer_jax.layers.attention import attention, projection
from ngrammer_jax.layers.ngram import ngrammer
from ngrammer_jax.models import block

# By norm policy, the praxis name of each norm. Praxis does not have the policy `primer`.
NORM_NAMES = {
  'pre': {'norm': 'layer_norm'},
  'post': {'post_norm': 'layer_norm'},
  'post_skip': {'post_norm': 'layer_norm'},
  'hybrid': {'norm': 'pre_layer_norm', 'post_norm': 'post_layer_norm'},
}
# Values that can be loaded, for options that do not follow from the arrays.
SUPPORTED_OPTIONS = {'norm': tuple(NORM_NAMES), 'position': ('rope', 'sinusoid', 'none')}
NGRAMMER_OPTIONS = ('heads', 'clusters', 'vocabulary_size', 'dim', 'combine', 'prenormalize')
# Options of any value.
FREE_OPTIONS = (
  'layers',
  'width',
  'heads',
  'feed_forward_width',
  'activation',
  'gated',
  'bias',
  'norm_epsilon',
  'per_dim_scale',
  'convolution',
  'shared_query_key',
  'attention.logit_cap',
  'tie_embeddings',
  'scale_embeddings',
  'softmax_bias',
  'positional.min_timescale',
  'positional.max_timescale',
  'ngram.layer',
  'ngram.pairing',
  *(f'ngram.{name}' for name in NGRAMMER_OPTIONS),
)

# Options of `layers.Attention` of any value.
ATTENTION_OPTIONS = (
  'heads',
  'logit_cap',
  'dropout',
  'kernel',
  'projections.bias',
  'projections.per_dim_scale',
  'projections.taps',
)
LANGUAGE_MODEL = 'a praxis language model'
NGRAMMER = 'a praxis N-Grammer'
ATTENTION = 'a praxis DotProductAttention'

_COLLECTION = re.compile('^(param|params|state|non_trainable)/')
_CACHE = 'input_id_to_cluster_id_cache'  # computed from the codebook, so never loaded


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int, dtype: Any = None
) -> dict[str, Any]:
  """Converts a praxis VQNgrammer, or an Ngrammer without clusters, to variables of `layer`.

  Praxis names, for each head i: `ngram_layer/emb_layer_norm_i/{scale,bias}` [H],
  `ngram_layer/ngram_layer_norm_i/{scale,bias}` [E], `ngram_layer/ngram_table_i/emb_var`
  [V, E]; and `vq_layer/means` [N, K, H]. The prefix `ngram_layer/` is optional: an Ngrammer does
  not have it. A token cache in the arrays is ignored.

  Args:
    arrays: praxis arrays by name.
    layer: the target layer, with the sizes and options of the praxis layer.
    width: D, number of input features.
    dtype: dtype of the parameters, see `named_arrays.convert`.

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.convert`.
  """
  sources = _layer_ngrammer_sources(layer, width)
  arrays = _without_collection_prefixes(arrays)
  arrays = {name.removeprefix('ngram_layer/'): array for name, array in arrays.items()}
  return named_arrays.convert(arrays, sources, NGRAMMER, (_CACHE,), dtype)


def export_ngrammer(
  variables: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
) -> dict[str, np.ndarray]:
  """Converts variables of `layer` to the arrays of a praxis VQNgrammer, or Ngrammer.

  It omits the token cache: praxis computes it from the codebook.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  ngram_prefix = '' if layer.clusters is None else 'ngram_layer/'
  return _export(variables, _layer_ngrammer_sources(layer, width, ngram_prefix), NGRAMMER)


def _layer_ngrammer_sources(
  layer: ngrammer.NGrammer, width: int, ngram_prefix: str = ''
) -> dict[str, ArraySource]:
  """Returns the sources of a supported n-gram layer."""
  loader_options.check_options(layer, (*NGRAMMER_OPTIONS, 'id_vocabulary'))
  loader_options.check_layer_width(layer, width)
  return _ngrammer_sources(layer, layer.heads, width, ngram_prefix=ngram_prefix)


def load_attention(
  arrays: Mapping[str, Any], layer: attention.Attention, width: int, dtype: Any = None
) -> dict[str, Any]:
  """Converts a praxis DotProductAttention to variables of `layer`.

  Praxis names: `{query,key,value}/w` [D, N, H] and `/b` [N, H], `post/w` [D, N, H] and `post/b`
  [D], `per_dim_scale/per_dim_scale` [H], and `dconv_{q,k,v}/dconv_i` [N, H] for tap i.

  Rotary positions (`use_rotary_position_emb`) are the `rotation` of the context, `atten_logit_cap`
  is `Attention.logit_cap`.

  Args:
    arrays: praxis arrays by name.
    layer: the target layer, with the options of the praxis layer.
    width: D, number of input features.
    dtype: dtype of the parameters, see `named_arrays.convert`.

  Returns:
    {'params': ...} for `layer.apply`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.convert`.
  """
  sources = _layer_attention_sources(layer, width)
  arrays = _without_collection_prefixes(arrays)
  return named_arrays.convert(arrays, sources, ATTENTION, dtype=dtype)


def export_attention(
  variables: Mapping[str, Any], layer: attention.Attention, width: int
) -> dict[str, np.ndarray]:
  """Converts variables of `layer` to the arrays of a praxis DotProductAttention.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  return _export(variables, _layer_attention_sources(layer, width), ATTENTION)


def _layer_attention_sources(layer: attention.Attention, width: int) -> dict[str, ArraySource]:
  """Returns the sources of a supported attention layer."""
  loader_options.check_options(layer, ATTENTION_OPTIONS)
  if width % layer.heads:
    raise errors.BadInput(f'width={width} must be divisible by heads={layer.heads}')
  sources = _attention_sources(layer.projections, layer.heads, width)
  return {f'params/{path}': source for path, source in sources.items()}


def load_language_model(
  arrays: Mapping[str, Any],
  config: model_config.ModelConfig,
  vocabulary_size: int,
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts a praxis TransformerLm to variables of `TransformerLM`.

  Praxis names: `softmax/logits_ffn/linear/w` [D, V] (if tied, also the embedding),
  `softmax/logits_ffn/bias/b`, `embedding_lookup/emb_var` [V, D] if untied,
  `final_ln`, per layer `transformer/x_layers_i/` with `layer_norm`, `self_attention/`
  `{query,key,value,post,per_dim_scale}`, `ff_layer/{layer_norm,ffn_layer1,
  ffn_layer1_gate,ffn_layer2}`, and `ngrammer/` as in `load_ngrammer`.
  N-grammers after attention are in `transformer/x_layers_i/self_attention/ngrammer/`; praxis trains
  their codebooks with padding too (`NGramConfig.padding_trains`).

  The names and shapes of the arrays must match the config. Set all other options as in the training
  of the model; docs/interop.md lists them.

  Args:
    arrays: praxis arrays by name.
    config: config of the target model.
    vocabulary_size: V.
    dtype: dtype of the parameters, see `named_arrays.convert`.

  Returns:
    {'params': ..., 'codebook': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.convert`.
  """
  sources = _language_model_sources(config, vocabulary_size)
  caches = [prefix + _CACHE for prefix in _ngrammer_prefixes(config).values()]
  arrays = _without_collection_prefixes(arrays)
  return named_arrays.convert(arrays, sources, LANGUAGE_MODEL, caches, dtype)


def export_language_model(
  variables: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, np.ndarray]:
  """Converts variables of `TransformerLM` to the arrays of a praxis TransformerLm.

  It omits token caches: praxis computes them from the codebooks.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  return _export(variables, _language_model_sources(config, vocabulary_size), LANGUAGE_MODEL)


def _export(
  variables: Mapping[str, Any], sources: named_arrays.ArraySources, origin: str
) -> dict[str, np.ndarray]:
  """Returns praxis arrays with the prefixes of their collections."""
  collections = {}
  for path, source in sources.items():
    collection = 'non_trainable' if path.startswith('codebook/') else 'params'
    collections |= dict.fromkeys(source.names, collection)
  arrays = named_arrays.restore(variables, sources, origin)
  return {f'{collections[name]}/{name}': array for name, array in arrays.items()}


def _language_model_sources(config: model_config.ModelConfig, V: int) -> dict[str, ArraySource]:
  """Returns the source of each variable of a supported config."""
  loader_options.check_options(config, FREE_OPTIONS, choices=SUPPORTED_OPTIONS)
  D = config.width
  softmax = ArraySource('softmax/logits_ffn/linear/w', (D, V), np.transpose)
  sources = _norm_sources('params/final_norm', 'final_ln', D)
  if config.tie_embeddings:
    sources['params/embedding'] = softmax
  else:
    sources['params/softmax_weight'] = softmax
    sources['params/embedding'] = ArraySource('embedding_lookup/emb_var', (V, D))
  if config.softmax_bias:
    sources['params/softmax_bias'] = ArraySource('softmax/logits_ffn/bias/b', (V,))
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  for layer_path, prefix in _ngrammer_prefixes(config).items():
    ngram_prefix = prefix if config.ngram.clusters is None else f'{prefix}ngram_layer/'
    N = config.ngram.heads or config.heads
    ngrammer_sources = _ngrammer_sources(config.ngram, N, D, prefix, ngram_prefix)
    for path, source in ngrammer_sources.items():
      collection, _, name = path.partition('/')
      sources[f'{collection}/{layer_path}/{name}'] = source
  return sources


def _ngrammer_prefixes(config: model_config.ModelConfig) -> dict[str, str]:
  """Returns the praxis name prefix of each n-gram layer, by the path of the layer."""
  if config.ngram is None:
    return {}
  if config.ngram.layer != 'attention':
    return {'ngrammer': 'ngrammer/'}
  return {
    f'layer_{i}/ngrammer': f'transformer/x_layers_{i}/self_attention/ngrammer/'
    for i in range(config.layers)
    if config.ngram.pairing_of(i) != 'none'
  }


def _without_collection_prefixes(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns arrays by their names in a collection. Raises BadInput for equal names."""
  stripped: dict[str, Any] = {}
  for name, array in arrays.items():
    short = _COLLECTION.sub('', name)
    if short in stripped:
      raise errors.BadInput(f'two arrays in different collections have the name {short}')
    stripped[short] = array
  return stripped


def _norm_sources(path: str, name: str, D: int) -> dict[str, ArraySource]:
  """Returns the sources of a layer norm; praxis stores its scale minus 1."""
  return {
    f'{path}/scale': ArraySource(f'{name}/scale', (D,), added=1),
    f'{path}/bias': ArraySource(f'{name}/bias', (D,)),
  }


def _ngrammer_sources(
  options: ngrammer.NGrammer | model_config.NGramConfig,
  N: int,
  D: int,
  prefix: str = '',
  ngram_prefix: str = '',
) -> dict[str, ArraySource]:
  """Returns the sources of an n-gram layer; n-gram names have a separate prefix."""
  V = options.vocabulary_size
  E = options.dim
  K = options.clusters
  H = D // N

  def per_head(name: str, part: str) -> tuple[str, ...]:
    return tuple(f'{ngram_prefix}{name}_{i}/{part}' for i in range(N))

  def norm(path: str, name: str, width: int) -> dict[str, ArraySource]:
    return {
      f'{path}/scale': ArraySource(per_head(name, 'scale'), (width,), added=1),
      f'{path}/bias': ArraySource(per_head(name, 'bias'), (width,)),
    }

  def one_table(tables: np.ndarray) -> np.ndarray:
    return tables.reshape(N * V, E)

  table = ArraySource(per_head('ngram_table', 'emb_var'), (V, E), one_table)
  sources = {'params/table': table}
  if K is not None:
    means = ArraySource(f'{prefix}vq_layer/means', (N, K, H))
    sources['codebook/quantizer/centroids'] = means
  sources |= norm('params/unigram_norm', 'emb_layer_norm', H)
  sources |= norm('params/ngram_norm', 'ngram_layer_norm', E)
  return sources


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[str, ArraySource]:
  """Returns the sources of a layer."""
  D = config.width
  path = f'params/layer_{i}'
  prefix = f'transformer/x_layers_{i}/'
  feed_forward_prefix = f'{prefix}ff_layer/'
  attention_sources = _attention_sources(
    block.projections(config), config.heads, D, f'{prefix}self_attention/'
  )
  sources = {f'{path}/attention/{name}': source for name, source in attention_sources.items()}
  for norm, source_norm in NORM_NAMES[config.norm].items():
    sources |= _norm_sources(f'{path}/attention_{norm}', prefix + source_norm, D)
  for norm, source_norm in NORM_NAMES[config.norm].items():
    source_name = feed_forward_prefix + source_norm
    sources |= _norm_sources(f'{path}/feed_forward_{norm}', source_name, D)
  return sources | _feed_forward_sources(config, f'{path}/feed_forward', feed_forward_prefix)


def _feed_forward_sources(
  config: model_config.ModelConfig, path: str, prefix: str
) -> dict[str, ArraySource]:
  """Returns the sources of the linear maps of a feed-forward layer."""
  D = config.width
  F = config.feed_forward_width
  linears = {'in': ('ffn_layer1', (D, F)), 'out': ('ffn_layer2', (F, D))}
  if config.gated:
    linears['gate'] = ('ffn_layer1_gate', (D, F))
  sources = {}
  for name, (source_name, shape) in linears.items():
    kernel = ArraySource(f'{prefix}{source_name}/linear/w', shape)
    sources[f'{path}/{name}/kernel'] = kernel
    if config.bias:
      sources[f'{path}/{name}/bias'] = ArraySource(f'{prefix}{source_name}/bias/b', shape[1:])
  return sources


def _attention_sources(
  projections: projection.Projections, N: int, D: int, prefix: str = ''
) -> dict[str, ArraySource]:
  """Returns the source of each parameter of an attention layer; praxis names have the prefix."""
  H = D // N
  sources = {}
  for name in ('query', 'key', 'value'):
    sources[f'{name}/kernel'] = ArraySource(f'{prefix}{name}/w', (D, N, H))
    if projections.bias:
      sources[f'{name}/bias'] = ArraySource(f'{prefix}{name}/b', (N, H))

  def output_axis_last(kernel: np.ndarray) -> np.ndarray:  # praxis has the output axis first
    return kernel.transpose(1, 2, 0)

  sources['out/kernel'] = ArraySource(f'{prefix}post/w', (D, N, H), output_axis_last)
  if projections.bias:
    sources['out/bias'] = ArraySource(f'{prefix}post/b', (D,))
  if projections.per_dim_scale:
    sources['per_dim_scale'] = ArraySource(f'{prefix}per_dim_scale/per_dim_scale', (H,))
  if projections.taps:
    for name in projections.names:
      first_letter = name[0]
      taps = tuple(f'{prefix}dconv_{first_letter}/dconv_{i}' for i in range(projections.taps))
      sources[f'{name}_convolution/taps'] = ArraySource(taps, (N, H))
  return sources
