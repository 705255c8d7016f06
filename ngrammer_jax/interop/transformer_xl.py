"""Loads and exports parameters of the PyTorch Transformer-XL (kimiyoung/transformer-xl) by name.

Names are as in the `state_dict` of the source model; weights of linear maps are [out, in]. PyTorch
is not needed.

N heads, H head width, D model width, F inner width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import loader_options, named_arrays, official_args, torch_arrays
from ngrammer_jax.interop.named_arrays import ArraySource

# Config fields that every source model shares; sizes, memory and clamp_length differ.
MODEL_OPTIONS = torch_arrays.MODEL_OPTIONS | {'position': 'relative'}  # attn_type 0

# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  'layers',
  'width',
  'heads',
  'feed_forward_width',
  'tie_embeddings',
  'positional.shared_biases',
  'positional.clamp_length',
  'positional.max_length',
  'memory.length',
  'memory.first',
  'memory.across_documents',
  'adaptive_softmax.cutoffs',
  'adaptive_softmax.divisor',
  'adaptive_softmax.embedding_width',
  'adaptive_softmax.tied_projections',
  'adaptive_softmax.project_same_width',
)
# `memory_and_self` is the TensorFlow code.
SAME_LENGTH = ('no', 'memory', 'memory_and_self')
# `position` of each attn_type of the source model.
ATTENTION_TYPES = ('relative', 'shaw', 'segment_sinusoid', 'learned')
BIASES = {'content_bias': 'r_w_bias', 'position_bias': 'r_r_bias'}
ORIGIN = 'a Transformer-XL'

# Defaults of the arguments of train.py that the model depends on. None: `cutoffs` and `tie_projs`
# are those of `dataset`, which train.py knows for these data sets.
ARGS = {
  'n_layer': 12,
  'n_head': 10,
  'd_head': 50,
  'd_model': 500,
  'd_inner': 1000,
  'd_embed': -1,
  'dropout': 0.0,
  'dropatt': 0.0,
  'not_tied': False,
  'div_val': 1,
  'pre_lnorm': False,
  'tgt_len': 70,
  'ext_len': 0,
  'mem_len': 0,
  'attn_type': 0,
  'clamp_len': -1,
  'same_length': False,
  'sample_softmax': -1,
  'adaptive': False,
  'dataset': 'wt103',
  'cutoffs': None,
  'tie_projs': None,
}
CUTOFFS = {'wt103': (20_000, 40_000, 200_000), 'lm1b': (60_000, 100_000, 640_000)}
# Arguments of training and evaluation, and those that train.py computes.
TRAINING_ARGS = (
  'data',
  'init',
  'emb_init',
  'init_range',
  'emb_init_range',
  'init_std',
  'proj_init_std',
  'optim',
  'lr',
  'mom',
  'scheduler',
  'warmup_step',
  'decay_rate',
  'lr_min',
  'clip',
  'clip_nonemb',
  'max_step',
  'batch_size',
  'batch_chunk',
  'eval_tgt_len',
  'seed',
  'cuda',
  'varlen',
  'multi_gpu',
  'log_interval',
  'eval_interval',
  'work_dir',
  'restart',
  'restart_dir',
  'debug',
  'eta_min',
  'gpu0_bsz',
  'max_eval_steps',
  'patience',
  'finetune_v2',
  'finetune_v3',
  'fp16',
  'static_loss_scale',
  'dynamic_loss_scale',
  'tied',
  'n_token',
  'n_all_param',
  'n_nonemb_param',
)


def config_from_args(args: official_args.OfficialArgs) -> model_config.ModelConfig:
  """Returns the model config for arguments of train.py, with training segments.

  It excludes initial weights (see `config.initial`), optimizer and data.

  Args:
    args: the training arguments of the model; missing arguments have their official defaults.
      `cutoffs` and `tie_projs` may be set for other data sets.

  Raises:
    BadInput: an unknown argument, or an unsupported value.
  """
  values = official_args.with_defaults(args, ARGS, TRAINING_ARGS, ORIGIN)
  _check_values(values)
  position = ATTENTION_TYPES[values['attn_type']]
  options = MODEL_OPTIONS | {'position': position}
  if values['pre_lnorm']:
    options['norm'] = 'pre'
  config = model_config.ModelConfig(
    **options,
    layers=values['n_layer'],
    width=values['d_model'],
    heads=values['n_head'],
    feed_forward_width=values['d_inner'],
    dropout=values['dropout'],
    inner_dropout=values['dropout'],
    attention_dropout=values['dropatt'],
    tie_embeddings=not values['not_tied'],
    positional=_positional_config(values, position),
    memory=_memory_config(values, position),
    adaptive_softmax=_adaptive_softmax_config(values),
  )
  config.check()
  return config


def _check_values(values: Mapping[str, Any]) -> None:
  """Raises BadInput for unsupported values of arguments."""
  D = values['d_model']
  N = values['n_head']
  cutoffs = values['cutoffs']
  if cutoffs and values['tie_projs'] is None:
    raise errors.BadInput(f'cutoffs={cutoffs!r} need tie_projs with {len(cutoffs) + 1} entries')
  head_widths = ()
  if D % N == 0:
    head_widths = (D // N,)
  supported = {
    'd_head': head_widths,
    'ext_len': (0,),
    'attn_type': range(4),
    'sample_softmax': (-1, 0),
  }
  if values['attn_type'] == ATTENTION_TYPES.index('segment_sinusoid'):
    supported['clamp_len'] = (-1, 0)
  if values['adaptive'] and cutoffs is None:
    supported['dataset'] = tuple(CUTOFFS)
  official_args.check_supported(values, supported, ORIGIN)


def _positional_config(values: Mapping[str, Any], position: str) -> model_config.PositionalConfig:
  """Returns the positional options of the arguments."""
  options = {}
  if position in ('relative', 'shaw') and values['clamp_len'] > 0:
    options['clamp_length'] = values['clamp_len']
  if position == 'shaw':
    options['max_length'] = values['tgt_len'] + values['mem_len']
  elif position == 'learned':
    options['max_length'] = values['tgt_len']
  return model_config.PositionalConfig(**options)


def _memory_config(values: Mapping[str, Any], position: str) -> model_config.MemoryConfig | None:
  """Returns the segment memory of the arguments; None without one."""
  if position in model_config.SEGMENT_POSITIONS and not values['mem_len']:
    return None
  same_length = 'no'
  if values['same_length']:
    same_length = 'memory'
  return model_config.MemoryConfig(
    values['mem_len'],
    same_length=same_length,
    across_documents=True,  # the official code knows no documents
  )


def _adaptive_softmax_config(
  values: Mapping[str, Any],
) -> model_config.AdaptiveSoftmaxConfig | None:
  """Returns the adaptive softmax of the arguments, None for a full one."""
  D = values['d_model']
  embedding_width = values['d_embed'] if values['d_embed'] >= 0 else D
  cutoffs = values['cutoffs'] or ()
  if values['adaptive'] and values['cutoffs'] is None:
    cutoffs = CUTOFFS[values['dataset']]
  if values['div_val'] == 1 and embedding_width == D:  # there are no projections
    if not cutoffs:
      return None
    return model_config.AdaptiveSoftmaxConfig(tuple(cutoffs))
  tied = values['tie_projs']
  if tied is None:  # as in train.py
    tied = (False, *[values['dataset'] == 'wt103' for _ in cutoffs])
  if len(set(tied)) == 1:
    tied = tied[:1]
  if embedding_width == D:
    embedding_width = None
  return model_config.AdaptiveSoftmaxConfig(
    cutoffs=tuple(cutoffs),
    divisor=values['div_val'],
    embedding_width=embedding_width,
    tied_projections=tuple(bool(is_tied) for is_tied in tied),
  )


def load_language_model(
  arrays: Mapping[str, Any],
  config: model_config.ModelConfig,
  vocabulary_size: int,
  args: official_args.OfficialArgs | None = None,
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts a MemTransformerLM to variables of `TransformerLM`.

  Source names: `word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i` and `crit.out_layers.i.bias`
  for each cluster i of an adaptive softmax, otherwise for i = 0; `crit.cluster_{weight,bias}`;
  `crit.out_layers.i.weight` and `crit.out_projs.i` if they are not tied; `r_w_bias` and
  `r_r_bias` [N, H] ([L, N, H] if each layer has its own), and per layer `layers.i.dec_attn.`
  `{qkv_net,r_net,o_net}.weight`, `layer_norm.{weight,bias}` and `layers.i.pos_ff.`
  `CoreNet.{0,3}.{weight,bias}`, `layer_norm.{weight,bias}`.

  The config is `config_from_args(args)`, which is `ModelConfig(**MODEL_OPTIONS, ...)` with the
  sizes of the source model. Pre-norm (`pre_lnorm`) is norm='pre'; it excludes absolute positions,
  where the source model does not normalize queries. `cutoffs`, `div_val`, `d_embed` and `tie_projs`
  are fields of `model.adaptive_softmax`, also required if `d_embed` is not D. The PyTorch code
  orders the columns of the tail clusters from last to first; the TensorFlow code and this package
  order them from first to last.

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
    loader_options.check_same_model(config, config_from_args(args))
  sources = _sources(config, vocabulary_size)
  arrays = named_arrays.without_wrappers(arrays, named_arrays.shapes_by_name(sources), ORIGIN)
  # A state_dict may list tied arrays under both of their names.
  ignored = ['pos_emb.inv_freq', *(name for name in arrays if _is_tied_copy(name, arrays))]
  return named_arrays.convert(arrays, sources, ORIGIN, ignored, dtype)


def export_language_model(
  variables: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, np.ndarray]:
  """Converts variables of `TransformerLM` to arrays for `load_language_model`.

  Each tied array occurs once: in PyTorch, `load_state_dict` needs `strict=False`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  return named_arrays.restore(variables, _sources(config, vocabulary_size), ORIGIN)


def _sources(config: model_config.ModelConfig, vocabulary_size: int) -> dict[str, ArraySource]:
  """Returns the source of each variable of a supported config."""
  choices = {
    'norm': ('post_skip', 'pre'),
    'position': ATTENTION_TYPES,
    'memory.same_length': SAME_LENGTH,
  }
  loader_options.check_options(config, FREE_OPTIONS, MODEL_OPTIONS, choices)
  if config.norm == 'pre' and config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.norm="pre" with model.position={config.position!r} cannot be loaded: the PyTorch '
      f'code does not normalize queries, model.norm="pre" does'
    )
  sources = _vocabulary_sources(config, vocabulary_size)
  if config.position == 'relative' and config.positions().shared_biases:
    shape = (config.heads, config.width // config.heads)
    for name, source_name in BIASES.items():
      sources[f'params/{name}'] = ArraySource(source_name, shape)
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  return sources


def _is_tied_copy(name: str, arrays: Mapping[str, Any]) -> bool:
  """Returns whether an array of the output layer equals its counterpart in the embedding."""
  embedding = name.replace('crit.out_layers', 'word_emb.emb_layers')
  embedding = embedding.replace('crit.out_projs', 'word_emb.emb_projs')
  if embedding == name:
    return False
  candidates = [embedding]
  if 'projs' in name:  # without a divisor, one projection serves all clusters
    candidates.append('word_emb.emb_projs.0')
  return any(
    candidate in arrays and np.array_equal(arrays[name], arrays[candidate])
    for candidate in candidates
  )


def _vocabulary_sources(config: model_config.ModelConfig, V: int) -> dict[str, ArraySource]:
  """Returns the sources of the embedding and the output layer."""
  D = config.width
  if config.adaptive_softmax is None:
    sources = {
      'params/embedding': ArraySource('word_emb.emb_layers.0.weight', (V, D)),
      'params/softmax_bias': ArraySource('crit.out_layers.0.bias', (V,)),
    }
    if not config.tie_embeddings:
      sources['params/softmax_weight'] = ArraySource('crit.out_layers.0.weight', (V, D))
    return sources
  return torch_arrays.adaptive_softmax(
    config,
    V,
    embedding='word_emb',
    output='crit',
    tail='crit.cluster_',
    # Without a divisor, the source model has one table for all clusters.
    is_single_table=config.adaptive_softmax.divisor == 1,
  )


def _layer_sources(config: model_config.ModelConfig, i: int) -> dict[str, ArraySource]:
  """Returns the sources of a layer."""
  D = config.width
  F = config.feed_forward_width
  path = f'params/layer_{i}'
  attention = f'layers.{i}.dec_attn'
  feed_forward = f'layers.{i}.pos_ff'
  sources = _position_sources(config, i)
  sources |= _projection_sources(config, f'{path}/attention', attention)
  sources |= torch_arrays.linear(f'{path}/feed_forward/in', f'{feed_forward}.CoreNet.0', F, D)
  sources |= torch_arrays.linear(f'{path}/feed_forward/out', f'{feed_forward}.CoreNet.3', D, F)
  norm = 'norm' if config.norm == 'pre' else 'post_norm'
  sources |= torch_arrays.layer_norm(f'{path}/attention_{norm}', f'{attention}.layer_norm', D)
  sources |= torch_arrays.layer_norm(f'{path}/feed_forward_{norm}', f'{feed_forward}.layer_norm', D)
  return sources


def _projection_sources(
  config: model_config.ModelConfig, path: str, prefix: str
) -> dict[str, ArraySource]:
  """Returns the sources of the projections of attention, some of which are fused in one array."""
  D = config.width
  N = config.heads
  if config.position in ('relative', 'shaw'):
    fused = ('query', 'key', 'value')
    fused_name = f'{prefix}.qkv_net.weight'
  else:  # queries have a projection of their own
    fused = ('key', 'value')
    fused_name = f'{prefix}.kv_net.weight'
  sources = {}
  for index, name in enumerate(fused):
    select = _fused_heads(index, len(fused), N)
    sources[f'{path}/{name}/kernel'] = ArraySource(fused_name, (len(fused) * D, D), select)
  if 'query' not in fused:
    query = torch_arrays.split_heads(f'{prefix}.q_net.weight', N, D)
    sources[f'{path}/query/kernel'] = query
  sources[f'{path}/out/kernel'] = torch_arrays.merge_heads(f'{prefix}.o_net.weight', N, D)
  return sources


def _fused_heads(index: int, count: int, heads: int) -> Callable[[np.ndarray], np.ndarray]:
  """Returns a function from `count` fused weights to the kernel [D, N, H] of one of them."""

  def select(fused: np.ndarray) -> np.ndarray:
    weight = np.split(fused, count)[index]
    return weight.T.reshape(weight.shape[1], heads, -1)

  return select


def _position_sources(config: model_config.ModelConfig, i: int) -> dict[str, ArraySource]:
  """Returns the sources of what the positions add to a layer."""
  D = config.width
  N = config.heads
  L = config.layers
  H = D // N
  rows = config.positions().max_length
  path = f'params/layer_{i}'
  sources = {}
  if config.position == 'relative':
    if not config.positions().shared_biases:
      for name, source_name in BIASES.items():
        sources[f'{path}/attention/{name}'] = _layer_of(source_name, i, (L, N, H))
    projection = torch_arrays.split_heads(f'layers.{i}.dec_attn.r_net.weight', N, D)
    sources[f'{path}/attention/relative/position/kernel'] = projection
  elif config.position == 'shaw':
    relative = f'{path}/attention/relative'
    sources[f'{path}/attention/content_bias'] = _layer_of('r_w_bias', i, (L, N, H))
    sources[f'{relative}/distance_embedding'] = _layer_of('r_emb', i, (L, rows, N, H))
    sources[f'{relative}/distance_bias'] = _layer_of('r_bias', i, (L, rows, N))
  elif config.position == 'learned':

    def merge_heads(embeddings: np.ndarray) -> np.ndarray:
      return embeddings[i].reshape(rows, D)

    sources[f'{path}/position'] = ArraySource('r_emb', (L, rows, N, H), merge_heads)
  return sources


def _layer_of(name: str, i: int, shape: tuple[int, ...]) -> ArraySource:
  """Returns the source of a variable that is one layer of an array."""
  return ArraySource(name, shape, lambda a: a[i])
