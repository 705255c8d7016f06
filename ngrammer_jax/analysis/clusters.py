"""What the quantiser has learned: which tokens share a cluster, and which n-grams a row.

V tokens of the vocabulary, U of them that occur, or different n-grams, D model width, N heads,
H head width, K clusters, T tokens of text, G length of an n-gram.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import progress, runs
from ngrammer_jax.data import token_cache
from ngrammer_jax.layers import documents, hashing, ngrammer, quantizer
from ngrammer_jax.models import config as model_config

SHUFFLES = 10  # random clusterings that coherence is compared with
MAX_TOKENS = 1_000_000  # of text that n-grams are taken from


def analyse(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """All there is to know of the clusters of a run, as plain values for JSON.

  Keys: `step`, `split`, `clusters` K, `tokens`, those of the vocabulary that occur in the text
  of the training, `never`, those that do not, and `heads`, for each head, of those that occur:

  `used`: clusters that some of the tokens belong to.
  `vocabulary_perplexity`: exp of the entropy of the share of tokens that each cluster has.
  `usage_perplexity`, `dead`: of the running usage in training (see `ProductQuantizer`).
  `coherence`: mean cosine similarity of all pairs of tokens of one cluster, of the embeddings
    less their mean; `coherence_elsewhere`, without the features of this head, which k-means has
    seen; each with the mean and the standard deviation of `random` clusters as large. None where
    no cluster has two tokens.
  `ngrams`: what the hash does to the n-grams of the split, by order (see `collisions`).
  `members`: the tokens of every cluster that has some, most frequent first, its coherence where
    it has two or more, and the tokens that never occur.

  Raises:
    BadInput: the model has no clusters that depend on the token alone.
  """
  ngram, clusters_VxN = run.config.model.ngram, run.token_clusters
  text, train = run.split(split), run.split('train').tokens
  V, N = clusters_VxN.shape
  hashed = collisions(ngram, clusters_VxN, text)
  count_V = np.zeros(V, np.int64)
  for first in range(0, len(train), MAX_TOKENS):
    count_V += np.bincount(train[first : first + MAX_TOKENS], minlength=V)
  by_count_V = np.argsort(-count_V, kind='stable')
  seen_U = by_count_V[: np.count_nonzero(count_V)]
  rows_UxD = np.asarray(run.state.params['embedding'], np.float32)[seen_U]
  rows_UxNxH = (rows_UxD - rows_UxD.mean(axis=0)).reshape(len(seen_U), N, -1)
  usage_NxK = np.asarray(run.state.codebook['ngrammer']['quantizer']['usage'], np.float64)
  texts = [run.vocabulary.decode([token]).decode(errors='replace') for token in by_count_V]
  heads = []
  with progress.Progress('comparing clusters', N, 'heads') as bar:
    for n in range(N):
      ids_V = clusters_VxN[by_count_V, n]
      ids_U = ids_V[: len(seen_U)]
      elsewhere = np.delete(rows_UxNxH, n, axis=1).reshape(len(ids_U), -1)
      count_K = np.bincount(ids_U, minlength=ngram.clusters)
      whole = rows_UxNxH.reshape(len(ids_U), -1)
      heads.append(
        {
          'used': int((count_K > 0).sum()),
          'vocabulary_perplexity': _perplexity(count_K),
          'usage_perplexity': _perplexity(usage_NxK[n]),
          'dead': float((usage_NxK[n] < quantizer.DEAD / ngram.clusters).mean()),
          'coherence': _against_random(whole, ids_U),
          'coherence_elsewhere': _against_random(elsewhere, ids_U),
          'ngrams': {order: of_order[n] for order, of_order in hashed.items()},
          'members': _members(whole, ids_U, ids_V, texts),
        }
      )
      bar.advance(1)
  sizes = {'clusters': ngram.clusters, 'tokens': len(seen_U), 'never': V - len(seen_U)}
  return {'step': int(run.state.step), 'split': split, **sizes, 'heads': heads}


def coherence(rows_UxD: np.ndarray, ids_U: np.ndarray) -> tuple[float | None, np.ndarray]:
  """Mean cosine similarity of the pairs inside clusters: over all pairs, and of each cluster.

  A cluster of fewer than two rows has none, nan; None where all are such.
  """
  return _coherence(_directions(rows_UxD), ids_U)


def _directions(rows_UxD):
  length_Ux1 = np.linalg.norm(rows_UxD, axis=1, keepdims=True)
  return rows_UxD / np.where(length_Ux1 > 0, length_Ux1, 1)


def _coherence(unit_UxD, ids_U):
  order_U = np.argsort(ids_U, kind='stable')
  there, first = np.unique(ids_U[order_U], return_index=True)
  size_K = np.bincount(ids_U)
  # The square of a sum holds every pair twice, and every row with itself.
  twice_K = np.zeros(len(size_K))
  twice_K[there] = np.square(np.add.reduceat(unit_UxD[order_U], first)).sum(axis=1)
  twice_K -= np.bincount(ids_U, weights=np.square(unit_UxD).sum(axis=1))
  pairs_K = size_K * (size_K - 1)
  overall = float(twice_K.sum() / pairs_K.sum()) if pairs_K.any() else None
  return overall, np.where(pairs_K > 0, twice_K / np.maximum(pairs_K, 1), np.nan)


def collisions(
  ngram: model_config.NGramConfig, ids_VxN: np.ndarray, text: token_cache.TokenSplit
) -> dict[int, list[dict[str, float]]]:
  """For each order and head, what the hash does to the n-grams of a text.

  `distinct`: different n-grams in the text; `rows`: rows that they fall on; `random_rows`: what a
  perfectly random hash would give; `shared`: share of the tokens whose n-gram has to share its
  row with another one.
  """
  T = min(len(text.tokens), MAX_TOKENS)
  ids_1xTxN = jnp.asarray(ids_VxN[np.asarray(text.tokens[:T])])[None]
  starts_1xT = np.isin(np.arange(T), [0, *text.starts])[None]
  K = ngram.clusters + ngram.distinct_start
  start = ngram.clusters if ngram.distinct_start else 0
  N, highest = ids_1xTxN.shape[-1], max(ngram.orders)
  memory = ngrammer.empty_memory(1, N, ngram.orders)
  numbers_1xT = documents.numbers(starts_1xT, memory['documents'][:, 0])
  back = ngrammer.previous_ids(ids_1xTxN, numbers_1xT, memory, highest, start)
  result = {}
  for order in ngram.orders:
    grams = [ids_1xTxN, *back[: order - 1]]
    hash_rows = jax.jit(hashing.ngram_rows, static_argnums=(1, 2))
    rows_TxN = np.asarray(hash_rows(grams, K, ngram.vocabulary_size))[0]
    grams_TxNxG = np.stack([np.asarray(part)[0] for part in grams], axis=-1)
    result[order] = [
      _collisions(grams_TxNxG[:, n], rows_TxN[:, n], ngram.vocabulary_size) for n in range(N)
    ]
  return result


def _collisions(grams_TxG, row_T, table_rows):
  grams_UxG, of_gram_T = np.unique(grams_TxG, axis=0, return_inverse=True)
  row_U = np.zeros(len(grams_UxG), np.int64)
  row_U[of_gram_T.ravel()] = row_T
  rows, sharing = np.unique(row_U, return_counts=True)
  shared_U = sharing[np.searchsorted(rows, row_U)] > 1
  return {
    'distinct': len(grams_UxG),
    'rows': len(rows),
    'random_rows': float(table_rows * (1 - (1 - 1 / table_rows) ** len(grams_UxG))),
    'shared': float(shared_U[of_gram_T].mean()),
  }


def _against_random(rows_UxD, ids_U):
  unit_UxD, random = _directions(rows_UxD), np.random.default_rng(0)
  found, _ = _coherence(unit_UxD, ids_U)
  if found is None or not rows_UxD.shape[1]:
    return None
  shuffled = [_coherence(unit_UxD, random.permutation(ids_U))[0] for _ in range(SHUFFLES)]
  return {
    'clusters': found,
    'random': float(np.mean(shuffled)),
    'random_deviation': float(np.std(shuffled)),
  }


def _perplexity(weight_K):
  share_K = weight_K[weight_K > 0] / weight_K.sum()
  return float(np.exp(-(share_K * np.log(share_K)).sum()))


def _members(rows_UxD, ids_U, ids_V, texts):
  _, of_each = coherence(rows_UxD, ids_U)
  members = {}
  for k in np.unique(ids_V):
    places = np.flatnonzero(ids_V == k)
    members[int(k)] = {
      'coherence': float(of_each[k]) if k < len(of_each) and np.isfinite(of_each[k]) else None,
      'tokens': [texts[place] for place in places if place < len(ids_U)],
      'never': [texts[place] for place in places if place >= len(ids_U)],
    }
  return members


def table(result: dict[str, Any], examples: int = 3, tokens: int = 10) -> str:
  """The heads, one a line; then the most coherent clusters of four tokens or more of each."""
  K, U = result['clusters'], result['tokens']
  lines = [
    f'step {result["step"]:,}: {U:,} tokens of the training text in {K:,} clusters a head '
    f'({result["never"]:,} never occur); n-grams of the {result["split"]} split',
    f'{"head":>4}{"used":>7}{"perplexity":>12}{"in training":>13}{"dead":>8}'
    f'{"coherence (random)":>22}{"elsewhere (random)":>22}{"rows shared":>13}',
  ]
  pair = lambda found: '' if found is None else f'{found["clusters"]:z.3f} ({found["random"]:z.3f})'
  for n, head in enumerate(result['heads']):
    shared = ' '.join(f'{of_order["shared"]:.1%}' for of_order in head['ngrams'].values())
    lines.append(
      f'{n:>4}{head["used"]:>7,}{head["vocabulary_perplexity"]:>12.1f}'
      f'{head["usage_perplexity"]:>13.1f}{head["dead"]:>8.1%}{pair(head["coherence"]):>22}'
      f'{pair(head["coherence_elsewhere"]):>22}{shared:>13}'
    )
  for n, head in enumerate(result['heads']):
    large = {k: of for k, of in head['members'].items() if len(of['tokens']) >= 4}
    best = sorted(large, key=lambda k: -large[k]['coherence'])[:examples]
    for k in best:
      words = ' '.join(repr(text)[1:-1].replace(' ', '_') for text in large[k]['tokens'][:tokens])
      more = len(large[k]['tokens']) - tokens
      lines.append(f'head {n} cluster {k}: {words}' + (f' and {more} more' if more > 0 else ''))
  return '\n'.join(lines)


def draw(result: dict[str, Any], axes: Any) -> None:
  """Three panels: how even the clusters are, how coherent, and how many n-grams share a row."""
  evenness, coherent, hashed = axes
  heads = range(len(result['heads']))
  for n, head in enumerate(result['heads']):
    sizes = [len(of['tokens']) for of in head['members'].values() if of['tokens']]
    sizes.sort(reverse=True)
    evenness.plot(np.arange(1, len(sizes) + 1), sizes, linewidth=1, label=f'head {n}')
  evenness.set(xlabel='cluster, largest first', ylabel='tokens', yscale='log')
  evenness.legend(fontsize='x-small')
  for name, place in (('coherence', -0.2), ('coherence_elsewhere', 0.2)):
    found = [head[name] for head in result['heads']]
    if None in found:
      continue
    label = {'coherence': 'all features', 'coherence_elsewhere': "other heads' features"}[name]
    coherent.bar([n + place for n in heads], [f['clusters'] for f in found], 0.4, label=label)
    random = [f['random'] for f in found]
    coherent.plot([n + place for n in heads], random, 'k_', markersize=8)
  coherent.set(xlabel='head', ylabel='cosine similarity in clusters (line: random)')
  coherent.set_xticks(heads)
  coherent.margins(y=0.2)
  coherent.legend(fontsize='x-small')
  for order in result['heads'][0]['ngrams']:
    shared = [100 * head['ngrams'][order]['shared'] for head in result['heads']]
    hashed.plot(heads, shared, 'o-', linewidth=1, markersize=4, label=f'order {order}')
  hashed.set(xlabel='head', ylabel='tokens whose n-gram shares its row (%)', ylim=(0, None))
  hashed.set_xticks(heads)
  hashed.legend(fontsize='x-small')
