"""Compares cluster statistics with loops; tests `analyze clusters`."""

import itertools
import json
import math

import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import clusters
from ngrammer_jax.config import model as model_config
from tests.checks import bad_input


def test_coherence_matches_loop():
  rng = np.random.default_rng(0)
  rows, ids = rng.normal(size=(12, 3)), np.array([0, 0, 0, 2, 2, 3, 5, 5, 5, 5, 5, 5])
  rows[4] = 0  # the similarity to a zero vector is 0
  length = np.linalg.norm(rows, axis=1)
  cosine = lambda a, b: rows[a] @ rows[b] / (length[a] * length[b]) if a != 4 and b != 4 else 0.0
  pairs = {
    k: [cosine(a, b) for a, b in itertools.combinations(np.flatnonzero(ids == k), 2)]
    for k in range(6)
  }
  overall, by_cluster = clusters.coherence(rows, ids)
  assert overall == pytest.approx(np.mean(list(itertools.chain(*pairs.values()))))
  for k, cosines in pairs.items():
    value = by_cluster[k]
    assert value == pytest.approx(np.mean(cosines)) if cosines else math.isnan(value)


def test_perplexity():
  assert clusters._perplexity(np.array([3, 0, 3, 3])) == pytest.approx(3)
  assert clusters._perplexity(np.array([1, 3])) == pytest.approx(4 / 3**0.75)


@pytest.mark.full
def test_clusters_of_a_run(tiny, untrained, capsys):
  usage = np.array([[0.5, 0.25, 0.25, 0, 0, 0, 0, 0], [1 / 8] * 8])

  def modify(params, codebook):
    codebook['ngrammer']['quantizer']['usage'] = usage.astype(np.float32)

  workdir = untrained(tiny(), modify)
  analyze.main(['clusters', f'--workdir={workdir}'])
  printed = capsys.readouterr().out
  assert (workdir / 'clusters.png').read_bytes().startswith(b'\x89PNG')
  result = json.loads((workdir / 'clusters.json').read_text())
  run = runs.load_run(workdir)
  tokens = run.split('train').tokens.tolist()
  used_tokens = sorted(set(tokens))
  sizes = (result['step'], result['clusters'], result['tokens'], result['never'])
  assert sizes == (4, 8, len(used_tokens), 257 - len(used_tokens))
  rows = np.asarray(run.restored.params['embedding'])
  centroids = np.asarray(run.restored.codebook['ngrammer']['quantizer']['centroids'])
  for n, head in enumerate(result['heads']):
    # Every token that occurs belongs to the cluster of the nearest centroid.
    features = (
      4 * rows[:, 8 * n : 8 * (n + 1)]
    )  # scaled by the square root of the width, as in the model
    ids = np.square(features[:, None] - centroids[n]).sum(axis=-1).argmin(axis=1)
    assert sum(len(cluster['never']) for cluster in head['members'].values()) == result['never']
    members = {k: cluster['tokens'] for k, cluster in head['members'].items() if cluster['tokens']}
    expected = {}
    for token in sorted(used_tokens, key=lambda token: (-tokens.count(token), token)):
      text = run.vocabulary.decode([token]).decode(errors='replace')
      expected.setdefault(str(ids[token]), []).append(text)
    assert members == expected and head['used'] == len(members) > 1
    shares = np.array([len(texts) for texts in members.values()]) / len(used_tokens)
    perplexity = np.prod(shares**-shares)
    assert head['vocabulary_perplexity'] == pytest.approx(perplexity)
    for name, columns in (
      ('coherence', rows),
      ('coherence_elsewhere', np.delete(rows, range(8 * n, 8 * n + 8), 1)),
    ):
      centered = columns[used_tokens] - columns[used_tokens].mean(axis=0)
      overall, _ = clusters.coherence(centered, ids[used_tokens])
      assert head[name]['clusters'] == pytest.approx(overall, rel=1e-4)
  heads = result['heads']
  assert [head['usage_perplexity'] for head in heads] == pytest.approx([2**1.5, 8])
  assert [head['dead'] for head in heads] == [5 / 8, 0]
  assert f'\n{len(used_tokens)} tokens of the training text in 8 clusters' in printed


def test_model_without_token_clusters_raises_bad_input(tiny, untrained):
  workdir = untrained(tiny(model={'ngram': None}))
  with bad_input(
    f'--workdir={workdir} has no token clusters: it needs model.ngram, with '
    f'model.ngram.clusters and model.ngram.layer="input", or an n-gram memory with '
    f'key="embedding_clusters"'
  ):
    analyze.main(['clusters', f'--workdir={workdir}'])


@pytest.mark.full
@pytest.mark.filterwarnings('error:No artists')
def test_more_clusters_than_tokens(tiny, untrained, monkeypatch):
  """No cluster has two tokens: the coherence is null, and the JSON has no NaN."""
  ngram = model_config.NGramConfig(clusters=300, vocabulary_size=64, dim=4)

  def modify(params, codebook):
    codebook['ngrammer']['quantizer']['usage'] = np.ones((2, 300), np.float32)

  workdir = untrained(tiny(model={'ngram': ngram}), modify)
  apart = np.stack([np.arange(257)] * 2, axis=1)
  monkeypatch.setattr(runs.Run, 'token_clusters_of', lambda run, memory: apart)
  rows, ids = np.ones((3, 2)), np.arange(3)
  assert clusters.coherence(rows, ids)[0] is None
  analyze.main(['clusters', f'--workdir={workdir}'])
  result = json.loads((workdir / 'clusters.json').read_text(), parse_constant=pytest.fail)
  assert [head['coherence'] for head in result['heads']] == [None, None]
