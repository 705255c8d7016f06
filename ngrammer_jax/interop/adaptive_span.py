"""Parameters of adaptive-span (facebookresearch/adaptive-span), arrays by name, to ours.

Also of its variants with persistent vectors and with adaptive input and output. Names are those
of its `state_dict`. Weights of linear maps are [out, in] there. No PyTorch is needed.

N heads, H head width, D model width, F inner width, V vocabulary, C persistent vectors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax.interop import arrays as interop_arrays
from ngrammer_jax.models import config as model_config

Source = interop_arrays.Source

# What the config of their models is in ours, beside sizes, dropout, `span` and `persistent`; a
# model with persistent vectors has feed_forward_width=0.
SWITCHES = {
  'activation': 'relu',
  'gated': False,
  'feed_forward_bias': True,
  'position': 'table',
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}
# And without an adaptive softmax, or with one.
PLAIN = {'tie_embeddings': False, 'scale_embeddings': False}
ADAPTIVE = {'tie_embeddings': True, 'scale_embeddings': True}

# What else theirs has, whatever the sizes.
FIXED = {
  'bias': False,
  'softmax_bias': True,
  'per_dim_scale': False,
  'convolution': None,
  'shared_query_key': False,
  'ngram': None,
  'memory.same_length': 'memory_alone',
  'span.kind': 'adaptive',
  'span.renormalize': True,
  'persistent.kind': 'all_attention',
}


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Variables of our `TransformerLM` from a TransformerSeq.

  Their names: `in_emb.weight`, `out_emb.{weight,bias}`, or with adaptive input and output
  `in_emb.emb_layers.i.weight`, `in_emb.emb_projs.i`, `out_emb.out_layers.i.bias` for each cluster
  i and `out_emb.cluster_proj.{weight,bias}`; `key_pe`; and per layer `layers.i.attn.`
  `proj_{query,key,val,out}.weight`, `attn.adaptive_span._mask.current_val`,
  `attn.persistent_memory.{key,val}`, `layers.i.norm1.{weight,bias}`, and without persistent
  vectors `layers.i.ff.{fc1,fc2}.{weight,bias}` and `layers.i.norm2.{weight,bias}`.

  The config is `ModelConfig(**SWITCHES, **PLAIN, ...)` (ADAPTIVE with an adaptive softmax), with
  `memory=MemoryConfig(length=S, first='zeros', same_length='memory_alone', across_documents=True)`,
  `positional=PositionalConfig(max_length=S)`, `span=SpanConfig(limit=S, ...)` where spans adapt,
  and `persistent=PersistentConfig(C)` with `feed_forward_width=0`.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: a config that theirs cannot have; or listing every missing, extra and misshapen
      array.
  """
  config.check()
  also = PLAIN if config.adaptive_softmax is None else ADAPTIVE
  switches = {key: (value,) for key, value in (SWITCHES | FIXED | also).items()}
  interop_arrays.check_switches(config, switches)
  sources = _vocabulary_sources(config, vocabulary_size)
  H, S = config.width // config.heads, config.positions().max_length
  # Theirs has the farthest first.
  nearest_first = lambda a: a[0][0].T[::-1]
  sources['params', 'distance_embedding'] = Source(('key_pe',), (1, H, S), nearest_first)
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  # With persistent vectors they list the span a second time.
  twins = [
    name for name in arrays if name.endswith('persistent_memory.adaptive_span._mask.current_val')
  ]
  return interop_arrays.convert(arrays, sources, 'an adaptive-span model', twins)


def _vocabulary_sources(config, V) -> dict[tuple[str, ...], Source]:
  a, D = config.adaptive_softmax, config.width
  if a is None:
    return {
      ('params', 'embedding'): Source(('in_emb.weight',), (V, D)),
      ('params', 'softmax_weight'): Source(('out_emb.weight',), (V, D)),
      ('params', 'softmax_bias'): Source(('out_emb.bias',), (V,)),
    }
  borders, J, sources = (0, *a.cutoffs, V), a.embedding_width or D, {}
  put = lambda name, *source: sources.__setitem__(
    ('params', 'adaptive_softmax', name), Source(*source)
  )
  for i in range(len(borders) - 1):
    rows, width = borders[i + 1] - borders[i], J // a.divisor**i
    put(f'embedding_{i}', (f'in_emb.emb_layers.{i}.weight',), (rows, width))
    put(f'bias_{i}', (f'out_emb.out_layers.{i}.bias',), (rows,))
    put(f'projection_{i}', (f'in_emb.emb_projs.{i}',), (D, width), lambda x: x[0].T)
  if a.cutoffs:
    reverse = lambda x: x[0][::-1]
    put('cluster_weight', ('out_emb.cluster_proj.weight',), (len(a.cutoffs), J), reverse)
    put('cluster_bias', ('out_emb.cluster_proj.bias',), (len(a.cutoffs),), reverse)
  return sources


def _layer_sources(config, i) -> dict[tuple[str, ...], Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H, ours, theirs = D // N, ('params', f'layer_{i}'), f'layers.{i}.'
  sources = {}

  def put(path, name, shape, change=lambda a: a[0]):
    sources[*ours, *path] = Source((theirs + name,), shape, change)

  for name, their_name in (('query', 'query'), ('key', 'key'), ('value', 'val')):
    heads = lambda a: a[0].T.reshape(D, N, H)
    put(('attention', name, 'kernel'), f'attn.proj_{their_name}.weight', (D, D), heads)
  whole = lambda a: a[0].T.reshape(N, H, D)
  put(('attention', 'out', 'kernel'), 'attn.proj_out.weight', (D, D), whole)
  norms = [('attention', 'norm1')]
  if config.span is not None:
    flat = lambda a: a[0].reshape(N)
    name = 'attn.attn.adaptive_span._mask.current_val'
    put(('attention', 'span', 'span'), name, (N, 1, 1), flat)
  if config.persistent is not None and config.persistent.vectors:
    C, path = config.persistent.vectors, ('attention', 'persistent')
    swapped = lambda a: np.swapaxes(a[0], 1, 2)
    put((*path, 'persistent_keys'), 'attn.attn.persistent_memory.key', (N, H, C), swapped)
    put((*path, 'persistent_values'), 'attn.attn.persistent_memory.val', (N, C, H))
  if F:
    norms.append(('feed_forward', 'norm2'))
    for name, their_name, shape in (('in', 'fc1', (F, D)), ('out', 'fc2', (D, F))):
      path = 'feed_forward', name
      put((*path, 'kernel'), f'ff.{their_name}.weight', shape, lambda a: a[0].T)
      put((*path, 'bias'), f'ff.{their_name}.bias', shape[:1])
  for name, their_name in norms:
    for part, their_part in (('scale', 'weight'), ('bias', 'bias')):
      put((f'{name}_post_norm', part), f'{their_name}.{their_part}', (D,))
  return sources
