"""The longest earlier match of each token, against a slow loop and the official arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.layers import copies
from ngrammer_jax.layers.context import Context, EmbeddingLookup
from ngrammer_jax.layers.copies import CopySearch
from ngrammer_jax.layers.copy_memory import CopyMemory
from tests.checks import REFERENCE, assert_close
from tests.slow_copies import slow_copies

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Finder:
  """Finds copies in texts of up to T tokens, in segments that are padded to T: one program."""

  def __init__(self, search, classes_V, T):
    self._search, self._classes_V, self._T = search, classes_V, T
    self._compute = jax.jit(search.__call__)

  def find(self, ids, documents, lengths):
    """What the search finds in one row, in segments of these lengths: tokens and buckets."""
    state, parts, first = self._search.empty_state(1), [], 0
    for length in lengths:
      place = np.minimum(first + np.arange(self._T), len(ids) - 1)[None]
      copied, state = self._compute(
        np.int32(ids)[place],
        np.int32(documents)[place],
        state,
        valid_BxT=np.int32(np.arange(self._T) < length)[None],
        classes_V=self._classes_V,
      )
      parts.append(np.asarray(copied)[:, 0, :length])
      first += length
    return np.concatenate(parts, axis=1)

  def check(self, ids, documents, *splits):
    """The search finds what the slow loop finds, in one pass and in segments."""
    expected = slow_copies(self._search, ids, self._classes_V[ids], documents)
    for lengths in ([len(ids)], *splits):
      np.testing.assert_array_equal(self.find(ids, documents, lengths), expected)
    return expected


# Both searches: segments of up to this many tokens are compared.
SHORT = pytest.mark.parametrize('short', [0, 10**6])


@SHORT
@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 30))]
)
def test_drawn_texts_equal_a_slow_loop(monkeypatch, short, seed):
  monkeypatch.setattr(copies, 'SHORT', short)
  monkeypatch.setattr(copies, 'COMPARED', 256)  # several steps
  rng = np.random.default_rng(seed)
  T = 60
  lengths = [LENGTHS, (1, 5), (2, 3), (4,)][seed % 4]
  search = CopySearch(int(rng.choice([1, 2, 5, 20, 100])), lengths, int(rng.integers(1, 5)))
  alphabet = int(rng.choice([1, 2, 3, 9]))
  ids = rng.integers(0, alphabet, T)
  documents = np.cumsum(rng.random(T) < 0.06)
  classes_V = rng.integers(0, alphabet, alphabet, np.int32)
  Finder(search, classes_V, T).check(ids, documents, [1, 20, T - 21])


@SHORT
def test_a_repeated_token_documents_long_repeats_and_the_window(monkeypatch, short):
  monkeypatch.setattr(copies, 'SHORT', short)
  check = Finder(CopySearch(40, LENGTHS), np.arange(100, dtype=np.int32), 80).check
  same = np.zeros(80, int)
  after, bucket = check(same, 0 * same)
  assert after[0] == -1 and set(after[1:]) == {0}
  assert bucket[:5].tolist() == [0, 1, 4, 7, 10]  # one token less than the text, once
  assert bucket[10] == 3 * LENGTHS.index(8) + 3  # at 8 and 9 too: the count saturates
  assert bucket[-1] == 3 * len(LENGTHS)  # 32 tokens, more than three times
  # The second document has the text of the first, and finds nothing there.
  twice = np.tile(np.arange(20), 2)
  after, bucket = check(twice, np.repeat([0, 1], 20))
  assert set(after) == {-1} and not bucket.any()
  after, bucket = check(twice, 0 * twice)
  assert after[20:].tolist() == [*range(1, 20), 0]
  # Repeats of more than 32 tokens have the bucket of 32.
  long = np.tile(np.arange(39), 2)
  _, bucket = check(long, 0 * long)
  assert bucket[-1] == 3 * LENGTHS.index(32) + 1
  # The last match ends 40 tokens back, then 41.
  apart = np.r_[1:41, 1:5]
  assert check(apart, 0 * apart)[1][40:].all()
  apart = np.r_[1:42, 1:5]
  assert not check(apart, 0 * apart)[1].any()


def test_token_by_token_with_padding_equals_one_pass():
  search = CopySearch(7, (1, 2, 3))
  ids = np.random.default_rng(0).integers(0, 3, 20)
  documents = np.repeat([0, 1], [12, 8])
  expected = slow_copies(search, ids, ids, documents)
  step = jax.jit(search.__call__)
  state, parts = search.empty_state(1), []
  for token, document in zip(ids, documents, strict=True):
    # After the token comes padding, of another document.
    tokens, numbers = np.int32([[token, 1]]), np.int32([[document, 5]])
    copied, state = step(tokens, numbers, state, valid_BxT=np.int32([[1, 0]]))
    parts.append(np.asarray(copied)[:, 0, 0])
  np.testing.assert_array_equal(np.transpose(parts), expected)


def test_later_tokens_change_nothing_before():
  search = CopySearch(30, LENGTHS)
  rng = np.random.default_rng(1)
  ids = rng.integers(0, 2, 50)
  classes_V, documents = np.arange(2, dtype=np.int32), 0 * ids
  finder = Finder(search, classes_V, 50)
  before = finder.find(ids, documents, [50])[:, :25]
  ids[25:] = 1 - ids[25:]
  np.testing.assert_array_equal(finder.find(ids, documents, [50])[:, :25], before)


@pytest.mark.parametrize('name', ['documents', 'classes'])
def test_equals_official_arrays(x64, name):
  arrays = np.load(REFERENCE / f'vp_copy_{name}.npz')
  config = json.loads(str(arrays['config']))
  T, alphabet = config['T'], config['alphabet']
  is_begin = arrays['ids'] == config['bos']
  ids = np.where(is_begin, alphabet, arrays['ids'])
  classes_V = np.zeros(alphabet + 1, np.int32)
  classes_V[ids] = np.where(is_begin, alphabet, arrays['norm_ids'])
  options = CopyMemoryConfig('compressed', T, tuple(config['lengths']), config['counts'])
  module = CopyMemory(options, alphabet + 1, config['D'], jnp.float64)
  params = {'bucket_scale': arrays['scale'], 'bucket_vector': arrays['bucket_embed']}
  variables = {'params': params, 'codebook': {'token_classes': classes_V}}

  @jax.jit
  def compute(variables, rows, tokens, documents):
    lookup = EmbeddingLookup(rows, tokens)
    context = Context(tokens_BxT=tokens, documents_BxT=documents, vocabulary=lookup)
    state = module.empty_state(1, None)
    return module.apply(variables, None, context, state, mutable='intermediates')

  (m, _), intermediates = compute(variables, arrays['tokens'], ids[None], np.cumsum(is_begin)[None])
  (copied,) = intermediates['intermediates']['copies']
  candidate = np.where(arrays['candidate'] == config['bos'], alphabet, arrays['candidate'])
  np.testing.assert_array_equal(copied.token_BxT[0], candidate)
  np.testing.assert_array_equal(copied.bucket_BxT[0], arrays['bucket'])
  assert_close(m[0], arrays['copy_vector'], 1e-12)


@pytest.mark.parametrize(
  'context, error',
  [
    (Context(tokens_BxT=np.zeros((1, 2), np.int32)), 'set context.documents_BxT'),
    (
      Context(tokens_BxT=np.zeros((1, 2), np.int32), documents_BxT=np.zeros((1, 2), np.int32)),
      'set context.vocabulary',
    ),
  ],
)
def test_a_context_without_documents_or_embedding(context, error):
  module = CopyMemory(CopyMemoryConfig(), 5, 4)
  with pytest.raises(ValueError, match=error):
    module.init(jax.random.key(0), None, context, module.empty_state(1, None))
