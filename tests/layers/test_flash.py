"""Attention in kernels: what the scores give, within documents, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.layers import attention, documents, flash, placement

B, T, N, H = 4, 256, 4, 32


@functools.cache
def inputs():
  """Inputs, document numbers with padding, and what is visible."""
  random = np.random.default_rng(0)
  x_BxTxD = jnp.asarray(random.normal(size=(B, T, N * H)), jnp.float32)
  documents_BxT = documents.numbers(jnp.asarray(random.random((B, T)) < 0.02))
  documents_BxT = documents.with_padding(documents_BxT, jnp.arange(T) < T - 40)
  return x_BxTxD, documents_BxT, documents.visible(documents_BxT, documents_BxT)


def attend(kernel, told=True, dtype=jnp.float32, **fields):
  """Value and gradients of attention with seeded weights."""
  x_BxTxD, documents_BxT, visible_BxTxT = inputs()
  layer = attention.Attention(N, kernel=kernel, dtype=dtype, **fields)
  told = {'causal_BxT': documents_BxT} if told else {}
  params = attention.Attention(N, kernel='xla', **fields).init(
    jax.random.key(0), x_BxTxD, visible_BxTxT
  )

  def loss(params, x_BxTxD):
    y_BxTxD, _ = layer.apply(params, x_BxTxD.astype(dtype), visible_BxTxT, **told)
    weights = jnp.where(documents_BxT < 0, 0.0, 1.0)[..., None] * jnp.sin(jnp.arange(N * H))
    return (y_BxTxD * weights).sum(), y_BxTxD

  return jax.jit(jax.value_and_grad(loss, has_aux=True, argnums=(0, 1)))(params, x_BxTxD)


def calls_kernel(kernel, **fields):
  program = str(jax.make_jaxpr(lambda: attend(kernel, **fields))())
  return 'pallas_call' in program or 'dot_product_attention_fwd' in program


@pytest.mark.parametrize('shape', [None, (2, 2, 2)])
def test_splash_is_what_the_scores_give(shape):
  wanted = attend('xla')
  assert calls_kernel('splash') and not calls_kernel('xla')
  if shape is None:
    found = attend('splash')
  else:
    with sharding.use(sharding.make_mesh(*shape)):
      found = attend('splash')
  compare = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
  jax.tree.map(compare, found, wanted)


@pytest.mark.parametrize('kernel', ['splash', 'cudnn'])
def test_in_bfloat16_a_kernel_is_no_further_from_float32_than_the_scores_are(kernel):
  if why := flash.why_not(kernel, (B, T, N, H), jnp.bfloat16):
    pytest.skip(f'{kernel} {why}')
  assert calls_kernel(kernel, dtype=jnp.bfloat16)
  exact = attend('xla')

  def errors(kernel):
    off = lambda a, b: jnp.abs(a - b).max()
    (_, y), gradients = jax.tree.map(off, attend(kernel, dtype=jnp.bfloat16), exact)
    return y, max(jax.tree.leaves(gradients))

  for found, of_scores in zip(errors(kernel), errors('xla'), strict=True):
    assert found < 1.5 * of_scores


def test_a_kernel_is_only_asked_where_it_can_do_it():
  assert not calls_kernel('splash', told=False)
  assert not calls_kernel('splash', persistent_vectors=4)
  assert not calls_kernel(None)  # a CPU has none


@pytest.mark.parametrize(
  'kernel, shape, dtype, why',
  [
    ('splash', (1, 256, 4, 32), 'float32', None),
    ('splash', (1, 200, 4, 32), 'float32', 'is for segments that 128 divides, not for 200 tokens'),
    ('splash', (1, 256, 4, 32), 'float64', 'has no float64'),
    (
      'cudnn',
      (1, 256, 4, 32),
      'bfloat16',
      'is for GPUs, bfloat16 and head widths that 8 divides, not for cpu, bfloat16 and 32',
    ),
  ],
)
def test_what_a_kernel_cannot_do_is_left_to_the_scores(kernel, shape, dtype, why):
  assert flash.why_not(kernel, shape, jnp.dtype(dtype)) == why
  assert flash.choose(kernel, shape, jnp.dtype(dtype)) == ('xla' if why else kernel)


@pytest.mark.parametrize(
  'kind, kernel', [('TPU v3', 'xla'), ('TPU v4', 'splash'), ('TPU v5 lite', 'splash')]
)
def test_tpus_have_splash_from_v4_on(kind, kernel, monkeypatch):
  monkeypatch.setattr(placement, 'device', lambda: ('tpu', kind))
  assert flash.choose(None, (1, 256, 4, 64), jnp.bfloat16) == kernel
  assert flash.choose('splash', (1, 256, 4, 64), jnp.bfloat16) == kernel
  assert flash.choose(None, (1, 256, 4, 64), jnp.float64) == 'xla'
  assert flash.choose(None, (1, 200, 4, 64), jnp.bfloat16) == 'xla'


@pytest.mark.parametrize(
  'fields, given',
  [
    ({'dropout': 0.1}, {'dropout_key': jax.random.key(0)}),
    ({'sees_itself': False}, {}),
    ({}, {'mix': lambda context_BxTxNxH, scores: (context_BxTxNxH, {})}),
    ({'relative': 'relative'}, {}),
  ],
)
def test_what_is_more_than_the_tokens_of_a_document_is_left_to_the_scores(fields, given):
  x_BxTxD, documents_BxT, visible_BxTxT = inputs()
  layer = attention.Attention(N, kernel='splash', **fields)
  params = layer.init(jax.random.key(0), x_BxTxD, visible_BxTxT)
  look = lambda **more: str(
    jax.make_jaxpr(
      lambda x: layer.apply(params, x, visible_BxTxT, causal_BxT=documents_BxT, **more)
    )(x_BxTxD)
  )
  assert 'pallas_call' not in look(**given)
  assert ('pallas_call' in look()) == ('dropout' in fields or 'mix' in given)
