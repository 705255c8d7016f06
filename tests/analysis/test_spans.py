"""Spans and persistent vectors of a run, and `analyze spans`."""

import json

import numpy as np
import pytest

from ngrammer_jax import analyze, errors, runs
from ngrammer_jax.analysis import spans
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.tokens import token_split
from tests.checks import bad_input, full

LIMIT, RAMP, VECTORS = 64, 8, 4
MODEL = {
  'ngram': None,
  'feed_forward_width': 0,
  'memory': model_config.MemoryConfig(LIMIT, same_length='memory_and_self'),
}


def analyze_spans(workdir, capsys):
  """Runs `analyze spans` and returns the JSON and the printed text."""
  assert analyze.main(['spans', f'--workdir={workdir}']) == 0
  assert (workdir / 'spans.png').stat().st_size > 1000
  return json.loads((workdir / 'spans.json').read_text()), capsys.readouterr().out


def test_adaptive_spans_and_the_share_of_persistent_vectors(tiny, untrained, capsys):
  """With zero queries, attention is proportional to the span mask."""
  shares_LxN = np.array([[0.0, 0.25], [0.7, 0.95]])

  def modify(params, codebook):
    for layer, share_N in enumerate(shares_LxN):
      attention = params[f'layer_{layer}']['attention']
      attention['span']['span'] = share_N.astype(np.float32)
      attention['query']['kernel'] *= 0

  span = model_config.SpanConfig(limit=LIMIT, ramp=RAMP, initial=0.25)
  persistent = model_config.PersistentConfig(VECTORS)
  model = MODEL | {'span': span, 'persistent': persistent}
  result, printed = analyze_spans(untrained(tiny(model), modify), capsys)
  assert result['step'] == 4 and (result['limit'], result['ramp']) == (LIMIT, RAMP)
  np.testing.assert_allclose(result['spans'], np.minimum(LIMIT * shares_LxN + RAMP, LIMIT))
  assert result['tokens'] == spans.MAX_SEGMENTS * 16 and result['along'] is None
  expected_LxN = np.zeros((2, 2))
  for layer, head in np.ndindex(2, 2):
    z, shares = LIMIT * shares_LxN[layer, head], []
    for token in range(result['tokens']):
      distances = range(min(token, LIMIT) + 1)
      context = sum(min(max((z - d) / RAMP + 1, 0), 1) for d in distances)
      shares.append(VECTORS / (VECTORS + context))
    expected_LxN[layer, head] = np.mean(shares)
  np.testing.assert_allclose(result['persistent'], expected_LxN, rtol=1e-4)
  assert 'share of attention on persistent vectors' in printed and 'head 1' in printed


@pytest.mark.parametrize('kind, memory', [full('adaptive', None), ('dynamic', 32)])
def test_documents_and_evaluation_memory(tiny, untrained, monkeypatch, kind, memory):
  """Compares with a loop; a token attends only to its document and the memory of evaluation."""
  starts, length = np.array([0, 50]), 128
  tokens = np.random.default_rng(0).integers(0, 256, 2 * length - 30).astype(np.uint16)
  text = token_split.TokenSplit(tokens, starts, None, 256)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: text)
  z_N, bias_N = np.array([20.0, 60.0]), np.log([20 / 44, 60 / 4])

  def modify(params, codebook):
    for layer in range(2):
      attention = params[f'layer_{layer}']['attention']
      attention['query']['kernel'] *= 0
      if kind == 'adaptive':
        attention['span']['span'] = (z_N / LIMIT).astype(np.float32)
      else:
        attention['span']['span_kernel'] *= 0
        attention['span']['span_bias'] = bias_N.astype(np.float32)

  span = model_config.SpanConfig(kind=kind, limit=LIMIT, ramp=RAMP, initial=0.0)
  model = MODEL | {'span': span, 'persistent': model_config.PersistentConfig(VECTORS)}
  evaluation = evaluation_config.EvaluationMemory(length=memory)
  config = tiny(
    model,
    training={'segment_length': length},
    evaluation=evaluation_config.EvaluationConfig(memory=memory and evaluation),
  )
  result = spans.analyze(runs.load_run(untrained(config, modify)))
  assert result['tokens'] == len(tokens)
  np.testing.assert_allclose(result['spans'], [np.minimum(z_N + RAMP, LIMIT)] * 2, rtol=1e-5)
  shares_TxN = np.zeros((len(tokens), 2))
  for token, head in np.ndindex(*shares_TxN.shape):
    first = starts[starts <= token].max()
    distances = range(min(token - first, memory or LIMIT) + 1)
    context = sum(min(max((z_N[head] - d) / RAMP + 1, 0), 1) for d in distances)
    shares_TxN[token, head] = VECTORS / (VECTORS + context)
  np.testing.assert_allclose(result['persistent'], [shares_TxN.mean(axis=0)] * 2, rtol=1e-4)
  assert result['along'] is None or len(result['along']['spans']) == spans.MAX_RECORDED_TOKENS


@pytest.mark.full
def test_dynamic_spans_along_a_text(tiny, untrained, capsys):
  """The spans of the first layer depend on the token alone, those of the second on nothing."""
  bias_N = np.array([-1.0, 0.5])

  def modify(params, codebook):
    second = params['layer_1']['attention']['span']
    second['span_kernel'] *= 0
    second['span_bias'] = bias_N.astype(np.float32)

  span = model_config.SpanConfig(kind='dynamic', limit=LIMIT, ramp=RAMP, initial=0.0)
  workdir = untrained(tiny(MODEL | {'span': span}), modify)
  result, printed = analyze_spans(workdir, capsys)
  expected_N = np.minimum(LIMIT / (1 + np.exp(-bias_N)) + RAMP, LIMIT)
  np.testing.assert_allclose(result['spans'][1], expected_N, rtol=1e-5)
  along = result['along']
  assert len(along['texts']) == len(along['spans']) == result['tokens'] == 8 * 16
  tokens = runs.load_run(workdir).split('validation').tokens[: 8 * 16]
  assert along['texts'][0] == '' and result['persistent'] is None  # the start of the document
  assert ''.join(along['texts']).encode() == bytes(tokens[:-1].tolist())
  # One is averaged over heads, the other over tokens; the overall means are equal.
  assert np.mean(along['spans']) == pytest.approx(np.mean(result['spans']), rel=1e-5)
  first_layer = 2 * np.array(along['spans']) - expected_N.mean()
  assert (RAMP < first_layer).all() and (first_layer < LIMIT + 1e-3).all()
  by_text = {text: first_layer[i] for i, text in enumerate(along['texts'])}
  np.testing.assert_allclose(first_layer, [by_text[text] for text in along['texts']], rtol=1e-4)
  assert len({round(span, 2) for span in by_text.values()}) > 5
  assert 'mean over tokens' in printed and 'persistent' not in printed


def test_model_without_spans_raises_bad_input(tiny, tmp_path):
  run = runs.Run(tmp_path / 'run', tiny(MODEL))
  with bad_input(
    f'--workdir={run.workdir} has no spans and no persistent vectors that share a softmax with '
    f'the context: it needs model.span or model.persistent'
  ):
    spans.analyze(run)


def test_a_model_without_spans_is_refused_before_the_corpus_is_read(trained, monkeypatch):
  monkeypatch.setattr(runs.Run, 'split', lambda *args: pytest.fail('read the corpus'))
  with pytest.raises(errors.BadInput, match='has no spans and no persistent vectors'):
    analyze.main(['spans', f'--workdir={trained}'])
