"""Loads and exports parameters of adaptive-span (facebookresearch/adaptive-span) as named arrays.

Variants with persistent vectors and with adaptive input and output are supported. Names are as in
the `state_dict` of the source model; weights of linear maps are [out, in]. PyTorch is not needed.

N heads, H head width, D model width, F inner width, V vocabulary, C persistent vectors.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import loader_options, named_arrays, official_args, torch_arrays
from ngrammer_jax.interop.named_arrays import ArraySource

ORIGIN = 'an adaptive-span model'
# Config fields that every source model shares; the sizes, dropout, `span` and `persistent` differ.
# A model with persistent vectors has feed_forward_width=0.
MODEL_OPTIONS = torch_arrays.MODEL_OPTIONS | {'position': 'table'}
# Config fields of a model with a full softmax and of one with an adaptive softmax.
FULL_SOFTMAX_OPTIONS = {'tie_embeddings': False, 'scale_embeddings': False}
ADAPTIVE_SOFTMAX_OPTIONS = {'tie_embeddings': True, 'scale_embeddings': True}

# Further required values: the cache is one stream that begins with zeros.
REQUIRED_OPTIONS = {
  'memory.same_length': 'memory_alone',
  'memory.first': 'zeros',
  'memory.across_documents': True,
}
# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  'layers',
  'width',
  'heads',
  'feed_forward_width',
  'positional.max_length',
  'span.ramp',
  'persistent.vectors',
  'adaptive_softmax.cutoffs',
  'adaptive_softmax.divisor',
  'adaptive_softmax.embedding_width',
)
# The official code counts all keys, or with its trimming those near the longest span.
EPSILON_KEYS = (None, 'all')

# Defaults of the model arguments of main.py, without their groups.
ARGS = {
  'hidden_size': 256,
  'inner_hidden_size': 1024,
  'nb_layers': 8,
  'nb_heads': 2,
  'attn_span': 32,
  'dropout': 0.2,
  'emb_dropout': 0.0,
  'pers_mem_size': 0,
  'adapt_io_enabled': False,
  'adapt_io_tied': False,
  'adapt_io_divval': 4,
  'adapt_io_cutoffs': (20_000, 40_000, 200_000),
  'adapt_span_enabled': False,
  'adapt_span_loss': 0.0,
  'adapt_span_ramp': 32,
  'adapt_span_init': 0.0,
}
# Arguments of training, data and how the model is computed.
TRAINING_ARGS = (
  'distributed',
  'local_rank',
  'data_path',
  'data_unit',
  'block_size',
  'adapt_span_cache',
  'lr',
  'momentum',
  'optim',
  'lr_warmup',
  'grad_clip',
  'batch_size',
  'batch_split',
  'nb_batches_per_iter',
  'nb_iter',
  'checkpoint_path',
  'full_eval_mode',
  'device',
  'rank',
  'world_size',
  'vocab_size',
)


def config_from_args(args: official_args.OfficialArgs) -> model_config.ModelConfig:
  """Returns the model config for arguments of main.py.

  It excludes initial weights (see `config.initial`), optimizer and data.

  Args:
    args: the arguments by their names in main.py, such as `hidden_size` for --hid-sz, in their
      groups (`model_params`, ...) or without. Missing arguments have their official defaults.

  Raises:
    BadInput: an unknown argument, or an unsupported value.
  """
  values = official_args.with_defaults(args, ARGS, TRAINING_ARGS, ORIGIN)
  if values['adapt_io_enabled']:
    supported = {'adapt_io_tied': (True,)}
  else:  # our dropout of the embedding is an option of the adaptive softmax
    supported = {'emb_dropout': (0,)}
  official_args.check_supported(values, supported, ORIGIN)
  S = values['attn_span']
  C = values['pers_mem_size']
  softmax_options = FULL_SOFTMAX_OPTIONS
  adaptive_softmax = None
  if values['adapt_io_enabled']:
    softmax_options = ADAPTIVE_SOFTMAX_OPTIONS
    adaptive_softmax = model_config.AdaptiveSoftmaxConfig(
      cutoffs=tuple(values['adapt_io_cutoffs']),
      divisor=values['adapt_io_divval'],
      dropout=values['emb_dropout'],
    )
  span = None
  if values['adapt_span_enabled']:
    span = model_config.SpanConfig(
      limit=S,
      ramp=values['adapt_span_ramp'],
      penalty=float(values['adapt_span_loss']),
      initial=float(values['adapt_span_init']),
    )
  persistent = None
  feed_forward_width = values['inner_hidden_size']
  if C > 0:
    persistent = model_config.PersistentConfig(C)
    feed_forward_width = 0
  config = model_config.ModelConfig(
    **MODEL_OPTIONS,
    **softmax_options,
    layers=values['nb_layers'],
    width=values['hidden_size'],
    heads=values['nb_heads'],
    feed_forward_width=feed_forward_width,
    attention_dropout=values['dropout'],
    inner_dropout=values['dropout'],
    positional=model_config.PositionalConfig(max_length=S),
    memory=model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
    span=span,
    persistent=persistent,
    adaptive_softmax=adaptive_softmax,
  )
  config.check()
  return config


def load_language_model(
  arrays: Mapping[str, Any],
  config: model_config.ModelConfig,
  vocabulary_size: int,
  args: official_args.OfficialArgs | None = None,
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts a `TransformerSeq` of adaptive-span to variables of `TransformerLM`.

  Source names: `in_emb.weight`, `out_emb.{weight,bias}`, or with adaptive input and output
  `in_emb.emb_layers.i.weight`, `in_emb.emb_projs.i`, `out_emb.out_layers.i.bias` for each cluster
  i and `out_emb.cluster_proj.{weight,bias}`; `key_pe`; and per layer `layers.i.attn.`
  `proj_{query,key,val,out}.weight`, `attn.adaptive_span._mask.current_val`,
  `attn.persistent_memory.{key,val}`, `layers.i.norm1.{weight,bias}`, and without persistent
  vectors `layers.i.ff.{fc1,fc2}.{weight,bias}` and `layers.i.norm2.{weight,bias}`.

  The config is `config_from_args(args)`, which is `ModelConfig(**MODEL_OPTIONS,
  **FULL_SOFTMAX_OPTIONS, ...)`, or with an adaptive softmax `ModelConfig(**MODEL_OPTIONS,
  **ADAPTIVE_SOFTMAX_OPTIONS, ...)`, with `memory=MemoryConfig(length=S, first='zeros',
  same_length='memory_alone', across_documents=True)`, `positional=PositionalConfig(max_length=S)`,
  `span=SpanConfig(limit=S, ...)` for adaptive spans, and `persistent=PersistentConfig(C)` with
  `feed_forward_width=0`. The official code adds 1e-8 to the attention weights of all keys in its
  trimmed window: `SpanConfig(epsilon_keys='all')` is the rule without trimming.

  Args:
    arrays: the source arrays by name.
    config: config of the target model.
    vocabulary_size: V.
    args: arguments of the source model. If given, a config of another model is an error.
    dtype: dtype of the parameters, see `named_arrays.convert`.

  Returns:
    {'params': ...} for `TransformerLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: see `loader_options.check_options`, `loader_options.check_same_model` and
      `named_arrays.convert`.
  """
  if args is not None:
    _check_args(config, args)
  sources = _sources(config, vocabulary_size)
  arrays = named_arrays.without_wrappers(arrays, named_arrays.shapes_by_name(sources), ORIGIN)
  # With persistent vectors, the state_dict lists each span twice.
  ending = 'persistent_memory.adaptive_span._mask.current_val'
  duplicates = [name for name in arrays if name.endswith(ending)]
  return named_arrays.convert(arrays, sources, ORIGIN, duplicates, dtype)


def export_language_model(
  variables: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, np.ndarray]:
  """Converts variables of `TransformerLM` to arrays for `load_language_model`.

  Each tied array occurs once: in PyTorch, `load_state_dict` needs `strict=False`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  return named_arrays.restore(variables, _sources(config, vocabulary_size), ORIGIN)


def _check_args(config: model_config.ModelConfig, args: official_args.OfficialArgs) -> None:
  """Raises BadInput if the config does not match the arguments."""
  official = config_from_args(args)
  if config.span is not None and official.span is not None:  # no argument says which keys count
    span = dataclasses.replace(official.span, epsilon_keys=config.span.epsilon_keys)
    official = dataclasses.replace(official, span=span)
  loader_options.check_same_model(config, official)


def _sources(config: model_config.ModelConfig, vocabulary_size: int) -> dict[str, ArraySource]:
  """Returns the source of each variable of a supported config."""
  S = config.positions().max_length
  if config.adaptive_softmax is None:
    softmax_options = FULL_SOFTMAX_OPTIONS
  else:
    softmax_options = ADAPTIVE_SOFTMAX_OPTIONS
  lengths = {'memory.length': S, 'span.limit': S}
  required = MODEL_OPTIONS | REQUIRED_OPTIONS | softmax_options | lengths
  choices = {'span.epsilon_keys': EPSILON_KEYS}
  loader_options.check_options(config, FREE_OPTIONS, required, choices)
  H = config.width // config.heads
  sources = _vocabulary_sources(config, vocabulary_size)
  sources['params/distance_embedding'] = ArraySource('key_pe', (1, H, S), _nearest_first)
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  return sources


def _nearest_first(table_1xHxS: np.ndarray) -> np.ndarray:
  """Returns the vectors of distances [S, H]; the source starts with the farthest distance."""
  return table_1xHxS[0].T[::-1]


def _vocabulary_sources(config: model_config.ModelConfig, V: int) -> dict[str, ArraySource]:
  """Returns the sources of the embedding and the output layer."""
  D = config.width
  if config.adaptive_softmax is None:
    return {
      'params/embedding': ArraySource('in_emb.weight', (V, D)),
      'params/softmax_weight': ArraySource('out_emb.weight', (V, D)),
      'params/softmax_bias': ArraySource('out_emb.bias', (V,)),
    }
  return torch_arrays.adaptive_softmax(
    config,
    V,
    embedding='in_emb',
    output='out_emb',
    tail='out_emb.cluster_proj.',
    is_single_table=False,
  )


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[str, ArraySource]:
  """Returns the sources of a layer."""
  D = config.width
  F = config.feed_forward_width
  path = f'params/layer_{i}'
  prefix = f'layers.{i}'
  sources = _attention_sources(config, f'{path}/attention', f'{prefix}.attn')
  if F:
    feed_forward = f'{path}/feed_forward'
    sources |= torch_arrays.linear(f'{feed_forward}/in', f'{prefix}.ff.fc1', F, D)
    sources |= torch_arrays.linear(f'{feed_forward}/out', f'{prefix}.ff.fc2', D, F)
  sources |= torch_arrays.layer_norm(f'{path}/attention_post_norm', f'{prefix}.norm1', D)
  if F:
    sources |= torch_arrays.layer_norm(f'{path}/feed_forward_post_norm', f'{prefix}.norm2', D)
  return sources


def _attention_sources(
  config: model_config.ModelConfig, path: str, prefix: str
) -> dict[str, ArraySource]:
  """Returns the sources of the attention of a layer, with its spans and persistent vectors."""
  D = config.width
  N = config.heads
  H = D // N
  sources = {
    f'{path}/query/kernel': torch_arrays.split_heads(f'{prefix}.proj_query.weight', N, D),
    f'{path}/key/kernel': torch_arrays.split_heads(f'{prefix}.proj_key.weight', N, D),
    f'{path}/value/kernel': torch_arrays.split_heads(f'{prefix}.proj_val.weight', N, D),
    f'{path}/out/kernel': torch_arrays.merge_heads(f'{prefix}.proj_out.weight', N, D),
  }
  if config.span is not None:
    span = f'{prefix}.attn.adaptive_span._mask.current_val'
    sources[f'{path}/span/span'] = ArraySource(span, (N, 1, 1), np.ravel)
  if config.persistent is not None and config.persistent.vectors:
    C = config.persistent.vectors
    memory = f'{prefix}.attn.persistent_memory'
    keys = ArraySource(f'{memory}.key', (N, H, C), lambda a: np.swapaxes(a, 1, 2))
    sources[f'{path}/persistent/persistent_keys'] = keys
    sources[f'{path}/persistent/persistent_values'] = ArraySource(f'{memory}.val', (N, C, H))
  return sources
