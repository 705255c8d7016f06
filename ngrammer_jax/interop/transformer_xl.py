"""Parameters of the PyTorch Transformer-XL (kimiyoung/transformer-xl), arrays by name, to ours.

Names are those of its `state_dict`. Weights of linear maps are [out, in] there. No PyTorch is
needed, nor imported.

N heads, H head width, D model width, F inner width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import arrays as interop_arrays
from ngrammer_jax.models import config as model_config

Source = interop_arrays.Source

# What the config of their models is in ours, beside sizes, memory and clamp_length.
SWITCHES = {
  'activation': 'relu',
  'gated': False,
  'feed_forward_bias': True,
  'position': 'relative',  # attn_type 0
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}

# What else theirs has, whatever the sizes.
FIXED = {
  'bias': False,
  'scale_embeddings': True,
  'softmax_bias': True,
  'per_dim_scale': False,
  'convolution': None,
  'shared_query_key': False,
  'ngram': None,
}
# Our positions by their attn_type, where it is not 0.
ATTENTION_TYPES = {'shaw': 1, 'segment_sinusoid': 2, 'learned': 3}


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Variables of our `TransformerLM` from a MemTransformerLM.

  Their names: `word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i` and `crit.out_layers.i.bias`
  for each cluster i of an adaptive softmax, or for 0 alone; `crit.cluster_{weight,bias}`;
  `crit.out_layers.i.weight` and `crit.out_projs.i` where they are not tied; `r_w_bias` and
  `r_r_bias` [N, H] ([L, N, H] where each layer has its own), and per layer `layers.i.dec_attn.`
  `{qkv_net,r_net,o_net}.weight`, `layer_norm.{weight,bias}` and `layers.i.pos_ff.`
  `CoreNet.{0,3}.{weight,bias}`, `layer_norm.{weight,bias}`.

  The config is `ModelConfig(**SWITCHES, ...)` with their sizes; their pre-norm (`pre_lnorm`) is
  norm='pre' in it (not with absolute positions, where theirs leaves queries out). `cutoffs`,
  `div_val`, `d_embed` and `tie_projs` are those of `model.adaptive_softmax`, which a `d_embed`
  other than D needs too. The PyTorch code has the columns of the tails in reverse, the TensorFlow
  code in order, as we do.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: listing every missing, extra and misshapen array.
  """
  config.check()
  also = {'norm': ('pre',), 'position': tuple(ATTENTION_TYPES)}
  switches = {key: (value, *also.get(key, ())) for key, value in (SWITCHES | FIXED).items()}
  interop_arrays.check_switches(config, switches)
  if config.norm == 'pre' and config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.norm="pre" with model.position={config.position!r}: theirs norms keys and values, '
      f'but not queries, which ours norms too'
    )
  c, V, D = config, vocabulary_size, config.width
  N, H, L = c.heads, D // c.heads, c.layers
  sources = _vocabulary_sources(c, V)
  biases = {'content_bias': 'r_w_bias', 'position_bias': 'r_r_bias'}
  for ours, theirs in biases.items() if c.position == 'relative' else ():
    if c.positions().shared_biases:
      sources['params', ours] = Source((theirs,), (N, H))
      continue
    for i in range(L):
      of_layer = lambda a, i=i: a[0][i]
      sources['params', f'layer_{i}', 'attention', ours] = Source((theirs,), (L, N, H), of_layer)
  for i in range(L):
    sources |= _layer_sources(c, i)
  # Tied arrays may be listed under both of their names.
  ignored = ['pos_emb.inv_freq', *(name for name in arrays if _is_twin(name, arrays))]
  return interop_arrays.convert(arrays, sources, 'a Transformer-XL', ignored)


def _is_twin(name: str, arrays: Mapping[str, Any]) -> bool:
  """Whether an array of the output layer is one of the embedding once more."""
  twin = name.replace('crit.out_layers', 'word_emb.emb_layers')
  twin = twin.replace('crit.out_projs', 'word_emb.emb_projs')
  # Without a divisor there is one projection for all clusters.
  twins = (twin, 'word_emb.emb_projs.0') if 'projs' in name else (twin,)
  return twin != name and any(
    other in arrays and np.array_equal(arrays[name], arrays[other]) for other in twins
  )


def _vocabulary_sources(config: model_config.ModelConfig, V: int) -> dict[tuple[str, ...], Source]:
  a, D = config.adaptive_softmax, config.width
  if a is None:
    sources = {
      ('params', 'embedding'): Source(('word_emb.emb_layers.0.weight',), (V, D)),
      ('params', 'softmax_bias'): Source(('crit.out_layers.0.bias',), (V,)),
    }
    if not config.tie_embeddings:
      name = 'crit.out_layers.0.weight'
      sources['params', 'softmax_weight'] = Source((name,), (V, D))
    return sources
  borders, J = (0, *a.cutoffs, V), a.embedding_width or D
  C, sources = len(a.cutoffs), {}
  tied = a.tied_projections * (C + 1) if len(a.tied_projections) == 1 else a.tied_projections
  put = lambda name, *source: sources.__setitem__(
    ('params', 'adaptive_softmax', name), Source(*source)
  )
  for i in range(C + 1):
    first, last = borders[i : i + 2]
    # Without a divisor theirs has one table for all clusters.
    whole = a.divisor == 1
    number, width = (0, J) if whole else (i, J // a.divisor**i)
    rows = V if whole else last - first
    part = (lambda x, cut=slice(first, last): x[0][cut]) if whole else (lambda x: x[0])
    put(f'embedding_{i}', (f'word_emb.emb_layers.{number}.weight',), (rows, width), part)
    put(f'bias_{i}', (f'crit.out_layers.{number}.bias',), (rows,), part)
    if not config.tie_embeddings:
      put(f'softmax_weight_{i}', (f'crit.out_layers.{number}.weight',), (rows, width), part)
    if width == D and (whole or not a.project_same_width):
      continue
    transposed = lambda x: x[0].T
    if not whole or i == 0:
      put(f'projection_{i}', (f'word_emb.emb_projs.{i}',), (D, width), transposed)
    if not tied[i]:
      put(f'softmax_projection_{i}', (f'crit.out_projs.{i}',), (D, width), transposed)
  if C:
    reverse = lambda x: x[0][::-1]
    put('cluster_weight', ('crit.cluster_weight',), (C, J), reverse)
    put('cluster_bias', ('crit.cluster_bias',), (C,), reverse)
  return sources


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[tuple[str, ...], Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H = D // N
  ours, theirs = ('params', f'layer_{i}'), f'layers.{i}.'
  sources = {}
  # The attention without relative positions has q apart.
  parts = ('query', 'key', 'value') if config.position in ('relative', 'shaw') else ('key', 'value')
  joined = (theirs + f'dec_attn.{"qkv" if len(parts) == 3 else "kv"}_net.weight',)
  for place, name in enumerate(parts):
    part = lambda a, place=place: np.split(a[0], len(parts))[place].T.reshape(D, N, H)
    sources[*ours, 'attention', name, 'kernel'] = Source(joined, (len(parts) * D, D), part)
  if 'query' not in parts:
    name = (theirs + 'dec_attn.q_net.weight',)
    whole = lambda a: a[0].T.reshape(D, N, H)
    sources[*ours, 'attention', 'query', 'kernel'] = Source(name, (D, D), whole)
  sources |= _position_sources(config, i)
  sources[*ours, 'attention', 'out', 'kernel'] = Source(
    (theirs + 'dec_attn.o_net.weight',), (D, D), lambda a: a[0].T.reshape(N, H, D)
  )
  for name, number, shape in (('in', 0, (F, D)), ('out', 3, (D, F))):
    path = f'{theirs}pos_ff.CoreNet.{number}'
    transposed = lambda a: a[0].T
    sources[*ours, 'feed_forward', name, 'kernel'] = Source((f'{path}.weight',), shape, transposed)
    sources[*ours, 'feed_forward', name, 'bias'] = Source((f'{path}.bias',), shape[:1])
  norm = 'norm' if config.norm == 'pre' else 'post_norm'
  for name, path in (('attention', 'dec_attn'), ('feed_forward', 'pos_ff')):
    for part, their_part in (('scale', 'weight'), ('bias', 'bias')):
      name_of_theirs = f'{theirs}{path}.layer_norm.{their_part}'
      sources[*ours, f'{name}_{norm}', part] = Source((name_of_theirs,), (D,))
  return sources


def _position_sources(config: model_config.ModelConfig, i: int) -> dict[tuple[str, ...], Source]:
  D, N, L = config.width, config.heads, config.layers
  H, rows = D // N, config.positions().max_length
  ours = ('params', f'layer_{i}')
  of_layer = lambda a: a[0][i]
  if config.position == 'relative':
    name, whole = f'layers.{i}.dec_attn.r_net.weight', lambda a: a[0].T.reshape(D, N, H)
    return {(*ours, 'attention', 'relative', 'position', 'kernel'): Source((name,), (D, D), whole)}
  if config.position == 'shaw':
    path = (*ours, 'attention')
    return {
      (*path, 'content_bias'): Source(('r_w_bias',), (L, N, H), of_layer),
      (*path, 'relative', 'distance_embedding'): Source(('r_emb',), (L, rows, N, H), of_layer),
      (*path, 'relative', 'distance_bias'): Source(('r_bias',), (L, rows, N), of_layer),
    }
  if config.position == 'learned':
    flat = lambda a: a[0][i].reshape(rows, D)
    return {(*ours, 'position'): Source(('r_emb',), (L, rows, N, H), flat)}
  return {}
