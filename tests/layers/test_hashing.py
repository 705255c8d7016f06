import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import ngram_sizes
from ngrammer_jax.layers import hashing

# The primes above 196,608 and 393,216 of the praxis tables.
PRIMES = {
  196_608: (
    *(196613, 196643, 196657, 196661, 196663, 196681, 196687, 196699),
    *(196709, 196717, 196727, 196739, 196751, 196769, 196771, 196799),
  ),
  393_216: (393241, 393247, 393257, 393271, 393287, 393299, 393301, 393311),
}


def slow_rows(ids, K, V, primes):
  """Rows of ids [order, n, N], in Python integers, which cannot overflow."""
  order, n, N = ids.shape
  rows = np.zeros((n, N), int)
  for t in range(n):
    for i in range(N):
      x = sum(int(ids[j, t, i]) * K**j for j in range(order))
      rows[t, i] = (x * (i + 1) + (i + 1)) % primes[i] % V
  return rows


def some_ids(K, order, heads):
  """Random ids, and every combination of the two largest and the smallest."""
  rng = np.random.default_rng(K)
  edges = np.array(np.meshgrid(*[[K - 1, K - 2, 0]] * order)).reshape(order, -1)
  ids = np.concatenate([edges, rng.integers(0, K, (order, 40))], axis=1)
  return np.broadcast_to(ids[..., None], (*ids.shape, heads)).astype('int32')


@pytest.mark.parametrize('V, primes', [*PRIMES.items(), (13, (17, 19)), (4, (5, 7))])
def test_first_primes_above_the_vocabulary(V, primes):
  assert hashing.primes_above(V, len(primes)) == primes


# Ids, rows, order and heads; the largest vocabulary that there may be, too.
CASES = [(K, V, 2, 16) for V in PRIMES for K in (16, 16_384)]
CASES += [(8192, 393_216, 2, 16), (50_257, 196_608, 3, 8), (50_257, ngram_sizes.MAX_ROWS, 2, 4)]


def test_rows_equal_python_integers():
  ids = {case: some_ids(case[0], *case[2:]) for case in CASES}
  compute_rows = jax.jit(
    lambda ids: {case: hashing.ngram_rows(tuple(ids[case]), *case[:2]) for case in CASES}
  )
  for (K, V, order, heads), rows in compute_rows(ids).items():
    expected = slow_rows(ids[K, V, order, heads], K, V, hashing.primes_above(V, heads))
    assert rows.dtype == 'int32'
    assert rows.tolist() == expected.tolist(), (K, V, order, heads)


def test_rows_equal_praxis(reference):
  f = reference('ng_hash_small')
  K, current, sizes = int(f['cfg/K']), f['ids'], f['cfg/Vs'].tolist()
  previous = np.pad(current, ((0, 0), (1, 0)))[:, :-1]
  primes = {V: f[f'prime/{V}'].tolist() for V in sizes}

  @jax.jit
  def compute_rows(ids):
    repeat_heads = lambda V: [jnp.repeat(z[..., None], len(primes[V]), axis=-1) for z in ids]
    return {V: hashing.ngram_rows(repeat_heads(V), K, V) for V in sizes}

  for V, rows in compute_rows([z.astype('int32') for z in (current, previous)]).items():
    assert list(hashing.primes_above(V, len(primes[V]))) == primes[V]
    assert rows.tolist() == f[f'row/{V}'].tolist()


@pytest.mark.parametrize(
  'V, message',
  [
    (
      16,
      '8 heads need 8 primes between 16 and 32, but there are only 5: '
      'use a larger n-gram vocabulary or fewer heads',
    ),
    (0, '0 n-grams per head are not between 1 and 536,870,912'),
    (2**29 + 1, '536,870,913 n-grams per head are not between 1 and 536,870,912'),
  ],
)
def test_impossible_vocabulary_says_what_to_change(V, message):
  with pytest.raises(ValueError) as caught:
    hashing.primes_above(V, 8)
  assert str(caught.value) == message
