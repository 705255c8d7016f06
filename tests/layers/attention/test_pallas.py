"""The Pallas kernels equal attention over full scores, in values and gradients (interpreted)."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import documents, dropout
from ngrammer_jax.layers.attention import pallas, relative
from ngrammer_jax.layers.attention.full import Heads, SpanMask
from ngrammer_jax.layers.context import Keys
from ngrammer_jax.models import language_model
from tests.layers.attention import test_blocks as blocked
from tests.layers.attention.test_blocks import RAMP, B, H, M, N, S, T

CASES = {
  'plain': {},
  'relative': {'distance': 'plain'},
  'shaw_same_length': {'distance': 'biased', 'window': 17},
  'shared_encoding': {'distance': 'shared'},
  'adaptive': {'spans': 'adaptive', 'distance': 'plain', 'window': M + 1, 'sees_itself': False},
  'dynamic': {'spans': 'dynamic'},
  'not_renormalized': {'spans': 'adaptive', 'renormalize': False, 'window': 13},
  'capped': {'spans': 'adaptive', 'distance': 'biased', 'logit_cap': 0.7},
}


@pytest.mark.parametrize('case', CASES)
def test_equals_full_scores(x64, monkeypatch, case):
  options = CASES[case]
  monkeypatch.setattr(pallas, 'BLOCK', 8)
  rng = np.random.default_rng(0)
  distance, spans = options.get('distance'), options.get('spans')
  heads, weights, z_BxTxN = blocked.random_operands(rng, distance, spans)
  if distance == 'shared':
    term = heads.distance
    heads = heads._replace(distance=term._replace(encoding_SxNxH=term.encoding_SxNxH[:, :1]))
  rows = jnp.asarray(rng.normal(size=(B, M, blocked.D)))
  document_BxS = np.zeros((B, S), np.int32)
  document_BxS[0, 10:] = 1
  document_BxS[0, M + 7 :] = 2
  document_BxS[1, :M] = documents.NONE
  document_BxS[1, M + 15 :] = documents.PADDING
  keys = Keys(
    query_documents_BxT=jnp.asarray(document_BxS[:, M:]),
    key_documents_BxS=jnp.asarray(document_BxS),
    window=options.get('window'),
    sees_itself=options.get('sees_itself', True),
  )
  renormalize, logit_cap = options.get('renormalize', True), options.get('logit_cap')
  no_drop = dropout.Dropout()

  def kernel(heads, weights, z_BxTxN):
    memory = (jnp.einsum('bmd,ndh->bmnh', rows, weight) for weight in weights)
    key, value = (jnp.concatenate(pair, axis=1) for pair in zip(memory, heads[1:3], strict=True))
    spans = None if z_BxTxN is None else SpanMask(z_BxTxN, RAMP, renormalize)
    heads = heads._replace(key_BxSxCxH=key, value_BxSxCxH=value, logit_cap=logit_cap)
    part = pallas.attend(heads, spans, keys)
    return part.values_BxTxNxH, part.log_mass_BxNxT

  def full(heads, weights, z_BxTxN):
    if heads.distance is not None:  # a shared encoding is that of all heads
      encoding_SxNxH = jnp.broadcast_to(heads.distance.encoding_SxNxH, (S, N, H))
      heads = heads._replace(distance=heads.distance._replace(encoding_SxNxH=encoding_SxNxH))
    operands = heads, weights, z_BxTxN
    return blocked.reference(operands, rows, keys, no_drop, renormalize, logit_cap)[:2]

  mixed = jnp.asarray(rng.normal(size=(B, T, N, H)))

  def values_and_gradient(attend):
    def loss(operands):
      values, log_mass = attend(*operands)
      log_mass = jnp.where(log_mass > -1e30, log_mass, 0)
      mixed_mass = log_mass * mixed[..., 0].swapaxes(1, 2)
      return (values * mixed).sum() + mixed_mass.sum(), (values, log_mass)

    (_, results), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      (heads, weights, z_BxTxN)
    )
    return results, gradient

  results, gradient = values_and_gradient(kernel)
  expected, expected_gradient = values_and_gradient(full)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, results, expected)
  jax.tree.map(close, gradient, expected_gradient)


def test_a_model_with_memory_uses_the_kernels(x64, one_device, monkeypatch):
  monkeypatch.setattr(pallas, 'BLOCK', 8)
  config = model_config.ModelConfig(
    layers=1,
    width=16,
    heads=2,
    feed_forward_width=16,
    position='relative',
    dtype='float64',
    memory=model_config.MemoryConfig(length=8),
  )
  tokens = np.random.default_rng(0).integers(0, 9, (2, 12))
  hidden = {}
  for kernel in ('xla', 'pallas'):
    model = language_model.build(dataclasses.replace(config, kernel=kernel), 9)
    memory = language_model.empty_memory(config, 2)
    variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, memory))

    def stream(variables, model=model, memory=memory):
      _, memory, _ = model.apply(variables, tokens, memory)
      return model.apply(variables, tokens[:, ::-1], memory)[0]

    assert ('pallas_call' in str(jax.make_jaxpr(stream)(variables))) == (kernel == 'pallas')
    hidden[kernel] = jax.jit(stream)(variables)
  np.testing.assert_allclose(hidden['pallas'], hidden['xla'], rtol=1e-9, atol=1e-9)


def test_each_device_attends_for_its_rows_and_heads(x64, monkeypatch):
  monkeypatch.setattr(pallas, 'BLOCK', 8)
  rng = np.random.default_rng(0)
  heads, _, z_BxTxN = blocked.random_operands(rng, 'biased', 'dynamic')
  heads = jax.tree.map(lambda x: jnp.concatenate([x, x[..., :1, :]], axis=-2), heads[:3])
  term = jax.tree.map(lambda x: x[-T:], blocked.random_operands(rng, 'plain', None)[0].distance)
  encoding = jnp.concatenate([term.encoding_SxNxH, term.encoding_SxNxH[:, :1]], axis=1)
  query = jnp.concatenate([term.query_BxTxNxH, term.query_BxTxNxH[:, :, :1]], axis=2)
  mesh = sharding.make_mesh(2, 1, 4)
  zeros = jnp.zeros((B, T), jnp.int32)
  keys = Keys(query_documents_BxT=zeros, key_documents_BxS=zeros)

  def loss(query, key, value, encoding):
    distance = relative.DistanceTerm(distance_query, encoding)
    part = pallas.attend(Heads(query, key, value, distance), None, keys)
    return (part.values_BxTxNxH**2).sum() + part.log_mass_BxNxT.sum()

  distance_query, arguments = query, (*heads, encoding)
  run = lambda: jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)
  expected = run()
  with sharding.use(mesh):
    assert 'shard_map' in str(jax.make_jaxpr(loss)(*arguments))
    actual = run()
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, jax.device_get(actual), jax.device_get(expected))
