"""Loads and exports parameters of adaptive-span (facebookresearch/adaptive-span) as named arrays.

Variants with persistent vectors and with adaptive input and output are supported. The names are
those of the `state_dict` of the source model, in which weights of linear maps are [out, in].
PyTorch is not needed.

N heads, H head width, D model width, F inner width, V vocabulary, C persistent vectors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion, settings

Source = conversion.Source

ORIGIN = 'an adaptive-span model'
# Config fields that every source model shares; the sizes, dropout, `span` and `persistent` differ.
# A model with persistent vectors has feed_forward_width=0.
MODEL_OPTIONS = conversion.TORCH_MODEL_OPTIONS | {'position': 'table'}
# Config fields of a model with a full softmax and of one with an adaptive softmax.
FULL_SOFTMAX_OPTIONS = {'tie_embeddings': False, 'scale_embeddings': False}
ADAPTIVE_SOFTMAX_OPTIONS = {'tie_embeddings': True, 'scale_embeddings': True}

# Values that the loader requires in addition: the cache is one stream that begins with zeros.
REQUIRED_OPTIONS = {
  'memory.same_length': 'memory_alone',
  'memory.first': 'zeros',
  'memory.across_documents': True,
}
# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  *('layers', 'width', 'heads', 'feed_forward_width', 'positional.max_length'),
  *('span.ramp', 'persistent.vectors'),
  *('adaptive_softmax.cutoffs', 'adaptive_softmax.divisor', 'adaptive_softmax.embedding_width'),
)

# Defaults of the arguments of main.py that the model depends on, without their groups.
ARGS = {
  **{'hidden_size': 256, 'inner_hidden_size': 1024, 'nb_layers': 8, 'nb_heads': 2},
  **{'attn_span': 32, 'dropout': 0.2, 'emb_dropout': 0.0, 'pers_mem_size': 0},
  **{'adapt_io_enabled': False, 'adapt_io_tied': False, 'adapt_io_divval': 4},
  **{'adapt_io_cutoffs': (20_000, 40_000, 200_000)},
  **{'adapt_span_enabled': False, 'adapt_span_loss': 0.0, 'adapt_span_ramp': 32},
  'adapt_span_init': 0.0,
}
# Arguments of training, data and how the model is computed.
TRAINING_ARGS = (
  *('distributed', 'local_rank', 'data_path', 'data_unit', 'block_size', 'adapt_span_cache'),
  *('lr', 'momentum', 'optim', 'lr_warmup', 'grad_clip', 'batch_size', 'batch_split'),
  *('nb_batches_per_iter', 'nb_iter', 'checkpoint_path', 'full_eval_mode'),
  *('device', 'rank', 'world_size', 'vocab_size'),
)


def config_from_args(args: settings.Settings) -> model_config.ModelConfig:
  """Returns the config of the model of these arguments of main.py.

  Initial weights are not part of it (see `config.initial`), nor are optimizer and data.

  Args:
    args: the arguments by the names that they have in main.py, such as `hidden_size` of --hid-sz,
      in their groups (`model_params`, ...) or without. Those that are not given have their official
      defaults.

  Raises:
    BadInput: an unknown argument, or a value with which the model cannot be loaded.
  """
  a = settings.read(args, ARGS, TRAINING_ARGS, ORIGIN)
  S, has_vectors = a['attn_span'], a['pers_mem_size'] > 0
  # Our dropout of the embedding is an option of the adaptive softmax.
  supported = {'adapt_io_tied': (True,)} if a['adapt_io_enabled'] else {'emb_dropout': (0,)}
  settings.check(a, supported, ORIGIN)
  adaptive = span = None
  if a['adapt_io_enabled']:
    adaptive = model_config.AdaptiveSoftmaxConfig(
      tuple(a['adapt_io_cutoffs']), a['adapt_io_divval'], dropout=a['emb_dropout']
    )
  if a['adapt_span_enabled']:
    span = model_config.SpanConfig(
      limit=S,
      ramp=a['adapt_span_ramp'],
      penalty=float(a['adapt_span_loss']),
      initial=float(a['adapt_span_init']),
    )
  config = model_config.ModelConfig(
    **MODEL_OPTIONS | (ADAPTIVE_SOFTMAX_OPTIONS if adaptive else FULL_SOFTMAX_OPTIONS),
    layers=a['nb_layers'],
    width=a['hidden_size'],
    heads=a['nb_heads'],
    feed_forward_width=0 if has_vectors else a['inner_hidden_size'],
    attention_dropout=a['dropout'],
    inner_dropout=a['dropout'],
    positional=model_config.PositionalConfig(max_length=S),
    memory=model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
    span=span,
    persistent=model_config.PersistentConfig(a['pers_mem_size']) if has_vectors else None,
    adaptive_softmax=adaptive,
  )
  config.check()
  return config


def load_language_model(
  arrays: Mapping[str, Any],
  config: model_config.ModelConfig,
  vocabulary_size: int,
  args: settings.Settings | None = None,
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts a `TransformerSeq` of adaptive-span to variables of `TransformerLM`.

  Source names: `in_emb.weight`, `out_emb.{weight,bias}`, or with adaptive input and output
  `in_emb.emb_layers.i.weight`, `in_emb.emb_projs.i`, `out_emb.out_layers.i.bias` for each cluster
  i and `out_emb.cluster_proj.{weight,bias}`; `key_pe`; and per layer `layers.i.attn.`
  `proj_{query,key,val,out}.weight`, `attn.adaptive_span._mask.current_val`,
  `attn.persistent_memory.{key,val}`, `layers.i.norm1.{weight,bias}`, and without persistent
  vectors `layers.i.ff.{fc1,fc2}.{weight,bias}` and `layers.i.norm2.{weight,bias}`.

  The config is `config_from_args(args)`, which is
  `ModelConfig(**MODEL_OPTIONS, **FULL_SOFTMAX_OPTIONS, ...)`, or with an adaptive
  softmax `ModelConfig(**MODEL_OPTIONS, **ADAPTIVE_SOFTMAX_OPTIONS, ...)`, with
  `memory=MemoryConfig(length=S, first='zeros', same_length='memory_alone', across_documents=True)`,
  `positional=PositionalConfig(max_length=S)`, `span=SpanConfig(limit=S, ...)` for adaptive spans,
  and `persistent=PersistentConfig(C)` with `feed_forward_width=0`.

  Args:
    arrays: the source arrays by name.
    config: config of the target model.
    vocabulary_size: V.
    args: arguments of the source model. If given, a config of another model is an error.
    dtype: dtype of the parameters, see `conversion.convert`.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `conversion.check_options`, `conversion.check_same_model` and
      `conversion.convert`.
  """
  if args is not None:
    conversion.check_same_model(config, config_from_args(args))
  sources = _sources(config, vocabulary_size)
  arrays = conversion.without_wrappers(arrays, conversion.names(sources), ORIGIN)
  # With persistent vectors, the state_dict lists each span twice.
  ending = 'persistent_memory.adaptive_span._mask.current_val'
  duplicates = [name for name in arrays if name.endswith(ending)]
  return conversion.convert(arrays, sources, ORIGIN, duplicates, dtype)


def export_language_model(
  variables: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, np.ndarray]:
  """Converts variables of `TransformerLM` to the arrays that `load_language_model` reads.

  Each tied array is there once: in PyTorch, `load_state_dict` needs `strict=False`.

  Raises:
    BadInput: see `conversion.check_options` and `conversion.restore`.
  """
  return conversion.restore(variables, _sources(config, vocabulary_size), ORIGIN)


def _sources(config: model_config.ModelConfig, vocabulary_size: int) -> dict[str, Source]:
  """Returns the source of each variable of a supported config."""
  full_softmax = config.adaptive_softmax is None
  softmax_options = FULL_SOFTMAX_OPTIONS if full_softmax else ADAPTIVE_SOFTMAX_OPTIONS
  H, S = config.width // config.heads, config.positions().max_length
  lengths = {'memory.length': S, 'span.limit': S}
  required = MODEL_OPTIONS | REQUIRED_OPTIONS | softmax_options | lengths
  conversion.check_options(config, FREE_OPTIONS, required)
  sources = _vocabulary_sources(config, vocabulary_size)
  # The source table starts with the farthest distance.
  nearest_first = lambda a: a[0].T[::-1]
  sources['params/distance_embedding'] = Source('key_pe', (1, H, S), nearest_first)
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  return sources


def _vocabulary_sources(config, V) -> dict[str, Source]:
  D = config.width
  if config.adaptive_softmax is None:
    return {
      'params/embedding': Source('in_emb.weight', (V, D)),
      'params/softmax_weight': Source('out_emb.weight', (V, D)),
      'params/softmax_bias': Source('out_emb.bias', (V,)),
    }
  names = 'in_emb', 'out_emb', 'out_emb.cluster_proj.'
  return conversion.torch_adaptive_softmax(config, V, names, is_single_table=False)


def _layer_sources(config, i) -> dict[str, Source]:
  D, N, F = config.width, config.heads, config.feed_forward_width
  H, path, prefix = D // N, f'params/layer_{i}', f'layers.{i}'
  attention, sources = f'{path}/attention', {}
  for name, source_name in (('query', 'query'), ('key', 'key'), ('value', 'val')):
    weight = f'{prefix}.attn.proj_{source_name}.weight'
    sources[f'{attention}/{name}/kernel'] = conversion.torch_heads(weight, N, D)
  out = conversion.torch_merged_heads(f'{prefix}.attn.proj_out.weight', N, D)
  sources[f'{attention}/out/kernel'] = out
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
      sources |= conversion.torch_layer(f'{path}/feed_forward/{name}', source, *shape)
  for name, source_name in norms.items():
    sources |= conversion.torch_layer(f'{path}/{name}_post_norm', f'{prefix}.{source_name}', D)
  return sources
