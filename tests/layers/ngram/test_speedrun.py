"""The hash and the random signs of the modded-nanogpt speedrun: its code, and Python loops."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram.memory import NGramMemory
from tests import checks

OPTIONS = {
  'hash': 'speedrun',
  'join': 'sum',
  'every_block': True,
  'table': 'grams',
  'heads': 1,
  'row_rule': 'exact',
  'boundary': 'none',
}
SPLITS = ([60], [1, 1, 1, 57], [2, 58], [30, 30])  # lengths of segments


def wrap(number):
  """A Python integer as one of 32 bits with sign."""
  return (number + 2**31) % 2**32 - 2**31


def xor(ids, factors):
  """The XOR of the products of ids and factors in 32 bits."""
  result = 0
  for token, factor in zip(ids, factors, strict=True):
    result ^= wrap(token * factor)
  return result


def slow_rows(ids, order, size):
  """The rows of the n-grams of one document, as published."""
  rows = []
  for t in range(len(ids)):
    gram = ids[t - order + 1 : t + 1][::-1] if t >= order - 1 else None
    if gram is None:
      rows.append(size - 1)
    elif order == 2:
      if t == 1:
        gram = [gram[0], size - 1]
      rows.append(xor(gram, (36313, 27191)) % (size - 1))
    else:
      rows.append(xor(gram, (17351, 60961, 45259)) % (size - 1))
  return rows


def slow_signs(ids, order, factors, count):
  """The rows of signs of the n-grams of one document."""
  grams = [ids[t - order + 1 : t + 1][::-1] for t in range(order - 1, len(ids))]
  return ([0] * (order - 1) + [xor(gram, factors) % count for gram in grams])[: len(ids)]


def table(vocabulary, **options):
  """The module of a shared table."""
  options = NGramMemoryConfig(**OPTIONS | options)
  options.check_sizes(options.width, vocabulary)
  return NGramMemory(options, vocabulary, options.width, is_table=True)


def look_up(module, variables, ids, documents, lengths):
  """The vectors [T, E] and the rows [T, I] of a text that comes in segments with padding."""
  variables = jax.tree.map(jnp.asarray, variables)
  state = module.empty_state(1)
  longest = max(lengths)

  @jax.jit
  def apply(ids, documents, valid, state):
    context = Context(tokens_BxT=ids, documents_BxT=documents, valid_BxT=valid)
    x = np.zeros((1, longest, module.width))
    return module.apply(variables, x, context, state, mutable=['intermediates'])

  vectors, rows = [], []
  for end, length in zip(np.cumsum(lengths), lengths, strict=True):
    part = np.minimum(np.arange(end - length, end - length + longest), len(ids) - 1)
    valid = (np.arange(longest) < length)[None]
    (e, state), sown = apply(ids[None, part], documents[None, part], valid, state)
    vectors.append(e[0, :length].sum(axis=1))
    rows.append(sown['intermediates']['lookup'][0]['rows'][0, :length])
  return np.concatenate(vectors), np.concatenate(rows)


def reference(name):
  with np.load(checks.REFERENCE / f'{name}.npz') as f:
    return {key: f[key] for key in f} | {'config': json.loads(str(f['config']))}


@pytest.mark.parametrize('lengths', checks.rest_is_full([[20], [1, 1, 18], [7, 13]], [[1, 1, 18]]))
def test_bigrams_equal_the_code_of_the_records(x64, lengths):
  f = reference('vp_bigram_small')
  c = f['config']
  fields = {'rows': (c['rows'],), 'width': c['D'], 'signs': c['sign_rows']}
  module = table(c['vocabulary'], orders=(2,), **fields)
  ids = f['ids']
  documents = np.zeros(len(ids), np.int32)

  def loss(table):
    variables = {'params': {'table': table}, 'codebook': {'signs': jnp.asarray(f['signs'])}}
    context = Context(tokens_BxT=jnp.asarray(ids)[None], documents_BxT=documents[None])
    e, _ = module.apply(variables, np.zeros((1, len(ids), c['D'])), context)
    return (e[0, :, 0] * f['cotangent']).sum()

  checks.assert_close(jax.jit(jax.grad(loss))(f['table']), f['grad/table'], 1e-12)
  variables = {'params': {'table': f['table']}, 'codebook': {'signs': f['signs']}}
  output, rows = look_up(module, variables, ids, documents, lengths)
  checks.assert_close(output, f['output'], 1e-12)
  assert rows[:, 0].tolist() == f['rows'].tolist()


@pytest.mark.parametrize(
  'name, orders', [('vp_bigram_gpt2', (2,)), ('vp_ngram_rows_small', (2, 3))]
)
def test_rows_equal_the_code_of_the_records(name, orders):
  f = reference(name)
  c = f['config']
  half = c['rows'] // 2
  sizes = (half, c['rows'] - half) if len(orders) == 2 else (c['rows'],)
  module = table(c['vocabulary'], orders=orders, rows=sizes, width=1)
  ids = f['ids'].ravel()
  variables = {'params': {'table': np.zeros((c['rows'], 1), np.float32)}}
  _, rows = look_up(module, variables, ids, np.zeros(len(ids), np.int32), [3, len(ids) - 3])
  first = np.cumsum((0, *sizes[:-1]))
  assert (rows + first).T.ravel().tolist() == f['rows'].ravel().tolist()


@pytest.mark.parametrize('lengths', checks.rest_is_full(SPLITS, [[1, 1, 1, 57]]))
@pytest.mark.parametrize('sign_hash', checks.rest_is_full(['xor', 'products'], ['products']))
def test_documents_of_any_split_equal_slow_loops(lengths, sign_hash):
  """With boundary="starts" each document is like a text of its own."""
  sizes = (37, 41)
  module = table(
    50_000, orders=(2, 3), rows=sizes, width=4, signs=16, sign_hash=sign_hash, boundary='starts'
  )
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 50_000, 60).astype(np.int32)
  starts = np.isin(np.arange(60), (0, 1, 3, 20, 40))
  documents = np.asarray(document_masks.numbers(starts[None]))[0]
  values = rng.normal(size=(sum(sizes), 4)).astype(np.float32)
  signs = rng.choice([-1, 1], (16, 4)).astype(np.int8)
  variables = {'params': {'table': values}, 'codebook': {'signs': signs}}
  output, _ = look_up(module, variables, ids, documents, lengths)
  factors = {'xor': ((1, 1), (1, 1, 1)), 'products': ((48271, 30011), (58699, 39779, 26801))}
  expected = []
  for number in np.unique(documents):
    text = ids[documents == number].tolist()
    vectors = np.zeros((len(text), 4), np.float32)
    for order, size, first in ((2, 37, 0), (3, 41, 37)):
      rows = first + np.array(slow_rows(text, order, size))
      sign_rows = slow_signs(text, order, factors[sign_hash][order - 2], 16)
      vectors += values[rows] * signs[sign_rows]
    expected.append(vectors)
  checks.assert_close(output, np.concatenate(expected), 1e-6)


def test_signs_are_random_and_not_trained():
  module = table(50, orders=(2,), rows=(37,), width=64, signs=128)
  variables = jax.jit(module.init)(
    jax.random.key(0), np.zeros((1, 3, 64)), Context(tokens_BxT=np.zeros((1, 3), np.int32))
  )
  signs = np.asarray(jax.tree.leaves(variables['codebook'])[0])
  assert signs.shape == (128, 64)
  assert set(np.unique(signs)) == {-1, 1}
  assert abs(signs.mean()) < 0.03
  assert len(np.unique(signs, axis=0)) == 128
