"""Loads parameters of the PyTorch Transformer-XL (kimiyoung/transformer-xl) from arrays by name.

The names are those of the `state_dict` of the source model, in which weights of linear maps are
[out, in]. PyTorch is not needed.

N heads, H head width, D model width, F inner width, V vocabulary.
"""

from collections.abc import Mapping
import itertools
import operator
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion

Source = conversion.Source

# Config fields that every source model shares; sizes, memory and clamp_length differ.
MODEL_OPTIONS = {
  'activation': 'relu',
  'gated': False,
  'feed_forward_bias': True,
  'position': 'relative',  # attn_type 0
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}

# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  *('layers', 'width', 'heads', 'feed_forward_width', 'tie_embeddings'),
  *('positional.shared_biases', 'positional.clamp_length', 'positional.max_length'),
  *('memory.length', 'memory.first', 'memory.same_length', 'memory.across_documents'),
  *('adaptive_softmax.cutoffs', 'adaptive_softmax.divisor', 'adaptive_softmax.embedding_width'),
  *('adaptive_softmax.tied_projections', 'adaptive_softmax.project_same_width'),
)
# The attn_type of the source model by `position`; `relative` is attn_type 0.
ATTENTION_TYPES = {'shaw': 1, 'segment_sinusoid': 2, 'learned': 3}


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Converts a MemTransformerLM to variables of `TransformerLM`.

  Source names: `word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i` and `crit.out_layers.i.bias`
  for each cluster i of an adaptive softmax, otherwise for i = 0; `crit.cluster_{weight,bias}`;
  `crit.out_layers.i.weight` and `crit.out_projs.i` if they are not tied; `r_w_bias` and
  `r_r_bias` [N, H] ([L, N, H] if each layer has its own), and per layer `layers.i.dec_attn.`
  `{qkv_net,r_net,o_net}.weight`, `layer_norm.{weight,bias}` and `layers.i.pos_ff.`
  `CoreNet.{0,3}.{weight,bias}`, `layer_norm.{weight,bias}`.

  The config is `ModelConfig(**MODEL_OPTIONS, ...)` with the sizes of the source model. Pre-norm
  (`pre_lnorm`) is norm='pre'; it cannot be combined with absolute positions, for which the source
  model does not normalize queries. `cutoffs`, `div_val`, `d_embed` and `tie_projs` are fields of
  `model.adaptive_softmax`, which is also needed if `d_embed` is not D. The PyTorch code orders the
  columns of the tail clusters from last to first; the TensorFlow code and this package order them
  from first to last.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `conversion.check_config` and `conversion.convert`.
  """
  config.check()
  alternatives = {'norm': ('pre',), 'position': tuple(ATTENTION_TYPES)}
  supported = {key: (value, *alternatives.get(key, ())) for key, value in MODEL_OPTIONS.items()}
  conversion.check_config(config, supported, FREE_OPTIONS)
  if config.norm == 'pre' and config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.norm="pre" with model.position={config.position!r} cannot be loaded: the PyTorch '
      f'code does not normalize queries, model.norm="pre" does'
    )
  V, D, N, L = vocabulary_size, config.width, config.heads, config.layers
  H = D // N
  sources = _vocabulary_sources(config, V)
  biases = {'content_bias': 'r_w_bias', 'position_bias': 'r_r_bias'}
  for name, source_name in biases.items() if config.position == 'relative' else ():
    if config.positions().shared_biases:
      sources[f'params/{name}'] = Source(source_name, (N, H))
      continue
    for i in range(L):
      select_layer = operator.itemgetter(i)
      sources[f'params/layer_{i}/attention/{name}'] = Source(source_name, (L, N, H), select_layer)
  for i in range(L):
    sources |= _layer_sources(config, i)
  # A state_dict may list tied arrays under both of their names.
  ignored = ['pos_emb.inv_freq', *(name for name in arrays if _is_tied_copy(name, arrays))]
  return conversion.convert(arrays, sources, 'a Transformer-XL', ignored)


def _is_tied_copy(name: str, arrays: Mapping[str, Any]) -> bool:
  """Returns whether an array of the output layer equals its counterpart in the embedding."""
  embedding = name.replace('crit.out_layers', 'word_emb.emb_layers')
  embedding = embedding.replace('crit.out_projs', 'word_emb.emb_projs')
  # Without a divisor, one projection serves all clusters.
  candidates = (embedding, 'word_emb.emb_projs.0') if 'projs' in name else (embedding,)
  return embedding != name and any(
    candidate in arrays and np.array_equal(arrays[name], arrays[candidate])
    for candidate in candidates
  )


def _vocabulary_sources(config: model_config.ModelConfig, V: int) -> dict[str, Source]:
  adaptive, D = config.adaptive_softmax, config.width
  if adaptive is None:
    sources = {
      'params/embedding': Source('word_emb.emb_layers.0.weight', (V, D)),
      'params/softmax_bias': Source('crit.out_layers.0.bias', (V,)),
    }
    if not config.tie_embeddings:
      sources['params/softmax_weight'] = Source('crit.out_layers.0.weight', (V, D))
    return sources
  path, J, C = 'params/adaptive_softmax', adaptive.embedding_width or D, len(adaptive.cutoffs)
  is_tied = adaptive.tied_projections
  is_tied = is_tied * (C + 1) if len(is_tied) == 1 else is_tied
  # Without a divisor, the source model has one table for all clusters.
  single_table, sources = adaptive.divisor == 1, {}
  for i, (first, last) in enumerate(itertools.pairwise((0, *adaptive.cutoffs, V))):
    index, width = (0, J) if single_table else (i, J // adaptive.divisor**i)
    rows = V if single_table else last - first
    select = operator.itemgetter(slice(first, last) if single_table else slice(None))
    embedding, output = f'word_emb.emb_layers.{index}', f'crit.out_layers.{index}'
    sources[f'{path}/embedding_{i}'] = Source(f'{embedding}.weight', (rows, width), select)
    sources[f'{path}/bias_{i}'] = Source(f'{output}.bias', (rows,), select)
    if not config.tie_embeddings:
      sources[f'{path}/softmax_weight_{i}'] = Source(f'{output}.weight', (rows, width), select)
    if width == D and (single_table or not adaptive.project_same_width):
      continue
    projections = {}
    if not single_table or i == 0:
      projections['projection'] = 'word_emb.emb_projs'
    if not is_tied[i]:
      projections['softmax_projection'] = 'crit.out_projs'
    for name, source_name in projections.items():
      sources[f'{path}/{name}_{i}'] = Source(f'{source_name}.{i}', (D, width), np.transpose)
  if C:
    sources |= {
      f'{path}/cluster_weight': Source('crit.cluster_weight', (C, J), np.flipud),
      f'{path}/cluster_bias': Source('crit.cluster_bias', (C,), np.flipud),
    }
  return sources


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[str, Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H, path, prefix = D // N, f'params/layer_{i}', f'layers.{i}'
  sources = _position_sources(config, i)
  # The attention without relative positions has a separate projection of queries.
  parts = ('query', 'key', 'value') if config.position in ('relative', 'shaw') else ('key', 'value')
  fused_weight = f'{prefix}.dec_attn.{"qkv" if len(parts) == 3 else "kv"}_net.weight'
  for index, name in enumerate(parts):
    select = lambda a, index=index: np.split(a, len(parts))[index].T.reshape(D, N, H)
    source = Source(fused_weight, (len(parts) * D, D), select)
    sources[f'{path}/attention/{name}/kernel'] = source
  if 'query' not in parts:
    source = Source(f'{prefix}.dec_attn.q_net.weight', (D, D), lambda a: a.T.reshape(D, N, H))
    sources[f'{path}/attention/query/kernel'] = source
  sources[f'{path}/attention/out/kernel'] = Source(
    f'{prefix}.dec_attn.o_net.weight', (D, D), lambda a: a.T.reshape(N, H, D)
  )
  for name, index, shape in (('in', 0, (F, D)), ('out', 3, (D, F))):
    source_name = f'{prefix}.pos_ff.CoreNet.{index}'
    sources |= conversion.torch_linear(f'{path}/feed_forward/{name}', source_name, shape)
  norm = 'norm' if config.norm == 'pre' else 'post_norm'
  for name, source_name in (('attention', 'dec_attn'), ('feed_forward', 'pos_ff')):
    source_norm = f'{prefix}.{source_name}.layer_norm'
    sources |= conversion.torch_norm(f'{path}/{name}_{norm}', source_norm, D)
  return sources


def _position_sources(config: model_config.ModelConfig, i: int) -> dict[str, Source]:
  D, N, L = config.width, config.heads, config.layers
  H, rows, path = D // N, config.positions().max_length, f'params/layer_{i}'
  select_layer = operator.itemgetter(i)
  if config.position == 'relative':
    name = f'layers.{i}.dec_attn.r_net.weight'
    source = Source(name, (D, D), lambda a: a.T.reshape(D, N, H))
    return {f'{path}/attention/relative/position/kernel': source}
  if config.position == 'shaw':
    relative = f'{path}/attention/relative'
    return {
      f'{path}/attention/content_bias': Source('r_w_bias', (L, N, H), select_layer),
      f'{relative}/distance_embedding': Source('r_emb', (L, rows, N, H), select_layer),
      f'{relative}/distance_bias': Source('r_bias', (L, rows, N), select_layer),
    }
  if config.position == 'learned':
    return {f'{path}/position': Source('r_emb', (L, rows, N, H), lambda a: a[i].reshape(rows, D))}
  return {}
