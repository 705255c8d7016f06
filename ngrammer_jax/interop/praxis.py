"""Variables of praxis layers, as plain arrays by name, to ours.

Names are paths joined by '/', with or without the collection in front: `param/` or
`params/` for trained variables, `state/` or `non_trainable/` for the others. No
praxis code is needed, nor imported.

N heads, H head width, D model width, F inner width, V vocabulary, K clusters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import arrays as interop_arrays
from ngrammer_jax.layers import attention as attention_layer
from ngrammer_jax.layers import ngrammer
from ngrammer_jax.models import config as model_config

Source = interop_arrays.Source

# Ours and theirs by norm policy; praxis has no policy `primer` (of the T5 code of Primer).
NORM_NAMES = {
  'pre': {'norm': 'layer_norm'},
  'post': {'post_norm': 'layer_norm'},
  'post_skip': {'post_norm': 'layer_norm'},
  'hybrid': {'norm': 'pre_layer_norm', 'post_norm': 'post_layer_norm'},
}
# What praxis has, of what the arrays cannot tell.
SWITCHES = {
  'norm': tuple(NORM_NAMES),
  'final_norm': (True,),
  'position': ('rope', 'sinusoid', 'none'),
  'memory': (None,),
  'adaptive_softmax': (None,),
  'span': (None,),
  'persistent': (None,),
  'ngram.orders': ((2,),),
  'ngram.distinct_start': (False,),
}
Path = tuple[str, ...]

_COLLECTIONS = ('param/', 'params/', 'state/', 'non_trainable/')
_CACHE = 'input_id_to_cluster_id_cache'  # derived from the codebook, so never loaded


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
) -> dict[str, Any]:
  """Variables of `layer` from a praxis VQNgrammer, or Ngrammer where it has no clusters.

  Praxis names, for each head i: `ngram_layer/emb_layer_norm_i/{scale,bias}` [H],
  `ngram_layer/ngram_layer_norm_i/{scale,bias}` [E], `ngram_layer/ngram_table_i/emb_var`
  [V, E]; and `vq_layer/means` [N, K, H]. The names of an Ngrammer begin without
  `ngram_layer/`, which is taken too. A token cache may be there and is ignored.

  Args:
    arrays: praxis arrays by name.
    layer: our layer, with the sizes and switches of theirs.
    width: D, features of the input.

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: listing every missing, extra and misshapen array.
  """
  if layer.orders != (2,) or layer.distinct_start:
    raise errors.BadInput(
      f'orders={layer.orders} and distinct_start={layer.distinct_start}: praxis has bi-grams, '
      f'(2,), and cluster 0 before the first token'
    )
  arrays = _without_collections(arrays)
  arrays = {name.removeprefix('ngram_layer/'): array for name, array in arrays.items()}
  if width % layer.heads:
    raise errors.BadInput(f'{layer.heads} heads do not divide the width {width}')
  sources = _ngrammer_sources(layer.heads, layer.vocabulary_size, layer.dim, width, '')
  if layer.clusters is not None:
    sources |= _codebook_source(layer.heads, layer.clusters, width, '')
  variables = interop_arrays.convert(arrays, sources, 'a praxis N-Grammer', ignored=(_CACHE,))
  return interop_arrays.with_usage(variables)


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Variables of our `TransformerLM` from a praxis TransformerLm.

  Praxis names: `softmax/logits_ffn/linear/w` [D, V] (tied: also the embedding),
  `softmax/logits_ffn/bias/b`, `embedding_lookup/emb_var` [V, D] where untied,
  `final_ln`, per layer `transformer/x_layers_i/` with `layer_norm`, `self_attention/`
  `{query,key,value,post,per_dim_scale}`, `ff_layer/{layer_norm,ffn_layer1,
  ffn_layer1_gate,ffn_layer2}`, and `ngrammer/` as in `load_ngrammer`;
  after attention, `transformer/x_layers_i/self_attention/ngrammer/`, whose codebooks are trained
  with padding too (`NGramConfig.padding_trains`).

  The config must say what the arrays cannot: praxis' usual model is
  `ModelConfig(bias=True, per_dim_scale=True)` with `activation`, `gated`, `position`,
  `tie_embeddings` and `scale_embeddings` as trained.

  Returns:
    {'params': ..., 'codebook': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: listing every missing, extra and misshapen array.
  """
  config.check()
  interop_arrays.check_switches(config, SWITCHES)
  arrays = _without_collections(arrays)
  V, D = vocabulary_size, config.width
  transposed = lambda a: a[0].T
  softmax = Source(('softmax/logits_ffn/linear/w',), (D, V), transposed)
  sources = _norm_sources(('params', 'final_norm'), 'final_ln', D)
  if config.tie_embeddings:
    sources['params', 'embedding'] = softmax
  else:
    sources['params', 'softmax_weight'] = softmax
    sources['params', 'embedding'] = Source(('embedding_lookup/emb_var',), (V, D))
  if config.softmax_bias:
    sources['params', 'softmax_bias'] = Source(('softmax/logits_ffn/bias/b',), (V,))
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  for ours, theirs in _ngrammer_places(config).items():
    n, N = config.ngram, config.ngram.heads or config.heads
    prefix = theirs if n.clusters is None else f'{theirs}ngram_layer/'
    layer = _ngrammer_sources(N, n.vocabulary_size, n.dim, D, prefix)
    if n.clusters is not None:
      layer |= _codebook_source(N, n.clusters, D, theirs)
    sources |= {(path[0], *ours, *path[1:]): source for path, source in layer.items()}
  caches = [prefix + _CACHE for prefix in _ngrammer_places(config).values()]
  variables = interop_arrays.convert(arrays, sources, 'a praxis language model', caches)
  return interop_arrays.with_usage(variables)


def _ngrammer_places(config: model_config.ModelConfig) -> dict[Path, str]:
  """Where the n-gram layers stand, and with what their names begin in praxis."""
  if config.ngram is None:
    return {}
  if config.ngram.layer != 'attention':
    return {('ngrammer',): 'ngrammer/'}
  return {
    (f'layer_{i}', 'ngrammer'): f'transformer/x_layers_{i}/self_attention/ngrammer/'
    for i in range(config.layers)
    if config.ngram.pairing_of(i) != 'none'
  }


def _without_collections(arrays: Mapping[str, Any]) -> dict[str, Any]:
  stripped: dict[str, Any] = {}
  for name, array in arrays.items():
    collection = next((c for c in _COLLECTIONS if name.startswith(c)), '')
    short = name[len(collection) :]
    if short in stripped:
      raise errors.BadInput(f'two arrays are named {short}, in different collections')
    stripped[short] = array
  return stripped


def _norm_sources(path: Path, name: str, D: int) -> dict[Path, Source]:
  """A layer norm: theirs stores gamma - 1."""
  return {
    (*path, 'scale'): Source((f'{name}/scale',), (D,), lambda a: 1 + a[0]),
    (*path, 'bias'): Source((f'{name}/bias',), (D,)),
  }


def _ngrammer_sources(N: int, V: int, E: int, D: int, prefix: str) -> dict[Path, Source]:
  def per_head(name):
    return tuple(prefix + name.format(i) for i in range(N))

  H = D // N
  sources = {
    ('params', 'table'): Source(per_head('ngram_table_{}/emb_var'), (V, E), np.concatenate)
  }
  for ours, theirs, width in (
    ('unigram_norm', 'emb_layer_norm_{}', H),
    ('ngram_norm', 'ngram_layer_norm_{}', E),
  ):
    scale, bias = per_head(theirs + '/scale'), per_head(theirs + '/bias')
    sources['params', ours, 'scale'] = Source(scale, (width,), lambda a: 1 + np.stack(a))
    sources['params', ours, 'bias'] = Source(bias, (width,), np.stack)
  return sources


def _codebook_source(N: int, K: int, D: int, prefix: str) -> dict[Path, Source]:
  path = ('codebook', 'quantizer', 'centroids')
  return {path: Source((f'{prefix}vq_layer/means',), (N, K, D // N))}


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[Path, Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H = D // N
  theirs, ours = f'transformer/x_layers_{i}/', ('params', f'layer_{i}')
  attention, feed = theirs + 'self_attention/', theirs + 'ff_layer/'
  sources = {}
  for name, path in (('attention', theirs), ('feed_forward', feed)):
    for ours_norm, their_norm in NORM_NAMES[config.norm].items():
      sources |= _norm_sources((*ours, f'{name}_{ours_norm}'), path + their_norm, D)

  def linear(path, weight, shape, bias, bias_shape, change=lambda a: a[0]):
    sources[*ours, *path, 'kernel'] = Source((weight,), shape, change)
    if config.bias:
      sources[*ours, *path, 'bias'] = Source((bias,), bias_shape)

  for name in ('query', 'key', 'value'):
    linear(('attention', name), f'{attention}{name}/w', (D, N, H), f'{attention}{name}/b', (N, H))
  output_last = lambda a: a[0].transpose(1, 2, 0)  # theirs has the output axis first
  linear(
    ('attention', 'out'), attention + 'post/w', (D, N, H), attention + 'post/b', (D,), output_last
  )
  if config.per_dim_scale:
    name = attention + 'per_dim_scale/per_dim_scale'
    sources[*ours, 'attention', 'per_dim_scale'] = Source((name,), (H,))
  for name in attention_layer.projections(config.shared_query_key) if config.convolution else ():
    taps = tuple(f'{attention}dconv_{name[0]}/dconv_{i}' for i in range(config.convolution))
    sources[*ours, 'attention', f'{name}_convolution', 'taps'] = Source(taps, (N, H), np.stack)
  maps = {'in': ('ffn_layer1', (D, F)), 'out': ('ffn_layer2', (F, D))}
  if config.gated:
    maps['gate'] = ('ffn_layer1_gate', (D, F))
  for name, (their_name, shape) in maps.items():
    their_path = feed + their_name
    linear(
      ('feed_forward', name), their_path + '/linear/w', shape, their_path + '/bias/b', shape[1:]
    )
  return sources
