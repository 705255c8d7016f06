"""Equality with the reference arrays of attention LSTMs, in float64 and float32."""

import jax
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.interop import attention_lstm
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import recurrent, recurrent_config
from tests.checks import assert_close, data_root

PRECISIONS = [('float64', 1e-9), ('float32', 2e-5)]
KINDS = ('none', 'attention', 'key_value', 'key_value_predict', 'ngram', 'recurrent_memory')
# All there may be, of which some are kept aside.
NAMES = (
  *('daniluk_lstm', 'daniluk_attention', 'daniluk_kv', 'daniluk_kvp', 'daniluk_attention_L1'),
  *('daniluk_kvp_L15', 'daniluk_attention_zeros', 'daniluk_kvp_zeros', 'daniluk_4gram'),
  *('daniluk_4gram_S3', 'daniluk_rm', 'daniluk_rm_2T', 'daniluk_rm_code'),
)


def config_of(f, dtype, carry):
  of = lambda name: int(f.get(f'cfg/{name}', 0))
  read = recurrent_config.RecurrentConfig(
    hidden=of('k'),
    readout=KINDS[of('kind')],
    window=of('L') or 1,
    slices=of('S') or 2,
    carry_memory=carry,
    empty_slots='zeros' if of('zeros') else 'mask',
    temporal_tables=1 + of('twoT'),
    gate_bias=bool(of('gbias')),
  )
  how = attention_lstm.SWITCHES | {'dtype': dtype}
  return model_config.ModelConfig(width=of('w'), recurrent=read, **how)


def parameters(f, dtype):
  return {k[6:]: v.astype(dtype) for k, v in f.items() if k.startswith('param/')}


@pytest.mark.parametrize('carry', [False, True])
@pytest.mark.parametrize(
  'dtype, tolerance', [PRECISIONS[0], pytest.param(*PRECISIONS[1], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('name', NAMES)
def test_chunks_of_a_stream(name, dtype, tolerance, carry):
  path = data_root('reference') / f'{name}.npz'
  if not path.exists():
    pytest.skip(f'{name} is not among the reference arrays')
  f, mode = dict(np.load(path)), int(carry)
  with jax.enable_x64(dtype == 'float64'):
    config, V = config_of(f, dtype, carry), int(f['cfg/V'])
    model = recurrent.RecurrentLM(config, V)
    params = attention_lstm.load_language_model(parameters(f, dtype), config, V)['params']
    memory = jax.jit(lambda: recurrent.empty_memory(config, int(f['cfg/B'])))()

    @jax.jit
    def chunk(params, x, y, first, memory):
      def loss_of(params):
        given = {'params': params}
        (hidden, after, _), seen = model.apply(
          given, x, memory, starts_BxT=first, mutable=['intermediates']
        )
        nll = model.apply(given, hidden, y, method='scores').nll_BxT
        log_probs = model.apply(given, hidden, method='log_probs')
        return nll.mean(), (hidden, after, seen, nll, log_probs)

      return jax.value_and_grad(loss_of, has_aux=True)(params)

    for j in range(int(f['cfg/nchunk'])):
      given = f['x'][j].astype('int32'), f['y'][j].astype('int32'), f['first'][j].astype(bool)
      (loss, (hidden, memory, seen, nll, log_probs)), gradient = jax.device_get(
        chunk(params, *given, memory)
      )
      at = f'{mode}/{j}'
      assert_close(log_probs, f[f'logprob/{at}'], tolerance)
      assert_close(nll, f[f'nll/{at}'], tolerance)
      assert_close(loss, f[f'loss/{at}'], tolerance)
      if f'hstar/{at}' in f:
        assert_close(hidden, f[f'hstar/{at}'], tolerance)
      assert_close(memory['state']['h'], f[f'h/{j}'][:, -1], tolerance)
      assert_close(memory['state']['c'], f[f'c_last/{j}'], tolerance)
      if f'att/{at}' in f and 'intermediates' in seen:
        weights = seen['intermediates']['readout']['weights'][0]
        assert_close(weights, f[f'att/{at}'], tolerance)
    theirs = {k.split('/', 2)[2]: v for k, v in f.items() if k.startswith(f'grad/{mode}/')}
    expected = attention_lstm.load_language_model(theirs, config, V)['params']
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, expected)


def test_arrays_that_do_not_fit_are_listed():
  r = recurrent_config.RecurrentConfig(hidden=4, readout='attention')
  config = model_config.ModelConfig(width=3, recurrent=r, **attention_lstm.SWITCHES)
  arrays = {'emb': np.zeros((5, 2)), 'more': np.zeros(1)}
  with pytest.raises(errors.BadInput, match='12 arrays do not fit') as found:
    attention_lstm.load_language_model(arrays, config, 5)
  for said in ('missing: Wh (4, 16)', 'extra: more (1,)', 'misshapen: emb is (5, 2), expected'):
    assert said in str(found.value)
