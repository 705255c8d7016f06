"""What the quantiser has learned: which tokens share a cluster, and which n-grams a row.

V tokens that occur, D model width, N heads, H head width, K clusters, T tokens of text.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.data import token_cache
from ngrammer_jax.layers import documents, hashing, ngrammer, quantizer
from ngrammer_jax.models import config as model_config

SHUFFLES = 10  # random clusterings that coherence is compared with
MAX_TOKENS = 1_000_000  # of text that n-grams are taken from


def analyse(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """All there is to know of the clusters of a run, as plain values for JSON.

  Only tokens that occur in the text of the split count, the first million of it: others were
  hardly trained. Keys: `step`, `split`, `clusters` K, `tokens` that occur, and `heads`:

  `used`: clusters that some of the tokens belong to.
  `vocabulary_perplexity`: exp of the entropy of the share of tokens that each cluster has.
  `usage_perplexity`, `dead`: of the running usage in training (see `ProductQuantizer`).
  `coherence`: mean cosine similarity of all pairs of tokens of one cluster, of the embeddings
    less their mean; `coherence_elsewhere`, without the features of this head, which k-means has
    seen; each with the mean and the standard deviation of `random` clusters as large.
  `ngrams`: what the hash does to the n-grams of the split, by order (see `collisions`).
  `members`: the tokens of every cluster that has some, most frequent first; and the coherence
    of each that has two or more.

  Raises:
    BadInput: the model has no clusters that depend on the token alone.
  """
  ngram = run.config.model.ngram
  if ngram is None or ngram.clusters is None or ngram.layer != 'input':
    what = 'no n-gram layer' if ngram is None else f'layer={ngram.layer!r}, {ngram.clusters=}'
    raise errors.BadInput(
      f'--workdir={run.workdir} has no clusters of tokens to look at ({what}): '
      f'it needs model.ngram with clusters, and model.ngram.layer="input"'
    )
  text = run.split(split)
  hashed = collisions(ngram, run.token_clusters, text)
  count_V = np.bincount(text.tokens[:MAX_TOKENS], minlength=len(run.token_clusters))
  by_count_V = np.argsort(-count_V, kind='stable')[: np.count_nonzero(count_V)]
  ids_VxN, N = run.token_clusters[by_count_V], run.token_clusters.shape[1]
  rows_VxD = np.asarray(run.state.params['embedding'], np.float64)[by_count_V]
  rows_VxNxH = (rows_VxD - rows_VxD.mean(axis=0)).reshape(len(rows_VxD), N, -1)
  usage_NxK = np.asarray(run.state.codebook['ngrammer']['quantizer']['usage'], np.float64)
  texts = [run.vocabulary.decode([token]).decode(errors='replace') for token in by_count_V]
  heads = []
  for n in range(N):
    ids_V = ids_VxN[:, n]
    elsewhere = np.delete(rows_VxNxH, n, axis=1).reshape(len(ids_V), -1)
    count_K = np.bincount(ids_V, minlength=ngram.clusters)
    whole = rows_VxNxH.reshape(len(ids_V), -1)
    heads.append(
      {
        'used': int((count_K > 0).sum()),
        'vocabulary_perplexity': _perplexity(count_K),
        'usage_perplexity': _perplexity(usage_NxK[n]),
        'dead': float((usage_NxK[n] < quantizer.DEAD / ngram.clusters).mean()),
        'coherence': _against_random(whole, ids_V),
        'coherence_elsewhere': _against_random(elsewhere, ids_V) if N > 1 else None,
        'ngrams': {order: of_order[n] for order, of_order in hashed.items()},
        'members': _members(whole, ids_V, texts),
      }
    )
  sizes = {'clusters': ngram.clusters, 'tokens': len(ids_VxN)}
  return {'step': int(run.state.step), 'split': split, **sizes, 'heads': heads}


def coherence(rows_VxD: np.ndarray, ids_V: np.ndarray) -> tuple[float, np.ndarray]:
  """Mean cosine similarity of the pairs inside clusters: over all pairs, and of each cluster.

  A cluster of fewer than two rows has none, nan.
  """
  length_Vx1 = np.linalg.norm(rows_VxD, axis=1, keepdims=True)
  unit_VxD = rows_VxD / np.where(length_Vx1 > 0, length_Vx1, 1)
  sums_KxD = np.zeros((ids_V.max() + 1, rows_VxD.shape[1]))
  np.add.at(sums_KxD, ids_V, unit_VxD)
  # The square of a sum holds every pair twice, and every row with itself.
  itself_K = np.bincount(ids_V, weights=np.square(unit_VxD).sum(axis=1))
  twice_K = np.square(sums_KxD).sum(axis=1) - itself_K
  size_K = np.bincount(ids_V)
  pairs_K = size_K * (size_K - 1)
  with np.errstate(invalid='ignore'):
    return float(twice_K.sum() / pairs_K.sum()), twice_K / pairs_K


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
  starts_1xT = np.isin(np.arange(T), text.starts)[None]
  K, V = ngram.clusters + ngram.distinct_start, ngram.vocabulary_size
  start = ngram.clusters if ngram.distinct_start else 0
  N, highest = ids_1xTxN.shape[-1], max(ngram.orders)
  memory = ngrammer.empty_memory(1, N, ngram.orders)
  numbers_1xT = documents.numbers(starts_1xT, memory['documents'][:, 0])
  back = ngrammer.previous_ids(ids_1xTxN, numbers_1xT, memory, highest, start)
  result = {}
  for order in ngram.orders:
    grams = [ids_1xTxN, *back[: order - 1]]
    rows_TxN = np.asarray(jax.jit(hashing.ngram_rows, static_argnums=(1, 2))(grams, K, V))[0]
    grams_TxNxG = np.stack([np.asarray(part)[0] for part in grams], axis=-1)
    result[order] = [_collisions(grams_TxNxG[:, n], rows_TxN[:, n], V) for n in range(N)]
  return result


def _collisions(grams_TxG, row_T, V):
  grams_UxG, of_gram_T = np.unique(grams_TxG, axis=0, return_inverse=True)
  row_U = np.zeros(len(grams_UxG), np.int64)
  row_U[of_gram_T.ravel()] = row_T
  rows, sharing = np.unique(row_U, return_counts=True)
  shared_U = sharing[np.searchsorted(rows, row_U)] > 1
  return {
    'distinct': len(grams_UxG),
    'rows': len(rows),
    'random_rows': float(V * -np.expm1(len(grams_UxG) * np.log1p(-1 / V))) if V > 1 else 1.0,
    'shared': float(shared_U[of_gram_T].mean()),
  }


def _against_random(rows_VxD, ids_V):
  random = np.random.default_rng(0)
  shuffled = [coherence(rows_VxD, random.permutation(ids_V))[0] for _ in range(SHUFFLES)]
  return {
    'clusters': coherence(rows_VxD, ids_V)[0],
    'random': float(np.mean(shuffled)),
    'random_deviation': float(np.std(shuffled)),
  }


def _perplexity(weight_K):
  share_K = weight_K[weight_K > 0] / weight_K.sum()
  return float(np.exp(-(share_K * np.log(share_K)).sum()))


def _members(rows_VxD, ids_V, texts):
  _, of_each = coherence(rows_VxD, ids_V)
  return {
    int(k): {
      'coherence': None if np.isnan(of_each[k]) else float(of_each[k]),
      'tokens': [texts[token] for token in np.flatnonzero(ids_V == k)],
    }
    for k in np.unique(ids_V)
  }


def table(result: dict[str, Any], examples: int = 3, tokens: int = 10) -> str:
  """The heads, one a line; then the most coherent clusters of four tokens or more of each."""
  K, V = result['clusters'], result['tokens']
  lines = [
    f'step {result["step"]:,}: the {V:,} tokens of the {result["split"]} split '
    f'in {K:,} clusters a head',
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
    sizes = sorted((len(of['tokens']) for of in head['members'].values()), reverse=True)
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
