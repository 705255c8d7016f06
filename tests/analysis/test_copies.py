"""Compares `analyze copies` with a slow loop."""

import json
import types

import numpy as np

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import copies
from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.layers.copies import CopySearch
from tests.checks import bad_input
from tests.slow_copies import slow_copies

START = 256


def test_copies_of_a_text(one_device, tiny, untrained, monkeypatch, capsys):
  ids = np.random.default_rng(0).integers(97, 100, 48).astype(np.uint16)
  starts = np.array([0, 20])
  ids[starts[1:] - 1] = START  # separates documents
  text = token_split.TokenSplit(ids, starts, None, START)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: text)
  options = CopyMemoryConfig(window=9, lengths=(1, 3), counts=2)
  workdir = untrained(tiny({'ngram': None, 'copy_memory': options}))
  analyze.main(['copies', f'--workdir={workdir}'])
  result = json.loads((workdir / 'copies.json').read_text())
  inputs = np.array([START, *ids[:-1]], int)
  documents = np.cumsum(np.isin(np.arange(48), starts))
  after, bucket = slow_copies(CopySearch(9, (1, 3), 2), inputs, inputs, documents)
  assert (result['step'], result['tokens'], result['copied']) == (4, 48, (bucket > 0).sum())
  assert result['right'] == ((after == ids) & (bucket > 0)).sum() > 0
  expected = []
  for number, (length, count) in enumerate([(1, 1), (1, 2), (3, 1), (3, 2)], 1):
    tokens = bucket == number
    found = {'tokens': tokens.sum(), 'right': (tokens & (after == ids)).sum()}
    expected.append({'length': length, 'count': count, 'or_more': count == 2} | found)
  assert result['buckets'] == expected
  share = f'{result["copied"] / 48:.1%} have a copy'
  assert share in capsys.readouterr().out
  assert (workdir / 'copies.png').stat().st_size > 1000


def test_a_model_without_copies(tiny):
  run = types.SimpleNamespace(config=tiny({'ngram': None}), workdir='runs/plain')
  with bad_input('--workdir=runs/plain has no copies: it needs model.copy_memory'):
    copies.analyze(run)
