"""The slow loops are written from the formulas at the top of the module."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from ngrammer_jax.layers import quantizer
from tests import jaxprs
from tests.checks import assert_close


def codebook(centroids):
  """Variables of a quantizer that all clusters share alike so far."""
  centroids = jnp.asarray(centroids)
  N, K, _ = centroids.shape
  usage = jnp.full((N, K), 1 / K, centroids.dtype)
  return {'codebook': {'centroids': centroids, 'usage': usage, 'changed': jnp.zeros(N)}}


@functools.partial(jax.jit, static_argnums=0)
def step(layer, variables, x, valid=None):
  return layer.apply(variables, x, valid, mutable=['codebook'])


def slow_ids(x, centroids):
  """The nearest centroid of every token and head, the first of equals."""
  ids = np.zeros(x.shape[:3], int)
  for b, t, n in np.ndindex(*ids.shape):
    distance_K = [((x[b, t, n] - m) ** 2).sum() for m in centroids[n]]
    ids[b, t, n] = distance_K.index(min(distance_K))
  return ids


def slow_step(x, centroids, valid, decay, epsilon, prenormalize):
  if prenormalize:
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
  ids = slow_ids(x, centroids)
  moved, counts = np.zeros_like(centroids), np.zeros(centroids.shape[:2])
  for n, k in np.ndindex(*counts.shape):
    tokens = x[:, :, n][(ids[..., n] == k) & (valid == 1)]
    counts[n, k] = len(tokens)
    mean = tokens.sum(axis=0) / (epsilon + len(tokens))
    moved[n, k] = decay * centroids[n, k] + (1 - decay) * mean
  return ids, moved, counts


@pytest.mark.parametrize('dtype, tolerance', [('float64', 1e-9), ('float32', 2e-5)])
@pytest.mark.parametrize('variant', ['default', 'prenorm', 'decay90', 'eps'])
def test_ten_steps_equal_praxis(reference, variant, dtype, tolerance):
  f = reference('ng_vq_train')
  decay, epsilon = float(f[f'cfg/{variant}/decay']), float(f[f'cfg/{variant}/eps'])
  prenormalize = bool(f[f'cfg/{variant}/prenorm'])
  K = f['means0'].shape[1]
  layer = quantizer.ProductQuantizer(K, decay, epsilon, prenormalize)

  @jax.jit
  def ten_steps(x, valid, centroids):
    def one(variables, batch):
      x, valid = batch
      ids, after = step(layer, variables, x, valid)
      if prenormalize:
        x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
      _, counts = quantizer.cluster_statistics(x, ids, K, valid)
      return after, (ids, counts, after['codebook']['centroids'])

    return jax.lax.scan(one, codebook(centroids), (x, valid))[1]

  with jax.enable_x64(dtype == 'float64'):
    x, centroids = f['x'].astype(dtype), f['means0'].astype(dtype)
    for case, valid in (('nopad', np.ones_like(f['paddings'])), ('pad', 1 - f['paddings'])):
      ids, counts, means = ten_steps(x, valid.astype(dtype), centroids)
      assert ids.tolist() == f[f'{variant}/{case}/id'].tolist()
      assert counts.tolist() == f[f'{variant}/{case}/count'].tolist()
      for t in (1, 2, 10):
        # The difference to the start: a step with decay .999 moves by less than a tolerance.
        expected = f[f'{variant}/{case}/means/{t}']
        assert_close(means[t - 1] - centroids, expected - f['means0'], tolerance)


@pytest.mark.parametrize('prenormalize', [False, True])
def test_step_equals_slow_loop(x64, prenormalize):
  rng = np.random.default_rng(0)
  x, centroids = rng.normal(size=(2, 7, 3, 4)), rng.normal(size=(3, 5, 4))
  valid = rng.integers(0, 2, (2, 7))
  layer = quantizer.ProductQuantizer(5, 0.8, 0.1, prenormalize)
  ids, after = step(layer, codebook(centroids), x, jnp.asarray(valid))
  expected_ids, moved, counts = slow_step(x, centroids, valid, 0.8, 0.1, prenormalize)
  assert ids.dtype == jnp.int32
  assert ids.tolist() == expected_ids.tolist()
  assert_close(after['codebook']['centroids'], moved, 1e-12)
  usage = 0.99 / 5 + 0.01 * counts / valid.sum()
  assert_close(after['codebook']['usage'], usage, 1e-12)


def test_no_valid_mask_means_all_tokens(x64):
  rng = np.random.default_rng(1)
  x, variables = rng.normal(size=(2, 5, 2, 3)), codebook(rng.normal(size=(2, 4, 3)))
  layer = quantizer.ProductQuantizer(4, 0.5)
  _, unmasked = step(layer, variables, x)
  _, masked = step(layer, variables, x, jnp.ones((2, 5)))
  jax.tree.map(np.testing.assert_array_equal, unmasked, masked)


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
  ids = quantizer.nearest_centroids(jnp.asarray(x, 'float32'), jnp.asarray(centroids, 'float32'))
  assert ids.tolist() == slow_ids(x, centroids).tolist()


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_token_that_is_not_finite_gets_id_zero(value):
  rng = np.random.default_rng(2)
  x, centroids = rng.normal(size=(1, 6, 2, 3)), rng.normal(size=(2, 5, 3))
  expected = slow_ids(x, centroids)
  assert expected[0, 2, 1] and expected[0, 2, 0]
  x[0, 2, 1, 0] = value
  expected[0, 2, 1] = 0
  ids = quantizer.nearest_centroids(jnp.asarray(x), jnp.asarray(centroids))
  assert ids.tolist() == expected.tolist()


def test_common_offset_costs_no_digits():
  rng = np.random.default_rng(3)
  # Rounded to float32 first, so that both precisions see the same numbers.
  x = (1e3 + rng.normal(size=(4, 64, 2, 8))).astype('float32')
  centroids = (1e3 + rng.normal(size=(2, 64, 8))).astype('float32')
  ids = quantizer.nearest_centroids(jnp.asarray(x), jnp.asarray(centroids))
  assert ids.tolist() == slow_ids(x.astype('float64'), centroids.astype('float64')).tolist()


def test_empty_cluster_shrinks_by_decay():
  x = jnp.ones((1, 4, 1, 2))
  variables = codebook(jnp.array([[[1.0, 1.0], [-4.0, 8.0]]]))
  _, after = step(quantizer.ProductQuantizer(2, decay=0.75), variables, x)
  assert after['codebook']['centroids'][0, 1].tolist() == [-3.0, 6.0]
  assert after['codebook']['usage'][0].tolist() == pytest.approx([0.505, 0.495])


def test_padding_moves_nothing():
  rng = np.random.default_rng(4)
  x, variables = rng.normal(size=(2, 5, 2, 3)), codebook(rng.normal(size=(2, 4, 3)))
  valid = jnp.asarray([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]])
  layer = quantizer.ProductQuantizer(4, 0.5)
  _, expected = step(layer, variables, x, valid)
  _, after = step(layer, variables, np.where(valid[..., None, None], x, 1e6), valid)
  jax.tree.map(np.testing.assert_array_equal, after, expected)
  _, unmasked = step(layer, variables, x)
  assert (np.asarray(unmasked['codebook']['centroids']) != after['codebook']['centroids']).any()


def test_batch_of_padding_only_stays_finite():
  variables = codebook(jnp.array([[[1.0, 2.0], [4.0, 8.0]]]))
  layer = quantizer.ProductQuantizer(2, decay=0.5)
  _, after = step(layer, variables, jnp.ones((1, 3, 1, 2)), jnp.zeros((1, 3)))
  assert after['codebook']['centroids'].tolist() == [[[0.5, 1.0], [2.0, 4.0]]]
  assert after['codebook']['usage'][0].tolist() == pytest.approx([0.495, 0.495])


def test_codebook_changes_only_when_mutable():
  x = jax.random.normal(jax.random.key(0), (2, 5, 2, 3))
  layer = quantizer.ProductQuantizer(4, 0.5)
  init = jax.jit(layer.init)
  variables = nn.unbox(init(jax.random.key(1), x))
  # Initialising is not a step: what it saw leaves no trace.
  again = nn.unbox(init(jax.random.key(1), 9 * x))
  jax.tree.map(np.testing.assert_array_equal, variables, again)
  ids, state = layer.apply(variables, x, mutable=['intermediates'])
  assert not state
  assert layer.apply(variables, x).tolist() == ids.tolist()
  _, after = step(layer, variables, x)
  assert set(after) == {'codebook'}
  for name in ('centroids', 'usage'):
    assert (after['codebook'][name] != variables['codebook'][name]).any()


def test_initial_centroids_are_xavier_uniform_and_equally_used():
  layer = quantizer.ProductQuantizer(64)
  variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), jnp.zeros((1, 1, 4, 8))))
  centroids = np.asarray(variables['codebook']['centroids'])
  bound = (6 / (4 * (64 + 8))) ** 0.5
  assert centroids.shape == (4, 64, 8)
  assert 0.99 * bound < np.abs(centroids).max() <= bound
  assert abs(centroids.std() - bound / 3**0.5) < 0.02 * bound
  assert (variables['codebook']['usage'] == 1 / 64).all()


@pytest.mark.parametrize('prenormalize', [False, True])
def test_nothing_is_differentiated_and_zero_vectors_stay_finite(prenormalize):
  x = jax.random.normal(jax.random.key(0), (2, 5, 2, 3)).at[0, 1].set(0)
  layer = quantizer.ProductQuantizer(4, 0.5, prenormalize=prenormalize)
  variables = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))

  def moved(x):
    ids, after = step(layer, variables, x)
    return sum(leaf.sum() for leaf in jax.tree.leaves(after)), (ids, after)

  gradient, (ids, after) = jax.grad(moved, has_aux=True)(x)
  assert (gradient == 0).all()
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
  nearest_to_zero = jnp.square(variables['codebook']['centroids']).sum(axis=-1).argmin(axis=-1)
  assert ids[0, 1].tolist() == nearest_to_zero.tolist()


def test_chunks_change_nothing(monkeypatch):
  rng = np.random.default_rng(5)
  x = jnp.asarray(rng.normal(size=(2, 13, 2, 3)), 'float32')
  centroids = jnp.asarray(rng.normal(size=(2, 5, 3)), 'float32')
  expected = slow_ids(np.asarray(x, 'float64'), np.asarray(centroids, 'float64')).tolist()
  for tokens in (1, 8, 26):  # one step, four steps and a rest, all steps at a time
    monkeypatch.setattr(quantizer, 'CPU_DISTANCES', tokens * 2 * 5)
    assert quantizer.nearest_centroids(x, centroids).tolist() == expected


@pytest.mark.parametrize('shape', [(2, 0, 2, 3), (0, 4, 2, 3)])
def test_no_tokens_have_no_clusters(shape):
  assert quantizer.nearest_centroids(jnp.zeros(shape), jnp.zeros((2, 5, 3))).shape == shape[:3]


def test_distances_of_one_chunk_exist_at_a_time(monkeypatch):
  for limit in ('CPU_DISTANCES', 'DISTANCES'):
    monkeypatch.setattr(quantizer, limit, 2**17)
  N, K, H = 2, 128, 4
  layer = quantizer.ProductQuantizer(K)
  x = jax.ShapeDtypeStruct((8, 640, N, H), jnp.float32)
  variables = codebook(jnp.zeros((N, K, H)))
  largest = jaxprs.largest_array(lambda x: step(layer, variables, x), x)
  assert largest == 2**17 < 8 * 640 * N * K


def test_bfloat16_inputs_reach_the_true_centres():
  true_KxH = np.array([[2, 1], [-1, 2], [-2, -1], [1, -2]], 'float32')
  rng = np.random.default_rng(6)
  truth = rng.integers(0, 4, (60, 4, 16, 1))
  x = true_KxH[truth] + 0.1 * rng.normal(size=(60, 4, 16, 1, 2))
  layer = quantizer.ProductQuantizer(4, decay=0.9)

  @jax.jit
  def train(variables, x):
    return jax.lax.scan(lambda v, x: step(layer, v, x)[::-1], variables, x)

  after, ids = train(codebook(0.4 * true_KxH[None]), jnp.asarray(x, jnp.bfloat16))
  assert after['codebook']['centroids'].dtype == after['codebook']['usage'].dtype == jnp.float32
  assert_close(after['codebook']['centroids'][0], true_KxH, 0.01)
  assert_close(after['codebook']['usage'], np.full((1, 4), 0.25), 0.05)
  assert (ids == truth).all()


def test_default_decay_moves_a_codebook_under_bfloat16_inputs():
  # In bfloat16 a decay of .999 is 1 and such a step is lost; it must not happen in float32.
  variables = codebook(jnp.ones((1, 1, 2)))
  layer = quantizer.ProductQuantizer(1)
  _, after = step(layer, variables, jnp.full((1, 8, 1, 2), 2, jnp.bfloat16))
  np.testing.assert_allclose(after['codebook']['centroids'], 1.001, rtol=1e-6)


def test_bfloat16_inputs_are_normalised_in_float32():
  layer = quantizer.ProductQuantizer(1, decay=0.0, epsilon=0.0, prenormalize=True)
  x = jnp.asarray([1, 2, 3], jnp.bfloat16).reshape(1, 1, 1, 3)
  _, after = step(layer, codebook(jnp.zeros((1, 1, 3))), x)
  assert_close(after['codebook']['centroids'][0, 0], np.arange(1, 4) / 14**0.5, 1e-6)


def test_eight_devices_equal_one(monkeypatch):
  monkeypatch.setattr(quantizer, 'CPU_DISTANCES', 8 * 2 * 8)
  rng = np.random.default_rng(7)
  centres = 4 * rng.normal(size=(8, 2, 3))
  # Row b belongs to device b // 2, which sees one or two of the eight clusters, some rarely.
  device = np.arange(16)[:, None] // 2
  cluster = (device + (rng.random((16, 11)) < 0.1)) % 8
  x = jnp.asarray(centres[cluster] + 0.1 * rng.normal(size=(16, 11, 2, 3)), 'float32')
  valid = jnp.asarray(rng.random((16, 11)) < 0.7, 'float32')
  layer = quantizer.ProductQuantizer(8, decay=0.5)
  variables = codebook(jnp.asarray(centres.swapaxes(0, 1), 'float32'))
  ids, after = step(layer, variables, x, valid)
  assert ids[:, :, 0].tolist() == cluster.tolist()

  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec('data'))
  with jax.set_mesh(mesh), nn.logical_axis_rules((('batch', 'data'),)):
    spread = [jax.device_put(a, rows) for a in (x, valid)]
    compiled = jax.jit(lambda x, valid: step(layer, variables, x, valid)).lower(*spread).compile()
    many_ids, many_after = compiled(*spread)
  assert many_ids.tolist() == ids.tolist()
  assert many_ids.sharding.is_equivalent_to(rows, 3)
  # Only statistics travel: tokens stay on their device.
  assert 'all-reduce' in compiled.as_text()
  assert 'all-gather' not in compiled.as_text()
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), many_after, after)


# Empty clusters, where centroids begin, and the vocabulary.


def test_an_empty_cluster_is_kept_where_it_is():
  x, before = jnp.ones((1, 4, 1, 2)), jnp.array([[[1.0, 1.0], [-4.0, 8.0]]])
  _, after = step(quantizer.ProductQuantizer(2, decay=0.75, empty='keep'), codebook(before), x)
  assert after['codebook']['centroids'][0, 1].tolist() == [-4.0, 8.0]
  assert_close(after['codebook']['centroids'][0, 0], [1.0, 1.0], 1e-6)


def slow_revived(centroids, usage):
  """One dead cluster after the other, beside the most used that is left."""
  centroids, usage = centroids.copy(), usage.copy()
  N, K = usage.shape
  for n in range(N):
    order = np.argsort(usage[n], kind='stable')
    for dead, giver in zip(order, order[::-1], strict=True):
      if usage[n, dead] < 0.1 / K and usage[n, giver] >= 1 / K:
        centroids[n, dead] = 1.01 * centroids[n, giver]
        usage[n, dead] = usage[n, giver] = usage[n, giver] / 2
  return centroids, usage


def test_the_dead_go_beside_the_most_used(x64):
  rng = np.random.default_rng(0)
  usage = rng.dirichlet(np.full(16, 0.1), size=5)
  centroids = rng.normal(size=(5, 16, 3))
  assert (usage < 0.1 / 16).any() and (usage >= 1 / 16).any()
  moved, used = quantizer.revived(jnp.asarray(centroids), jnp.asarray(usage))
  expected, shares = slow_revived(centroids, usage)
  assert_close(moved, expected, 1e-12)
  assert_close(used, shares, 1e-12)
  same, _ = quantizer.revived(jnp.asarray(centroids), jnp.full((5, 16), 1 / 16))
  assert same.tolist() == centroids.tolist()


def test_a_revived_cluster_takes_tokens_again():
  x = jax.random.normal(jax.random.key(0), (8, 32, 1, 2))
  variables = codebook(jnp.array([[[0.0, 0.0], [0.1, 0.1], [90.0, 90.0], [99.0, 0.0]]]))
  perplexities = {}
  for empty in quantizer.EMPTY:
    layer, now = quantizer.ProductQuantizer(4, decay=0.99, empty=empty), variables
    for _ in range(300):
      ids, now = step(layer, now, x)
    share = np.bincount(ids.ravel(), minlength=4) / ids.size
    perplexities[empty] = np.exp(-sum(p * np.log(p) for p in share if p))
  assert perplexities['revive'] > 3.5 > 2.1 > perplexities['keep']


def test_initial_centroids_of_the_data_are_rows_of_the_vocabulary():
  rows = jax.random.normal(jax.random.key(0), (40, 6))
  tokens = jnp.zeros((1, 1), int)
  vocabulary = quantizer.Vocabulary(rows, tokens)
  layer = quantizer.ProductQuantizer(16, initial='data')
  made = nn.unbox(layer.init(jax.random.key(1), rows[tokens].reshape(1, 1, 2, 3), None, vocabulary))
  centroids = np.asarray(made['codebook']['centroids'])
  table = np.asarray(rows).reshape(40, 2, 3)
  for head in range(2):
    found = [int((table[:, head] == c).all(axis=1).argmax()) for c in centroids[head]]
    assert (table[found, head] == centroids[head]).all() and len(set(found)) == 16
  with pytest.raises(ValueError, match='need the vocabulary'):
    layer.init(jax.random.key(1), jnp.zeros((1, 1, 2, 3)))
  normal = quantizer.ProductQuantizer(4096, initial='normal')
  made = nn.unbox(normal.init(jax.random.key(1), jnp.zeros((1, 1, 2, 3))))
  assert abs(made['codebook']['centroids'].std() - 1) < 0.02


@pytest.mark.parametrize('prenormalize', [False, True])
@pytest.mark.parametrize('valid', [None, np.arange(20) < 13])
def test_clustering_the_vocabulary_equals_clustering_every_token(prenormalize, valid):
  rng = np.random.default_rng(0)
  rows = jnp.asarray(rng.normal(size=(7, 6)), 'float32')
  tokens = jnp.asarray(rng.integers(0, 7, (3, 20)))
  valid = None if valid is None else jnp.tile(jnp.asarray(valid), (3, 1))
  variables = codebook(jnp.asarray(rng.normal(size=(2, 5, 3)), 'float32'))
  layer = quantizer.ProductQuantizer(5, 0.5, prenormalize=prenormalize)
  x = rows[tokens].reshape(3, 20, 2, 3)
  ids, after = step(layer, variables, x, valid)

  @jax.jit
  def by_row(x, rows, tokens):
    vocabulary = quantizer.Vocabulary(rows, tokens)
    return layer.apply(variables, x, valid, vocabulary, mutable=['codebook'])

  same_ids, same = by_row(x, rows, tokens)
  assert same_ids.tolist() == ids.tolist()
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), same, after)
  # 7 rows instead of 60 tokens: no distances of all of them.
  assert jaxprs.largest_array(by_row, x, rows, tokens) < 60 * 2 * 5


def test_tokens_that_change_their_cluster_are_counted():
  """Of the first row, and without its padding."""
  x = jnp.array([[[[1.0]], [[2.0]], [[3.0]], [[0.9]]], [[[2.4]]] * 4])
  valid = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]])
  layer = quantizer.ProductQuantizer(2, decay=0.0)
  # All are of the second cluster; it goes to their mean, 2.2, and the first, empty, to 0.
  _, after = step(layer, codebook(jnp.array([[[0.5], [0.8]]])), x, valid)
  assert after['codebook']['changed'].tolist() == pytest.approx([1 / 3])
  # The centroids go to 1 and 2.43: none changes.
  _, after = step(layer, codebook(jnp.array([[[0.0], [2.2]]])), x, valid)
  assert after['codebook']['changed'].tolist() == [0]


def test_serving_looks_the_cluster_up():
  rng = np.random.default_rng(0)
  rows, tokens = rng.normal(size=(7, 6)).astype('float32'), rng.integers(0, 7, (3, 20))
  variables = codebook(jnp.asarray(rng.normal(size=(2, 5, 3)), 'float32'))
  layer = quantizer.ProductQuantizer(5)
  of_rows = layer.apply(variables, rows.reshape(1, 7, 2, 3))[0]
  served = layer.apply(
    {'codebook': {'token_ids': of_rows}},
    jnp.full((3, 20, 2, 3), jnp.nan),
    None,
    quantizer.Vocabulary(None, tokens),
  )
  assert served.tolist() == layer.apply(variables, rows[tokens].reshape(3, 20, 2, 3)).tolist()
