"""Mean attention by distance of recurrent models and Transformers, and `analyze attention`."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import attention, capture
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.models import language_model
from tests.checks import bad_input, full

TOKENS, LENGTH = 96, 16  # of the text and of a segment
SECOND_START = 37  # first token of the second document


@pytest.fixture
def text(monkeypatch):
  """Replaces the splits of runs by a text of two documents."""
  tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.uint16)
  split = token_split.TokenSplit(tokens, np.array([0, SECOND_START]), None, 256)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: split)
  return split


def recurrent(**fields):
  r = recurrent_config.RecurrentConfig(hidden=12, **fields)
  return model_config.ModelConfig(width=16, tie_embeddings=False, recurrent=r)


def capture_segments(run, config, split, length, memory):
  """Yields the intermediates of each segment, from a separate implementation of the loop."""
  config = dataclasses.replace(config, scan_layers=False)
  model = language_model.build(config, run.vocabulary.size)

  @jax.jit
  def apply(tokens_1xT, starts_1xT, memory):
    (_, memory, _), captured = model.apply(
      {'params': run.restored.params},
      tokens_1xT,
      memory,
      starts_BxT=starts_1xT,
      mutable=['intermediates'],
    )
    return captured['intermediates'], memory

  for first in range(0, TOKENS, length):
    inputs, _, starts = split.window(first, length)
    intermediates, memory = apply(inputs[None], starts[None], memory)
    yield jax.device_get(intermediates)


@pytest.mark.parametrize('readout', ['key_value', full('recurrent_memory')])
def test_weights_of_a_recurrent_model(tiny, untrained, text, capsys, readout):
  model = recurrent(readout=readout, window=4)
  workdir = untrained(dataclasses.replace(tiny(), model=model))
  assert analyze.main(['attention', f'--workdir={workdir}', '--split=test']) == 0
  printed = capsys.readouterr().out
  result = json.loads((workdir / 'attention_test.json').read_text())
  assert (workdir / 'attention_test.png').stat().st_size > 1000 and 'other keys' in printed
  run, memory = runs.load_run(workdir), language_model.empty_memory(model, 1, 1)
  (intermediates,) = capture_segments(run, model, text, TOKENS, memory)
  weights_TxL = intermediates['readout']['weights'][0][0]
  first = readout == 'key_value'
  # The first tokens of each document attend to fewer than four tokens.
  counted = [
    t for t in range(TOKENS) if t - (SECOND_START if t >= SECOND_START else 0) >= 3 + first
  ]
  np.testing.assert_allclose(result['mean'], weights_TxL[counted].mean(axis=0)[::-1], rtol=1e-4)
  assert np.ptp(result['mean']) > 1e-3
  assert result['distances'] == list(range(first, 4 + first))
  assert sum(result['mean']) == pytest.approx(1, abs=1e-5) and result['rest'] < 1e-5
  assert (result['counted'], result['tokens']) == (len(counted), TOKENS)


MEMORY = model_config.MemoryConfig(16)
EVALUATION_MEMORY = evaluation_config.EvaluationMemory(length=20)


@pytest.mark.full
@pytest.mark.parametrize(
  'memory, evaluation_memory',
  [(None, None), pytest.param(MEMORY, None, marks=pytest.mark.slow), (MEMORY, EVALUATION_MEMORY)],
)
def test_weights_of_a_transformer(tiny, untrained, text, memory, evaluation_memory):
  """Compares with a loop over tokens and distances, also with another memory in evaluation."""
  position = 'rope' if memory is None else 'relative'
  changes = {'ngram': None, 'feed_forward_width': 0, 'memory': memory, 'position': position}
  evaluation = evaluation_config.EvaluationConfig(memory=evaluation_memory)
  config = tiny(changes, evaluation=evaluation)
  run = runs.load_run(untrained(config))
  result = attention.analyze(run, 'test')
  model = config.evaluation_model()
  M = 0 if memory is None else model.memory.length
  assert M == (0 if memory is None else 20 if evaluation_memory else 16)
  weights = []  # of tokens that can attend to all distances
  memory = language_model.empty_memory(model, 1)
  for number, layers in enumerate(capture_segments(run, model, text, LENGTH, memory)):
    probs_LxNxTxS = np.stack([layers[f'layer_{i}']['attention']['probs'][0][0] for i in range(2)])
    assert probs_LxNxTxS.shape == (2, 2, LENGTH, M + LENGTH)
    for t in range(LENGTH):
      index = LENGTH * number + t
      position = index - (SECOND_START if index >= SECOND_START else 0)
      if min(position, min(M, LENGTH * number) + t) >= 15:
        weights.append(probs_LxNxTxS[:, :, t, [M + t - d for d in range(16)]])
  heads = np.mean(weights, axis=0)
  assert result['distances'] == list(range(16)) and result['counted'] == len(weights)
  np.testing.assert_allclose(result['heads'], heads, rtol=1e-4)
  np.testing.assert_allclose(result['layers'], heads.mean(axis=1), rtol=1e-4)
  np.testing.assert_allclose(result['mean'], heads.mean(axis=(0, 1)), rtol=1e-4)
  assert result['rest'] == pytest.approx(1 - heads.mean(axis=(0, 1)).sum(), abs=1e-5)
  assert (result['rest'] < 1e-5) == (M == 0)


def test_reported_distances():
  distances = attention._select_distances
  transformer = lambda memory: model_config.ModelConfig(position='relative', memory=memory)
  readouts = ('key_value', 'key_value_predict', 'recurrent_memory')
  assert [distances(recurrent(readout=readout, window=3), 16) for readout in readouts] == [
    [1, 2, 3],
    [1, 2, 3],
    [0, 1, 2],
  ]
  assert distances(transformer(None), 5) == [0, 1, 2, 3, 4]
  assert distances(transformer(None), 100) == list(range(16))
  for same_length, expected in (
    ('no', range(9)),
    ('memory', range(8)),
    ('memory_and_self', range(9)),
    ('memory_alone', range(1, 9)),
  ):
    memory = model_config.MemoryConfig(8, same_length=same_length)
    assert distances(transformer(memory), 4) == list(expected), same_length
  count = attention._count_visible_tokens
  position_T = np.array([7, 8, 0, 1])
  assert count(transformer(None), position_T, 8).tolist() == [0, 1, 0, 1]
  assert count(transformer(model_config.MemoryConfig(6)), position_T, 8).tolist() == [6, 7, 0, 1]
  assert count(transformer(model_config.MemoryConfig(6)), position_T, 4).tolist() == [4, 5, 0, 1]
  assert count(recurrent(readout='key_value', window=3), position_T, 8) is position_T


def test_weights_by_distance_beside_persistent_vectors():
  N, T, K, vectors = 3, 4, 9, 2
  probs = np.random.default_rng(0).random((1, N, T, K + vectors), np.float32)
  distances = [0, 1, 3, 7]
  weights = capture.weights_by_distance({'probs': [probs]}, vectors, np.array(distances))
  expected = np.zeros((N, T, len(distances)), np.float32)
  for n, t, i in np.ndindex(*expected.shape):
    key = K - T + t - distances[i]
    expected[n, t, i] = probs[0, n, t, key] if key >= 0 else 0
  np.testing.assert_array_equal(np.asarray(weights), expected)


def test_model_without_attention_raises_bad_input(tiny, tmp_path):
  model = recurrent(readout='ngram', slices=3)
  run = runs.Run(tmp_path / 'run', dataclasses.replace(tiny(), model=model))
  with bad_input(f"--workdir={run.workdir} has no attention: model.recurrent.readout='ngram'"):
    attention.analyze(run)
