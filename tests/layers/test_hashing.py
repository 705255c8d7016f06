import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize('V, primes', PRIMES.items())
def test_first_primes_above_the_vocabulary(V, primes):
  assert hashing.primes_above(V, len(primes)) == primes


@pytest.mark.parametrize('V', PRIMES)
@pytest.mark.parametrize('K', [16, 1024, 8192, 16_384, 50_257])
def test_rows_equal_python_integers(K, V):
  ids = some_ids(K, order=2, heads=16)
  expected = slow_rows(ids, K, V, hashing.primes_above(V, 16))
  rows = hashing.ngram_rows(tuple(jnp.asarray(ids)), K, V)
  assert rows.dtype == jnp.int32
  assert rows.tolist() == expected.tolist()


def test_trigram_rows_equal_python_integers():
  K, V = 50_257, 196_608
  ids = some_ids(K, order=3, heads=16)
  rows = hashing.ngram_rows(tuple(jnp.asarray(ids)), K, V)
  assert rows.tolist() == slow_rows(ids, K, V, PRIMES[V]).tolist()


def test_rows_of_the_largest_vocabulary_equal_python_integers():
  K, V = 50_257, hashing.MAX_ROWS
  ids = some_ids(K, order=2, heads=4)
  rows = hashing.ngram_rows(tuple(jnp.asarray(ids)), K, V)
  assert rows.tolist() == slow_rows(ids, K, V, hashing.primes_above(V, 4)).tolist()


def test_rows_equal_praxis(reference):
  f = reference('ng_hash_small')
  K, current = int(f['cfg/K']), f['ids']
  previous = np.pad(current, ((0, 0), (1, 0)))[:, :-1]
  for V in f['cfg/Vs'].tolist():
    primes = f[f'prime/{V}'].tolist()
    assert list(hashing.primes_above(V, len(primes))) == primes
    ids = [np.repeat(z[..., None], len(primes), axis=-1) for z in (current, previous)]
    rows = hashing.ngram_rows(jnp.asarray(ids, 'int32'), K, V)
    assert rows.tolist() == f[f'row/{V}'].tolist()


@pytest.mark.parametrize(
  'V, message',
  [
    (
      16,
      '8 heads need 8 primes between 16 and 32, but there are only 5: '
      'use a larger n-gram vocabulary or fewer heads',
    ),
    (0, 'a vocabulary of 0 n-grams a head is outside 1 to 536,870,912'),
    (2**29 + 1, 'a vocabulary of 536,870,913 n-grams a head is outside 1 to 536,870,912'),
  ],
)
def test_impossible_vocabulary_says_what_to_change(V, message):
  with pytest.raises(ValueError) as caught:
    hashing.primes_above(V, 8)
  assert str(caught.value) == message
