"""Loads and exports parameters of the PyTorch Transformer-XL (kimiyoung/transformer-xl) by name.

The names are those of the `state_dict` of the source model, in which weights of linear maps are
[out, in]. PyTorch is not needed.

N heads, H head width, D model width, F inner width, V vocabulary.
"""

from collections.abc import Mapping
import operator
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion, settings

Source = conversion.Source

# Config fields that every source model shares; sizes, memory and clamp_length differ.
MODEL_OPTIONS = conversion.TORCH_MODEL_OPTIONS | {'position': 'relative'}  # attn_type 0

# Options of any value; all others must have their defaults.
FREE_OPTIONS = (
  *('layers', 'width', 'heads', 'feed_forward_width', 'tie_embeddings'),
  *('positional.shared_biases', 'positional.clamp_length', 'positional.max_length'),
  *('memory.length', 'memory.first', 'memory.across_documents'),
  *('adaptive_softmax.cutoffs', 'adaptive_softmax.divisor', 'adaptive_softmax.embedding_width'),
  *('adaptive_softmax.tied_projections', 'adaptive_softmax.project_same_width'),
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
  **{'n_layer': 12, 'n_head': 10, 'd_head': 50, 'd_model': 500, 'd_inner': 1000, 'd_embed': -1},
  **{'dropout': 0.0, 'dropatt': 0.0, 'not_tied': False, 'div_val': 1, 'pre_lnorm': False},
  **{'tgt_len': 70, 'ext_len': 0, 'mem_len': 0, 'attn_type': 0, 'clamp_len': -1},
  **{'same_length': False, 'sample_softmax': -1, 'adaptive': False, 'dataset': 'wt103'},
  **{'cutoffs': None, 'tie_projs': None},
}
CUTOFFS = {'wt103': (20_000, 40_000, 200_000), 'lm1b': (60_000, 100_000, 640_000)}
# Arguments of training and evaluation, and those that train.py computes.
TRAINING_ARGS = (
  *('data', 'init', 'emb_init', 'init_range', 'emb_init_range', 'init_std', 'proj_init_std'),
  *('optim', 'lr', 'mom', 'scheduler', 'warmup_step', 'decay_rate', 'lr_min', 'clip'),
  *('clip_nonemb', 'max_step', 'batch_size', 'batch_chunk', 'eval_tgt_len', 'seed', 'cuda'),
  *('varlen', 'multi_gpu', 'log_interval', 'eval_interval', 'work_dir', 'restart', 'restart_dir'),
  *('debug', 'eta_min', 'gpu0_bsz', 'max_eval_steps', 'patience', 'finetune_v2', 'finetune_v3'),
  *('fp16', 'static_loss_scale', 'dynamic_loss_scale'),
  *('tied', 'n_token', 'n_all_param', 'n_nonemb_param', 'max_eval_steps'),
)


def config_from_args(args: settings.Settings) -> model_config.ModelConfig:
  """Returns the config of the model of these arguments of train.py, for segments as in training.

  Initial weights are not part of it (see `config.initial`), nor are optimizer and data.

  Args:
    args: the arguments, such as `torch.load('model.pt')` was trained with; those that are not given
      have their official defaults. `cutoffs` and `tie_projs` may be given for other data sets.

  Raises:
    BadInput: an unknown argument, or a value with which the model cannot be loaded.
  """
  a = settings.read(args, ARGS, TRAINING_ARGS, ORIGIN)
  D, embedding_width = a['d_model'], a['d_embed'] if a['d_embed'] >= 0 else a['d_model']
  if a['cutoffs'] and a['tie_projs'] is None:
    raise errors.BadInput(
      f'cutoffs={a["cutoffs"]!r} need tie_projs with {len(a["cutoffs"]) + 1} entries'
    )
  supported = {
    'd_head': (D // a['n_head'],) if D % a['n_head'] == 0 else (),
    'ext_len': (0,),
    'attn_type': range(4),
    'sample_softmax': (-1, 0),
  }
  if a['attn_type'] == ATTENTION_TYPES.index('segment_sinusoid'):
    supported['clamp_len'] = (-1, 0)
  if a['adaptive'] and a['cutoffs'] is None:
    supported['dataset'] = tuple(CUTOFFS)
  settings.check(a, supported, ORIGIN)
  position = ATTENTION_TYPES[a['attn_type']]
  positional = {}
  if position in ('relative', 'shaw'):
    positional['clamp_length'] = a['clamp_len'] if a['clamp_len'] > 0 else None
  if position in ('shaw', 'learned'):
    positional['max_length'] = a['tgt_len'] + (a['mem_len'] if position == 'shaw' else 0)
  memory = None
  if position not in model_config.SEGMENT_POSITIONS or a['mem_len']:
    same_length = 'memory' if a['same_length'] else 'no'
    # The official code knows no documents.
    memory = model_config.MemoryConfig(a['mem_len'], same_length=same_length, across_documents=True)
  config = model_config.ModelConfig(
    **MODEL_OPTIONS
    | {'position': position, 'norm': 'pre' if a['pre_lnorm'] else 'post_skip'}
    | {'layers': a['n_layer'], 'width': D, 'heads': a['n_head']},
    feed_forward_width=a['d_inner'],
    dropout=a['dropout'],
    inner_dropout=a['dropout'],
    attention_dropout=a['dropatt'],
    tie_embeddings=not a['not_tied'],
    positional=model_config.PositionalConfig(**positional),
    memory=memory,
    adaptive_softmax=_adaptive_softmax_config(a, embedding_width),
  )
  config.check()
  return config


def _adaptive_softmax_config(a, embedding_width):
  """Returns the adaptive softmax of the arguments, None for a full one."""
  cutoffs, tied = a['cutoffs'] or (), a['tie_projs']
  if a['adaptive'] and a['cutoffs'] is None:
    cutoffs = CUTOFFS[a['dataset']]
  if tied is None:  # as in train.py
    tied = (False, *(a['dataset'] == 'wt103',) * len(cutoffs))
  if a['div_val'] == 1 and embedding_width == a['d_model']:  # there are no projections
    return model_config.AdaptiveSoftmaxConfig(tuple(cutoffs)) if cutoffs else None
  tied = tuple(map(bool, tied if len(set(tied)) > 1 else tied[:1]))
  width = None if embedding_width == a['d_model'] else embedding_width
  return model_config.AdaptiveSoftmaxConfig(tuple(cutoffs), a['div_val'], width, tied)


def load_language_model(
  arrays: Mapping[str, Any],
  config: model_config.ModelConfig,
  vocabulary_size: int,
  args: settings.Settings | None = None,
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
  sizes of the source model. Pre-norm
  (`pre_lnorm`) is norm='pre'; it cannot be combined with absolute positions, for which the source
  model does not normalize queries. `cutoffs`, `div_val`, `d_embed` and `tie_projs` are fields of
  `model.adaptive_softmax`, which is also needed if `d_embed` is not D. The PyTorch code orders the
  columns of the tail clusters from last to first; the TensorFlow code and this package order them
  from first to last.

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
  # A state_dict may list tied arrays under both of their names.
  ignored = ['pos_emb.inv_freq', *(name for name in arrays if _is_tied_copy(name, arrays))]
  return conversion.convert(arrays, sources, ORIGIN, ignored, dtype)


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
  choices = {'norm': ('post_skip', 'pre'), 'position': ATTENTION_TYPES}
  choices['memory.same_length'] = SAME_LENGTH
  conversion.check_options(config, FREE_OPTIONS, MODEL_OPTIONS, choices)
  if config.norm == 'pre' and config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.norm="pre" with model.position={config.position!r} cannot be loaded: the PyTorch '
      f'code does not normalize queries, model.norm="pre" does'
    )
  sources = _vocabulary_sources(config, vocabulary_size)
  if config.position == 'relative' and config.positions().shared_biases:
    shape = config.heads, config.width // config.heads
    sources |= {f'params/{name}': Source(source, shape) for name, source in BIASES.items()}
  for i in range(config.layers):
    sources |= _layer_sources(config, i)
  return sources


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
  names = 'word_emb', 'crit', 'crit.cluster_'
  # Without a divisor, the source model has one table for all clusters.
  return conversion.torch_adaptive_softmax(config, V, names, adaptive.divisor == 1)


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
    query = conversion.torch_heads(f'{prefix}.dec_attn.q_net.weight', N, D)
    sources[f'{path}/attention/query/kernel'] = query
  out = conversion.torch_merged_heads(f'{prefix}.dec_attn.o_net.weight', N, D)
  sources[f'{path}/attention/out/kernel'] = out
  for name, index, shape in (('in', 0, (F, D)), ('out', 3, (D, F))):
    source_name = f'{prefix}.pos_ff.CoreNet.{index}'
    sources |= conversion.torch_layer(f'{path}/feed_forward/{name}', source_name, *shape)
  norm = 'norm' if config.norm == 'pre' else 'post_norm'
  for name, source_name in (('attention', 'dec_attn'), ('feed_forward', 'pos_ff')):
    source_norm = f'{prefix}.{source_name}.layer_norm'
    sources |= conversion.torch_layer(f'{path}/{name}_{norm}', source_norm, D)
  return sources


def _position_sources(config: model_config.ModelConfig, i: int) -> dict[str, Source]:
  D, N, L = config.width, config.heads, config.layers
  H, rows, path = D // N, config.positions().max_length, f'params/layer_{i}'
  select_layer = operator.itemgetter(i)
  if config.position == 'relative':
    own = {} if config.positions().shared_biases else BIASES
    biases = {f'{path}/attention/{n}': Source(s, (L, N, H), select_layer) for n, s in own.items()}
    source = conversion.torch_heads(f'layers.{i}.dec_attn.r_net.weight', N, D)
    return biases | {f'{path}/attention/relative/position/kernel': source}
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
