"""Mean attention by distance, of recurrent models and of Transformers, and the verb."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import attention
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import language_model, recurrent_config
from ngrammer_jax.training import loop
from tests.checks import bad_input


def trained(tiny, tmp_path, model):
  c = dataclasses.replace(tiny(training={'steps': 2, 'evaluate_every': 0}), model=model)
  c.check()
  loop.train(c, tmp_path / 'run')
  return tmp_path / 'run'


def recurrent_model(**fields):
  r = recurrent_config.RecurrentConfig(**fields)
  return model_config.ModelConfig(width=16, tie_embeddings=False, recurrent=r)


@pytest.mark.parametrize('readout', ['key_value', 'recurrent_memory'])
def test_weights_of_a_recurrent_model(tiny, tmp_path, capsys, readout):
  model = recurrent_model(hidden=12, readout=readout, window=4)
  workdir = trained(tiny, tmp_path, model)
  assert analyze.main(['attention', f'--workdir={workdir}', '--split=test']) == 0
  printed, result = capsys.readouterr().out, json.loads((workdir / 'attention.json').read_text())
  assert (workdir / 'attention.png').stat().st_size > 1000 and 'elsewhere' in printed
  run = runs.load_run(workdir)
  tokens = run.split('test')
  inputs, _, starts = tokens.window(0, min(attention.TOKENS, len(tokens.tokens)))
  memory = language_model.empty_memory(model, 1, 1)
  _, seen = jax.jit(
    lambda params: run.model.apply(
      {'params': params}, inputs[None], memory, starts_BxT=starts[None], mutable=['intermediates']
    )
  )(run.state.params)
  weights_TxL = np.asarray(seen['intermediates']['readout']['weights'][0][0])
  first = readout == 'key_value'
  expected = weights_TxL[3 + first :].mean(axis=0)[::-1]  # the first ones find less than four
  np.testing.assert_allclose(result['mean'], expected, rtol=1e-4)
  assert result['distances'] == list(range(first, 4 + first))
  assert sum(result['mean']) == pytest.approx(1, abs=1e-5) and result['rest'] < 1e-5
  assert result['counted'] == len(inputs) - 3 - first


@pytest.mark.parametrize('memory', [None, model_config.MemoryConfig(16)])
def test_weights_of_a_transformer(tiny, tmp_path, memory):
  position = 'rope' if memory is None else 'relative'
  model = tiny().model
  model = dataclasses.replace(model, memory=memory, position=position, ngram=None)
  result = attention.analyse(runs.load_run(trained(tiny, tmp_path, model)), 'test')
  heads = np.array(result['heads'])
  assert heads.shape == (2, 2, 16) and result['distances'] == list(range(16))
  np.testing.assert_allclose(heads.mean(axis=1), result['layers'])
  np.testing.assert_allclose(heads.mean(axis=(0, 1)), result['mean'])
  # Without a memory only the last of 16 tokens finds 15 others, and there is nothing else.
  segments = -(-result['tokens'] // 16)
  if memory is None:
    assert result['counted'] in (segments, segments - 1) and result['rest'] < 1e-5
  else:
    assert result['counted'] == result['tokens'] - 15 and 0.2 < result['rest'] < 0.6


def test_a_run_without_attention(tiny, tmp_path):
  model = recurrent_model(hidden=12, readout='ngram', slices=3)
  workdir = trained(tiny, tmp_path, model)
  with bad_input(f"--workdir={workdir} has no attention: model.recurrent.readout='ngram'"):
    attention.analyse(runs.load_run(workdir))
