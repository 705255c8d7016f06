"""The slow loops are written from the formulas at the top of the module."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from ngrammer_jax.layers.context import EmbeddingLookup
from ngrammer_jax.layers.ngram import quantizer
from tests import jaxprs
from tests.checks import assert_close

B, T, N, K, H = 2, 7, 2, 5, 3


def codebook(centroids):
  """Variables of a quantizer that all clusters share alike so far."""
  centroids = np.asarray(centroids)
  N, K, _ = centroids.shape
  usage, changed = np.full((N, K), 1 / K, centroids.dtype), np.zeros(N, centroids.dtype)
  return {'codebook': {'centroids': centroids, 'usage': usage, 'changed': changed}}


@functools.partial(jax.jit, static_argnames=('prenormalize', 'empty'))
def step(variables, x, valid=None, decay=0.5, epsilon=1e-6, *, prenormalize=False, empty='shrink'):
  """One program for all decays and epsilons."""
  K = variables['codebook']['centroids'].shape[1]
  layer = quantizer.ProductQuantizer(K, decay, epsilon, prenormalize, empty)
  return layer.apply(variables, x, valid, mutable=['codebook'])


@pytest.fixture
def random_step(x64):
  """Tokens, which of them are valid, and variables, of the shapes that most tests share."""
  rng = np.random.default_rng(0)
  valid = rng.integers(0, 2, (B, T))
  return rng.normal(size=(B, T, N, H)), valid, codebook(0.3 * rng.normal(size=(N, K, H)))


def slow_ids(x, centroids):
  """The nearest centroid of every token and head, the first of equals."""
  ids = np.zeros(x.shape[:3], int)
  for b, t, n in np.ndindex(*ids.shape):
    distance_K = [((x[b, t, n] - m) ** 2).sum() for m in centroids[n]]
    ids[b, t, n] = distance_K.index(min(distance_K))
  return ids


def slow_step(x, centroids, valid, decay, epsilon, prenormalize):
  """Ids, the centroids after the step, the tokens of each, and the share that changed."""
  if prenormalize:
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
  ids = slow_ids(x, centroids)
  updated, counts = np.zeros_like(centroids), np.zeros(centroids.shape[:2])
  for n, k in np.ndindex(*counts.shape):
    tokens = x[:, :, n][(ids[..., n] == k) & (valid == 1)]
    counts[n, k] = len(tokens)
    mean = tokens.sum(axis=0) / (epsilon + len(tokens))
    updated[n, k] = decay * centroids[n, k] + (1 - decay) * mean
  changed = (slow_ids(x[:1], updated) != ids[:1]) & (valid[:1] == 1)[..., None]
  return ids, updated, counts, changed.sum(axis=(0, 1)) / valid[0].sum()


def equals_slow_step(actual, *args):
  (ids, after), (expected_ids, updated, counts, changed) = actual, slow_step(*args)
  assert ids.dtype == jnp.int32
  assert ids.tolist() == expected_ids.tolist()
  assert_close(after['codebook']['centroids'], updated, 1e-12)
  assert_close(after['codebook']['usage'], 0.99 / K + 0.01 * counts / args[2].sum(), 1e-12)
  # Of the first row, and without its padding.
  assert_close(after['codebook']['changed'], changed, 1e-12)
  return changed


@pytest.mark.parametrize(
  'dtype, tolerance', [('float64', 1e-9), pytest.param('float32', 2e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('prenormalize', [False, True])
def test_ten_steps_equal_praxis(reference, prenormalize, dtype, tolerance):
  f = reference('ng_vq_train')
  K = f['means0'].shape[1]

  @jax.jit
  def ten_steps(x, valid, centroids, decay, epsilon):
    def one(variables, batch):
      x, valid = batch
      ids, after = step(variables, x, valid, decay, epsilon, prenormalize=prenormalize)
      if prenormalize:
        x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
      _, counts = quantizer.cluster_statistics(x, ids, K, valid)
      return after, (ids, counts, after['codebook']['centroids'])

    variables = codebook(np.zeros_like(f['means0'], dtype))
    variables['codebook']['centroids'] = centroids
    return jax.lax.scan(one, variables, (x, valid))[1]

  variants = [
    v
    for v in ('default', 'prenorm', 'decay90', 'eps')
    if bool(f[f'cfg/{v}/prenorm']) == prenormalize
  ]
  assert variants
  with jax.enable_x64(dtype == 'float64'):
    x, centroids = f['x'].astype(dtype), f['means0'].astype(dtype)
    for variant in variants:
      options = [f[f'cfg/{variant}/{name}'].astype(dtype) for name in ('decay', 'eps')]
      for case, valid in (('nopad', np.ones_like(f['paddings'])), ('pad', 1 - f['paddings'])):
        ids, counts, means = jax.device_get(ten_steps(x, valid.astype(dtype), centroids, *options))
        assert ids.tolist() == f[f'{variant}/{case}/id'].tolist()
        assert counts.tolist() == f[f'{variant}/{case}/count'].tolist()
        for t in (1, 2, 10):
          # The difference to the start: a step with decay .999 moves by less than a tolerance.
          expected = f[f'{variant}/{case}/means/{t}']
          assert_close(means[t - 1] - centroids, expected - f['means0'], tolerance)


@pytest.mark.parametrize('prenormalize', [False, True])
def test_step_equals_slow_loop(random_step, prenormalize):
  """The ids are by the centroids before the step, which changes some."""
  x, valid, variables = random_step
  options, centroids = (0.3, 0.1), variables['codebook']['centroids']
  actual = step(variables, x, valid, *options, prenormalize=prenormalize)
  changed = equals_slow_step(actual, x, centroids, valid, *options, prenormalize)
  assert changed.any() or prenormalize


def test_an_accelerator_computes_the_same(random_step, monkeypatch):
  """What is chosen by platform, with that of accelerators on this CPU."""
  x, valid, variables = random_step
  chosen = lambda *args, default, **others: default(*args)
  monkeypatch.setattr(jax.lax, 'platform_dependent', chosen)
  not_compiled_yet = jax.jit(lambda *args: step.__wrapped__(*args))
  actual = not_compiled_yet(variables, x, valid, 0.3, 0.1)
  equals_slow_step(actual, x, variables['codebook']['centroids'], valid, 0.3, 0.1, False)


def test_a_tpu_adds_rows_and_no_windows():
  """It would add windows in a loop, see tests/test_tpu_programs.py."""
  arrays = jax.ShapeDtypeStruct((1, 4, 2, 3), 'float32'), jax.ShapeDtypeStruct((1, 4, 2), 'int32')
  sums = jax.jit(lambda x, ids: quantizer.cluster_statistics(x, ids, 5)[0]).trace(*arrays)
  text = sums.lower(lowering_platforms=('tpu',)).as_text()
  assert 'update_window_dims = [1]' in text and 'update_window_dims = [1, 2]' not in text


def test_no_valid_mask_means_all_tokens(random_step):
  x, valid, variables = random_step
  equals_slow_step(
    step(variables, x), x, variables['codebook']['centroids'], np.ones_like(valid), 0.5, 1e-6, False
  )


def test_sums_and_counts_of_parts_make_one_step(random_step):
  """Parts have different numbers of tokens."""
  x, valid, variables = random_step
  valid[0] = np.arange(T) < 2
  valid[1] = np.arange(T) < 6
  layer = quantizer.ProductQuantizer(K, 0.5, 0.1)

  @jax.jit
  def run_part(x, valid):
    ids, state = layer.apply(variables, x, valid, mutable=['statistics'])
    return ids, state['statistics']

  @jax.jit
  def update(first, second):
    return layer.update_codebook(variables['codebook'], jax.tree.map(jnp.add, first, second))

  ids, parts = zip(*(run_part(x[b : b + 1], valid[b : b + 1]) for b in range(B)), strict=True)
  expected_ids, centroids, counts, _ = slow_step(
    x, variables['codebook']['centroids'], valid, 0.5, 0.1, False
  )
  assert np.concatenate(ids).tolist() == expected_ids.tolist()
  after = update(*parts)
  assert_close(after['centroids'], centroids, 1e-12)
  assert_close(after['usage'], 0.99 / K + 0.01 * counts / valid.sum(), 1e-12)


nearest = jax.jit(quantizer.nearest_centroids)


@pytest.mark.parametrize('K', [12, 16])
def test_lowest_id_wins_a_tie(K):
  rng = np.random.default_rng(0)
  # Multiples of 1/2: distances, and with them ties, are exact in float32.
  x = rng.integers(-3, 4, (4, 12, 4, 3)) / 2
  centroids = rng.integers(-3, 4, (4, K, 3)) / 2
  centroids[:, K - 1] = centroids[:, 1]
  distance_K = ((x[..., None, :] - centroids) ** 2).sum(axis=-1)
  tied = (distance_K == distance_K.min(axis=-1, keepdims=True)).sum(axis=-1) > 1
  assert tied.sum() > 20
  ids = nearest(x.astype('float32'), centroids.astype('float32'))
  assert ids.tolist() == slow_ids(x, centroids).tolist()


def test_token_that_is_not_finite_gets_id_zero():
  rng = np.random.default_rng(2)
  x, centroids = rng.normal(size=(1, 6, 2, 3)), rng.normal(size=(2, 5, 3))
  expected = slow_ids(x, centroids)
  assert expected[0, 2, 1] and expected[0, 2, 0]
  expected[0, 2, 1] = 0
  x = np.repeat(x, 3, axis=0)
  x[:, 2, 1, 0] = np.nan, np.inf, -np.inf
  ids = nearest(x.astype('float32'), centroids.astype('float32'))
  assert ids.tolist() == [expected[0].tolist()] * 3


def test_common_offset_costs_no_digits():
  rng = np.random.default_rng(3)
  # Rounded to float32 first, so that both precisions see the same numbers.
  x = (1e3 + rng.normal(size=(4, 64, 2, 8))).astype('float32')
  centroids = (1e3 + rng.normal(size=(2, 64, 8))).astype('float32')
  wide = (a.astype('float64') for a in (x[..., None, :], centroids))
  distance = np.square(np.subtract(*wide)).sum(axis=-1)
  assert nearest(x, centroids).tolist() == distance.argmin(axis=-1).tolist()


def around_the_first(random_step):
  """Tokens that are all of the first cluster."""
  x, valid, variables = random_step
  centroids = np.full((N, K, H), 8.0)
  centroids[:, 0] = 1
  return np.ones_like(x), np.ones_like(valid), codebook(centroids)


def test_empty_cluster_shrinks_by_decay(random_step):
  x, valid, variables = around_the_first(random_step)
  _, after = step(variables, x, valid, 0.75)
  assert (
    np.asarray(after['codebook']['centroids'])[:, 1:].tolist() == np.full((N, K - 1, H), 6).tolist()
  )
  assert after['codebook']['usage'][0].tolist() == pytest.approx([0.208, *[0.198] * 4])


def test_an_empty_cluster_is_kept_where_it_is(random_step):
  x, valid, variables = around_the_first(random_step)
  _, after = step(variables, x, valid, 0.75, empty='keep')
  assert_close(after['codebook']['centroids'], variables['codebook']['centroids'], 1e-6)
  assert (np.asarray(after['codebook']['centroids'])[:, 1:] == 8).all()


def test_padding_moves_nothing(random_step):
  x, valid, variables = random_step
  _, expected = step(variables, x, valid)
  for anything in (1e6, np.nan):
    _, after = step(variables, np.where(valid[..., None, None], x, anything), valid)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
  _, all_valid = step(variables, x, np.ones_like(valid))
  centroids_of = lambda state: np.asarray(state['codebook']['centroids'])
  assert (centroids_of(all_valid) != centroids_of(expected)).any()


def test_batch_of_padding_only_stays_finite(random_step):
  x, valid, variables = random_step
  _, after = step(variables, x, np.zeros_like(valid))
  assert_close(after['codebook']['centroids'], variables['codebook']['centroids'] / 2, 1e-12)
  assert_close(after['codebook']['usage'], np.full((N, K), 0.99 / K), 1e-12)


@pytest.mark.full
def test_codebook_changes_only_when_mutable():
  x = np.random.default_rng(0).normal(size=(B, T, N, H)).astype('float32')
  layer = quantizer.ProductQuantizer(K, 0.5)
  init = jax.jit(lambda x: nn.unbox(layer.init(jax.random.key(1), x)))
  variables = init(x)
  # Initialising is not a step: what it saw leaves no trace.
  jax.tree.map(np.testing.assert_array_equal, variables, init(9 * x))

  @jax.jit
  def looked_up(x):
    return layer.apply(variables, x, mutable=['intermediates']), layer.apply(variables, x)

  (ids, state), same = looked_up(x)
  assert not state
  assert same.tolist() == ids.tolist()
  _, after = step(variables, x)
  assert set(after) == {'codebook'}
  for name in ('centroids', 'usage'):
    assert (np.asarray(after['codebook'][name]) != variables['codebook'][name]).any()


@pytest.mark.full
def test_initial_centroids_are_xavier_uniform_and_equally_used():
  """Or normal, or rows of the vocabulary, none of them twice."""
  rows = np.random.default_rng(0).normal(size=(40, 6)).astype('float32')
  tokens = np.zeros((1, 1), int)

  @jax.jit
  def initialize(key):
    init = lambda clusters, initial, *args: quantizer.ProductQuantizer(
      clusters, initial=initial
    ).init(key, *args)
    vocabulary = EmbeddingLookup(rows, tokens)
    data_init = init(16, 'data', rows[tokens].reshape(1, 1, 2, 3), None, vocabulary)
    uniform = init(64, 'uniform', jnp.zeros((1, 1, 4, 8)))
    return nn.unbox((uniform, init(4096, 'normal', jnp.zeros((1, 1, 2, 3))), data_init))

  uniform, normal, data = (
    state['codebook'] for state in jax.device_get(initialize(jax.random.key(1)))
  )
  centroids = uniform['centroids']
  bound = (6 / (4 * (64 + 8))) ** 0.5
  assert centroids.shape == (4, 64, 8)
  assert 0.99 * bound < np.abs(centroids).max() <= bound
  assert abs(centroids.std() - bound / 3**0.5) < 0.02 * bound
  assert (uniform['usage'] == 1 / 64).all()
  assert abs(normal['centroids'].std() - 1) < 0.02
  table = rows.reshape(40, 2, 3)
  for head in range(2):
    matches = [int((table[:, head] == c).all(axis=1).argmax()) for c in data['centroids'][head]]
    assert (table[matches, head] == data['centroids'][head]).all() and len(set(matches)) == 16
  layer = quantizer.ProductQuantizer(16, initial='data')
  with pytest.raises(ValueError, match='needs the rows of the vocabulary'):
    jax.eval_shape(layer.init, jax.random.key(1), np.zeros((1, 1, 2, 3), 'float32'))


@pytest.mark.full
def test_nothing_is_differentiated_and_zero_vectors_stay_finite(random_step):
  x, _, variables = random_step
  x[0, 1] = 0

  @jax.jit
  def run(x):
    def quantize(x, prenormalize):
      ids, after = step(variables, x, prenormalize=prenormalize)
      return sum(leaf.sum() for leaf in jax.tree.leaves(after)), (ids, after)

    return [jax.grad(quantize, has_aux=True)(x, prenormalize) for prenormalize in (False, True)]

  nearest_to_zero = np.square(variables['codebook']['centroids']).sum(axis=-1).argmin(axis=-1)
  for gradient, (ids, after) in run(x):
    assert (np.asarray(gradient) == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert ids[0, 1].tolist() == nearest_to_zero.tolist()


def test_chunks_change_nothing(monkeypatch):
  rng = np.random.default_rng(5)
  x, centroids = rng.normal(size=(2, 13, 2, 3)), rng.normal(size=(2, 5, 3))

  @jax.jit
  def run_all(x, centroids):
    outputs = []
    for tokens in (1, 8, 26):  # one step, four steps and a rest, all steps at a time
      monkeypatch.setattr(quantizer, 'CPU_DISTANCES', tokens * 2 * 5)
      outputs.append(quantizer.nearest_centroids(x, centroids))
    return outputs

  expected = slow_ids(x, centroids).tolist()
  outputs = run_all(x.astype('float32'), centroids.astype('float32'))
  assert [ids.tolist() for ids in outputs] == [expected] * 3


@pytest.mark.parametrize('shape', [(2, 0, 2, 3), (0, 4, 2, 3)])
def test_no_tokens_have_no_clusters(shape):
  args = np.zeros(shape, 'float32'), np.zeros((2, 5, 3), 'float32')
  assert jax.eval_shape(quantizer.nearest_centroids, *args).shape == shape[:3]


def test_distances_of_one_chunk_exist_at_a_time(monkeypatch):
  for limit in ('CPU_DISTANCES', 'DISTANCES'):
    monkeypatch.setattr(quantizer, limit, 2**17)
  N, K, H = 2, 128, 4
  x = jax.ShapeDtypeStruct((8, 640, N, H), jnp.float32)
  variables = codebook(np.zeros((N, K, H), 'float32'))
  largest = jaxprs.largest_array(lambda x: step(variables, x), x)
  assert largest == 2**17 < 8 * 640 * N * K


@pytest.mark.full
def test_bfloat16_inputs_reach_the_true_centres():
  true_KxH = np.array([[2, 1], [-1, 2], [-2, -1], [1, -2]], 'float32')
  rng = np.random.default_rng(6)
  truth = rng.integers(0, 4, (60, 4, 16, 1))
  x = true_KxH[truth] + 0.1 * rng.normal(size=(60, 4, 16, 1, 2))

  @jax.jit
  def train(variables, x):
    return jax.lax.scan(lambda v, x: step(v, x, None, 0.9)[::-1], variables, x)

  after, ids = train(codebook(0.4 * true_KxH[None]), x.astype('float32').astype(jnp.bfloat16))
  assert after['codebook']['centroids'].dtype == after['codebook']['usage'].dtype == jnp.float32
  assert_close(after['codebook']['centroids'][0], true_KxH, 0.01)
  assert_close(after['codebook']['usage'], np.full((1, 4), 0.25), 0.05)
  assert (np.asarray(ids) == truth).all()


def test_bfloat16_inputs_are_normalised_and_followed_in_float32():
  """In bfloat16 a decay of .999 is 1 and such a step is lost."""
  x = np.tile(np.array([1, 2, 3], jnp.bfloat16), (1, 8, 1, 1))
  variables = codebook(np.ones((1, 1, 3), 'float32'))
  follow = lambda *options: np.asarray(
    step(variables, x, None, *options, prenormalize=True)[1]['codebook']['centroids'][0, 0]
  )
  direction = np.arange(1, 4) / 14**0.5
  assert_close(follow(0.0, 0.0), direction, 1e-6)
  layer = quantizer.ProductQuantizer(1)
  slowly = follow(layer.decay, layer.epsilon)
  np.testing.assert_allclose(slowly, 1 + 0.001 * (direction - 1), rtol=1e-6)
  assert (slowly != 1).all()


@pytest.mark.full
def test_eight_devices_equal_one(monkeypatch):
  monkeypatch.setattr(quantizer, 'CPU_DISTANCES', 8 * 2 * 8)
  rng = np.random.default_rng(7)
  centres = 4 * rng.normal(size=(8, 2, 3))
  # Row b belongs to device b // 2, which sees one or two of the eight clusters, some rarely.
  device = np.arange(16)[:, None] // 2
  cluster = (device + (rng.random((16, 11)) < 0.1)) % 8
  x = (centres[cluster] + 0.1 * rng.normal(size=(16, 11, 2, 3))).astype('float32')
  valid = (rng.random((16, 11)) < 0.7).astype('float32')
  variables = codebook(centres.swapaxes(0, 1).astype('float32'))
  ids, after = jax.device_get(step(variables, x, valid))
  assert ids[:, :, 0].tolist() == cluster.tolist()

  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec('data'))
  with jax.set_mesh(mesh), nn.logical_axis_rules((('batch', 'data'),)):
    spread = [jax.device_put(a, rows) for a in (x, valid)]
    compiled = jax.jit(lambda x, valid: step(variables, x, valid)).lower(*spread).compile()
    many_ids, many_after = compiled(*spread)
  assert many_ids.tolist() == ids.tolist()
  assert many_ids.sharding.is_equivalent_to(rows, 3)
  # Only statistics travel: tokens stay on their device.
  assert 'all-reduce' in compiled.as_text()
  assert 'all-gather' not in compiled.as_text()
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), many_after, after)


# Empty clusters, and the vocabulary.


def slow_reset(centroids, usage):
  """Resets one dead code after the other, next to the most used code that is left."""
  centroids, usage = centroids.copy(), usage.copy()
  N, K = usage.shape
  for n in range(N):
    order = np.argsort(usage[n], kind='stable')
    for dead, donor in zip(order, order[::-1], strict=True):
      if usage[n, dead] < 0.1 / K and usage[n, donor] >= 1 / K:
        centroids[n, dead] = 1.01 * centroids[n, donor]
        usage[n, dead] = usage[n, donor] = usage[n, donor] / 2
  return centroids, usage


def test_dead_codes_are_set_next_to_the_most_used(x64):
  rng = np.random.default_rng(0)
  usage = rng.dirichlet(np.full(16, 0.1), size=5)
  centroids = rng.normal(size=(5, 16, 3))
  assert (usage < 0.1 / 16).any() and (usage >= 1 / 16).any()
  reset = jax.jit(quantizer.reset_dead_codes)
  centroids_after, used = reset(centroids, usage)
  expected, shares = slow_reset(centroids, usage)
  assert_close(centroids_after, expected, 1e-12)
  assert_close(used, shares, 1e-12)
  same, _ = reset(centroids, np.full((5, 16), 1 / 16))
  assert same.tolist() == centroids.tolist()


@pytest.mark.full
def test_a_reset_cluster_takes_tokens_again():
  x = np.random.default_rng(0).normal(size=(8, 32, 1, 2)).astype('float32')
  centroids = np.array([[[0, 0], [0.1, 0.1], [90, 90], [99, 0]]], 'float32')

  @jax.jit
  def train(variables):
    one = lambda variables, _: step(variables, x, None, 0.99, empty='revive')[::-1]
    return jax.lax.scan(one, variables, length=300)[1]

  def perplexity(ids):
    share = np.bincount(ids.ravel(), minlength=4) / ids.size
    return np.exp(-sum(p * np.log(p) for p in share if p))

  ids = np.asarray(train(codebook(centroids)))
  assert perplexity(ids[-1]) > 3.5 > 2.1 > perplexity(ids[0])


@pytest.mark.parametrize('prenormalize, padded', [(False, True), (True, False)])
def test_clustering_the_vocabulary_equals_clustering_every_token(x64, prenormalize, padded):
  rng = np.random.default_rng(0)
  rows, tokens = rng.normal(size=(7, 6)), rng.integers(0, 7, (3, 20))
  valid = np.tile(np.arange(20) < (13 if padded else 20), (3, 1))
  variables = codebook(rng.normal(size=(2, K, 3)))
  layer = quantizer.ProductQuantizer(K, 0.5, prenormalize=prenormalize)
  x = rows[tokens].reshape(3, 20, 2, 3)

  @jax.jit
  def by_row(x, rows, tokens):
    vocabulary = EmbeddingLookup(rows, tokens)
    return layer.apply(variables, x, valid if padded else None, vocabulary, mutable=['codebook'])

  centroids = variables['codebook']['centroids']
  equals_slow_step(by_row(x, rows, tokens), x, centroids, valid, 0.5, 1e-6, prenormalize)
  # 7 rows instead of 60 tokens: no distances of all of them.
  assert jaxprs.largest_array(by_row, x, rows, tokens) < 60 * 2 * K


def test_serving_looks_the_cluster_up(x64):
  rng = np.random.default_rng(0)
  rows, tokens = rng.normal(size=(7, 6)), rng.integers(0, 7, (3, 20))
  centroids, layer = rng.normal(size=(2, K, 3)), quantizer.ProductQuantizer(K)
  expected_ids = slow_ids(rows.reshape(1, 7, 2, 3), centroids)[0]
  nothing, vocabulary = np.full((3, 20, 2, 3), np.nan), EmbeddingLookup(None, tokens)
  serve = jax.jit(
    lambda ids: layer.apply({'codebook': {'token_ids': ids}}, nothing, None, vocabulary)
  )
  assert serve(expected_ids).tolist() == expected_ids[tokens].tolist()
