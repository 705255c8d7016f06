"""`analyze recl` equals its definition: one pass for every loss, and a loop over contexts."""

import json
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import elements, recl
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.data.vocabularies import ByteVocabulary
from ngrammer_jax.models import language_model
from tests.checks import bad_input, full

T, START = 6, 256
EVALUATION = evaluation_config.EvaluationConfig(segment_length=T)
MEMORY = model_config.MemoryConfig(5)


@pytest.fixture
def text(monkeypatch):
  """Every split: random tokens in two documents."""
  ids = np.random.default_rng(0).choice(list(b'ab<&'), 40).astype(np.uint16)
  split = token_split.TokenSplit(ids, np.array([0, 23]), None, START)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: split)
  return split


@pytest.mark.parametrize('memory', [None, full(MEMORY)])
def test_losses_are_those_of_exactly_the_context(one_device, tiny, untrained, text, memory):
  config = tiny({'layers': 1, 'ngram': None, 'memory': memory}, evaluation=EVALUATION)
  run, contexts = runs.load_run(untrained(config)), [4, 8, 12]
  targets = np.array([11, 15, 19, 23, 27, 31, 35, 39])
  losses_CxP = recl.losses(run, text, targets, contexts)
  variables = {'params': run.restored.params, 'codebook': run.restored.codebook}

  @jax.jit
  def read(tokens_1xT, starts_1xT, carried):
    hidden, carried, _ = run.evaluated.apply(
      variables, tokens_1xT, carried, starts_BxT=starts_1xT, train=False
    )
    return run.evaluated.apply(variables, hidden, method='logits')[0, -1], carried

  for c, t in np.ndindex(losses_CxP.shape):
    target, length = targets[t], contexts[c] if memory else min(contexts[c], T)
    carried = language_model.empty_memory(run.config.evaluation_model(), 1)
    for first in range(target + 1 - length, target + 1, T):  # segments of the window
      inputs, goals, starts = text.window(first, min(T, target + 1 - first))
      logits_V, carried = read(inputs[None], starts[None], carried)
    expected = float(jax.nn.logsumexp(logits_V) - logits_V[goals[-1]])
    assert losses_CxP[c, t] == pytest.approx(expected, rel=1e-4)


def test_lengths_follow_the_procedure_of_the_paper(monkeypatch):
  """Of three models with random losses, compared with a loop over context lengths and tokens."""
  rng, contexts, P = np.random.default_rng(1), [10, 20, 30, 40, 50], 37
  falling_C = np.array([0.0, -0.3, -0.4, -0.402, -0.404])
  losses = 2 + rng.random((3, 1, P)) + 0.02 * rng.random((3, 5, P))
  losses[0] += falling_C[:, None]
  losses[2] += 2 * np.linspace(0, -0.5, 5)[:, None]  # every step helps
  split = types.SimpleNamespace(tokens=np.zeros(50 + 36 * 10))
  all_runs = [
    types.SimpleNamespace(
      split=lambda name: split, restored=types.SimpleNamespace(step=4), vocabulary=ByteVocabulary()
    )
    for _ in range(3)
  ]
  remaining = list(losses)
  monkeypatch.setattr(recl, 'losses', lambda run, text, targets, contexts: remaining.pop(0))
  result = recl.analyze(all_runs, 'abc', context_step=10, max_context=59)
  assert (result['contexts'], result['targets']) == (contexts, P)
  lengths = {}
  for i, run in enumerate(result['runs']):
    np.testing.assert_allclose(run['losses'], losses[i].mean(axis=1))
    for each in run['shares']:
      c = 0
      while c < 4:
        tokens = range(P)
        best = [min(losses[m][c][t] for m in range(3)) for t in tokens]
        hardest = sorted(tokens, key=lambda t: -best[t])[: round(each['share'] * P)]
        now, more = (
          np.exp(np.mean([min(best[t], losses[i][at][t]) for t in hardest])) for at in (c, c + 1)
        )
        gain = (now - more) / now
        assert each['gains'][c] == pytest.approx(gain)
        if gain < 0.01:
          break
        c += 1
      assert (each['length'], each['is_lower_bound']) == (contexts[c], c == 4)
      lengths[run['name'], each['share']] = each['length']
  assert len(set(lengths.values())) > 1 and lengths['c', 0.1] == 50
  printed = elements.format_tables(recl.elements(result))
  assert '>= 50' in printed and '37 tokens of validation' in printed


@pytest.mark.full
def test_two_runs_and_bad_input(one_device, tiny, untrained, text, tmp_path, monkeypatch, capsys):
  config = tiny({'layers': 1, 'ngram': None, 'memory': MEMORY}, evaluation=EVALUATION)
  workdir = untrained(config)
  flags = [f'--workdir={workdir}', f'--workdir={workdir}', '--label=a', '--label=b']
  figure = tmp_path / 'other' / 'recl.svg'
  analyze.main(['recl', *flags, '--context_step=4', '--max_context=12', f'--figure={figure}'])
  result = json.loads(figure.with_suffix('.json').read_text())
  a, b = result['runs']
  assert (a.pop('name'), b.pop('name')) == ('a', 'b') and a == b
  assert result['targets'] == 8 and b'<svg' in figure.read_bytes()
  assert 'RECL, r=0.1' in capsys.readouterr().out
  run = runs.load_run(workdir)
  for step, longest, message in (
    (7, 13, '--context_step=7 must be at least 1, and at most half of --max_context=13'),
    (0, 13, '--context_step=0 must be at least 1, and at most half of --max_context=13'),
    (
      25,
      99,
      '--split=validation has 40 tokens, fewer than the longest context of 75: lower --max_context',
    ),
  ):
    with bad_input(message):
      recl.analyze([run], 'a', context_step=step, max_context=longest)
  other = runs.Run(tmp_path / 'elsewhere', config)
  vars(other)['vocabulary'] = types.SimpleNamespace(size=300)
  with bad_input(
    f'{other.workdir} and {workdir} read different tokens: recl needs runs '
    f'with the same text and vocabulary'
  ):
    recl.analyze([run, other], 'ab')
