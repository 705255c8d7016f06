"""Clusters of a run: their statistics against loops, and the verb."""

import itertools
import json
import math

import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import clusters
from ngrammer_jax.data import token_cache
from ngrammer_jax.models import config as model_config
from tests.checks import bad_input


def test_coherence_equals_slow_loop():
  rng = np.random.default_rng(0)
  rows, ids = rng.normal(size=(12, 3)), np.array([0, 0, 0, 2, 2, 3, 5, 5, 5, 5, 5, 5])
  rows[4] = 0  # has no direction: similar to nothing
  length = np.linalg.norm(rows, axis=1)
  cosine = lambda a, b: rows[a] @ rows[b] / (length[a] * length[b]) if a != 4 and b != 4 else 0.0
  pairs = {
    k: [cosine(a, b) for a, b in itertools.combinations(np.flatnonzero(ids == k), 2)]
    for k in range(6)
  }
  overall, of_each = clusters.coherence(rows, ids)
  assert overall == pytest.approx(np.mean([c for found in pairs.values() for c in found]))
  for k, found in pairs.items():
    assert of_each[k] == pytest.approx(np.mean(found)) if found else math.isnan(of_each[k])


@pytest.mark.parametrize('distinct_start', [False, True])
def test_collisions_equal_slow_loop(distinct_start):
  K, V, N = 5, 11, 2
  ngram = model_config.NGramConfig(
    clusters=K, vocabulary_size=V, orders=(2, 3), distinct_start=distinct_start
  )
  rng = np.random.default_rng(0)
  ids, tokens = rng.integers(0, K, (20, N)), rng.integers(0, 20, 60)
  text = token_cache.TokenSplit(tokens, np.array([0, 25]), None, 0)
  found = clusters.collisions(ngram, ids, text)
  nothing, primes = (K if distinct_start else 0), (13, 17)
  for order, n in itertools.product((2, 3), range(N)):
    grams = []
    for t in range(60):
      first = 25 if t >= 25 else 0
      back = range(t, t - order, -1)
      grams.append(tuple(ids[tokens[s], n] if s >= first else nothing for s in back))
    number = lambda gram: sum(int(z) * (K + distinct_start) ** j for j, z in enumerate(gram))
    row = {g: (number(g) * (n + 1) + n + 1) % primes[n] % V for g in grams}
    rows = list(row.values())
    of = found[order][n]
    assert (of['distinct'], of['rows']) == (len(row), len(set(rows)))
    assert of['shared'] == pytest.approx(np.mean([rows.count(row[g]) > 1 for g in grams]))
    assert of['random_rows'] == pytest.approx(V * (1 - (1 - 1 / V) ** len(row)))


def test_perplexity_is_that_of_as_many_equal_shares():
  assert clusters._perplexity(np.array([3, 0, 3, 3])) == pytest.approx(3)
  assert clusters._perplexity(np.array([1, 3])) == pytest.approx(4 / 3**0.75)


def test_clusters_of_a_run(tiny, untrained, capsys):
  usage = np.array([[0.5, 0.25, 0.25, 0, 0, 0, 0, 0], [1 / 8] * 8])

  def change(params, codebook):
    codebook['ngrammer']['quantizer']['usage'] = usage.astype(np.float32)

  workdir = untrained(tiny(), change)
  analyze.main(['clusters', f'--workdir={workdir}'])
  printed = capsys.readouterr().out
  assert (workdir / 'clusters.png').read_bytes().startswith(b'\x89PNG')
  result = json.loads((workdir / 'clusters.json').read_text())
  run = runs.load_run(workdir)
  tokens = run.split('train').tokens.tolist()
  there = sorted(set(tokens))
  sizes = (result['step'], result['clusters'], result['tokens'], result['never'])
  assert sizes == (4, 8, len(there), 257 - len(there))
  rows = np.asarray(run.state.params['embedding'])
  centroids = np.asarray(run.state.codebook['ngrammer']['quantizer']['centroids'])
  for n, head in enumerate(result['heads']):
    # Every token that occurs is in one cluster: that of the nearest centroid.
    part = 4 * rows[:, 8 * n : 8 * (n + 1)]  # by the square root of the width, as in the model
    ids = np.square(part[:, None] - centroids[n]).sum(axis=-1).argmin(axis=1)
    assert sum(len(of['never']) for of in head['members'].values()) == result['never']
    members = {k: of['tokens'] for k, of in head['members'].items() if of['tokens']}
    expected = {}
    for token in sorted(there, key=lambda token: (-tokens.count(token), token)):
      text = run.vocabulary.decode([token]).decode(errors='replace')
      expected.setdefault(str(ids[token]), []).append(text)
    assert members == expected and head['used'] == len(members) > 1
    shares = np.array([len(texts) for texts in members.values()]) / len(there)
    perplexity = np.prod(shares**-shares)
    assert head['vocabulary_perplexity'] == pytest.approx(perplexity)
    for name, kept in (
      ('coherence', rows),
      ('coherence_elsewhere', np.delete(rows, range(8 * n, 8 * n + 8), 1)),
    ):
      kept = kept[there] - kept[there].mean(axis=0)
      expected_of, _ = clusters.coherence(kept, ids[there])
      assert head[name]['clusters'] == pytest.approx(expected_of, rel=1e-4)
  heads = result['heads']
  assert [head['usage_perplexity'] for head in heads] == pytest.approx([2**1.5, 8])
  assert [head['dead'] for head in heads] == [5 / 8, 0]
  assert printed.startswith(f'step 4: {len(there)} tokens of the training text in 8 clusters')


def test_a_run_without_clusters_of_tokens(tiny, untrained):
  workdir = untrained(tiny(model={'ngram': None}))
  with bad_input(
    f'--workdir={workdir} has no clusters of tokens: it needs model.ngram, with '
    f'model.ngram.clusters and model.ngram.layer="input"'
  ):
    analyze.main(['clusters', f'--workdir={workdir}'])


def test_more_clusters_than_tokens(tiny, untrained, monkeypatch):
  """No cluster has two: nothing to compare, and no number that is none."""
  ngram = model_config.NGramConfig(clusters=300, vocabulary_size=64, dim=4)

  def change(params, codebook):
    codebook['ngrammer']['quantizer']['usage'] = np.ones((2, 300), np.float32)

  workdir = untrained(tiny(model={'ngram': ngram}), change)
  monkeypatch.setattr(runs.Run, 'token_clusters', np.stack([np.arange(257)] * 2, axis=1))
  rows, ids = np.ones((3, 2)), np.arange(3)
  assert clusters.coherence(rows, ids)[0] is None
  analyze.main(['clusters', f'--workdir={workdir}'])
  result = json.loads((workdir / 'clusters.json').read_text(), parse_constant=pytest.fail)
  assert [head['coherence'] for head in result['heads']] == [None, None]
