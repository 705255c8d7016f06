import functools
import json
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.ngram import hashes as ngram_hashes
from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.layers.ngram import uint64
from ngrammer_jax.layers.ngram.hashing import NGramHash
from ngrammer_jax.layers.ngram.windows import Windows
from tests import checks
from tests.ngram_rows import numpy_rows


def slow_rows(ids, K, V, primes):
  """Rows of praxis of ids [order, n, N], in Python integers, which cannot overflow."""
  order, n, N = ids.shape
  rows = np.zeros((n, N), int)
  for t in range(n):
    for i in range(N):
      x = sum(int(ids[j, t, i]) * K**j for j in range(order))
      rows[t, i] = (x * (i + 1) + (i + 1)) % primes[i] % V
  return rows


def wrap(x):
  """A Python integer as one of 64 bits with sign."""
  return (x + 2**63) % 2**64 - 2**63


def slow_row(ngram_hash, gram, j, p):
  """The row of one n-gram, present id first, in head j of p rows."""
  V = ngram_hash.vocabulary
  if ngram_hash.kind == 'blt':
    a = ngram_hashes.BLT_FACTORS[j]
    return wrap(sum(x * a**power for power, x in enumerate(reversed(gram)))) % p
  if ngram_hash.kind == 'polynomial':
    return sum(x * V**s for s, x in enumerate(gram)) % p
  multipliers = ngram_hash.multipliers().tolist()
  return (
    wrap(functools.reduce(operator.xor, [x * m for x, m in zip(gram, multipliers, strict=False)]))
    % p
  )


def some_ids(K, order, heads, lowest=0):
  """Random ids, and every combination of the two largest and the smallest, [order, n, heads]."""
  rng = np.random.default_rng(K)
  edges = np.array(np.meshgrid(*[[K - 1, K - 2, lowest]] * order)).reshape(order, -1)
  ids = np.concatenate([edges, rng.integers(lowest, K, (order, 40))], axis=1)
  return np.broadcast_to(ids[..., None], (*ids.shape, heads)).astype('int32')


# Ids, rows, order and heads; the largest number of rows that there may be, too.
PRAXIS = [(K, V, 2, 16) for V in (196_608, 393_216) for K in (16, 16_384)]
PRAXIS += [(8192, 393_216, 2, 16), (50_257, 196_608, 3, 8), (50_257, ngram_sizes.MAX_ROWS, 2, 4)]


@pytest.mark.full
def test_praxis_equals_python_integers():
  ids = {case: some_ids(case[0], *case[2:]) for case in PRAXIS}
  hashes = {
    (K, V, order, heads): NGramHash('praxis', (order,), ((V,) * heads,), K)
    for K, V, order, heads in PRAXIS
  }
  all_rows = jax.jit(lambda ids: {case: hashes[case](ids[case]) for case in PRAXIS})(ids)
  for (K, V, order, heads), rows in all_rows.items():
    case = K, V, order, heads
    expected = slow_rows(ids[case], K, V, ngram_sizes.primes_above(V, heads))
    assert rows.dtype == 'int32'
    assert rows.tolist() == expected.tolist(), case
    assert numpy_rows(hashes[case], ids[case]).tolist() == expected.tolist(), case


def test_praxis_equals_its_arrays(reference):
  f = reference('ng_hash_small')
  K, current, sizes = int(f['cfg/K']), f['ids'], f['cfg/Vs'].tolist()
  previous = np.pad(current, ((0, 0), (1, 0)))[:, :-1]
  heads = {V: len(f[f'prime/{V}']) for V in sizes}
  ids = [z[..., None].astype('int32') for z in (current, previous)]
  hash_rows = lambda V: NGramHash('praxis', (2,), ((V,) * heads[V],), K)(ids)
  for V, rows in jax.jit(lambda: dict(zip(sizes, map(hash_rows, sizes), strict=True)))().items():
    assert list(ngram_sizes.primes_above(V, heads[V])) == f[f'prime/{V}'].tolist()
    assert rows.tolist() == f[f'row/{V}'].tolist()


# The largest rows, ids of 31 bits, and single ids.
SIZES = ((97, 2**28), (16_000_057, 5), (1, 2))
HASHES = [
  NGramHash('engram', (2, 4, 1), SIZES, 99_092, seed=3, layer=14),
  NGramHash('engram', (4, 2, 3), SIZES, 7, layer=1),
  NGramHash('ple', (4, 3, 2), SIZES, 248_320, seed=1234, index=2),
  NGramHash('polynomial', (4, 3, 1), SIZES, 2**31 - 1),
  NGramHash('polynomial', (2, 3, 4), SIZES, 60),
  NGramHash('blt', (4, 3, 2), SIZES, 260),
  NGramHash('blt', (2, 1, 4), SIZES, 2**31 - 1),
]


def test_rows_equal_python_integers():
  """Ids of their own for each head; negative ones too where a hash lets them pass."""
  ids = [some_ids(h.vocabulary, 4, 2, -1 if h.kind != 'polynomial' else 0)[:, :100] for h in HASHES]
  ids = [np.concatenate([z[..., :1], z[:, ::-1, 1:]], axis=-1) for z in ids]
  all_rows = jax.jit(lambda ids: [h(z) for h, z in zip(HASHES, ids, strict=True)])(ids)
  for h, z, rows in zip(HASHES, ids, all_rows, strict=True):
    expected = [
      [
        slow_row(h, z[:n, t, j].tolist(), j, p)
        for n, sizes in zip(h.orders, h.sizes, strict=True)
        for j, p in enumerate(sizes)
      ]
      for t in range(z.shape[1])
    ]
    assert rows.dtype == 'int32'
    assert rows.tolist() == expected, h
    assert numpy_rows(h, z).tolist() == expected, h


def test_missing_ids_are_an_error():
  with pytest.raises(ValueError, match=r'^n-grams of orders \(2, 4, 1\) need 4 ids, not 2$'):
    HASHES[0]([jnp.zeros((3, 1), jnp.int32)] * 2)


# The arrays of the official implementations.


def references(pattern, key):
  """The files of reference arrays that hold a key, and their configurations, by name."""
  files = {name: dict(np.load(path)) for name, path in checks.reference_files(pattern).items()}
  files = {name: f for name, f in files.items() if any(k.startswith(key) for k in f)}
  return {name: (f, json.loads(str(f['config']))) for name, f in files.items()}


def look_back(windows, raw_ids):
  """The ids at each place of the windows of a text, [B, T, 1] each."""
  B, T = raw_ids.shape
  ids, _ = windows(jnp.asarray(raw_ids[..., None], jnp.int32), jnp.zeros((B, T), jnp.int32), None)
  return ids


def engram_rows(f, c):
  """The rows, sizes and multipliers of each layer."""
  table = np.asarray(f.get('lookup_table', np.arange(c.get('compressed_vocab', 0))), np.int32)
  windows = Windows(max(c['orders']), fill_id=c['pad_id'])
  ids = jax.jit(functools.partial(look_back, windows))(f['input_ids'])
  ids = [np.where(x >= 0, table[x], x) for x in map(np.asarray, ids)]
  V = c.get('compressed_vocab') or int(f['lookup_table'].max()) + 1
  orders, bases = tuple(c['orders']), tuple(c['engram_vocab_size'])
  sizes = ngram_sizes.table_sizes('prime', bases, orders, c['heads'], V, len(c['layer_ids']))
  for layer, layer_sizes in zip(c['layer_ids'], sizes, strict=True):
    ngram_hash = NGramHash('engram', orders, layer_sizes, V, c['seed'], layer)
    drawn_later = NGramHash('engram', orders, layer_sizes, V + 1, c['seed'], layer)
    words = uint64.split_words(ngram_hash.multipliers())
    both = jax.jit(lambda ids, words, a=ngram_hash, b=drawn_later: (a(ids), b(ids, words)))
    hashes, with_multipliers = both(ids, words)
    yield {
      'hashes': hashes,
      'with_multipliers': with_multipliers,
      'table_sizes': np.array(layer_sizes),
      'multipliers': ngram_hash.multipliers(),
    }


@pytest.mark.full
def test_engram_equals_its_arrays():
  files = references('engram_*', 'layer')
  assert len(files) >= 6
  for name, (f, c) in files.items():
    for layer, actual in zip(c['layer_ids'], engram_rows(f, c), strict=True):
      expected = {key: f[f'layer{layer}/{key}'] for key in ('hashes', 'table_sizes', 'multipliers')}
      expected['with_multipliers'] = expected['hashes']
      for key, values in expected.items():
        assert actual[key].tolist() == values.tolist(), (name, layer, key)


@pytest.mark.full
def test_ple_equals_its_arrays():
  files = references('qwen_ple_*', 'rows')
  assert len(files) >= 2
  for name, (f, c) in files.items():
    orders = tuple(range(2, c['ngram_size'] + 1))
    base, index = c['ngram_vocab_size_base'], c['ple_layer_index']
    all_sizes = ngram_sizes.table_sizes(
      'prime', (base,), orders, c['heads_per_ngram'], c['vocab'], index + 1
    )
    ngram_hash = NGramHash('ple', orders, all_sizes[index], c['vocab'], seed=c['seed'], index=index)
    assert np.ravel(all_sizes[index]).tolist() == f['table_sizes'].tolist(), name
    assert ngram_hash.multipliers().tolist() == f['multipliers'].tolist(), name
    windows = Windows(c['ngram_size'], 'eos_id', eos_id=c['eos'], fill_id=c['eos'])
    rows = jax.jit(lambda raw, h=ngram_hash, w=windows: h(look_back(w, raw)))(f['input_ids'])
    assert (rows + f['offsets']).tolist() == f['rows'].tolist(), name


@pytest.mark.full
def test_longcat_equals_its_arrays():
  files = references('longcat_*', 'hashes')
  assert len(files) >= 2
  for name, (f, c) in files.items():
    orders, V = tuple(range(2, c['orders'] + 1)), c['vocab']
    (sizes,) = ngram_sizes.table_sizes('longcat', (int(c['ratio'] * V),), orders, c['k'], V, 1)
    windows = Windows(c['orders'], 'eos_id', eos_id=c['eos'])
    ids = jax.jit(functools.partial(look_back, windows))(f['input_ids'])
    for s in range(1, c['orders']):
      assert ids[s][..., 0].tolist() == f[f'shifted/{s + 1}'].tolist(), (name, s)
    rows = jax.jit(NGramHash('polynomial', orders, sizes, V))(ids)
    for t in range(len(orders) * c['k']):
      assert rows[..., t].tolist() == f[f'hashes/{t}'].tolist(), (name, t)


@pytest.mark.full
def test_blt_equals_its_arrays():
  files = references('blt_*', 'hashes')
  assert len(files) >= 2
  for name, (f, c) in files.items():
    orders, heads = tuple(c['group_sizes']), c['functions']
    sizes = ((c['rows'],) * heads,) * len(orders)
    ids = jax.jit(functools.partial(look_back, Windows(max(orders))))(f['input_ids'])
    rows = jax.jit(NGramHash('blt', orders, sizes, 260))(ids)
    # BLT has its tables by function, then by order.
    by_function = rows.reshape(*rows.shape[:2], len(orders), heads).swapaxes(2, 3)
    for i, actual in enumerate(np.moveaxis(by_function.reshape(rows.shape), -1, 0)):
      assert actual.tolist() == f[f'hashes/{i}'].tolist(), (name, i)
  assert list(ngram_hashes.BLT_FACTORS) == c['primes']
