"""Mean attention by distance, of recurrent models and of Transformers, and the verb."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, evaluation_config, runs
from ngrammer_jax.analysis import attention
from ngrammer_jax.data import token_cache
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import language_model, recurrent_config
from tests.checks import bad_input

TOKENS, LENGTH, SECOND = 96, 16, 37  # of the text, of a segment, and where a document begins


@pytest.fixture
def text(monkeypatch):
  """Two documents instead of a text."""
  tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.uint16)
  split = token_cache.TokenSplit(tokens, np.array([0, SECOND]), None, 256)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: split)
  return split


def recurrent(**fields):
  r = recurrent_config.RecurrentConfig(hidden=12, **fields)
  return model_config.ModelConfig(width=16, tie_embeddings=False, recurrent=r)


def seen(run, model, split, length, memory):
  """What the model has looked at, segment by segment, by a program of the test's own."""
  config = dataclasses.replace(model, scan_layers=False)
  built = language_model.build(config, run.vocabulary.size)

  @jax.jit
  def look(tokens_1xT, starts_1xT, memory):
    (_, memory, _), intermediates = built.apply(
      {'params': run.state.params},
      tokens_1xT,
      memory,
      starts_BxT=starts_1xT,
      mutable=['intermediates'],
    )
    return intermediates['intermediates'], memory

  for first in range(0, TOKENS, length):
    inputs, _, starts = split.window(first, length)
    found, memory = look(inputs[None], starts[None], memory)
    yield jax.device_get(found)


@pytest.mark.parametrize('readout', ['key_value', 'recurrent_memory'])
def test_weights_of_a_recurrent_model(tiny, untrained, text, capsys, readout):
  model = recurrent(readout=readout, window=4)
  workdir = untrained(dataclasses.replace(tiny(), model=model))
  assert analyze.main(['attention', f'--workdir={workdir}', '--split=test']) == 0
  printed, result = capsys.readouterr().out, json.loads((workdir / 'attention.json').read_text())
  assert (workdir / 'attention.png').stat().st_size > 1000 and 'elsewhere' in printed
  run, memory = runs.load_run(workdir), language_model.empty_memory(model, 1, 1)
  (found,) = seen(run, model, text, TOKENS, memory)
  weights_TxL = found['readout']['weights'][0][0]
  first = readout == 'key_value'
  # The first ones of each document find less than four.
  full = [t for t in range(TOKENS) if t - (SECOND if t >= SECOND else 0) >= 3 + first]
  np.testing.assert_allclose(result['mean'], weights_TxL[full].mean(axis=0)[::-1], rtol=1e-4)
  assert np.ptp(result['mean']) > 1e-3
  assert result['distances'] == list(range(first, 4 + first))
  assert sum(result['mean']) == pytest.approx(1, abs=1e-5) and result['rest'] < 1e-5
  assert (result['counted'], result['tokens']) == (len(full), TOKENS)


MEMORY = model_config.MemoryConfig(16)
OTHER = evaluation_config.EvaluationMemory(length=20)


@pytest.mark.parametrize(
  'memory, other',
  [(None, None), pytest.param(MEMORY, None, marks=pytest.mark.slow), (MEMORY, OTHER)],
)
def test_weights_of_a_transformer(tiny, untrained, text, memory, other):
  """With the memory of evaluation, against a loop over tokens and distances."""
  position = 'rope' if memory is None else 'relative'
  changes = {'ngram': None, 'feed_forward_width': 0, 'memory': memory, 'position': position}
  evaluation = evaluation_config.EvaluationConfig(memory=other)
  config = tiny(changes, evaluation=evaluation)
  run = runs.load_run(untrained(config))
  result = attention.analyse(run, 'test')
  model = config.evaluation_model()
  M = 0 if memory is None else model.memory.length
  assert M == (0 if memory is None else 20 if other else 16)
  weights = []  # of tokens that find all distances
  empty = language_model.empty_memory(model, 1)
  for number, found in enumerate(seen(run, model, text, LENGTH, empty)):
    probs_LxNxTxS = np.stack([found[f'layer_{i}']['attention']['probs'][0][0] for i in range(2)])
    assert probs_LxNxTxS.shape == (2, 2, LENGTH, M + LENGTH)
    for t in range(LENGTH):
      place = LENGTH * number + t
      position = place - (SECOND if place >= SECOND else 0)
      if min(position, min(M, LENGTH * number) + t) >= 15:
        weights.append(probs_LxNxTxS[:, :, t, [M + t - d for d in range(16)]])
  heads = np.mean(weights, axis=0)
  assert result['distances'] == list(range(16)) and result['counted'] == len(weights)
  np.testing.assert_allclose(result['heads'], heads, rtol=1e-4)
  np.testing.assert_allclose(result['layers'], heads.mean(axis=1), rtol=1e-4)
  np.testing.assert_allclose(result['mean'], heads.mean(axis=(0, 1)), rtol=1e-4)
  assert result['rest'] == pytest.approx(1 - heads.mean(axis=(0, 1)).sum(), abs=1e-5)
  assert (result['rest'] < 1e-5) == (memory is None)


def test_distances_that_are_shown():
  of = attention._distances
  transformer = lambda memory: model_config.ModelConfig(position='relative', memory=memory)
  kinds = ('key_value', 'key_value_predict', 'recurrent_memory')
  assert [of(recurrent(readout=kind, window=3), 16) for kind in kinds] == [
    [1, 2, 3],
    [1, 2, 3],
    [0, 1, 2],
  ]
  assert of(transformer(None), 5) == [0, 1, 2, 3, 4]
  assert of(transformer(None), 100) == list(range(16))
  for same_length, expected in (
    ('no', range(9)),
    ('memory', range(8)),
    ('memory_and_self', range(9)),
    ('memory_alone', range(1, 9)),
  ):
    memory = model_config.MemoryConfig(8, same_length=same_length)
    assert of(transformer(memory), 4) == list(expected), same_length
  within = attention._within_reach
  position_T = np.array([7, 8, 0, 1])
  assert within(transformer(None), position_T, 8).tolist() == [0, 1, 0, 1]
  assert within(transformer(model_config.MemoryConfig(6)), position_T, 8).tolist() == [6, 7, 0, 1]
  assert within(transformer(model_config.MemoryConfig(6)), position_T, 4).tolist() == [4, 5, 0, 1]
  assert within(recurrent(readout='key_value', window=3), position_T, 8) is position_T


def test_queries_in_blocks_and_persistent_vectors():
  """The weights by distance, of queries that were computed in blocks, against a loop."""
  F, N, b, K, extra = 2, 3, 4, 9, 2
  probs = np.random.default_rng(0).random((F, N, b, K + extra), np.float32)
  distances = [0, 1, 3, 7]
  found = attention._by_distance({'probs': [probs]}, extra, np.array(distances))
  expected = np.zeros((N, F * b, len(distances)))
  for t, n, place in np.ndindex(F * b, N, len(distances)):
    key = K - b + t % b - distances[place]
    expected[n, t, place] = probs[t // b, n, t % b, key] if key >= 0 else 0
  np.testing.assert_array_equal(np.asarray(found), expected.astype(np.float32))


def test_a_run_without_attention(tiny, tmp_path):
  model = recurrent(readout='ngram', slices=3)
  run = runs.Run(tmp_path / 'run', dataclasses.replace(tiny(), model=model))
  with bad_input(f"--workdir={run.workdir} has no attention: model.recurrent.readout='ngram'"):
    attention.analyse(run)
