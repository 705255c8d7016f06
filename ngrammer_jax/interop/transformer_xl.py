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
  'position': 'relative',
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Variables of our `TransformerLM` from a MemTransformerLM.

  Their names: `word_emb.emb_layers.0.weight` [V, D] (tied: also the softmax),
  `crit.out_layers.0.bias` [V], `r_w_bias` and `r_r_bias` [N, H] ([L, N, H] where each layer has
  its own), and per layer `layers.i.dec_attn.` `{qkv_net,r_net,o_net}.weight`,
  `layer_norm.{weight,bias}` and `layers.i.pos_ff.` `CoreNet.{0,3}.{weight,bias}`,
  `layer_norm.{weight,bias}`.

  The config is `ModelConfig(**SWITCHES, ...)` with their sizes; their pre-norm (`pre_lnorm`) is
  norm='pre' in it.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: listing every missing, extra and misshapen array.
  """
  config.check()
  for key, value in SWITCHES.items():
    valid = ('post_skip', 'pre') if key == 'norm' else (value,)
    if getattr(config, key) not in valid:
      raise errors.BadInput(
        f'model.{key}={getattr(config, key)!r}: theirs has {" or ".join(map(repr, valid))}'
      )
  c, V, D = config, vocabulary_size, config.width
  N, H, L = c.heads, D // c.heads, c.layers
  sources = {
    ('params', 'embedding'): Source(('word_emb.emb_layers.0.weight',), (V, D)),
    ('params', 'softmax_bias'): Source(('crit.out_layers.0.bias',), (V,)),
  }
  for ours, theirs in (('content_bias', 'r_w_bias'), ('position_bias', 'r_r_bias')):
    if c.positions().shared_biases:
      sources['params', ours] = Source((theirs,), (N, H))
      continue
    for i in range(L):
      of_layer = lambda a, i=i: a[0][i]
      sources['params', f'layer_{i}', 'attention', ours] = Source((theirs,), (L, N, H), of_layer)
  for i in range(L):
    sources |= _layer_sources(c, i)
  ignored = ('crit.out_layers.0.weight', 'pos_emb.inv_freq')
  return interop_arrays.convert(arrays, sources, 'a Transformer-XL', ignored)


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[tuple[str, ...], Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H = D // N
  ours, theirs = ('params', f'layer_{i}'), f'layers.{i}.'
  sources = {}
  qkv = (theirs + 'dec_attn.qkv_net.weight',)
  for place, name in enumerate(('query', 'key', 'value')):
    part = lambda a, place=place: np.split(a[0], 3)[place].T.reshape(D, N, H)
    sources[*ours, 'attention', name, 'kernel'] = Source(qkv, (3 * D, D), part)
  sources[*ours, 'attention', 'relative', 'position', 'kernel'] = Source(
    (theirs + 'dec_attn.r_net.weight',), (D, D), lambda a: a[0].T.reshape(D, N, H)
  )
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
