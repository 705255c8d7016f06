"""Training with a segment memory: the trajectory of the official code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.interop import transformer_xl
from ngrammer_jax.models import language_model, transformer
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step
from tests.checks import arrays_of, assert_close
from tests.interop.test_transformer_xl import PRECISIONS, config_of


@pytest.mark.parametrize(
  'dtype, tolerance',
  [
    pytest.param(*p, marks=pytest.mark.full if p[0] == 'float64' else pytest.mark.slow)
    for p in PRECISIONS
  ],
)
def test_updates_equal_those_of_the_official_code(reference, dtype, tolerance):
  f = reference('xl_train_nowarm') | {
    k: v for k, v in reference('xl_base').items() if k.startswith('cfg/')
  }
  f |= {k: v for k, v in reference('xl_train_nowarm').items() if k.startswith('cfg/')}
  with jax.enable_x64(dtype == 'float64'):
    config, V = config_of(f, dtype), int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    lr = float(f['cfg/lr'])
    load = lambda t: transformer_xl.load_language_model(
      arrays_of(f, f'param/{t}/', dtype), config, V
    )
    params = load(0)['params']
    labels = jax.tree.map(lambda _: 'dense', params)
    optimizer = partition.make(
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
      labels,
    )
    memory = language_model.empty_memory(config, int(f['cfg/B']))
    state = train_state.TrainState(
      jnp.zeros((), jnp.int32), params, {}, optimizer.init(params), memory
    )
    step = jax.jit(train_step.TrainStep(model, optimizer, labels, seed=0))
    for t in range(int(f['cfg/steps'])):
      x, y = f[f'x/{t}'].T.astype('int32'), f[f'y/{t}'].T.astype('int32')
      segment = token_batch.Batch(x, y, np.zeros(x.shape, bool), np.ones(x.shape, dtype))
      state, metrics = step(state, segment)
      assert_close(metrics['loss'], f[f'loss/{t}'], tolerance)
      assert_close(metrics['gradient_norm/dense'], f[f'gnorm/{t}'], tolerance)
      expected = load(t + 1)['params']
      jax.tree.map(lambda a, b: assert_close(a, b, tolerance), state.params, expected)
