"""Statistics of the learned clusters: their tokens, coherence and usage.

V vocabulary, U unique tokens in the text, D model width, N heads, H head width, K clusters.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture
from ngrammer_jax.analysis.elements import Element
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.system import progress

FIGURE_SIZE = (2, 9.0)  # panels, and width in inches
NUM_SHUFFLES = 10  # random clusterings that coherence is compared with
MAX_CLUSTERS = 6  # that are shown, the most coherent ones
MAX_WORDS = 12  # tokens of each of them
BLOCK = 1_000_000  # tokens that are counted at a time

COLUMNS = (
  'head',
  'codes used',
  'perplexity',
  'token-weighted perplexity',
  'dead',
  'coherence (random)',
  'cross-head coherence (random)',
)


def analyze(run: runs.Run, split: str = 'validation', memory: str | None = None) -> dict[str, Any]:
  """Computes the cluster statistics of a run, as plain values for JSON.

  They depend on the training split alone; `split` is ignored. `memory` is the path of a memory,
  such as `layer_1/ngram_memory_0`. None: the first with token clusters. For the collisions of
  n-grams of clusters, see `ngrams`.

  Keys: `step`, `split`, `memory`, `clusters` K; `tokens`, number of vocabulary entries that occur
  in the training split; `never`, number of the other entries; and `heads`, with for each head, over
  the occurring tokens:

  `used`: number of clusters with at least one token.
  `vocabulary_perplexity`: exp of the entropy of the share of the tokens in each cluster.
  `usage_perplexity`, `dead`: from the running usage in training (see `ProductQuantizer`).
  `coherence`: mean cosine similarity over all pairs of tokens in one cluster, of the centered
    embeddings; `coherence_elsewhere`: the same without the features of this head, which k-means
    was trained on. Each with the mean and standard deviation for `random` clusters of the same
    sizes. None if no cluster has two tokens.
  `members`: for each non-empty cluster, its tokens, the most frequent first, its coherence
    if it has at least two, and its tokens that never occur.

  Raises:
    BadInput: the model, or this memory, has no token clusters.
  """
  memories = run.token_memories()
  if memory is None:
    memory = next(iter(memories))
  if memory not in memories:
    raise errors.BadInput(f'--memory={memory} has no token clusters: use {", ".join(memories)}')
  clusters_VxN = run.token_clusters_of(memory)
  train = run.split('train').tokens
  V, N = clusters_VxN.shape
  count_V = np.zeros(V, np.int64)
  for first in range(0, len(train), BLOCK):
    count_V += np.bincount(train[first : first + BLOCK], minlength=V)
  by_frequency_V = np.argsort(-count_V, kind='stable')
  tokens_U = by_frequency_V[: np.count_nonzero(count_V)]
  U = len(tokens_U)
  embedding_UxD = np.asarray(run.restored.params['embedding'], np.float32)[tokens_U]
  embedding_UxNxH = (embedding_UxD - embedding_UxD.mean(axis=0)).reshape(U, N, -1)
  codebook = run.restored.codebook
  for name in memory.split('/'):
    codebook = codebook[name]
  usage_NxK = np.asarray(codebook['quantizer']['usage'], np.float64)
  texts = [capture.decode(run, [token]) for token in by_frequency_V]
  heads = []
  with progress.Progress('comparing clusters', N, 'heads') as bar:
    for n in range(N):
      ids_V = clusters_VxN[by_frequency_V, n]
      heads.append(_analyze_head(embedding_UxNxH, n, ids_V, usage_NxK[n], texts))
      bar.advance(1)
  return {
    'step': run.restored.step,
    'split': split,
    'memory': memory,
    'clusters': memories[memory].options.clusters,
    'tokens': U,
    'never': V - U,
    'heads': heads,
  }


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no token clusters."""
  run.token_memories()


def _analyze_head(
  embedding_UxNxH: np.ndarray,
  n: int,
  ids_V: np.ndarray,
  usage_K: np.ndarray,
  texts: Sequence[str],
) -> dict[str, Any]:
  """Returns the statistics of head n; tokens are sorted by frequency."""
  U = len(embedding_UxNxH)
  K = len(usage_K)
  all_features = embedding_UxNxH.reshape(U, -1)
  other_features = np.delete(embedding_UxNxH, n, axis=1).reshape(U, -1)
  count_K = np.bincount(ids_V[:U], minlength=K)
  return {
    'used': int((count_K > 0).sum()),
    'vocabulary_perplexity': _perplexity(count_K),
    'usage_perplexity': _perplexity(usage_K),
    'dead': float((usage_K < quantizer.DEAD / K).mean()),
    'coherence': _compare_with_random(all_features, ids_V[:U]),
    'coherence_elsewhere': _compare_with_random(other_features, ids_V[:U]),
    'members': _list_members(all_features, ids_V[:U], ids_V, texts),
  }


def coherence(rows_UxD: np.ndarray, ids_U: np.ndarray) -> tuple[float | None, np.ndarray]:
  """Computes the mean cosine similarity of pairs in the same cluster: overall, and by cluster [K].

  It is nan for clusters with fewer than two rows, and None overall without larger clusters.
  """
  length_Ux1 = np.linalg.norm(rows_UxD, axis=1, keepdims=True)
  unit_UxD = rows_UxD / np.where(length_Ux1 > 0, length_Ux1, 1)
  order_U = np.argsort(ids_U, kind='stable')
  used, first = np.unique(ids_U[order_U], return_index=True)
  size_K = np.bincount(ids_U)
  # The squared norm of a sum contains every pair twice and every row with itself.
  twice_K = np.zeros(len(size_K))
  twice_K[used] = np.square(np.add.reduceat(unit_UxD[order_U], first)).sum(axis=1)
  twice_K -= np.bincount(ids_U, weights=np.square(unit_UxD).sum(axis=1))
  pairs_K = size_K * (size_K - 1)
  overall = float(twice_K.sum() / pairs_K.sum()) if pairs_K.any() else None
  return overall, np.where(pairs_K > 0, twice_K / np.maximum(pairs_K, 1), np.nan)


def _compare_with_random(rows_UxD: np.ndarray, ids_U: np.ndarray) -> dict[str, float] | None:
  """Returns the coherence of the clusters and of random clusters of the same sizes, or None."""
  overall, _ = coherence(rows_UxD, ids_U)
  if overall is None or not rows_UxD.shape[1]:
    return None
  rng = np.random.default_rng(0)
  shuffled = [coherence(rows_UxD, rng.permutation(ids_U))[0] for _ in range(NUM_SHUFFLES)]
  return {
    'clusters': overall,
    'random': float(np.mean(shuffled)),
    'random_deviation': float(np.std(shuffled)),
  }


def _perplexity(weight_K: np.ndarray) -> float:
  """Returns exp of the entropy of the shares of the clusters."""
  share_K = weight_K[weight_K > 0] / weight_K.sum()
  return float(np.exp(-(share_K * np.log(share_K)).sum()))


def _list_members(
  rows_UxD: np.ndarray, ids_U: np.ndarray, ids_V: np.ndarray, texts: Sequence[str]
) -> dict[int, dict[str, Any]]:
  """Returns the tokens and the coherence of each non-empty cluster."""
  _, coherence_K = coherence(rows_UxD, ids_U)
  members = {}
  for k in np.unique(ids_V):
    indices = np.flatnonzero(ids_V == k)
    coherence_of_k = None
    if k < len(coherence_K) and np.isfinite(coherence_K[k]):
      coherence_of_k = float(coherence_K[k])
    members[int(k)] = {
      'coherence': coherence_of_k,
      'tokens': [texts[i] for i in indices if i < len(ids_U)],
      'never': [texts[i] for i in indices if i >= len(ids_U)],
    }
  return members


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the most coherent clusters of four or more tokens, and the statistics of the heads."""
  large = []
  statistics = [COLUMNS]
  for n, head in enumerate(result['heads']):
    statistics.append(
      (
        str(n),
        f'{head["used"]:,}',
        f'{head["vocabulary_perplexity"]:.1f}',
        f'{head["usage_perplexity"]:.1f}',
        f'{head["dead"]:.1%}',
        _format_coherence(head['coherence']),
        _format_coherence(head['coherence_elsewhere']),
      )
    )
    for k, cluster in head['members'].items():
      if len(cluster['tokens']) >= 4:
        large.append((cluster['coherence'], f'head {n}, cluster {k}', cluster['tokens']))
  examples = [('cluster', 'coherence', 'most frequent tokens')]
  for coherence, name, tokens in sorted(large, key=lambda each: -each[0])[:MAX_CLUSTERS]:
    visible = ' '.join(repr(token)[1:-1].replace(' ', '_') for token in tokens[:MAX_WORDS])
    examples.append((name, f'{coherence:.3f}', visible))
  title = (
    f'{result["tokens"]:,} tokens of the training text in {result["clusters"]:,} clusters per head '
    f'({result["never"]:,} never occur)'
  )
  return [
    Element('the most coherent clusters of four or more tokens', examples, has_words=True),
    Element(title, statistics, is_folded=True),
  ]


def _format_coherence(value: dict[str, float] | None) -> str:
  if value is None:
    return ''
  return f'{value["clusters"]:z.3f} ({value["random"]:z.3f})'


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots cluster sizes and coherence in two panels."""
  sizes_axes, coherence_axes = axes
  heads = range(len(result['heads']))
  for n, head in enumerate(result['heads']):
    sizes = sorted((len(cluster['tokens']) for cluster in head['members'].values()), reverse=True)
    sizes = [size for size in sizes if size]
    sizes_axes.plot(np.arange(1, len(sizes) + 1), sizes, linewidth=1, label=f'head {n}')
  sizes_axes.set(xlabel='cluster, largest first', ylabel='tokens', yscale='log')
  sizes_axes.legend(fontsize='x-small')
  for name, label, offset in (
    ('coherence', 'all features', -0.2),
    ('coherence_elsewhere', "other heads' features", 0.2),
  ):
    values = [head[name] for head in result['heads']]
    if None in values:
      continue
    positions = [n + offset for n in heads]
    coherence_axes.bar(positions, [value['clusters'] for value in values], 0.4, label=label)
    randoms = [value['random'] for value in values]
    random_label = 'random clusters' if offset > 0 else None
    coherence_axes.plot(positions, randoms, 'k_', markersize=8, label=random_label)
  coherence_axes.set(xlabel='head', ylabel='cosine similarity in clusters')
  coherence_axes.axhline(0, color='black', linewidth=0.5)
  coherence_axes.set_xticks(heads)
  if coherence_axes.get_legend_handles_labels()[1]:  # above the panel, where nothing is drawn
    coherence_axes.legend(
      loc='lower center', bbox_to_anchor=(0.5, 1), ncols=3, fontsize='x-small', frameon=False
    )
