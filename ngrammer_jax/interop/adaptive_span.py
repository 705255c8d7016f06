"""Loads parameters of adaptive-span (facebookresearch/adaptive-span) from arrays by name.

Variants with persistent vectors and with adaptive input and output are supported. The names are
those of the `state_dict` of the source model, in which weights of linear maps are [out, in].
PyTorch is not needed.

N heads, H head width, D model width, F inner width, V vocabulary, C persistent vectors.
"""

from collections.abc import Mapping
import itertools
from typing import Any

import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion

Source = conversion.Source

# Config fields that every source model shares; the sizes, dropout, `span` and `persistent` differ.
# A model with persistent vectors has feed_forward_width=0.
MODEL_OPTIONS = {
  'activation': 'relu',
  'gated': False,
  'feed_forward_bias': True,
  'position': 'table',
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}
# Config fields of a model with a full softmax and of one with an adaptive softmax.
FULL_SOFTMAX_OPTIONS = {'tie_embeddings': False, 'scale_embeddings': False}
ADAPTIVE_SOFTMAX_OPTIONS = {'tie_embeddings': True, 'scale_embeddings': True}

# Values that the loader requires in addition.
REQUIRED_OPTIONS = {'memory.same_length': 'memory_alone'}
# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  *('layers', 'width', 'heads', 'feed_forward_width', 'positional.max_length'),
  *('memory.length', 'memory.first', 'memory.across_documents'),
  *('span.limit', 'span.ramp', 'persistent.vectors'),
  *('adaptive_softmax.cutoffs', 'adaptive_softmax.divisor', 'adaptive_softmax.embedding_width'),
)


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Converts a `TransformerSeq` of adaptive-span to variables of `TransformerLM`.

  Source names: `in_emb.weight`, `out_emb.{weight,bias}`, or with adaptive input and output
  `in_emb.emb_layers.i.weight`, `in_emb.emb_projs.i`, `out_emb.out_layers.i.bias` for each cluster
  i and `out_emb.cluster_proj.{weight,bias}`; `key_pe`; and per layer `layers.i.attn.`
  `proj_{query,key,val,out}.weight`, `attn.adaptive_span._mask.current_val`,
  `attn.persistent_memory.{key,val}`, `layers.i.norm1.{weight,bias}`, and without persistent
  vectors `layers.i.ff.{fc1,fc2}.{weight,bias}` and `layers.i.norm2.{weight,bias}`.

  The config is `ModelConfig(**MODEL_OPTIONS, **FULL_SOFTMAX_OPTIONS, ...)`, or with an adaptive
  softmax `ModelConfig(**MODEL_OPTIONS, **ADAPTIVE_SOFTMAX_OPTIONS, ...)`, with
  `memory=MemoryConfig(length=S, first='zeros', same_length='memory_alone', across_documents=True)`,
  `positional=PositionalConfig(max_length=S)`, `span=SpanConfig(limit=S, ...)` for adaptive spans,
  and `persistent=PersistentConfig(C)` with `feed_forward_width=0`.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `conversion.check_config` and `conversion.convert`.
  """
  config.check()
  full_softmax = config.adaptive_softmax is None
  softmax_options = FULL_SOFTMAX_OPTIONS if full_softmax else ADAPTIVE_SOFTMAX_OPTIONS
  required = MODEL_OPTIONS | REQUIRED_OPTIONS | softmax_options
  supported = {key: (value,) for key, value in required.items()}
  conversion.check_config(config, supported, FREE_OPTIONS)
  sources = _vocabulary_sources(config, vocabulary_size)
  H, S = config.width // config.heads, config.positions().max_length
  # The source table starts with the farthest distance.
  nearest_first = lambda a: a[0].T[::-1]
  sources['params/distance_embedding'] = Source('key_pe', (1, H, S), nearest_first)
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  # With persistent vectors, the state_dict lists each span twice.
  duplicates = [
    name for name in arrays if name.endswith('persistent_memory.adaptive_span._mask.current_val')
  ]
  return conversion.convert(arrays, sources, 'an adaptive-span model', duplicates)


def _vocabulary_sources(config, V) -> dict[str, Source]:
  adaptive, D = config.adaptive_softmax, config.width
  if adaptive is None:
    return {
      'params/embedding': Source('in_emb.weight', (V, D)),
      'params/softmax_weight': Source('out_emb.weight', (V, D)),
      'params/softmax_bias': Source('out_emb.bias', (V,)),
    }
  path, J, C = 'params/adaptive_softmax', adaptive.embedding_width or D, len(adaptive.cutoffs)
  sources = {}
  for i, (first, last) in enumerate(itertools.pairwise((0, *adaptive.cutoffs, V))):
    rows, width, embedding = last - first, J // adaptive.divisor**i, 'in_emb.emb'
    sources |= {
      f'{path}/embedding_{i}': Source(f'{embedding}_layers.{i}.weight', (rows, width)),
      f'{path}/bias_{i}': Source(f'out_emb.out_layers.{i}.bias', (rows,)),
      f'{path}/projection_{i}': Source(f'{embedding}_projs.{i}', (D, width), np.transpose),
    }
  if C:
    sources |= {
      f'{path}/cluster_weight': Source('out_emb.cluster_proj.weight', (C, J), np.flipud),
      f'{path}/cluster_bias': Source('out_emb.cluster_proj.bias', (C,), np.flipud),
    }
  return sources


def _layer_sources(config, i) -> dict[str, Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H, path, prefix = D // N, f'params/layer_{i}', f'layers.{i}'
  attention, sources = f'{path}/attention', {}
  split_heads, merge_heads = lambda a: a.T.reshape(D, N, H), lambda a: a.T.reshape(N, H, D)
  for name, source_name in (('query', 'query'), ('key', 'key'), ('value', 'val')):
    weight = f'{prefix}.attn.proj_{source_name}.weight'
    sources[f'{attention}/{name}/kernel'] = Source(weight, (D, D), split_heads)
  weight = f'{prefix}.attn.proj_out.weight'
  sources[f'{attention}/out/kernel'] = Source(weight, (D, D), merge_heads)
  if config.span is not None:
    span = f'{prefix}.attn.attn.adaptive_span._mask.current_val'
    sources[f'{attention}/span/span'] = Source(span, (N, 1, 1), np.ravel)
  if config.persistent is not None and config.persistent.vectors:
    C, memory = config.persistent.vectors, f'{prefix}.attn.attn.persistent_memory'
    keys = Source(f'{memory}.key', (N, H, C), lambda a: np.swapaxes(a, 1, 2))
    sources[f'{attention}/persistent/persistent_keys'] = keys
    sources[f'{attention}/persistent/persistent_values'] = Source(f'{memory}.val', (N, C, H))
  norms = {'attention': 'norm1'}
  if F:
    norms['feed_forward'] = 'norm2'
    for name, source_name, shape in (('in', 'fc1', (F, D)), ('out', 'fc2', (D, F))):
      source = f'{prefix}.ff.{source_name}'
      sources |= conversion.torch_linear(f'{path}/feed_forward/{name}', source, shape)
  for name, source_name in norms.items():
    sources |= conversion.torch_norm(f'{path}/{name}_post_norm', f'{prefix}.{source_name}', D)
  return sources
