"""Compares models with arrays of the official adaptive-span code, in float64 and float32."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import adaptive_span, loader_options, named_arrays
from ngrammer_jax.models import language_model, transformer
from ngrammer_jax.optimizers import partition
from tests.checks import (
  arrays_of,
  assert_close,
  assert_same_arrays,
  bad_input,
  config_file_model,
  full,
  with_scan,
)
from tests.interop.test_transformer_xl import PRECISIONS


def config_of(f, dtype, **fields):
  option = lambda name, default=0: f.get(f'cfg/{name}', default)
  S, C = int(option('S')), int(option('pers'))
  sizes = {
    'layers': int(option('NL', 2)),
    'width': int(option('H', 16)),
    'heads': int(option('K', 2)),
    'feed_forward_width': 0 if C else int(option('INNER', 32)),
    'positional': model_config.PositionalConfig(max_length=S),
    'memory': model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
  }
  if option('adapt', 1):
    ramp, penalty = int(option('R')), float(option('lam'))
    sizes['span'] = model_config.SpanConfig(limit=S, ramp=ramp, penalty=penalty)
  if C:
    sizes['persistent'] = model_config.PersistentConfig(C)
  options = adaptive_span.MODEL_OPTIONS | adaptive_span.FULL_SOFTMAX_OPTIONS
  return model_config.ModelConfig(**options | sizes | {'dtype': dtype} | fields)


def by_distance(probs_BxNxTxS, S):
  """Returns the probabilities of the S keys before each token, the farthest first."""
  B, N, T, keys = probs_BxNxTxS.shape
  rows = [probs_BxNxTxS[:, :, i, keys - T + i - S : keys - T + i] for i in range(T)]
  return np.stack(rows, axis=2).reshape(B * N, T, S)


@pytest.mark.parametrize('dtype, tolerance, scan', with_scan(PRECISIONS))
@pytest.mark.parametrize('name', ['span_adaptive', full('span_fixed_pers')])
def test_stream_matches_reference(reference, name, dtype, tolerance, scan):
  f = reference(name)
  with jax.enable_x64(dtype == 'float64'):
    config, V = config_of(f, dtype, scan_layers=scan), int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    params = adaptive_span.load_language_model(arrays_of(f, 'param/', dtype), config, V)['params']
    memory = jax.jit(lambda: language_model.empty_memory(config, int(f['cfg/B'])))()

    def loss(params, memory, x, y):
      variables = {'params': params}
      (hidden, memory, aux), captured = model.apply(variables, x, memory, mutable=['intermediates'])
      nll = model.apply(variables, hidden, y, method='scores').nll_BxT
      log_probs = model.apply(variables, hidden, method='log_probs')
      return nll.mean() + sum(aux.values()), (log_probs, memory, nll, captured)

    loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for b in range(int(f['cfg/nblk'])):
      for i in range(config.layers):
        assert_close(memory['layers'][i]['hidden'], f[f'cache_in/{b}/{i}'], tolerance)
      (total, (log_probs, memory, nll, captured)), gradient = jax.device_get(
        loss_and_gradient(params, memory, f['x'][b], f['y'][b])
      )
      assert_close(total, f[f'total_loss/{b}'], tolerance)
      assert_close(nll, f[f'nll/{b}'], tolerance)
      assert_close(log_probs, f[f'logprob/{b}'], tolerance)
      for i in range(0 if scan else config.layers):
        (probs,) = captured['intermediates'][f'layer_{i}']['attention']['probs']
        C = int(f['cfg/pers'])
        context = probs[..., : probs.shape[-1] - C]
        assert_close(by_distance(context, int(f['cfg/S'])), f[f'attn/{b}/{i}'], tolerance)
        if C:
          persistent = probs[..., -C:].reshape(-1, *probs.shape[2:3], C)
          assert_close(persistent, f[f'attn_pers/{b}/{i}'], tolerance)
    expected = adaptive_span.load_language_model(arrays_of(f, 'grad/', dtype), config, V)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, expected['params'])


def adagrad(f, dtype, V=23):
  """Returns the optimizer, a loader of the reference arrays, and the config."""
  optimizer_config = experiment.OptimizerConfig(
    algorithm='adagrad',
    learning_rate=float(f['cfg/lr']),
    schedule='constant',
    warmup_steps=int(f['cfg/warm']),
    epsilon=1e-10,
    clip_norm=float(f['cfg/clip']),
  )
  config = config_of(f, dtype)

  def load(prefix):
    arrays = arrays_of(f, prefix, dtype)
    return adaptive_span.load_language_model(arrays, config, V)['params']

  labels = jax.tree.map(lambda _: 'dense', load('param/0/'))
  return partition.make(optimizer_config, 100, labels), load, config


@pytest.mark.full
def test_adagrad_updates_from_reference_gradients(x64, reference):
  f = reference('span_train_adagrad')
  optimizer, load, _ = adagrad(f, 'float64')

  @jax.jit
  def step(gradient, state, params):
    updates, state = optimizer.update(gradient, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  params = load('param/0/')
  state = jax.jit(optimizer.init)(params)
  for s in range(int(f['cfg/steps'])):
    params, state = step(load(f'grad/{s}/'), state, params)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-9), params, load(f'param/{s + 1}/'))


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', PRECISIONS)
def test_training_with_adagrad(reference, dtype, tolerance):
  f = reference('span_train_adagrad')
  with jax.enable_x64(dtype == 'float64'):
    optimizer, load, config = adagrad(f, dtype)
    model, params = transformer.TransformerLM(config, 23), load('param/0/')
    state, memory = optimizer.init(params), language_model.empty_memory(config, f['x'].shape[1])

    def loss(params, memory, x, y):
      variables = {'params': params}
      hidden, memory, aux = model.apply(variables, x, memory)
      nll = model.apply(variables, hidden, y, method='scores').nll_BxT.mean()
      return nll + sum(aux.values()), (nll, memory)

    loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for s in range(int(f['cfg/steps'])):
      (_, (nll, memory)), gradient = loss_and_gradient(params, memory, f['x'][s], f['y'][s])
      assert_close(nll, f[f'loss/{s}'], tolerance)
      jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, load(f'grad/{s}/'))
      updates, state = optimizer.update(gradient, state, params)
      params = jax.tree.map(jnp.add, params, updates)
      jax.tree.map(lambda a, b: assert_close(a, b, tolerance), params, load(f'param/{s + 1}/'))


def args_of(f):
  """The arguments of main.py in its groups."""
  option = lambda name: f[f'cfg/{name}'].item()
  return {
    'model_params': {
      'hidden_size': option('H'),
      'inner_hidden_size': option('INNER'),
      'nb_heads': option('K'),
      'nb_layers': option('NL'),
      'attn_span': option('S'),
      'block_size': 8,
      'dropout': 0.1,
    },
    'adapt_span_params': {
      'adapt_span_enabled': bool(option('adapt')),
      'adapt_span_ramp': option('R'),
      'adapt_span_loss': option('lam'),
    },
    'pers_mem_params': {'pers_mem_size': option('pers')},
    'optim_params': {'lr': 0.07},
  }


@pytest.mark.parametrize('name', ['span_adaptive', 'span_fixed_pers'])
def test_the_config_of_official_arguments(x64, reference, name):
  """That of the official arrays; the exported arrays are the official ones bit for bit."""
  f = reference(name)
  args = args_of(f)
  config = adaptive_span.config_from_args(args)
  assert config.attention_dropout == config.inner_dropout == 0.1 and config.dropout == 0
  expected = config_of(f, 'auto', attention_dropout=0.1, inner_dropout=0.1)
  if expected.span is not None:
    expected = dataclasses.replace(expected, span=dataclasses.replace(expected.span, initial=0.0))
  assert dataclasses.replace(config, feed_forward_width=expected.feed_forward_width) == expected
  arrays = arrays_of(f, 'param/', 'float64')
  config = dataclasses.replace(config, dtype='float64')
  variables = adaptive_span.load_language_model(arrays, config, 23, args)
  assert_same_arrays(adaptive_span.export_language_model(variables, config, 23), arrays, 0)
  cap = dataclasses.replace(config, attention=model_config.AttentionConfig(20.0))
  with bad_input('model.attention.logit_cap=20.0 must be None for these official settings'):
    adaptive_span.load_language_model(arrays, cap, 23, args)
  flat = argparse.Namespace(**{k: v for group in args.values() for k, v in group.items()})
  flat.nb_heads = 4
  with bad_input('model.heads=2 must be 4 for these official settings'):
    adaptive_span.load_language_model(arrays, config, 23, flat)


def test_official_arguments_with_adaptive_input_and_output():
  args = {'adapt_io_enabled': True, 'adapt_io_cutoffs': [6, 12], 'adapt_io_divval': 2}
  args |= {'hidden_size': 16, 'nb_layers': 2, 'attn_span': 8, 'emb_dropout': 0.2}
  config = adaptive_span.config_from_args(args | {'adapt_io_tied': True})
  expected = model_config.AdaptiveSoftmaxConfig((6, 12), 2, dropout=0.2)
  assert config.adaptive_softmax == expected and config.tie_embeddings and config.scale_embeddings
  suffix = 'an adaptive-span model with another value is a model that cannot be loaded'
  with bad_input(f'adapt_io_tied=False must be True: {suffix}'):
    adaptive_span.config_from_args(args)
  with bad_input(f'emb_dropout=0.2 must be 0: {suffix}'):
    adaptive_span.config_from_args({'emb_dropout': 0.2})
  with bad_input(
    'an adaptive-span model has no setting nb_head (its value is 3): did you mean nb_heads?'
  ):
    adaptive_span.config_from_args({'nb_head': 3})


def test_exported_variables_that_do_not_fit_are_listed():
  config = config_of({'cfg/S': 8, 'cfg/R': 4, 'cfg/lam': 0.1}, 'float32')
  variables = {'params': {'embedding': np.zeros((3, 16)), 'more': np.zeros(2)}}
  with pytest.raises(errors.BadInput, match='arrays do not match an adaptive-span') as error:
    adaptive_span.export_language_model(variables, config, 23)
  for line in (
    'missing: params/softmax_bias (23,)',
    'extra: params/more (2,)',
    'wrong shape: params/embedding is (3, 16), expected (23, 16)',
  ):
    assert line in str(error.value)


@pytest.mark.parametrize(
  'script, args',
  [
    (
      'enwik8_small',
      {'nb_layers': 8, 'hidden_size': 256, 'nb_heads': 4, 'attn_span': 1024, 'dropout': 0.0}
      | {'adapt_span_loss': 2e-6},
    ),
    (
      'wiki103_pers',
      {'nb_layers': 36, 'hidden_size': 512, 'inner_hidden_size': 1, 'nb_heads': 8}
      | {'attn_span': 2048, 'dropout': 0.3, 'emb_dropout': 0.1, 'adapt_span_loss': 5e-7}
      | {'pers_mem_size': 2048, 'adapt_io_enabled': True, 'adapt_io_tied': True},
    ),
  ],
)
def test_the_arguments_of_the_official_scripts_make_the_models_of_the_configs(script, args):
  config = adaptive_span.config_from_args(args | {'adapt_span_enabled': True})
  expected = config_file_model(f'adaptive_span.py:{script}')
  loader_options.check_same_model(expected, config)
  assert config.span.penalty == expected.span.penalty
  assert config.adaptive_softmax == expected.adaptive_softmax  # its dropout too
  for name in ('dropout', 'inner_dropout', 'attention_dropout'):
    assert getattr(config, name) == getattr(expected, name)


def layer_norm(x, arrays, name):
  centred = x - x.mean(axis=-1, keepdims=True)
  normalised = centred / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
  return normalised * arrays[f'{name}.weight'] + arrays[f'{name}.bias']


def untrimmed_log_probs(arrays, tokens, heads, S, R):
  """The official model of one layer in loops, without trimming; the cache is zeros."""
  a = {name.removeprefix('layers.0.'): array for name, array in arrays.items()}
  x_TxD = a['in_emb.weight'][tokens]
  T, D = x_TxD.shape
  H = D // heads
  history = np.concatenate([np.zeros((S, D)), x_TxD])
  head_outputs = np.zeros((T, D))
  for n in range(heads):
    rows = slice(n * H, (n + 1) * H)
    span = S * a['attn.attn.adaptive_span._mask.current_val'][n, 0, 0]
    for t in range(T):
      query = a['attn.proj_query.weight'][rows] @ x_TxD[t]
      scores, values, mask = [], [], []
      for distance in range(1, S + 1):
        h = history[S + t - distance]
        key = a['attn.proj_key.weight'][rows] @ h + a['key_pe'][0, :, S - distance]
        scores.append(query @ key / np.sqrt(H))
        values.append(a['attn.proj_val.weight'][rows] @ h)
        mask.append(np.clip((R + span + 1 - distance) / R, 0, 1))
      exponents = np.exp(np.array(scores) - max(scores))
      masked = exponents / exponents.sum() * np.array(mask)
      head_outputs[t, rows] = masked / (masked.sum() + 1e-8) @ np.array(values)
  x_TxD = layer_norm(x_TxD + head_outputs @ a['attn.proj_out.weight'].T, a, 'norm1')
  inner = np.maximum(x_TxD @ a['ff.fc1.weight'].T + a['ff.fc1.bias'], 0)
  x_TxD = layer_norm(x_TxD + inner @ a['ff.fc2.weight'].T + a['ff.fc2.bias'], a, 'norm2')
  logits = x_TxD @ a['out_emb.weight'].T + a['out_emb.bias']
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_all_keys_of_the_window_count_without_trimming(x64):
  """`epsilon_keys='all'` is the official rule where nothing is trimmed; the default is not."""
  S, R, V = 64, 4, 11
  args = {'hidden_size': 8, 'inner_hidden_size': 12, 'nb_layers': 1, 'nb_heads': 2}
  args |= {'attn_span': S, 'adapt_span_enabled': True, 'adapt_span_ramp': R}
  official = adaptive_span.config_from_args(args)
  default = dataclasses.replace(official, dtype='float64')
  span = dataclasses.replace(official.span, epsilon_keys='all')
  untrimmed = dataclasses.replace(default, span=span)
  rng = np.random.default_rng(0)
  sources = adaptive_span._sources(untrimmed, V)
  shapes = named_arrays.shapes_by_name(sources)
  arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
  arrays['layers.0.attn.attn.adaptive_span._mask.current_val'][:, 0, 0] = 0.0, 0.1
  tokens = rng.integers(V, size=5)

  def log_probs(config):
    variables = adaptive_span.load_language_model(arrays, config, V, args)
    model = transformer.TransformerLM(config, V)
    memory = language_model.empty_memory(config, 1)
    hidden, _, _ = jax.jit(model.apply)(variables, tokens[None], memory)
    return model.apply(variables, hidden, method='log_probs')[0]

  expected = untrimmed_log_probs(arrays, tokens, 2, S, R)
  np.testing.assert_allclose(log_probs(untrimmed), expected, atol=1e-11)
  assert np.abs(log_probs(default) - expected).max() > 1e-10
  with bad_input("model.span.epsilon_keys='span' must be None or 'all' for these weights"):
    log_probs(dataclasses.replace(default, span=dataclasses.replace(span, epsilon_keys='span')))


@pytest.mark.full
def test_all_keys_count_in_the_official_arrays(x64, reference):
  """With spans below 64, the default is the same rule."""
  f = reference('span_adaptive')
  config, V = config_of(f, 'float64'), int(f['cfg/V'])
  span = dataclasses.replace(config.span, epsilon_keys='all')
  config = dataclasses.replace(config, span=span)
  variables = adaptive_span.load_language_model(arrays_of(f, 'param/', 'float64'), config, V)
  model = transformer.TransformerLM(config, V)
  memory = language_model.empty_memory(config, int(f['cfg/B']))
  hidden, _, _ = jax.jit(model.apply)(variables, f['x'][0], memory)
  log_probs = model.apply(variables, hidden, method='log_probs')
  assert_close(log_probs, f['logprob/0'], 1e-9)
