import contextlib
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.layers import FeedForward, LayerNorm, NGrammer, ProductQuantizer
from ngrammer_jax.layers.attention import full
from ngrammer_jax.layers.ngram.pairs import paired_ids
from ngrammer_jax.layers.ngram.windows import Windows
from ngrammer_jax.layers.normalization import RMSNorm
from tests.checks import assert_close, random_variables
from tests.layers.ngram.test_hashing import slow_rows
from tests.layers.programs import apply
from tests.layers.test_normalization import slow_layer_norm

N, H, K, V = 2, 4, 5, 13
D = N * H
PRIMES = {13: (17, 19), 50: (53, 59)}


def latent(dim=2, **options):
  return NGrammer(
    **{'heads': N, 'clusters': K, 'vocabulary_size': V, 'dim': dim, 'dtype': jnp.float64} | options
  )


def random_inputs(B, T, dtype='float32'):
  return jnp.asarray(np.random.default_rng(9).normal(size=(B, T, D)), dtype)


def random_array(shape, seed=9):
  return np.random.default_rng(seed).normal(size=shape)


# Pairing.


@pytest.mark.parametrize('part', ['golden', 'rand'])
def test_bigrams_equal_praxis(reference, part):
  f = {k.split('/')[1]: v for k, v in reference('ng_bigram').items() if k.startswith(part)}
  ids = f['ids'].astype('int32')[..., None]

  @jax.jit
  def previous(starts):
    paired = paired_ids(ids, jnp.asarray(f['pair_ids']), ~starts)
    (_, previous), _ = Windows(2)(ids, jnp.cumsum(starts, axis=1), None)
    return previous, paired

  for case in ('plain', 'seg', 'pair', 'pair_seg'):
    before = previous((f['segment_pos'] == 0) & ('seg' in case))['pair' in case][..., 0]
    # In Python integers: K^2 does not fit 32 bits.
    bigrams = f['ids'].astype(object) + int(f['K']) * np.asarray(before).astype(object)
    assert bigrams.tolist() == f[case].tolist(), case


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
  actual = jax.jit(paired_ids)(ids, pairs, continues)
  assert actual.tolist() == slow_pairs(ids, pairs, continues).tolist()


def test_most_attended_equals_slow_loop():
  rng = np.random.default_rng(0)
  scores, allowed = rng.integers(0, 3, (2, N, 4, 7)), rng.random((2, 4, 7)) < 0.4
  allowed[0, 0] = False
  actual = jax.jit(full.most_attended)(scores.astype('float32'), allowed).tolist()
  for b, n, t in np.ndindex(2, N, 4):
    positions = [s for s in range(7) if allowed[b, t, s]]
    first_best = max(positions, key=lambda s: scores[b, n, t, s], default=7)
    assert actual[b][n][t] == first_best


@pytest.mark.full
def test_pairs_reach_into_the_memory(x64):
  """With the ids of the tokens before a segment, a split equals one pass."""
  x, layer, split = random_array((2, 6, D)), latent(clusters=None, id_vocabulary=7), 2
  ids = np.random.default_rng(2).integers(0, 7, (2, 6, N))
  pairs = np.random.default_rng(0).integers(0, 6, (2, N, 6))
  pairs = np.where(pairs < np.arange(6), pairs, 6)  # those before, or none
  variables = random_variables(layer, x, ids=ids, dtype='float64')
  full, segment_ids = apply(layer, variables, x, ids=ids, pair_ids=pairs)
  assert segment_ids['ids'].tolist() == ids.tolist()
  kwargs = {'pair_ids': pairs[..., split:], 'earlier_ids': ids[:, :split], 'ids': ids[:, split:]}
  part, after = apply(layer, variables, x[:, split:], **kwargs)
  assert_close(part, full[:, split:], 1e-12)
  assert after['ids'].tolist() == ids[:, split:].tolist()


def slow_back(ids, numbers, order, start):
  """Going back one token at a time, as long as the document lasts."""
  B, T, N = ids.shape
  shifted = np.full((order - 1, B, T, N), start)
  for j, b, t in np.ndindex(order - 1, B, T):
    if t > j and numbers[b, t - j - 1] == numbers[b, t]:
      shifted[j, b, t] = ids[b, t - j - 1]
  return shifted


# The whole layer against loops.


def slow_layer(x, ids, previous, id_count, params, dim, combine):
  """A layer of bi-grams from its ids on, one token and head at a time."""
  grams = {2: np.stack([ids, previous])}
  return slow_orders(x, grams, id_count, params, dim, combine, V)


def slow_orders(x, grams, id_count, params, dim, combine, V):
  """The layer from the ids of its n-grams on, by order, one token and head at a time."""
  B, T, _ = x.shape
  tables = np.asarray(params['table']).reshape(len(grams), N, V, dim)
  norms = {name: jax.tree.map(np.asarray, params[f'{name}_norm']) for name in ('unigram', 'ngram')}
  rows = {
    order: slow_rows(ids.reshape(order, -1, N), id_count, V, PRIMES[V]).reshape(B, T, N)
    for order, ids in grams.items()
  }
  y = np.zeros((B, T, N, H))
  for b, t, n in np.ndindex(B, T, N):
    head_norm = {part: value[n] for part, value in norms['unigram'].items()}
    unigram, ngrams = slow_layer_norm(x[b, t].reshape(N, H)[n], **head_norm), []
    for g, order in enumerate(grams):
      head_norm = {part: value[g * N + n] for part, value in norms['ngram'].items()}
      ngrams.append(slow_layer_norm(tables[g, n, rows[order][b, t, n]], **head_norm))
    unigram_features = unigram[: H - dim * len(grams)]
    y[b, t, n] = (
      unigram + sum(ngrams) if combine == 'add' else np.concatenate([unigram_features, *ngrams])
    )
  return y.reshape(B, T, N * H)


def slow_previous(ids, documents):
  previous = np.zeros_like(ids)
  same = documents[:, 1:] == documents[:, :-1]
  previous[:, 1:] = np.where(same[..., None], ids[:, :-1], 0)
  return previous


def slow_ids(x, variables):
  """The nearest centroid of every token and head."""
  centroids = np.asarray(variables['codebook']['quantizer']['centroids'])
  tokens = np.asarray(x).reshape(*x.shape[:2], N, 1, H)
  return ((tokens - centroids) ** 2).sum(axis=-1).argmin(axis=-1)


DOCUMENTS = np.array([[0, 0, 0, 3, 3, 4], [1, 1, 1, 1, 1, 1]])
# Orders, how n-grams and token are joined, and the width of an n-gram.
JOINED = [((2,), 'concat', 1), ((2,), 'concat', 3), ((2,), 'concat', H), ((2,), 'add', H)]
JOINED += [((3,), 'concat', 2), ((2, 3), 'concat', 2)]
JOINED += [((4, 2, 3), 'concat', 1), ((4, 2, 3), 'add', H)]


def equals_slow_loop(orders, combine, dim, distinct_start, **sizes):
  x = random_array((2, 6, D))
  layer = latent(dim, orders=orders, combine=combine, distinct_start=distinct_start, **sizes)
  variables = random_variables(layer, x, dtype='float64')
  y, memory = apply(layer, variables, x, documents_BxT=DOCUMENTS)
  ids, start = slow_ids(x, variables), layer.clusters if distinct_start else 0
  grams = {
    order: np.concatenate([ids[None], slow_back(ids, DOCUMENTS, order, start)]) for order in orders
  }
  args = layer.clusters + distinct_start, variables['params'], dim, combine
  assert_close(y, slow_orders(x, grams, *args, layer.vocabulary_size), 1e-12)
  R = max(orders) - 1
  assert memory['ids'].tolist() == ids[:, -R:].tolist()
  assert memory['documents'].tolist() == DOCUMENTS[:, -R:].tolist()


@pytest.mark.parametrize(
  'orders, combine, dim, distinct_start',
  [(*JOINED[i], start) for i, start in ((1, False), (5, True), (7, True))],
)
def test_equals_slow_loop(x64, orders, combine, dim, distinct_start):
  equals_slow_loop(orders, combine, dim, distinct_start)


def test_more_rows_than_bigrams_and_vectors_as_wide_as_a_head(x64):
  """The n-grams are all that is left of a token."""
  equals_slow_loop((2,), 'concat', H, False, clusters=2, vocabulary_size=50)


@pytest.mark.slow
@pytest.mark.parametrize('distinct_start', [False, True])
@pytest.mark.parametrize('orders, combine, dim', JOINED)
def test_all_orders_equal_slow_loop(x64, orders, combine, dim, distinct_start):
  equals_slow_loop(orders, combine, dim, distinct_start)


@pytest.mark.parametrize('case', ['ids', 'ids of heads, packed', 'pairs', 'pairs, packed'])
def test_raw_ids_equal_slow_loop(x64, case):
  """Given pairs stop at document starts only."""
  rng, by_head, packed = np.random.default_rng(1), case != 'ids', 'packed' in case
  x, vocabulary = random_array((2, 6, D)), 50_257
  ids = rng.integers(0, vocabulary, (2, 6, N) if by_head else (2, 6))
  layer = latent(3, clusters=None, id_vocabulary=vocabulary)
  kwargs, numbers = {'ids': ids}, DOCUMENTS if packed else np.zeros_like(DOCUMENTS)
  if packed:
    kwargs['documents_BxT'] = DOCUMENTS
  broadcast_ids = np.broadcast_to(ids.reshape(2, 6, -1), (2, 6, N))
  previous = slow_previous(broadcast_ids, numbers)
  if 'pairs' in case:
    kwargs['pair_ids'] = rng.integers(0, 7, (2, N, 6))
    starts = packed & (np.diff(numbers, axis=1, prepend=-1) != 0)
    previous = slow_pairs(broadcast_ids, kwargs['pair_ids'], ~starts)
  variables = random_variables(layer, x, dtype='float64', **kwargs)
  assert set(variables) == {'params'}
  y, _ = apply(layer, variables, x, **kwargs)
  params = variables['params']
  assert_close(y, slow_layer(x, broadcast_ids, previous, vocabulary, params, 3, 'concat'), 1e-12)


def test_codebook_learns_by_the_options_of_the_layer_but_not_from_padding():
  options = {'decay': 0.5, 'epsilon': 0.1, 'prenormalize': True}
  x, layer = random_array((2, 4, D)).astype('float32'), latent(dtype=jnp.float32, **options)
  valid = np.array([[1, 1, 1, 0], [0, 1, 1, 1]])
  variables = random_variables(layer, x)

  @jax.jit
  def run_both(x):
    state = {'codebook': variables['codebook']['quantizer']}
    heads, quantizer = x.reshape(2, 4, N, H), ProductQuantizer(K, **options)
    return (
      layer.apply(variables, x, valid_BxT=valid, mutable=['codebook']),
      quantizer.apply(state, heads, valid, mutable=['codebook']),
    )

  ((y, memory), after), (ids, expected) = jax.device_get(run_both(x))
  assert memory['ids'].tolist() == [[ids[0, 2].tolist()], [ids[1, 3].tolist()]]
  jax.tree.map(
    lambda a, b: assert_close(a, b, 1e-6), after['codebook']['quantizer'], expected['codebook']
  )
  assert ((np.abs(y).sum(axis=-1) > 0) == valid).all()
  (_, other), _ = run_both(np.where(valid[..., None], x, 50))
  jax.tree.map(np.testing.assert_array_equal, after, other)


# Streams and documents.


@pytest.mark.full
def test_tokens_one_by_one_equal_one_pass(x64):
  """Without documents they go on with that of the memory; with none there, with document 0."""
  x, layer = random_array((3, 5, D)), latent(2, orders=(2, 3))
  row_documents = np.zeros((3, 5), 'int32') + np.arange(3, dtype='int32')[:, None]
  empty = jax.device_get(Windows(3).empty_state(3, N))
  run = functools.partial(apply, layer, random_variables(layer, x, dtype='float64'))
  one_pass, last = run(x, documents_BxT=row_documents, memory=empty)
  holds_no_token = empty | {'ids': empty['ids'] + 3}
  for kwargs in ({}, {'documents_BxT': row_documents[:, :1]}):
    y, memory = run(x[:, :1], memory=holds_no_token, **kwargs)
    outputs = [y]
    for t in range(1, 5):
      y, memory = run(x[:, t : t + 1], memory=memory)
      outputs.append(y)
    assert_close(np.concatenate(outputs, axis=1), one_pass, 1e-12)
    assert memory['ids'].tolist() == last['ids'].tolist()
    assert (
      memory['documents'].tolist()
      == (row_documents if kwargs else 0 * row_documents)[:, :2].tolist()
    )


# What depends on what.


def test_unigrams_have_no_memory():
  x = random_inputs(2, 3)
  layer = NGrammer(heads=2, clusters=4, vocabulary_size=8, dim=2, orders=(1,))
  (y, memory), _ = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
  assert y.shape == x.shape and memory is None


@pytest.mark.full
def test_token_reaches_its_own_output_by_gradient_and_the_next_by_its_id():
  T, layer = 5, latent(dtype=jnp.float32)
  x = random_array((1, T, D)).astype('float32')
  variables = random_variables(layer, x)
  jacobian = jax.jit(jax.jacrev(lambda x: layer.apply(variables, x)[0][0].sum(axis=-1)))(x)
  reached = np.abs(jacobian).sum(axis=-1)[:, 0] > 0  # [output, input]
  assert reached.tolist() == np.eye(T, dtype=bool).tolist()
  # Row t has another token t; the last is as it was.
  inputs = np.where(np.eye(T + 1, T)[..., None] > 0, -x, x)
  *rows, y = np.asarray(apply(layer, variables, inputs)[0])
  changed_next = False
  for t, row in enumerate(rows):
    changed = (row != y).any(axis=-1)
    assert not changed[:t].any() and changed[t] and not changed[t + 2 :].any()
    changed_next |= bool(changed[t + 1 : t + 2].any())
  assert changed_next


@functools.partial(jax.jit, static_argnums=0)
def gradients(layer, variables, x):
  """Of the sum of cubes, by variables and inputs, and the codebook after the step."""

  def loss(variables, x):
    (y, _), after = layer.apply(variables, x, mutable=['codebook'])
    return (y**3).sum(), after

  return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)


@pytest.mark.full
def test_gradient_reaches_looked_up_rows_only_and_no_centroid():
  """It is finite at a vector of zeros too."""
  layer, x = latent(3, dtype=jnp.float32), random_array((1, 3, D)).astype('float32')
  x[0, 1] = 0
  variables = random_variables(layer, x)
  (gradient, d_x), after = gradients(layer, variables, x)
  for leaf in jax.tree.leaves((gradient, d_x, after)):
    assert np.isfinite(leaf).all()
  assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient['codebook']))
  assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient['params']))
  ids = slow_ids(x, variables)
  previous = slow_previous(ids, np.zeros((1, 3)))
  touched = np.zeros((N, V), bool)
  for row_N in slow_rows(np.stack([ids[0], previous[0]]), K, V, (17, 19)):
    touched[np.arange(N), row_N] = True
  reached = np.abs(gradient['params']['table']).sum(axis=-1) > 0
  assert reached.reshape(N, V).tolist() == touched.tolist()


@pytest.mark.full
def test_concat_of_the_full_head_width_drops_the_unigram():
  """A vector of zeros has a finite gradient where vectors are normalised to be clustered."""
  layer, x = (
    latent(H, dtype=jnp.float32, prenormalize=True),
    random_array((1, 3, D)).astype('float32'),
  )
  x[0, 1] = 0
  variables = random_variables(layer, x)
  (gradient, d_x), after = gradients(layer, variables, x)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, after)))
  assert (np.asarray(d_x) == 0).all()
  assert (np.asarray(gradient['params']['table']) != 0).any()


# Use.


@pytest.mark.parametrize(
  'options, message',
  [
    ({'heads': 3}, 'width 8 must be divisible by heads=3'),
    ({'dim': 5}, 'n-gram dim 5 is not between 1 and the head width 4 (width 8 / 2 heads)'),
    ({'dim': 0}, 'n-gram dim 0 is not between 1 and the head width 4 (width 8 / 2 heads)'),
    ({'combine': 'add', 'dim': 3}, 'combine "add" needs n-gram dim 3 to equal the head width 4'),
    ({'orders': (2, 3), 'dim': 3}, '2 orders of n-gram dim 3 exceed the head width 4'),
    ({'combine': 'sum'}, "combine 'sum' is not one of concat, add"),
    ({'clusters': None}, 'an NGrammer without clusters needs raw ids and their id_vocabulary'),
    ({'orders': 3}, 'orders=3 must be a tuple such as (2,) or (2, 3)'),
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


def test_a_memory_of_another_number_of_rows_is_refused():
  layer = latent()
  with pytest.raises(ValueError, match=r'but the input has 1 rows: .* or empty_memory\(1\)'):
    layer.init(jax.random.key(0), random_inputs(1, 2), memory=layer.empty_memory(2))


@pytest.mark.full
@pytest.mark.parametrize('documents', [DOCUMENTS.astype(bool), DOCUMENTS * 1.0, DOCUMENTS[:, 1:]])
def test_documents_that_are_no_numbers_are_refused(documents):
  with pytest.raises(ValueError, match='expected the document number of each token, integers'):
    latent().init(jax.random.key(0), random_inputs(*DOCUMENTS.shape), documents_BxT=documents)


@pytest.mark.full
def test_more_heads_are_no_more_operations():
  def operations(heads):
    layer = NGrammer(heads=heads, clusters=K, vocabulary_size=97, dim=2)
    x = np.zeros((2, 6, 4 * heads), 'float32')
    variables = jax.eval_shape(lambda: nn.unbox(layer.init(jax.random.key(0), x)))
    step = lambda variables, x: layer.apply(variables, x, mutable=['codebook'])
    # Lowered for a CPU: on GPUs, sums of rows are scans whose depth grows with the logarithm.
    return jax.jit(step).lower(variables, x).as_text().count(' = stablehlo.')

  assert operations(8) == operations(2)


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


def test_without_a_dtype_the_output_has_that_of_the_input():
  layer = latent(dtype=None, return_memory=False)
  x = random_inputs(2, 6, 'bfloat16')
  variables = random_variables(layer, x)
  y, updated = apply(layer, variables, x, mutable=('codebook',))
  centroids = updated['codebook']['quantizer']['centroids']
  assert y.dtype == jnp.bfloat16 and y.shape == x.shape and centroids.dtype == jnp.float32
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables['params'])} == {'float32'}
  # Small steps of k-means would be lost in bfloat16.
  before = variables['codebook']['quantizer']['centroids']
  assert (np.asarray(centroids) != np.asarray(before)).any()
  named = apply(latent(dtype=jnp.bfloat16), variables, x)[0]
  np.testing.assert_array_equal(y, named)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {'float32'}
  assert jax.eval_shape(layer.apply, variables, random_inputs(2, 6)).dtype == jnp.float32


@pytest.mark.parametrize(
  'layer', [LayerNorm(dtype=None), RMSNorm(dtype=None), FeedForward(4, dtype=None)]
)
def test_other_layers_without_a_dtype(layer):
  for dtype in ('bfloat16', 'float32'):
    y, variables = jax.eval_shape(
      layer.init_with_output, jax.random.key(0), random_inputs(2, 6, dtype)
    )
    assert y.dtype == dtype and {str(leaf.dtype) for leaf in jax.tree.leaves(variables)} == {
      'float32'
    }


def test_an_input_without_a_batch_axis_or_tokens_is_refused():
  message = r'at least one token, not of shape \(6, 8\): for one sequence \[T, D\], pass x\['
  with pytest.raises(ValueError, match=message):
    latent().init(jax.random.key(0), random_inputs(2, 6)[0])
  with pytest.raises(ValueError, match=r'not of shape \(2, 0, 8\)'):
    latent().init(jax.random.key(0), random_inputs(2, 6)[:, :0])


@pytest.mark.parametrize('in_context', [pytest.param(True, marks=pytest.mark.full), False])
def test_explicit_axes_are_refused_unless_in_auto_axes(in_context):
  layer, x = latent(dtype=jnp.float32, return_memory=False), jnp.ones((8, 3, D))
  variables = random_variables(layer, x)
  mesh = jax.make_mesh((8,), ('data',))
  spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P('data')))
  with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
    with pytest.raises(
      errors.BadInput, match=r'explicit mesh axes data, .* in jax\.sharding\.auto_axes'
    ):
      layer.apply(variables, spread)
    if in_context:
      automatic = jax.sharding.auto_axes(layer.apply, out_sharding=jax.P('data'))
      actual = jax.jit(automatic)(variables, spread)
  if in_context:
    assert_close(actual, layer.apply(variables, x), 1e-6)
