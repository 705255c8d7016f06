"""Sums of token embeddings and n-gram vectors equal LongCat and BLT, and a slow loop."""

import json

import jax
import numpy as np
import pytest

from ngrammer_jax.layers.ngram import token_sum
from tests.checks import assert_close


@pytest.mark.parametrize('name', ['longcat_n2_k1', 'longcat_n3_k2_prime'])
def test_the_mean_of_projections_equals_longcat(reference, name):
  f = reference(name)
  count = sum(key.startswith('weights/embedders') for key in f)
  words, tokens = f['weights/word_embeddings.weight'], f['input_ids']
  numbered = lambda pattern: [f[pattern.format(i)] for i in range(count)]
  tables = numbered('weights/embedders.{}.weight')
  hashes = numbered('hashes/{}')
  pad = json.loads(str(f['config']))['pad']
  with jax.enable_x64(True):
    layer = token_sum.TokenSum(is_mean=True, is_projected=True, dtype=np.float64)
    projections = np.stack(numbered('weights/post_projs.{}.weight')).swapaxes(1, 2)
    e = np.stack([t[h] for t, h in zip(tables, hashes, strict=True)], axis=2)

    @jax.jit
    def gradients(projection, x, e):
      def loss(projection, x, e):
        y = layer.apply({'params': {'projection': projection}}, x, e)
        return (y * f['cotangent']).sum(), y

      return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(projection, x, e)

    (d_projection, d_x, d_e), y = gradients(projections, words[tokens], e)
  assert_close(y, f['output'], 1e-12)
  assert_close(d_projection, np.stack(numbered('grad/post_projs.{}.weight')).swapaxes(1, 2), 1e-12)
  d_words = np.zeros_like(words)
  np.add.at(d_words, tokens, d_x)
  d_words[pad] = 0  # the official code trains neither this embedding nor these rows
  assert_close(d_words, f['grad/word_embeddings.weight'], 1e-12)
  for i, (table, rows) in enumerate(zip(tables, hashes, strict=True)):
    gradient = np.zeros_like(table)
    np.add.at(gradient, rows, np.asarray(d_e)[:, :, i])
    gradient[pad] = 0
    assert_close(gradient, f[f'grad/embedders.{i}.weight'], 1e-12)


@pytest.mark.parametrize('name', ['blt_hash_2to5_short', 'blt_hash_4x3'])
def test_the_sum_equals_blt(reference, name):
  f = reference(name)
  count = sum(key.startswith('hashes/') for key in f)
  tables = [f[f'weights/encoder_hash_tok_embedding.{i}.weight'] for i in range(count)]
  e = np.stack([table[f[f'hashes/{i}']] for i, table in enumerate(tables)], axis=2)
  x = f['weights/tok_embeddings.weight'][f['input_ids']]
  with jax.enable_x64(True):
    y = token_sum.TokenSum(dtype=np.float64).apply({}, x, e)
  assert_close(y, f['output'], 1e-12)


def test_amplification_equals_the_formula():
  rng = np.random.default_rng(0)
  x, e = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3, 2, 8))
  mean = (x + e.sum(axis=2)) / 3
  centred = mean - mean.mean(axis=-1, keepdims=True)
  normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
  with jax.enable_x64(True):
    for amplification, expected in (('sqrt_width', mean * 8**0.5), ('norm', normed)):
      layer = token_sum.TokenSum(
        is_mean=True, amplification=amplification, dtype=np.dtype('float64')
      )
      y, _ = layer.init_with_output(jax.random.key(0), x, e)
      assert_close(y, expected, 1e-12)


def test_vectors_of_another_width_need_projections():
  x, e = np.zeros((1, 1, 8), 'float32'), np.zeros((1, 1, 2, 4), 'float32')
  with pytest.raises(ValueError, match='width 4 are added to embeddings of width 8: project'):
    token_sum.TokenSum().apply({}, x, e)
