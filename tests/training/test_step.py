"""One step of a model that is a table of scores and a dropout."""

import functools
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.training import accumulation
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step
from tests.checks import mesh_of

B, T, V = 4, 6, 11


LABELS = {'embedding': 'dense'}


class Table:
  """The score of a token is its row of a table, of which dropout leaves half of the columns."""

  config = model_config.ModelConfig(ngram=None)

  def apply(self, variables, tokens_BxT, *rest, method=None, rngs=None, **kwargs):
    if method == 'scores':  # here of hidden vectors and targets
      return types.SimpleNamespace(nll_BxT=tokens_BxT.sum(axis=-1) + 0.1 * rest[0])
    dropout_mask = jax.random.bernoulli(rngs['dropout'], 0.5, (16,))
    hidden = variables['params']['embedding'][tokens_BxT] * dropout_mask
    updated = {'codebook': {}} if 'codebook' in kwargs['mutable'] else {}
    return (hidden, rest[0] + tokens_BxT.sum(axis=1), {}), updated


def state_of(step):
  return train_state.TrainState(
    step=np.int32(step),
    params={'embedding': np.random.default_rng(0).normal(size=(V, 16)).astype(np.float32)},
    codebook={},
    opt_state=optax.sgd(0.1).init({}),
    memory=np.arange(B, dtype=np.int32),
  )


def segment_of(counts):
  rng = np.random.default_rng(1)
  tokens, targets = rng.integers(0, V, (2, B, T)).astype(np.int32)
  return token_batch.Batch(tokens, targets, np.zeros((B, T), bool), counts.astype(np.float32))


@functools.cache
def step_of(seed, **options):
  return jax.jit(train_step.TrainStep(Table(), optax.sgd(0.1), LABELS, seed, **options))


WHOLE = np.ones((B, T))


def test_dropout_is_drawn_anew_at_every_step_and_for_every_seed():
  def nonzero(seed, step):
    before = state_of(step)
    after, _ = step_of(seed)(before, segment_of(WHOLE))
    assert int(after.step) == step + 1
    changed = np.asarray(after.params['embedding']) != before.params['embedding']
    return tuple(changed.any(axis=0))

  masks = {(seed, step): nonzero(seed, step) for seed in (0, 1) for step in (3, 4, 5)}
  assert len(set(masks.values())) == len(masks) and nonzero(1, 4) == masks[1, 4]


def by_hand(state, segment, counted_BxT, after):
  """The loss and the moved table, with the dropout that the gradient tells."""
  nonzero = (np.asarray(after.params['embedding']) != state.params['embedding']).any(axis=0)
  hidden = state.params['embedding'][segment.tokens_BxT] * nonzero
  nll_BxT = hidden.sum(axis=-1) + 0.1 * segment.targets_BxT
  total = counted_BxT.sum()
  gradient = np.zeros_like(state.params['embedding'])
  np.add.at(gradient, segment.tokens_BxT, counted_BxT[..., None] / total * nonzero)
  loss = (nll_BxT * counted_BxT).sum() / total
  return loss, state.params['embedding'] - 0.1 * gradient


@pytest.mark.parametrize('half', [False, True])
def test_the_loss_is_the_mean_of_what_counts(half):
  counts = np.random.default_rng(2).random((B, T)) < 0.7
  before, segment = state_of(0), segment_of(counts)
  after, metrics = step_of(0, half_loss=half)(before, segment)
  counted = counts * (np.arange(T) >= (T // 2 if half else 0))
  loss, table = by_hand(before, segment, counted, after)
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
  np.testing.assert_allclose(after.params['embedding'], table, rtol=1e-5, atol=1e-7)


def test_what_counts_may_be_less_than_what_is_seen():
  counts = np.random.default_rng(3).random((B, T)) < 0.3
  before, segment = state_of(0), segment_of(WHOLE)
  segment = segment._replace(counts_BxT=counts.astype(np.float32))
  after, metrics = step_of(0)(before, segment)
  loss, _ = by_hand(before, segment, counts, after)
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)


def test_parts_weigh_by_their_tokens_and_draw_a_dropout_of_their_own():
  """Of equal rows with one token, the loss of a part depends on its dropout alone."""
  counts = WHOLE * (np.arange(T) < np.array([6, 5, 1, 0])[:, None])
  before = state_of(0)
  ones = {'embedding': np.ones((V, 16), np.float32)}
  before = before.replace(params=ones)
  segment = segment_of(counts)
  parts = accumulation.GradientAccumulation(2, mesh_of(1, 1, 1))
  after, metrics = step_of(0, microbatches=parts)(before, segment)
  updates = np.asarray(1 - after.params['embedding']).sum(axis=0) / 0.1  # of each column
  shares = sorted(set(np.round(updates, 4)))
  # Columns kept by none, by the second part, by the first, by both: 1 of 12 tokens, 11, all.
  np.testing.assert_allclose(shares, [0, 1 / 12, 11 / 12, 1], atol=1e-4)
  expected = updates.sum() + 0.1 * (segment.targets_BxT * counts).sum() / 12
  np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-5)
  rows = np.arange(B) + segment.tokens_BxT.sum(axis=1)
  np.testing.assert_array_equal(after.memory, rows)


@pytest.mark.parametrize('frozen', [(), ('ngrammer/table',)])
def test_the_clusters_of_a_frozen_memory_stay(monkeypatch, frozen):
  class Moving(Table):
    def apply(self, *args, **kwargs):
      result = super().apply(*args, **kwargs)
      return result if kwargs.get('method') else (result[0], {'codebook': clusters(1)})

  clusters = lambda value: {'ngrammer': {'quantizer': {'centroids': np.full(3, value)}}}
  monkeypatch.setattr(train_step.step_metrics, 'codebook_metrics', lambda *args: {})
  before = state_of(0)
  before = before.replace(codebook=clusters(0), params=before.params | {'ngrammer': {'table': 0.0}})
  labels = LABELS | ({} if frozen else {'ngrammer': {'table': 'dense'}})
  step = train_step.TrainStep(Moving(), optax.sgd(0.1), labels, 0, frozen=frozen)
  after, _ = jax.jit(step)(before, segment_of(WHOLE))
  moved = after.codebook['ngrammer']['quantizer']['centroids']
  assert moved.tolist() == ([0] * 3 if frozen else [1] * 3)


def test_a_call_makes_as_many_steps_as_it_is_told_and_skips_the_rest():
  """Each with the segment of its own; the padding of the last call is not trained on."""
  segments = [segment_of(WHOLE)._replace(tokens_BxT=np.full((B, T), i, np.int32)) for i in range(4)]
  stacked = jax.tree.map(lambda *parts: np.stack(parts), *segments)
  state, place = state_of(0), sharding.replicated(mesh_of(1, 1, 1))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
  step = train_step.TrainStep(Table(), optax.sgd(0.1), LABELS, seed=0)
  call = train_step.make_call(step, abstract)
  losses = []
  for steps in range(5):
    final_state, metrics = call(jax.device_put(state_of(0), place), stacked, np.int32(steps))
    jax.tree.map(np.testing.assert_array_equal, final_state, state)
    np.testing.assert_array_equal(metrics['loss'][:steps], losses)
    if steps < 4:
      state, one = step_of(0)(state, segments[steps])
      losses.append(one['loss'])
  assert call._cache_size() == 1  # one program for any number of steps
  assert np.unique(losses).size == 4


def test_options_of_the_compiler_reach_the_program():
  state, place = state_of(0), sharding.replicated(mesh_of(1, 1, 1))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
  step = train_step.TrainStep(Table(), optax.sgd(0.1), LABELS, seed=0)
  call = train_step.make_call(step, abstract, {'xla_none_such': '1'})
  stacked = jax.tree.map(lambda part: part[None], segment_of(WHOLE))
  with pytest.raises(jax.errors.JaxRuntimeError, match='xla_none_such'):
    call.trace(abstract, stacked, np.int32(1)).lower().compile()


def test_the_first_state_is_that_of_its_seed_on_any_mesh(monkeypatch):
  """And of nothing else; a model of one array."""
  model = type('Model', (), {'config': Table.config, 'vocabulary_size': 8})()
  model.clone = lambda **kwargs: model
  normal = nn.with_logical_partitioning(nn.initializers.normal(1.0), ('ngram_vocab', 'ngram_embed'))
  model.init = lambda key, *args: {'params': {'embedding': normal(key, (8, 4))}}
  monkeypatch.setattr(language_model, 'empty_memory', lambda *args: {'rows': jnp.zeros(B)})

  def make_state(seed, shape=(1, 1, 1)):
    variables = model_variables.abstract(model)
    create, abstract = train_state.make_initializer(
      model, variables, optax.sgd(0.1), B, seed, mesh_of(*shape)
    )
    state = create()
    description = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
    assert jax.tree.map(description, state) == jax.tree.map(description, abstract)
    assert state.params['embedding'].addressable_shards[0].data.size == 32 // shape[1] // shape[2]
    return np.asarray(state.params['embedding'])

  assert (make_state(1) == make_state(1, (2, 2, 2))).all() and (
    make_state(0) != make_state(1)
  ).all()
