import functools
import itertools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import NGrammer, ProductQuantizer, cache, documents, ngrammer
from tests import jaxprs
from tests.checks import assert_close, random_variables
from tests.layers.test_hashing import slow_rows
from tests.layers.test_normalization import slow_layer_norm

N, H, K, V = 2, 4, 5, 13
D = N * H


def latent(dim=2, **options):
  return NGrammer(heads=N, clusters=K, vocabulary_size=V, dim=dim, **options)


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, variables, x, **given):
  return layer.apply(variables, x, **given)


def random_inputs(B, T, dtype='float32'):
  return jnp.asarray(np.random.default_rng(9).normal(size=(B, T, D)), dtype)


# Pairing.


@pytest.mark.parametrize('part', ['golden', 'rand'])
@pytest.mark.parametrize('case', ['plain', 'seg', 'pair', 'pair_seg'])
def test_bigrams_equal_praxis(reference, part, case):
  f = {k.split('/')[1]: v for k, v in reference('ng_bigram').items() if k.startswith(part)}
  starts = jnp.asarray(f['segment_pos'] == 0) & ('seg' in case)
  ids = jnp.asarray(f['ids'], 'int32')[..., None]
  if 'pair' in case:
    previous = ngrammer.paired_ids(ids, jnp.asarray(f['pair_ids']), ~starts)[..., 0]
  else:
    memory = ngrammer.empty_memory(len(ids), 1)
    (previous,) = ngrammer.previous_ids(ids, documents.numbers(starts), memory, 2)
    previous = previous[..., 0]
  # In Python integers: K^2 does not fit 32 bits.
  bigrams = f['ids'].astype(object) + int(f['K']) * np.asarray(previous).astype(object)
  assert bigrams.tolist() == f[case].tolist()


def slow_pairs(ids, pairs, continues):
  """The id at the given position of each head, 0 where there is none."""
  B, T, N = ids.shape
  paired = np.zeros_like(ids)
  for b, t, n in np.ndindex(B, T, N):
    if continues[b, t] and pairs[b, n, t] < T:
      paired[b, t, n] = ids[b, pairs[b, n, t], n]
  return paired


def test_pair_ids_of_every_head_equal_slow_loop():
  rng = np.random.default_rng(0)
  B, T = 2, 6
  ids, pairs = rng.integers(0, K, (B, T, N)), rng.integers(0, T + 1, (B, N, T))
  continues = rng.integers(0, 2, (B, T)) == 1
  given = (jnp.asarray(a) for a in (ids, pairs, continues))
  assert ngrammer.paired_ids(*given).tolist() == slow_pairs(ids, pairs, continues).tolist()


def test_most_attended_equals_slow_loop():
  rng = np.random.default_rng(0)
  scores, may = rng.integers(0, 3, (2, N, 4, 7)), rng.random((2, 4, 7)) < 0.4
  may[0, 0] = False
  got = ngrammer.most_attended(jnp.asarray(scores, 'float32'), jnp.asarray(may))
  for b, n, t in np.ndindex(2, N, 4):
    allowed = [s for s in range(7) if may[b, t, s]]
    first_best = max(allowed, key=lambda s: scores[b, n, t, s], default=7)
    assert got[b, n, t] == first_best


def test_pairs_reach_into_the_memory(x64):
  """With the ids of the tokens before a segment, a split equals one pass."""
  x, layer = random_inputs(2, 6, 'float64'), latent(dtype=jnp.float64)
  pairs = np.random.default_rng(0).integers(0, 6, (2, N, 6))
  pairs = np.where(pairs < np.arange(6), pairs, 6)  # those before, or none
  variables = random_variables(layer, x, dtype='float64')
  whole, kept = apply(layer, variables, x, pair_ids=jnp.asarray(pairs))
  for split in (1, 4):
    now = kept['ids'][:, :split]
    given = {'pair_ids': jnp.asarray(pairs[..., split:]), 'earlier_ids': now}
    part, ids = apply(layer, variables, x[:, split:], **given)
    assert_close(part, whole[:, split:], 1e-12)
    assert ids['ids'].tolist() == kept['ids'][:, split:].tolist()


def slow_back(ids, numbers, order, start):
  """Going back one token at a time, as long as the document lasts."""
  B, T, N = ids.shape
  back = np.full((order - 1, B, T, N), start)
  for j, b, t in np.ndindex(order - 1, B, T):
    if t > j and numbers[b, t - j - 1] == numbers[b, t]:
      back[j, b, t] = ids[b, t - j - 1]
  return back


@pytest.mark.parametrize('order, start', [(2, 0), (3, 0), (4, 9)])
@pytest.mark.parametrize('split', [0, 1, 3])
def test_tokens_before_the_segment_are_predecessors_too(order, start, split):
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 9, (3, 8, 2))
  numbers = np.cumsum(rng.random((3, 8)) < 0.3, axis=1)
  memory, got = ngrammer.empty_memory(3, 2, (order,)), []
  for cut in (slice(0, split), slice(split, 8)):
    now = {
      'ids': jnp.asarray(ids[:, cut], 'int32'),
      'documents': jnp.asarray(numbers[:, cut], 'int32'),
    }
    got.append(ngrammer.previous_ids(now['ids'], now['documents'], memory, order, start))
    memory = jax.tree.map(lambda a, b: cache.last(a, b, None), memory, now)
  got = np.concatenate([np.stack(part) for part in got], axis=2)
  assert got.tolist() == slow_back(ids, numbers, order, start).tolist()


# The whole layer against loops.


def slow_layer(x, ids, previous, id_count, params, dim, combine):
  """The layer from its ids on, one token and head at a time."""
  B, T, _ = x.shape
  table = np.asarray(params['table']).reshape(N, V, dim)
  y = np.zeros((B, T, N, H))
  rows = slow_rows(np.stack([ids, previous]).reshape(2, -1, N), id_count, V, (17, 19))
  norms = {name: jax.tree.map(np.asarray, params[f'{name}_norm']) for name in ('unigram', 'ngram')}
  of_head = lambda name, n: {part: value[n] for part, value in norms[name].items()}
  for b, t, n in np.ndindex(B, T, N):
    unigram = slow_layer_norm(x[b, t].reshape(N, H)[n], **of_head('unigram', n))
    ngram = slow_layer_norm(table[n, rows.reshape(B, T, N)[b, t, n]], **of_head('ngram', n))
    both = np.concatenate([unigram[: H - dim], ngram])
    y[b, t, n] = unigram + ngram if combine == 'add' else both
  return y.reshape(B, T, D)


def slow_previous(ids, documents):
  previous = np.zeros_like(ids)
  same = documents[:, 1:] == documents[:, :-1]
  previous[:, 1:] = np.where(same[..., None], ids[:, :-1], 0)
  return previous


DOCUMENTS = np.array([[0, 0, 0, 3, 3, 4], [1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize('combine, dim', [('concat', 1), ('concat', 3), ('concat', H), ('add', H)])
def test_latent_bigrams_equal_slow_loop(x64, combine, dim):
  x = random_inputs(2, 6, 'float64')
  layer = latent(dim, combine=combine, dtype=jnp.float64)
  variables = random_variables(layer, x, dtype='float64')
  y, memory = apply(layer, variables, x, documents_BxT=jnp.asarray(DOCUMENTS))
  centroids = np.asarray(variables['codebook']['quantizer']['centroids'])
  tokens = np.asarray(x).reshape(2, 6, N, 1, H)
  ids = ((tokens - centroids) ** 2).sum(axis=-1).argmin(axis=-1)
  previous = slow_previous(ids, DOCUMENTS)
  params = variables['params']
  assert_close(y, slow_layer(np.asarray(x), ids, previous, K, params, dim, combine), 1e-12)
  assert memory['ids'].tolist() == ids[:, -1:].tolist()
  assert memory['documents'].tolist() == DOCUMENTS[:, -1:].tolist()


@pytest.mark.parametrize('shape', [(2, 6), (2, 6, N)])
def test_raw_ids_equal_slow_loop(x64, shape):
  x, vocabulary = random_inputs(2, 6, 'float64'), 50_257
  ids = np.random.default_rng(1).integers(0, vocabulary, shape)
  layer = NGrammer(
    heads=N, clusters=None, vocabulary_size=V, dim=3, id_vocabulary=vocabulary, dtype=jnp.float64
  )
  given = {'ids': jnp.asarray(ids), 'documents_BxT': jnp.asarray(DOCUMENTS)}
  variables = random_variables(layer, x, dtype='float64', **given)
  assert set(variables) == {'params'}
  y, _ = apply(layer, variables, x, **given)
  ids = np.broadcast_to(ids.reshape(2, 6, -1), (2, 6, N))
  previous = slow_previous(ids, DOCUMENTS)
  params = variables['params']
  assert_close(y, slow_layer(np.asarray(x), ids, previous, vocabulary, params, 3, 'concat'), 1e-12)


@pytest.mark.parametrize('packed', [False, True])
def test_given_pairs_stop_at_document_starts_only(x64, packed):
  x, rng = random_inputs(2, 6, 'float64'), np.random.default_rng(2)
  ids, pairs = rng.integers(0, 7, (2, 6, N)), rng.integers(0, 7, (2, N, 6))
  layer = NGrammer(
    heads=N, clusters=None, vocabulary_size=V, dim=3, id_vocabulary=7, dtype=jnp.float64
  )
  given = {'ids': jnp.asarray(ids), 'pair_ids': jnp.asarray(pairs)}
  if packed:
    given['documents_BxT'] = jnp.asarray(DOCUMENTS)
  starts = np.diff(DOCUMENTS, axis=1, prepend=-1) != 0
  previous = slow_pairs(ids, pairs, ~starts if packed else np.ones_like(starts))
  variables = random_variables(layer, x, dtype='float64', **given)
  y, _ = apply(layer, variables, x, **given)
  expected = slow_layer(np.asarray(x), ids, previous, 7, variables['params'], 3, 'concat')
  assert_close(y, expected, 1e-12)


def slow_orders(x, ids, numbers, params, orders, dim, combine, distinct_start):
  """The layer from its ids on, for several orders, one token and head at a time."""
  B, T, _ = x.shape
  id_count, start = K + distinct_start, K if distinct_start else 0
  tables = np.asarray(params['table']).reshape(len(orders), N, V, dim)
  norms = {name: jax.tree.map(np.asarray, params[f'{name}_norm']) for name in ('unigram', 'ngram')}
  rows = {}
  for order in orders:
    grams = np.concatenate([ids[None], slow_back(ids, numbers, order, start)])
    rows[order] = slow_rows(grams.reshape(order, -1, N), id_count, V, (17, 19)).reshape(B, T, N)
  y = np.zeros((B, T, N, H))
  for b, t, n in np.ndindex(B, T, N):
    of_head = {part: value[n] for part, value in norms['unigram'].items()}
    unigram, ngrams = slow_layer_norm(x[b, t].reshape(N, H)[n], **of_head), []
    for g, order in enumerate(orders):
      of_head = {part: value[g * N + n] for part, value in norms['ngram'].items()}
      ngrams.append(slow_layer_norm(tables[g, n, rows[order][b, t, n]], **of_head))
    kept = unigram[: H - dim * len(orders)]
    y[b, t, n] = unigram + sum(ngrams) if combine == 'add' else np.concatenate([kept, *ngrams])
  return y.reshape(B, T, D)


@pytest.mark.parametrize('distinct_start', [False, True])
@pytest.mark.parametrize(
  'orders, combine, dim',
  [((2,), 'concat', 3), ((3,), 'concat', 2), ((2, 3), 'concat', 2)]
  + [((4, 2, 3), 'concat', 1), ((2, 3), 'add', H)],
)
def test_all_orders_equal_slow_loop(x64, orders, combine, dim, distinct_start):
  x = random_inputs(2, 6, 'float64')
  options = {'orders': orders, 'distinct_start': distinct_start, 'combine': combine}
  layer = latent(dim, dtype=jnp.float64, **options)
  variables = random_variables(layer, x, dtype='float64')
  y, memory = apply(layer, variables, x, documents_BxT=jnp.asarray(DOCUMENTS))
  centroids = np.asarray(variables['codebook']['quantizer']['centroids'])
  tokens = np.asarray(x).reshape(2, 6, N, 1, H)
  ids = ((tokens - centroids) ** 2).sum(axis=-1).argmin(axis=-1)
  given = (np.asarray(x), ids, DOCUMENTS, variables['params'], orders, dim, combine)
  assert_close(y, slow_orders(*given, distinct_start), 1e-12)
  assert memory['ids'].shape == (2, max(orders) - 1, N)


def test_codebook_learns_by_the_options_of_the_layer():
  x, options = random_inputs(2, 6), {'decay': 0.5, 'epsilon': 0.1, 'prenormalize': True}
  layer = latent(**options)
  variables = random_variables(layer, x)

  @jax.jit
  def both():
    quantizer = {'codebook': variables['codebook']['quantizer']}
    heads, alone = x.reshape(2, 6, N, H), ProductQuantizer(K, **options)
    return (
      layer.apply(variables, x, mutable=['codebook']),
      alone.apply(quantizer, heads, mutable=['codebook']),
    )

  ((_, memory), after), (ids, expected) = both()
  assert memory['ids'].tolist() == ids[:, -1:].tolist()
  jax.tree.map(
    lambda a, b: assert_close(a, b, 1e-6), after['codebook']['quantizer'], expected['codebook']
  )


def test_concat_keeps_the_first_features_of_the_normalised_unigram():
  x, layer = random_inputs(2, 6), latent(dim=1)
  variables = random_variables(layer, x)
  y, _ = apply(layer, variables, x)
  norm = jax.tree.map(np.asarray, variables['params']['unigram_norm'])
  unigram = slow_layer_norm(np.asarray(x).reshape(2, 6, N, H), **norm)
  y = np.asarray(y).reshape(2, 6, N, H)
  assert_close(y[..., :-1], unigram[..., :-1], 1e-5)
  assert np.abs(y[..., -1] - unigram[..., -1]).min() > 1e-3


# Streams and documents.


def every_document_layout(T):
  """Document numbers [2^(T-1), T] of all ways to cut T tokens into documents."""
  cuts = np.array(list(itertools.product([0, 1], repeat=T - 1)))
  return np.pad(cuts, ((0, 0), (1, 0))).cumsum(axis=1)


def test_packed_documents_equal_separate_sequences():
  x, layer = random_inputs(1, 6), latent()
  variables = random_variables(layer, x)
  packed, _ = apply(layer, variables, x, documents_BxT=jnp.asarray([[4, 4, 4, 5, 5, 5]]))
  separate, _ = apply(layer, variables, x.reshape(2, 3, D))
  assert_close(packed.reshape(2, 3, D), separate, 1e-6)
  one_document, _ = apply(layer, variables, x)
  assert (packed != one_document).any()


def test_stream_split_anywhere_equals_one_pass():
  T = 5
  numbers = jnp.asarray(every_document_layout(T))  # with a document start at the seam or not
  x, layer = random_inputs(len(numbers), T), latent()
  variables = random_variables(layer, x)
  run = lambda x, numbers, memory: apply(layer, variables, x, documents_BxT=numbers, memory=memory)
  one_pass, last = run(x, numbers, None)
  for split in range(1, T):
    first, memory = run(x[:, :split], numbers[:, :split], None)
    second, memory = run(x[:, split:], numbers[:, split:], memory)
    both = jnp.concatenate([first, second], axis=1)
    assert_close(both, one_pass, 1e-6)
    jax.tree.map(np.testing.assert_array_equal, memory, last)
  # Without the memory the second part is another one, or this test would prove nothing.
  forgetful, _ = run(x[:, split:], numbers[:, split:], None)
  assert (forgetful != second).any()


def test_segments_without_documents_go_on_with_that_of_the_memory():
  x, layer = random_inputs(2, 5), latent()
  variables = random_variables(layer, x)
  one_pass, _ = apply(layer, variables, x)
  y, memory = apply(layer, variables, x[:, :1], documents_BxT=jnp.asarray([[0], [5]]))
  outputs = [y]
  for t in range(1, 5):
    y, memory = apply(layer, variables, x[:, t : t + 1], memory=memory)
    outputs.append(y)
  assert_close(jnp.concatenate(outputs, axis=1), one_pass, 1e-6)
  assert memory['documents'].tolist() == [[0], [5]]


def test_empty_memory_holds_no_token():
  x, layer = random_inputs(2, 3), latent()
  variables = random_variables(layer, x)
  numbers = jnp.zeros((2, 3), jnp.int32)
  expected, _ = apply(layer, variables, x, documents_BxT=numbers)
  # Whatever ids it holds, a masked slot gives no bi-gram, nor does it for a document 0.
  memory = ngrammer.empty_memory(2, N)
  memory['ids'] += 3
  for given in ({}, {'documents_BxT': numbers}):
    y, _ = apply(layer, variables, x, memory=memory, **given)
    np.testing.assert_array_equal(y, expected)


# What depends on what.


def test_token_reaches_its_own_output_by_gradient_and_the_next_by_its_id():
  B, T = 1, 5
  x, layer = random_inputs(B, T), latent()
  variables = random_variables(layer, x)
  run = lambda x: apply(layer, variables, x)[0][0]
  jacobian = jax.jit(jax.jacrev(run))(x)
  reached = jnp.abs(jacobian).sum(axis=(1, 4))[:, 0] > 0  # [output, input]
  assert reached.tolist() == np.eye(T, dtype=bool).tolist()
  y, changed_next = run(x), False
  for t in range(T):
    changed = (run(x.at[:, t].multiply(-1)) != y).any(axis=-1)
    assert not changed[:t].any() and changed[t] and not changed[t + 2 :].any()
    changed_next |= bool(changed[t + 1 : t + 2].any())
  assert changed_next


def test_concat_of_the_full_head_width_drops_the_unigram():
  x, layer = random_inputs(1, 4), latent(dim=H)
  variables = random_variables(layer, x)
  gradient = jax.grad(lambda x: jnp.square(apply(layer, variables, x)[0]).sum())(x)
  assert (gradient == 0).all()


def test_gradient_reaches_looked_up_rows_only_and_no_centroid():
  x, layer = random_inputs(1, 3), latent(dim=3)
  variables = random_variables(layer, x)
  loss = lambda variables: (apply(layer, variables, x)[0] ** 3).sum()
  gradient = jax.grad(loss)(variables)
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient['codebook']))
  assert all((leaf != 0).any() for leaf in jax.tree.leaves(gradient['params']))
  centroids = np.asarray(variables['codebook']['quantizer']['centroids'])
  ids = ((np.asarray(x).reshape(3, N, 1, H) - centroids) ** 2).sum(axis=-1).argmin(axis=-1)
  previous = np.pad(ids, ((1, 0), (0, 0)))[:-1]
  touched = np.zeros((N, V), bool)
  for row_N in slow_rows(np.stack([ids, previous]), K, V, (17, 19)):
    touched[np.arange(N), row_N] = True
  reached = jnp.abs(gradient['params']['table']).sum(axis=-1) > 0
  assert reached.reshape(N, V).tolist() == touched.tolist()


@pytest.mark.parametrize('prenormalize', [False, True])
def test_zero_vector_has_a_finite_gradient(prenormalize):
  x, layer = random_inputs(1, 3).at[0, 1].set(0), latent(prenormalize=prenormalize)
  variables = random_variables(layer, x)

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def gradients_and_codebook(params, x):
    variables_now = {**variables, 'params': params}
    y, after = layer.apply(variables_now, x, mutable=['codebook'])
    return jnp.square(y[0]).sum(), after

  results = gradients_and_codebook(variables['params'], x)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def test_padding_gives_zeros_and_does_not_move_the_codebook():
  x, layer = random_inputs(2, 4), latent(decay=0.5)
  variables = random_variables(layer, x)
  valid = jnp.asarray([[1, 1, 1, 0], [0, 1, 1, 1]])

  @jax.jit
  def run(x):
    return layer.apply(variables, x, valid_BxT=valid, mutable=['codebook'])

  (y, _), after = run(x)
  assert ((jnp.abs(y).sum(axis=-1) > 0) == valid).all()
  _, other = run(jnp.where(valid[..., None], x, 50))
  jax.tree.map(np.testing.assert_array_equal, after, other)


# Use.


@pytest.mark.parametrize(
  'options, message',
  [
    ({'heads': 3}, '3 heads do not divide the width 8'),
    ({'dim': 5}, 'n-gram dim 5 is not between 1 and the head width 4 (width 8 / 2 heads)'),
    ({'dim': 0}, 'n-gram dim 0 is not between 1 and the head width 4 (width 8 / 2 heads)'),
    ({'combine': 'add', 'dim': 3}, 'combine "add" needs n-gram dim 3 to equal the head width 4'),
    ({'orders': ()}, 'orders () are not different numbers from 2 on'),
    ({'orders': (1, 2)}, 'orders (1, 2) are not different numbers from 2 on'),
    ({'orders': (2, 2)}, 'orders (2, 2) are not different numbers from 2 on'),
    ({'orders': (2, 3), 'dim': 3}, '2 orders of n-gram dim 3 exceed the head width 4'),
    ({'combine': 'sum'}, "combine 'sum' is not one of concat, add"),
    ({'clusters': None}, 'an NGrammer without clusters needs raw ids and their id_vocabulary'),
    (
      {'heads': 8, 'dim': 1, 'vocabulary_size': 2**28},
      '8 heads of 268,435,456 n-grams exceed the 2^31 rows of a table',
    ),
    (
      {'heads': 4, 'dim': 2, 'vocabulary_size': 4},
      '4 heads need 4 primes between 4 and 8, but there are only 2: '
      'use a larger n-gram vocabulary or fewer heads',
    ),
  ],
)
def test_impossible_layer_says_what_to_change(options, message):
  layer = NGrammer(**{'heads': N, 'clusters': K, 'vocabulary_size': V, 'dim': 2} | options)
  with pytest.raises(ValueError) as caught:
    jax.eval_shape(layer.init, jax.random.key(0), random_inputs(1, 2))
  assert str(caught.value) == message


def test_more_heads_are_no_more_operations():
  def operations(heads):
    layer = NGrammer(heads=heads, clusters=K, vocabulary_size=97, dim=2)
    x = jnp.zeros((2, 6, 4 * heads))
    variables = random_variables(layer, x)
    step = lambda x: layer.apply(variables, x, mutable=['codebook'])
    return len(list(jaxprs.equations(jax.make_jaxpr(step)(x).jaxpr)))

  assert operations(8) == operations(2)


def test_more_rows_than_bigrams_and_vectors_as_wide_as_a_head():
  layer = NGrammer(heads=N, clusters=2, vocabulary_size=50, dim=H)
  x = random_inputs(2, 6)
  y, _ = apply(layer, random_variables(layer, x), x)
  assert jnp.isfinite(y).all()


def test_training_steps_compile_once():
  x, layer = random_inputs(2, 3), latent()
  variables = random_variables(layer, x)
  traces = []

  @jax.jit
  def step(codebook, memory, x):
    traces.append(x.shape)
    variables_now = {'params': variables['params'], 'codebook': codebook}
    (_, memory), after = layer.apply(variables_now, x, memory=memory, mutable=['codebook'])
    return after['codebook'], memory

  codebook, memory = variables['codebook'], ngrammer.empty_memory(2, N)
  for _ in range(3):
    codebook, memory = step(codebook, memory, x)
  assert len(traces) == 1


def test_bfloat16_output_leaves_parameters_and_codebook_in_float32():
  x, layer = random_inputs(2, 3).astype(jnp.bfloat16), latent(dtype=jnp.bfloat16)

  @jax.eval_shape
  def everything():
    variables = nn.unbox(layer.init(jax.random.key(0), x))
    return variables, layer.apply(variables, x, mutable=['codebook'])

  variables, ((y, _), after) = everything
  assert y.dtype == jnp.bfloat16
  assert {leaf.dtype.name for leaf in jax.tree.leaves((variables, after))} == {'float32'}


def test_initial_table_is_xavier_uniform_per_head():
  layer = NGrammer(heads=N, clusters=K, vocabulary_size=500, dim=2)
  params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), random_inputs(1, 2)))['params']
  bound = (6 / (500 + 2)) ** 0.5
  assert params['table'].shape == (N * 500, 2)
  assert 0.99 * bound < np.abs(params['table']).max() <= bound


@pytest.mark.parametrize('padding', [1, 5])
def test_segment_that_ends_in_padding_continues_after_its_last_token(padding):
  """Row 0 has tokens before the padding, row 1 nothing else: it keeps its memory."""
  layer = latent()
  x = random_inputs(2, 6)
  variables = random_variables(layer, x)
  _, memory = layer.apply(variables, x)
  padded = jnp.concatenate([x, 9 * jnp.ones((2, padding, x.shape[-1]))], axis=1)
  valid = np.zeros((2, 6 + padding))
  valid[0, :6] = 1
  _, seam = layer.apply(variables, padded, valid_BxT=valid, memory=memory)
  _, unpadded = layer.apply(variables, x, memory=memory)
  for key in ('ids', 'documents'):
    assert seam[key][0].tolist() == unpadded[key][0].tolist()
    assert seam[key][1].tolist() == memory[key][1].tolist()
