"""Compares attention LSTMs with reference arrays, in float64 and float32."""

import jax
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.models import language_model, recurrent
from tests import checks, equation_names
from tests.checks import arrays_of, assert_close

PRECISIONS = [('float64', 1e-9), ('float32', 2e-5)]
KINDS = ('none', 'attention', 'key_value', 'key_value_predict', 'ngram', 'recurrent_memory')
FILES = checks.reference_files('daniluk_*')


def config_of(f, dtype, carry):
  option = lambda name: int(f.get(f'cfg/{name}', 0))
  recurrent = recurrent_config.RecurrentConfig(
    hidden=option('k'),
    readout=KINDS[option('kind')],
    window=option('L') or 1,
    slices=option('S') or 2,
    carry_memory=carry,
    empty_slots='zeros' if option('zeros') else 'mask',
    temporal_tables=1 + option('twoT'),
    gate_bias=bool(option('gbias')),
  )
  options = equation_names.MODEL_OPTIONS | {'dtype': dtype}
  return model_config.ModelConfig(width=option('w'), recurrent=recurrent, **options)


@pytest.mark.full
@pytest.mark.parametrize('carry', [False, True])
@pytest.mark.parametrize(
  'dtype, tolerance', [PRECISIONS[0], pytest.param(*PRECISIONS[1], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('name', FILES)
def test_stream_matches_reference(name, dtype, tolerance, carry):
  f, mode = dict(np.load(FILES[name])), int(carry)
  with jax.enable_x64(dtype == 'float64'):
    config, V = config_of(f, dtype, carry), int(f['cfg/V'])
    model = recurrent.RecurrentLM(config, V)
    arrays = arrays_of(f, 'param/', dtype)
    params = equation_names.load(arrays, config, V)['params']
    memory = jax.jit(lambda: language_model.empty_memory(config, int(f['cfg/B'])))()

    @jax.jit
    def chunk_loss(params, x, y, first, memory):
      def loss(params):
        variables = {'params': params}
        (hidden, next_memory, _), captured = model.apply(
          variables, x, memory, starts_BxT=first, mutable=['intermediates']
        )
        nll = model.apply(variables, hidden, y, method='scores').nll_BxT
        log_probs = model.apply(variables, hidden, method='log_probs')
        return nll.mean(), (hidden, next_memory, captured, nll, log_probs)

      return jax.value_and_grad(loss, has_aux=True)(params)

    for j in range(int(f['cfg/nchunk'])):
      x, y, first = f['x'][j].astype('int32'), f['y'][j].astype('int32'), f['first'][j].astype(bool)
      (loss, (hidden, memory, captured, nll, log_probs)), gradient = jax.device_get(
        chunk_loss(params, x, y, first, memory)
      )
      suffix = f'{mode}/{j}'
      assert_close(log_probs, f[f'logprob/{suffix}'], tolerance)
      assert_close(nll, f[f'nll/{suffix}'], tolerance)
      assert_close(loss, f[f'loss/{suffix}'], tolerance)
      if f'hstar/{suffix}' in f:
        assert_close(hidden, f[f'hstar/{suffix}'], tolerance)
      assert_close(memory['state']['h'], f[f'h/{j}'][:, -1], tolerance)
      assert_close(memory['state']['c'], f[f'c_last/{j}'], tolerance)
      if f'att/{suffix}' in f and 'intermediates' in captured:
        weights = captured['intermediates']['readout']['weights'][0]
        assert_close(weights, f[f'att/{suffix}'], tolerance)
    arrays = {k.split('/', 2)[2]: v for k, v in f.items() if k.startswith(f'grad/{mode}/')}
    expected = equation_names.load(arrays, config, V)['params']
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, expected)
