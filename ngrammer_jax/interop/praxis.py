"""Loads variables of praxis layers and language models from arrays by name.

Names are paths joined by '/', with or without the collection as a prefix: `param/` or `params/`
for trained variables, `state/` or `non_trainable/` for the others. Praxis itself is not needed.

N heads, H head width, D model width, F inner width, V vocabulary, K clusters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion
from ngrammer_jax.layers import ngrammer
from ngrammer_jax.models import block

Source = conversion.Source

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
  *('layers', 'width', 'heads', 'feed_forward_width', 'activation', 'gated', 'bias'),
  *('norm_epsilon', 'per_dim_scale', 'convolution', 'shared_query_key'),
  *('tie_embeddings', 'scale_embeddings', 'softmax_bias'),
  *('positional.min_timescale', 'positional.max_timescale'),
  *('ngram.layer', 'ngram.pairing', *(f'ngram.{name}' for name in NGRAMMER_OPTIONS)),
)

_COLLECTIONS = ('param/', 'params/', 'state/', 'non_trainable/')
_CACHE = 'input_id_to_cluster_id_cache'  # computed from the codebook, so never loaded


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
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

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: see `conversion.check_layer` and `conversion.convert`.
  """
  conversion.check_layer(layer, (*NGRAMMER_OPTIONS, 'id_vocabulary'))
  arrays = _without_collection_prefixes(arrays)
  arrays = {name.removeprefix('ngram_layer/'): array for name, array in arrays.items()}
  if width % layer.heads:
    raise errors.BadInput(f'width={width} must be divisible by heads={layer.heads}')
  sources = _ngrammer_sources(layer, layer.heads, width)
  return conversion.convert(arrays, sources, 'a praxis N-Grammer', ignored=(_CACHE,))


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Converts a praxis TransformerLm to variables of `TransformerLM`.

  Praxis names: `softmax/logits_ffn/linear/w` [D, V] (if tied, also the embedding),
  `softmax/logits_ffn/bias/b`, `embedding_lookup/emb_var` [V, D] if untied,
  `final_ln`, per layer `transformer/x_layers_i/` with `layer_norm`, `self_attention/`
  `{query,key,value,post,per_dim_scale}`, `ff_layer/{layer_norm,ffn_layer1,
  ffn_layer1_gate,ffn_layer2}`, and `ngrammer/` as in `load_ngrammer`.
  N-grammers after attention are in `transformer/x_layers_i/self_attention/ngrammer/`; praxis trains
  their codebooks with padding too (`NGramConfig.padding_trains`).

  The config must set the options that do not follow from the arrays: the usual praxis model is
  `ModelConfig(bias=True, per_dim_scale=True)` with the `activation`, `gated`, `position`,
  `tie_embeddings` and `scale_embeddings` that it was trained with.

  Returns:
    {'params': ..., 'codebook': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `conversion.check_config` and `conversion.convert`.
  """
  config.check()
  conversion.check_config(config, SUPPORTED_OPTIONS, FREE_OPTIONS)
  arrays = _without_collection_prefixes(arrays)
  V, D = vocabulary_size, config.width
  softmax = Source('softmax/logits_ffn/linear/w', (D, V), np.transpose)
  sources = _norm_sources('params/final_norm', 'final_ln', D)
  if config.tie_embeddings:
    sources['params/embedding'] = softmax
  else:
    sources['params/softmax_weight'] = softmax
    sources['params/embedding'] = Source('embedding_lookup/emb_var', (V, D))
  if config.softmax_bias:
    sources['params/softmax_bias'] = Source('softmax/logits_ffn/bias/b', (V,))
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  prefixes = _ngrammer_prefixes(config)
  for layer_path, prefix in prefixes.items():
    ngram_prefix = prefix if config.ngram.clusters is None else f'{prefix}ngram_layer/'
    N = config.ngram.heads or config.heads
    for path, source in _ngrammer_sources(config.ngram, N, D, prefix, ngram_prefix).items():
      collection, _, name = path.partition('/')
      sources[f'{collection}/{layer_path}/{name}'] = source
  caches = [prefix + _CACHE for prefix in prefixes.values()]
  return conversion.convert(arrays, sources, 'a praxis language model', caches)


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
  stripped: dict[str, Any] = {}
  for name, array in arrays.items():
    collection = next((c for c in _COLLECTIONS if name.startswith(c)), '')
    short = name[len(collection) :]
    if short in stripped:
      raise errors.BadInput(f'two arrays in different collections have the name {short}')
    stripped[short] = array
  return stripped


def _norm_sources(path: str, name: str, D: int) -> dict[str, Source]:
  """Returns the sources of a layer norm; praxis stores its scale minus 1."""
  return {
    f'{path}/scale': Source(f'{name}/scale', (D,), lambda a: 1 + a),
    f'{path}/bias': Source(f'{name}/bias', (D,)),
  }


def _ngrammer_sources(
  options: ngrammer.NGrammer | model_config.NGramConfig,
  N: int,
  D: int,
  prefix: str = '',
  ngram_prefix: str = '',
) -> dict[str, Source]:
  """Returns the sources of an n-gram layer; the names of the n-grams have a prefix of their own."""
  V, E, K = options.vocabulary_size, options.dim, options.clusters
  per_head = lambda name, part: tuple(f'{ngram_prefix}{name}_{i}/{part}' for i in range(N))
  sources = {'params/table': Source(per_head('ngram_table', 'emb_var'), (V, E), np.concatenate)}
  if K is not None:
    means = Source(f'{prefix}vq_layer/means', (N, K, D // N))
    sources['codebook/quantizer/centroids'] = means
  for name, source_name, width in (
    ('unigram_norm', 'emb_layer_norm', D // N),
    ('ngram_norm', 'ngram_layer_norm', E),
  ):
    scale, bias = per_head(source_name, 'scale'), per_head(source_name, 'bias')
    sources[f'params/{name}/scale'] = Source(scale, (width,), lambda a: 1 + np.stack(a))
    sources[f'params/{name}/bias'] = Source(bias, (width,), np.stack)
  return sources


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[str, Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H, path, prefix = D // N, f'params/layer_{i}', f'transformer/x_layers_{i}/'
  attention, feed_forward = prefix + 'self_attention/', prefix + 'ff_layer/'
  sources = {}
  for name, norm_prefix in (('attention', prefix), ('feed_forward', feed_forward)):
    for norm, source_norm in NORM_NAMES[config.norm].items():
      sources |= _norm_sources(f'{path}/{name}_{norm}', norm_prefix + source_norm, D)
  weights, biases = {}, {}
  for name in ('query', 'key', 'value'):
    weights[f'attention/{name}'] = Source(f'{attention}{name}/w', (D, N, H))
    biases[f'attention/{name}'] = Source(f'{attention}{name}/b', (N, H))
  output_axis_last = lambda a: a.transpose(1, 2, 0)  # praxis has the output axis first
  weights['attention/out'] = Source(f'{attention}post/w', (D, N, H), output_axis_last)
  biases['attention/out'] = Source(f'{attention}post/b', (D,))
  linears = {'in': ('ffn_layer1', (D, F)), 'out': ('ffn_layer2', (F, D))}
  if config.gated:
    linears['gate'] = ('ffn_layer1_gate', (D, F))
  for name, (source_name, shape) in linears.items():
    weights[f'feed_forward/{name}'] = Source(f'{feed_forward}{source_name}/linear/w', shape)
    biases[f'feed_forward/{name}'] = Source(f'{feed_forward}{source_name}/bias/b', shape[1:])
  sources |= {f'{path}/{name}/kernel': source for name, source in weights.items()}
  if config.bias:
    sources |= {f'{path}/{name}/bias': source for name, source in biases.items()}
  if config.per_dim_scale:
    name = attention + 'per_dim_scale/per_dim_scale'
    sources[f'{path}/attention/per_dim_scale'] = Source(name, (H,))
  for name in block.projections(config).names if config.convolution else ():
    taps = tuple(f'{attention}dconv_{name[0]}/dconv_{i}' for i in range(config.convolution))
    sources[f'{path}/attention/{name}_convolution/taps'] = Source(taps, (N, H), np.stack)
  return sources
