"""Configs of praxis hyperparameters, and what praxis models of other settings do not become."""

import dataclasses

import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import conversion, praxis, praxis_hyperparameters
from tests.checks import assert_same_arrays, bad_input
from tests.interop.test_praxis import LM_CONFIG

STACK = {'num_layers': 2, 'num_heads': 2, 'hidden_dims': 24, 'dropout_prob': 0.1}
STACK |= {'fprop_dtype': 'bfloat16', 'params_init': {'method': 'gaussian', 'scale': 0.02}}
ATTENTION = {'use_rotary_position_emb': True}
FEED_FORWARD = {
  'use_gated_activation': True,
  'activation_tpl': {'cls': 'praxis.layers.activations.GELU'},
}
SUFFIX = 'a praxis TransformerLm with another value is a model that cannot be loaded'


def hyperparameters(stack=(), layer=(), attention=(), feed_forward=(), **others):
  """Those of `lm_plain`, nested as the templates of praxis, with changes."""
  layer = dict(layer) | {
    'tr_atten_tpl': ATTENTION | dict(attention),
    'tr_fflayer_tpl': FEED_FORWARD | dict(feed_forward),
  }
  return {
    'model_dims': 16,
    'vocab_size': 23,
    'stacked_transformer_tpl': STACK | dict(stack) | {'transformer_layer_params_tpl': layer},
    'softmax_tpl': {'scale_sqrt_depth': True},
    'position_emb_tpl': None,
  } | others


def config_of(**changes):
  return praxis_hyperparameters.config_from_hyperparameters(hyperparameters(**changes))


def test_the_config_of_the_official_arrays(x64, reference):
  f = reference('lm_plain')
  config = config_of()
  conversion.check_same_model(config, model_config.ModelConfig(**LM_CONFIG))
  arrays = {k: v for k, v in f.items() if k.startswith('param/')}
  variables = praxis.load_language_model(arrays, config, 23, hyperparameters())
  exported = praxis.export_language_model(variables, config, 23)
  official = {k.replace('param/', 'params/'): v for k, v in arrays.items()}
  assert_same_arrays(exported, official, 1e-15)  # praxis stores scales minus 1


@pytest.mark.parametrize(
  'changes, fields',
  [
    ({'attention': {'atten_logit_cap': 50.0}}, {'attention': model_config.AttentionConfig(50.0)}),
    (
      {'feed_forward': {'activation_tpl': {'cls': 'GELU', 'approximate': False}}},
      {'activation': 'gelu_erf', 'gated': True},
    ),
    (
      {'feed_forward': {'activation_tpl': {'cls': 'SquaredReLU'}, 'use_gated_activation': False}},
      {'activation': 'squared_relu', 'gated': False},
    ),
    (
      {
        'position_emb_tpl': {'cls': 'PositionalEmbedding'},
        'attention': {'use_rotary_position_emb': False, 'internal_enable_per_dim_scale': False},
      },
      {'position': 'sinusoid', 'per_dim_scale': False},
    ),
    ({'attention': {'use_rotary_position_emb': False}}, {'position': 'none'}),
    (
      {'attention': {'dconv_qkv': True}, 'layer': {'norm_policy': 'primer_hybrid'}},
      {'convolution': 3, 'norm': 'hybrid'},
    ),
    (
      {
        'separate_embedding_tpl': {'cls': 'Embedding'},
        'softmax_tpl': {'cls': 'FullSoftmax'},
        'attention': {'use_bias': False},
        'feed_forward': {'has_bias': False},
      },
      {'tie_embeddings': False, 'scale_embeddings': False, 'bias': False},
    ),
    (
      {'ngrammer_tpl': {'cls': 'VQNgrammer', 'num_clusters': 8, 'ngram_vocab_size': 50}},
      {'ngram': model_config.NGramConfig(8, 50, 8, combine='add')},
    ),
    (
      {'ngrammer_tpl': {'cls': 'Ngrammer', 'num_heads': 4, 'ngram_emb_dim': 4}},
      {'ngram': model_config.NGramConfig(None, 196_608, 4, heads=4)},
    ),
  ],
)
def test_hyperparameters_become_options(changes, fields):
  config = config_of(**changes)
  assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      {'attention': {'attention_extra_logit': 0.0}},
      'stacked_transformer_tpl.transformer_layer_params_tpl.tr_atten_tpl.attention_extra_logit=0.0 '
      f'must be None: {SUFFIX}',
    ),
    (
      {'softmax_tpl': {'soft_cap_logits': 30.0}},
      f'softmax_tpl.soft_cap_logits=30.0 must be 0.0 or None: {SUFFIX}',
    ),
    (
      {'feed_forward': {'has_bias': False}},
      'stacked_transformer_tpl.transformer_layer_params_tpl.tr_fflayer_tpl.has_bias=False must be '
      f'True: {SUFFIX}',
    ),
    (
      {'stack': {'num_layer': 3}},
      'a praxis TransformerLm has no setting stacked_transformer_tpl.num_layer (its value is 3): '
      'did you mean stacked_transformer_tpl.num_layers?',
    ),
    (
      {'stack': {'num_heads': 0}},
      'stacked_transformer_tpl.num_heads is missing or 0: a praxis TransformerLm needs at least 1',
    ),
    (
      {'ngrammer_tpl': {'num_clusters': 4, 'ngram_vocab_size': 50}},
      'ngrammer_tpl.cls is missing: expected VQNgrammer or Ngrammer',
    ),
  ],
)
def test_hyperparameters_of_other_models_are_refused(changes, message):
  with bad_input(message):
    config_of(**changes)


def test_a_config_without_the_logit_cap_of_the_model_is_refused():
  capped = hyperparameters(attention={'atten_logit_cap': 20.0})
  config = config_of()
  with bad_input('model.attention.logit_cap=None must be 20.0 for these official settings'):
    praxis.load_language_model({}, config, 23, capped)
  config = dataclasses.replace(config, attention=model_config.AttentionConfig(20.0))
  with bad_input('model.attention.logit_cap=20.0 must be None for these official settings'):
    praxis.load_language_model({}, config, 23, hyperparameters())


def test_inputs_of_praxis(reference):
  """Packed sequences, with and without the positions in them."""
  f = reference('lm_plain')
  paddings, ids, places = (f[f'packed/{n}'] for n in ('paddings', 'segment_ids', 'segment_pos'))
  for arrays in ((paddings, ids), (paddings, ids, places)):
    valid, starts = praxis.valid_and_starts(*arrays)
    np.testing.assert_array_equal(valid, 1 - paddings)
    is_valid = valid > 0
    np.testing.assert_array_equal(starts[is_valid], (places == 0)[is_valid])
  valid, starts = praxis.valid_and_starts(paddings)
  assert starts[:, 0].all() and not starts[:, 1:].any()
  message = 'row 2 of the paddings has padding before a token: move it to the end of the row'
  with bad_input(message):
    praxis.valid_and_starts(paddings[:, ::-1])
