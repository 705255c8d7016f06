"""Training with a segment memory: the trajectory of the official code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.data import streams
from ngrammer_jax.interop import transformer_xl
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from ngrammer_jax.training import optimizers
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step
from tests.checks import assert_close, random_variables
from tests.interop.test_transformer_xl import PRECISIONS, config_of, parameters


@pytest.mark.parametrize('dtype, tolerance', PRECISIONS)
def test_updates_equal_those_of_the_official_code(reference, dtype, tolerance):
  f = reference('xl_train_nowarm') | {
    k: v for k, v in reference('xl_base').items() if k.startswith('cfg/')
  }
  f |= {k: v for k, v in reference('xl_train_nowarm').items() if k.startswith('cfg/')}
  with jax.enable_x64(dtype == 'float64'):
    config, V = config_of(f, dtype), int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    lr = float(f['cfg/lr'])
    optimizer = optimizers.make(
      experiment.OptimizerConfig(
        learning_rate=lr,
        schedule='transformer_xl',
        warmup_steps=int(f['cfg/warm']),
        final_fraction=float(f['cfg/eta_min']) / lr,
        adam=experiment.AdamConfig(beta2=0.999),
        epsilon=1e-8,
        clip_norm=float(f['cfg/clip']),
      ),
      int(f['cfg/max_step']),
    )
    load = lambda t: transformer_xl.load_language_model(
      parameters(f, f'param/{t}/', dtype), config, V
    )
    params = load(0)['params']
    memory = transformer.empty_memory(config, int(f['cfg/B']))
    state = train_state.TrainState(
      jnp.zeros((), jnp.int32), params, {}, optimizer.init(params), memory
    )
    for t in range(int(f['cfg/steps'])):
      x, y = f[f'x/{t}'].T.astype('int32'), f[f'y/{t}'].T.astype('int32')
      segment = streams.Segment(x, y, np.zeros(x.shape, bool), np.ones(x.shape, dtype))
      state, metrics = train_step.train_step(model, optimizer, 0, state, segment)
      assert_close(metrics['loss'], f[f'loss/{t}'], tolerance)
      assert_close(metrics['gradient_norm/dense'], f[f'gnorm/{t}'], tolerance)
      expected = load(t + 1)['params']
      jax.tree.map(lambda a, b: assert_close(a, b, tolerance), state.params, expected)


@pytest.mark.slow
def test_half_the_loss_is_that_of_the_later_half(tiny):
  config = tiny()
  model = transformer.TransformerLM(config.model, 11)
  optimizer = optimizers.make(config.optimizer, 10)
  tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype('int32')
  memory = transformer.empty_memory(config.model, 2)
  variables = random_variables(model, tokens, memory)
  params, codebook = variables['params'], variables['codebook']
  state = train_state.TrainState(
    jnp.zeros((), jnp.int32), params, codebook, optimizer.init(params), memory
  )
  segment = streams.Segment(tokens, tokens, np.zeros((2, 8), bool), np.ones((2, 8), 'float32'))
  step = functools.partial(train_step.train_step, model, optimizer, 0, state)
  whole, half = (step(segment, half_loss=h)[1]['loss'] for h in (False, True))
  hidden, _, _ = model.apply(variables, tokens, memory)
  nll = model.apply(variables, hidden, tokens, method='scores').nll_BxT
  np.testing.assert_allclose([whole, half], [nll.mean(), nll[:, 4:].mean()], rtol=1e-5)


def test_no_gradient_reaches_the_memory():
  config = model_config.ModelConfig(
    layers=2,
    width=16,
    heads=2,
    feed_forward_width=24,
    position='relative',
    memory=model_config.MemoryConfig(length=4),
    scan_layers=False,
  )
  model, memory = transformer.TransformerLM(config, 11), transformer.empty_memory(config, 1)
  tokens = np.arange(8, dtype='int32').reshape(2, 1, 4)
  variables = random_variables(model, tokens[0], memory)

  def of_second_segment(embedding_of_first):
    params = variables['params'] | {'embedding': embedding_of_first}
    _, kept, _ = model.apply({'params': params}, tokens[0], memory)
    hidden, _, _ = model.apply(variables, tokens[1], kept)
    return (hidden * jnp.arange(16)).sum()  # their squares have one sum

  value, gradient = jax.value_and_grad(of_second_segment)(variables['params']['embedding'])
  assert (gradient == 0).all()
  moved = of_second_segment(variables['params']['embedding'][::-1])
  assert abs(moved - value) > 1e-3  # it is looked at all the same
