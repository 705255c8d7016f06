"""The FLOP count of a model equals the matrix products of its formulas."""

import dataclasses

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.attention import fused, local
from ngrammer_jax.layers.attention.full import Heads
from ngrammer_jax.layers.context import Keys
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.training import flops
from tests import jaxprs
from tests.models import test_recurrent

V, B, T, M, D, F, LAYERS = 29, 2, 12, 8, 16, 40, 2
CONFIG = model_config.ModelConfig(
  layers=LAYERS, width=D, heads=2, feed_forward_width=F, gated=False, ngram=None
)
MEMORY = model_config.MemoryConfig(length=M)
WINDOW = model_config.MemoryConfig(length=M, same_length='memory')


def count(config, V=V):
  config.check()
  model = language_model.build(config, V)
  return flops.count(model, model_variables.abstract(model), B, T)


def multiplications(keys, span=0, clusters=0, gated=False):
  """Multiplications of a token: projections, scores and values, feed-forward, output, clusters.

  Keys and values of the memory are projected once a segment, as far as the spans reach.
  """
  attention = 4 * D * D + 2 * D * keys + 2 * D * D * span / T
  return LAYERS * (attention + (3 if gated else 2) * D * F) + D * V + D * clusters


@pytest.mark.full
@pytest.mark.parametrize(
  'gated, clusters, scan',
  [(True, None, True), (False, 16, True), (True, 16, False), (False, None, False)],
)
def test_a_causal_query_attends_to_half_of_the_segment(gated, clusters, scan):
  ngram = model_config.NGramConfig(clusters=clusters, vocabulary_size=64, dim=4)
  config = dataclasses.replace(CONFIG, gated=gated, ngram=ngram, scan_layers=scan)
  expected = 2 * multiplications(T / 2, clusters=clusters or 0, gated=gated)
  assert count(config).forward() == pytest.approx(expected, rel=1e-9)


def test_chunks_of_distances_that_do_not_divide_the_segment_count_every_token_once(monkeypatch):
  for name in ('CPU_DISTANCES', 'DISTANCES'):
    monkeypatch.setattr(quantizer, name, 5 * B * 2 * 16)  # of the two heads
  ngram = model_config.NGramConfig(clusters=16, vocabulary_size=64, dim=4)
  measured = count(dataclasses.replace(CONFIG, gated=False, ngram=ngram))
  expected = 2 * multiplications(T / 2, clusters=16)
  assert measured.forward() == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize('change', [{}, {'remat': 'full'}, {'kernel': 'blocks'}])
def test_a_memory_is_attended_to_and_projected(change):
  config = dataclasses.replace(CONFIG, memory=MEMORY, **change)
  expected = 2 * multiplications(M + T / 2, M)
  assert count(config).forward() == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
def test_a_window_in_a_scan_over_layers_counts_full_scores():
  """At this length attention works in parts of the queries, but not at lengths next to it."""
  memory = model_config.MemoryConfig(length=128, same_length='memory')
  counts = []
  for scan in (True, False):
    config = dataclasses.replace(CONFIG, memory=memory, scan_layers=scan)
    assert local.block_count(128, 128) > 1
    model = language_model.build(config, V)
    variables = model_variables.abstract(model)
    counts.append(flops.count(model, variables, B, 128).forward())
  attention = 4 * D * D + 2 * D * 128 + 2 * D * D
  expected = 2 * (LAYERS * (attention + 2 * D * F) + D * V)
  assert counts == pytest.approx([expected, expected], rel=1e-9)


@pytest.mark.full
def test_persistent_vectors_are_attended_to():
  persistent = model_config.PersistentConfig(vectors=5)
  config = dataclasses.replace(CONFIG, persistent=persistent)
  expected = 2 * (multiplications(T / 2) + LAYERS * 2 * D * 5)
  assert count(config).forward() == pytest.approx(expected, rel=1e-9)


def test_keys_beyond_a_span_cost_nothing():
  span = model_config.SpanConfig(kind='adaptive', limit=M, ramp=2)
  config = dataclasses.replace(CONFIG, memory=WINDOW, span=span)
  measured = count(config)
  assert measured.forward() == pytest.approx(2 * multiplications(M, M), rel=1e-9)
  spans = np.array([[3.0, 5.0], [M, M], [0.0, 100.0]])
  expected = [2 * multiplications(keys, keys) for keys in (4, M, M / 2)]
  np.testing.assert_allclose(measured.forward(spans), expected, rtol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize('name', test_recurrent.NAMES)
def test_recurrent_models(name):
  config = test_recurrent.config_of(name, dtype='float32')
  r, W = config.recurrent, config.width
  K, J, gates = r.hidden, r.width, 1 if r.cell == 'rnn' else 4
  # Keys of the window are projected once more in every segment.
  attention = 4 * J * J + r.window * J + r.window * J * J / T
  readout = {'none': 0, 'ngram': K * J, 'recurrent_memory': 6 * K * K + r.window * K}.get(
    r.readout, attention
  )
  expected = 2 * (gates * K * (W + K) + readout + J * V)
  assert count(config).forward() == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
def test_rows_of_memories_cost_their_projections_and_the_lookup_nothing():
  engram = NGramMemoryConfig(layers=(0, 1), join='gate', heads=2, width=8, rows=(101,))
  rows = len(engram.orders) * engram.heads * engram.width
  at_input = dataclasses.replace(engram, layers=(), join='sum', projection=True)
  config = dataclasses.replace(CONFIG, ngram_memories=(engram, at_input))
  # In each block to the key of the gate and to the value, at the input to the model width.
  expected = 2 * (multiplications(T / 2) + (2 * 2 + 1) * rows * D)
  assert count(config).forward() == pytest.approx(expected, rel=1e-9)


L, ROWS, WIDTH = 6, 4096, 64


@pytest.mark.parametrize('loop', [True, False])
def test_flops_include_loop_iterations_and_rematerialization(loop):
  x, w = jnp.zeros((ROWS, WIDTH)), jnp.zeros((L, WIDTH, WIDTH))
  layer_flops = 2 * ROWS * WIDTH * WIDTH
  count = lambda function: flops.matrix_flops(jax.make_jaxpr(function)(x, w).jaxpr)
  forward = lambda x, w: jaxprs.tanh_layers(x, w, loop).sum()
  assert count(forward) == L * layer_flops
  assert count(jax.grad(forward, 1)) == pytest.approx(3 * L * layer_flops, rel=1 / L)
  rematerialized = jax.grad(jax.checkpoint(forward), 1)
  assert count(rematerialized) == pytest.approx(4 * L * layer_flops, rel=1 / L)


def test_flops_of_a_conditional_are_those_of_the_most_expensive_branch():
  x, w = jnp.zeros((ROWS, WIDTH)), jnp.zeros((WIDTH, WIDTH))
  conditional = lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)
  assert flops.matrix_flops(jax.make_jaxpr(conditional)(x, w).jaxpr) == 4 * ROWS * WIDTH * WIDTH


@pytest.mark.full
def test_flops_of_a_kernel_include_every_block():
  """Two products forward; five backward, plus two recomputed products in the backward kernels."""
  q = jnp.zeros((2, 1024, 4, 128))
  keys = Keys(query_documents_BxT=jnp.zeros((2, 1024), int))
  attend = lambda q: fused.attend('splash', 0, Heads(q, q, q), None, keys).values_BxTxNxH.sum()
  product = 2 * 2 * 4 * 1024 * 1024 * 128
  count = lambda function: flops.matrix_flops(jax.make_jaxpr(function)(q).jaxpr)
  assert count(attend) == 2 * product
  assert count(jax.grad(attend)) == pytest.approx((2 + 7) * product, rel=0.001)
  # Of the four blocks of a head, causal attention skips one.
  found = flops.kernel_flops(jax.make_jaxpr(jax.grad(attend))(q))
  products = {'fwd_segmented_residuals': 2, 'dq_segmented_no_residuals': 3}
  products |= {'dkv_segmented_no_residuals': 4}
  names = {name.removeprefix('splash_mha_'): count for (name, *_), count in found.items()}
  assert names == {name: 3 / 4 * number * product for name, number in products.items()}
  (shapes,) = (shapes for name, *shapes in found if '_dq_' in name)
  assert shapes[-1] == (2, 4, 1024, 128)


def test_a_kernel_may_have_no_name():
  def double(x_ref, y_ref):
    y_ref[...] = 2 * x_ref[...]

  x = jnp.zeros((8, 128))
  run = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
  assert list(flops.kernel_flops(jax.make_jaxpr(run)(x)).values()) == [0]


def test_the_peak_of_a_device_is_that_of_its_longest_name():
  assert flops.peak_flops('TPU v5 lite') == flops.PEAK_FLOPS['TPU v5 lite']
  assert flops.peak_flops('NVIDIA A100-SXM4-40GB') == flops.PEAK_FLOPS['NVIDIA A100']
  assert flops.peak_flops('cpu') is None
