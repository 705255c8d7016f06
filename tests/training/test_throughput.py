"""The FLOP count equals the matrix products that the model really makes."""

import jax
import numpy as np
import pytest

from launch import flops
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.models import transformer
from ngrammer_jax.training import throughput
from tests.jaxprs import equations
from tests.models import test_recurrent


@pytest.mark.parametrize('gated', [True, False])
@pytest.mark.parametrize('clusters', [None, 32])
def test_forward_flops(gated, clusters, monkeypatch):
  # Or the program for each platform would be counted.
  for_any = lambda *arguments, default, **of_platforms: default(*arguments)
  monkeypatch.setattr(jax.lax, 'platform_dependent', for_any)
  ngram = model_config.NGramConfig(clusters=clusters, vocabulary_size=64, dim=4)
  config = model_config.ModelConfig(
    layers=2, width=16, heads=2, feed_forward_width=40, gated=gated, ngram=ngram, scan_layers=False
  )
  model, V, T = transformer.TransformerLM(config, 23), 23, 12
  memory, tokens = transformer.empty_memory(config, 1), np.zeros((1, T), np.int32)
  variables = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)

  def forward(variables):
    hidden, _, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, method='logits')

  total = 0
  for equation in equations(jax.make_jaxpr(forward)(variables).jaxpr):
    if equation.primitive.name == 'dot_general':
      (contract, _), _ = equation.params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      total += 2 * equation.outvars[0].aval.size * np.prod([shape[axis] for axis in contract])
  # The program multiplies the masked half of the attention scores as well.
  masked = 2 * config.layers * 2 * config.width * (T / 2) * T
  assert total - masked == T * throughput.forward_flops(config, V, T)


@pytest.mark.parametrize('name', test_recurrent.NAMES)
def test_forward_flops_of_recurrent_models(name):
  config = test_recurrent.config_of(name, dtype='float32')
  model, variables, memory = test_recurrent.model_of(config)
  r, T = config.recurrent, test_recurrent.T
  tokens, _ = test_recurrent.text()

  def forward(variables):
    hidden, _, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, method='logits')

  total = flops.matrix_flops(jax.make_jaxpr(forward)(variables).jaxpr)
  # The weighted sum of what is attended to is no matrix product in the program.
  attends = r.readout not in ('none', 'ngram')
  total += test_recurrent.B * T * 2 * r.window * r.width * attends
  # And the keys of the window are projected once more.
  again = r.readout in recurrent_config.ATTENTION
  total -= test_recurrent.B * 2 * r.window * r.width**2 * again
  assert total == test_recurrent.B * T * throughput.forward_flops(config, test_recurrent.V, T)


def test_rates_leave_out_what_is_not_training(monkeypatch):
  now = 100.0
  monkeypatch.setattr(throughput.time, 'monotonic', lambda: now)
  meter = throughput.Meter()
  meter.flops = 1.0
  now = 102.0
  meter.pause()
  now = 150.0
  meter.resume()
  now = 152.0
  assert meter.measure(400) == {'tokens_per_second': 100.0}
  assert meter.measure(0) == {} and meter.rate == 100.0
  now = 153.0  # nor does what was before it count again
  assert meter.measure(50) == {'tokens_per_second': 50.0}
