"""Compares models with arrays of the PyTorch Transformer-XL, in float64 and float32."""

import argparse
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import loader_options, transformer_xl
from ngrammer_jax.layers.attention import relative
from ngrammer_jax.models import language_model, transformer
from tests.checks import (
  arrays_of,
  assert_close,
  assert_same_arrays,
  bad_input,
  config_file_model,
  missing_arrays,
  rest_is_full,
  with_scan,
)

pytestmark = pytest.mark.usefixtures('all_shown')

PRECISIONS = [('float64', 1e-9), ('float32', 1e-4)]


def test_shift_and_encodings(reference):
  f = reference('xl_rel_shift')
  shifted = np.asarray(jax.jit(relative.shift)(f['x'][None, None]))[0, 0]
  T, S = f['x'].shape
  is_visible = np.tril(np.ones((T, S), bool), S - T)
  assert_close(np.where(is_visible, shifted, 0), np.where(is_visible, f['shifted'], 0), 1e-6)
  f = reference('xl_sinusoid')
  assert f['pos'].tolist() == list(range(15, -1, -1))
  with jax.enable_x64(True):
    encodings = jax.jit(lambda: relative.encodings(16, 16, dtype=jnp.float64))()
    assert_close(encodings, f['emb'] - f['emb'][-1], 1e-12)


def config_of(f, dtype, **fields):
  memory = model_config.MemoryConfig(length=int(f['cfg/mem_len']))
  clamp = int(f['cfg/clamp_len'])
  sizes = {
    'layers': int(f['cfg/n_layer']),
    'width': int(f['cfg/d_model']),
    'heads': int(f['cfg/n_head']),
    'feed_forward_width': int(f['cfg/d_inner']),
    'positional': model_config.PositionalConfig(clamp_length=clamp if clamp > 0 else None),
  }
  options = transformer_xl.MODEL_OPTIONS | sizes | {'memory': memory, 'dtype': dtype} | fields
  return model_config.ModelConfig(**options)


@pytest.mark.full
@pytest.mark.parametrize('dtype, tolerance, scan', with_scan(PRECISIONS))
def test_stream_matches_reference(reference, dtype, tolerance, scan):
  f = reference('xl_base')
  with jax.enable_x64(dtype == 'float64'):
    config = config_of(f, dtype, scan_layers=scan)
    V = int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    variables = transformer_xl.load_language_model(arrays_of(f, 'param/', dtype), config, V)
    memory = jax.jit(lambda: language_model.empty_memory(config, int(f['cfg/B'])))()

    def loss(params, memory, x, y):
      variables = {'params': params}
      (hidden, memory, _), captured = model.apply(variables, x, memory, mutable=['intermediates'])
      scores = model.apply(variables, hidden, y, method='scores')
      log_probs = model.apply(variables, hidden, method='log_probs')
      return scores.nll_BxT.mean(), (hidden, memory, scores.nll_BxT, log_probs, captured)

    loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for s in range(int(f['cfg/n_seg'])):
      (value, (hidden, memory, nll, log_probs, captured)), gradient = jax.device_get(
        loss_and_gradient(variables['params'], memory, f[f'x/{s}'].T, f[f'y/{s}'].T)
      )
      assert_close(value, f[f'loss/{s}'], tolerance)
      assert_close(hidden.swapaxes(0, 1), f[f'hidden/{s}'], tolerance)
      assert_close(nll.T, f[f'nll/{s}'], tolerance)
      assert_close(log_probs.swapaxes(0, 1), f[f'logprob/{s}'], tolerance)
      for i in range(config.layers):
        expected = f[f'mems_out/{s}/{i}']
        layer_memory = memory['layers'][i]['hidden'].swapaxes(0, 1)
        assert_close(layer_memory[-len(expected) :], expected, tolerance)
        if not scan:
          (probs,) = captured['intermediates'][f'layer_{i}']['attention']['probs']
          expected = f[f'attn_prob/{s}/{i}']
          assert_close(probs.transpose(2, 3, 0, 1)[:, -expected.shape[1] :], expected, tolerance)
    gradients = transformer_xl.load_language_model(arrays_of(f, 'grad/', dtype), config, V)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, gradients['params'])


VARIANTS = {
  'pre-norm': {'norm': 'pre'},
  'biases per layer': {'positional': model_config.PositionalConfig(shared_biases=False)},
  'learned distances': {
    'position': 'shaw',
    'positional': model_config.PositionalConfig(max_length=8),
  },
  'sinusoids': {'position': 'segment_sinusoid', 'memory': None},
  'learned positions': {
    'position': 'learned',
    'positional': model_config.PositionalConfig(max_length=8),
    'memory': None,
  },
  'narrow embedding': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig(embedding_width=8)},
  'adaptive': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12))},
  'adaptive, with divisor': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12), 2)},
  'adaptive, untied': {
    'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12), 2, tied_projections=(False,)),
    'tie_embeddings': False,
  },
}


@pytest.mark.parametrize('variant', rest_is_full(VARIANTS, ('sinusoids',)))
def test_source_names_of_a_variant_cover_all_variables(reference, variant):
  f = reference('xl_base') | {'cfg/clamp_len': -1}
  fields = {'positional': None} | VARIANTS[variant]
  config, V = config_of(f, 'float32', **fields), 23
  with pytest.raises(errors.BadInput) as error:
    transformer_xl.load_language_model({}, config, V)
  arrays = missing_arrays(error.value)
  variables = transformer_xl.load_language_model(arrays, config, V)
  model, tokens = transformer.TransformerLM(config, V), np.zeros((1, 3), np.int32)
  memory = language_model.empty_memory(config, 1)
  expected = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens, memory)))
  get_shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  assert get_shapes(variables) == get_shapes(expected)
  assert_same_arrays(transformer_xl.export_language_model(variables, config, V), arrays)
  fused_name = 'layers.1.dec_attn.kv_net.weight'
  if fused_name in arrays:  # keys first
    attention = variables['params']['layer_1']['attention']
    for name, weight in zip(('key', 'value'), np.split(arrays[fused_name], 2), strict=True):
      kernel = attention[name]['kernel']
      assert_close(kernel, weight.T.reshape(kernel.shape), 1e-6)
  assert (fused_name in arrays) == (config.position in model_config.SEGMENT_POSITIONS)
  if 'crit.cluster_weight' in arrays:  # the source has the last tail cluster first
    cluster_weight = variables['params']['adaptive_softmax']['cluster_weight']
    assert_close(cluster_weight, arrays['crit.cluster_weight'][::-1], 1e-6)


def test_all_mismatches_are_listed(reference):
  f = reference('xl_base')
  arrays = arrays_of(f, 'param/', 'float32')
  arrays['r_w_bias'] = arrays['r_w_bias'][:1]
  arrays['r_x_bias'] = arrays.pop('r_r_bias')
  with pytest.raises(errors.BadInput) as error:
    transformer_xl.load_language_model(arrays, config_of(f, 'float32'), 23)
  assert str(error.value).splitlines() == [
    '3 arrays do not match a Transformer-XL. Check the config against the arrays.',
    '  missing: r_r_bias (2, 8)',
    '  extra: r_x_bias (2, 8)',
    '  wrong shape: r_w_bias is (1, 8), expected (2, 8)',
  ]
  message = "model.norm='hybrid' must be 'post_skip' or 'pre' for these weights"
  with pytest.raises(errors.BadInput, match=message):
    config = config_of(f, 'float32', norm='hybrid')
    transformer_xl.load_language_model(arrays_of(f, 'param/', 'float32'), config, 23)


def test_untied_arrays_are_not_ignored_if_the_config_ties_them(reference):
  f = reference('xl_base')
  arrays, config = arrays_of(f, 'param/', 'float32'), config_of(f, 'float32')
  copy = 'crit.out_layers.0.weight'
  arrays[copy] = arrays['word_emb.emb_layers.0.weight']
  transformer_xl.load_language_model(arrays, config, 23)  # a tied array under both names
  arrays[copy] = arrays[copy] + 1
  with pytest.raises(errors.BadInput, match=rf'extra: {copy}'):
    transformer_xl.load_language_model(arrays, config, 23)
  with pytest.raises(errors.BadInput, match='model.scale_embeddings=False must be True'):
    other = config_of(f, 'float32', scale_embeddings=False)
    transformer_xl.load_language_model(arrays_of(f, 'param/', 'float32'), other, 23)


ARGS = {'n_layer': 2, 'n_head': 2, 'd_head': 8, 'd_model': 16, 'd_inner': 32, 'tgt_len': 8}


def test_the_config_of_official_arguments(x64, reference):
  """That of the official arrays; the exported arrays are the official ones bit for bit."""
  f = reference('xl_base')
  args = {name: f[f'cfg/{name}'].item() for name in (*ARGS, 'mem_len') if f'cfg/{name}' in f}
  config = transformer_xl.config_from_args(args | {'dropout': 0.1, 'lr': 1.0, 'seed': 1})
  assert (config.dropout, config.inner_dropout, config.attention_dropout) == (0.1, 0.1, 0.0)
  config = dataclasses.replace(config, dtype='float64')
  official = config_of(f, 'float64')
  loader_options.check_same_model(
    config,
    dataclasses.replace(
      official, memory=dataclasses.replace(official.memory, across_documents=True)
    ),
  )
  arrays = arrays_of(f, 'param/', 'float64')
  variables = transformer_xl.load_language_model(arrays, config, 23, args)
  exported = transformer_xl.export_language_model(variables, config, 23)
  assert_same_arrays(exported, arrays, 0)
  with bad_input('model.memory.length=9 must be 8 for these official settings'):
    longer = dataclasses.replace(config.memory, length=9)
    longer = dataclasses.replace(config, memory=longer)
    transformer_xl.load_language_model(arrays, longer, 23, argparse.Namespace(**args))


@pytest.mark.parametrize(
  'args, fields',
  [
    ({'pre_lnorm': True, 'not_tied': True}, {'norm': 'pre', 'tie_embeddings': False}),
    ({'attn_type': 1, 'clamp_len': 3, 'mem_len': 4}, {'position': 'shaw'}),
    ({'attn_type': 3}, {'position': 'learned', 'memory': None}),
    (
      {'adaptive': True, 'dataset': 'lm1b', 'div_val': 2},
      {
        'adaptive_softmax': model_config.AdaptiveSoftmaxConfig(
          transformer_xl.CUTOFFS['lm1b'], 2, None, (False,)
        )
      },
    ),
    (
      {'cutoffs': [6, 12], 'tie_projs': [False, True, True], 'd_embed': 8},
      {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12), 1, 8, (False, True, True))},
    ),
    (
      {'same_length': True, 'mem_len': 4},
      {'memory': model_config.MemoryConfig(4, same_length='memory', across_documents=True)},
    ),
  ],
)
def test_official_arguments_become_options(args, fields):
  config = transformer_xl.config_from_args(ARGS | args)
  assert {name: getattr(config, name) for name in fields} == fields
  if config.position == 'shaw':
    assert (config.positional.max_length, config.positional.clamp_length) == (12, 3)


@pytest.mark.parametrize(
  'args, message',
  [
    (
      {'attn_type': 2, 'clamp_len': 3},
      'clamp_len=3 must be -1 or 0: a Transformer-XL with another value is a model that cannot be '
      'loaded',
    ),
    (
      {'ext_len': 4, 'd_head': 4},
      'd_head=4 must be 8: a Transformer-XL with another value is a model that cannot be loaded\n'
      'ext_len=4 must be 0: a Transformer-XL with another value is a model that cannot be loaded',
    ),
    (
      {'n_layers': 3},
      'a Transformer-XL has no setting n_layers (its value is 3): did you mean n_layer?',
    ),
    ({'cutoffs': [6]}, 'cutoffs=[6] need tie_projs with 2 entries'),
    (
      {'adaptive': True, 'dataset': 'enwik8'},
      "dataset='enwik8' must be 'wt103' or 'lm1b': a Transformer-XL with another value is a model "
      'that cannot be loaded',
    ),
  ],
)
def test_official_arguments_of_other_models_are_refused(args, message):
  with bad_input(message):
    transformer_xl.config_from_args(ARGS | args)


# The arguments of the scripts of the official code, in the order of SCRIPT_ARGS.
SCRIPT_ARGS = (
  'dataset',
  'n_layer',
  'd_model',
  'n_head',
  'd_inner',
  'dropout',
  'dropatt',
  'tgt_len',
)
SCRIPTS = {
  'enwik8_base': ('enwik8', 12, 512, 8, 2048, 0.1, 0.0, 512),
  'wt103_base': ('wt103', 16, 410, 10, 2100, 0.1, 0.0, 150),
  'wt103_large': ('wt103', 18, 1024, 16, 4096, 0.2, 0.2, 384),
  'lm1b_large': ('lm1b', 24, 1280, 16, 8192, 0.05, 0.05, 32),
}


@pytest.mark.parametrize('script', SCRIPTS)
def test_the_arguments_of_the_official_scripts_make_the_models_of_the_configs(script):
  args = dict(zip(SCRIPT_ARGS, SCRIPTS[script], strict=True))
  args |= {'d_head': args['d_model'] // args['n_head'], 'mem_len': args['tgt_len'], 'cuda': True}
  args |= {'adaptive': args['dataset'] != 'enwik8', 'div_val': 4 if 'large' in script else 1}
  config = transformer_xl.config_from_args(args)
  expected = config_file_model(f'transformer_xl.py:{script}')
  loader_options.check_same_model(expected, config)
  dropout = lambda c: (c.dropout, c.inner_dropout, c.attention_dropout)
  assert dropout(config) == dropout(expected)
