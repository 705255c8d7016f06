"""The optimizers equal their formulas, each on its own parameters."""

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.optimizers import partition, schedule, weight_decay
from tests.optimizers.table_model import MemoryConfig

PARAMS = {
  'layer_0': {'attention': {'query': {'kernel': np.ones((2, 3), np.float32)}}},
  'ngrammer': {
    'table': np.ones((4, 2), np.float32),
    'ngram_norm': {'scale': np.ones(2, np.float32)},
  },
}
LABELS = {
  'layer_0': {'attention': {'query': {'kernel': 'dense'}}},
  'ngrammer': {'table': 'ngram_table', 'ngram_norm': {'scale': 'dense'}},
}
STEPS = 5


def all_dense(params):
  return jax.tree.map(lambda _: 'dense', params)


def test_labels_follow_the_logical_axis_names():
  names = {('layer_0', 'attention', 'query', 'kernel'): ('embed', 'heads', 'kv')}
  names['ngrammer', 'table'] = ('ngram_vocab', 'ngram_embed')
  names['ngrammer', 'ngram_norm', 'scale'] = (None,)
  params = flax.traverse_util.flatten_dict(PARAMS)
  boxed = {path: nn.LogicallyPartitioned(leaf, names[path]) for path, leaf in params.items()}
  assert partition.labels(flax.traverse_util.unflatten_dict(boxed)) == LABELS


def test_a_memory_with_another_optimizer_has_its_own_label():
  """A label for its tables in all layers; the state of other optimizers is as without memories."""
  table = lambda: nn.LogicallyPartitioned(np.ones((2**17, 2), np.float32), ('ngram_vocab', None))
  params = {f'ngram_memory_{i}': {'table': table()} for i in range(4)}
  params['layer_1'] = {'ngram_memory_2': {'table': table()}}
  names = [('adagrad', None), ('adagrad', 2.0), ('adam', None), ('frozen', None)]
  memories = [MemoryConfig(*fields) for fields in names] + [ProductMemoryConfig()]
  params['product_memory'] = {'table': table()}
  labels = partition.labels(params, memories)
  numbered = ('ngram_memory_1', 'ngram_memory_2', 'ngram_memory_3')
  own = {name: {'table': name} for name in (*numbered, 'product_memory')}
  shared = {'ngram_memory_0': {'table': 'ngram_table'}}
  assert labels == shared | own | {'layer_1': {'ngram_memory_2': own['ngram_memory_2']}}
  config, params = experiment.OptimizerConfig(), nn.unbox(params)
  states = partition.make(config, STEPS, labels, memories).init(params)[0].inner_states
  assert set(states) == {'dense', 'ngram_table', *own}
  assert set(partition.make(config, STEPS, LABELS).init(PARAMS)[0].inner_states) == {
    'dense',
    'ngram_table',
  }


def test_a_parameter_without_axis_names_is_an_error():
  with pytest.raises(ValueError, match='parameter layer_0/novelty has no axis names'):
    partition.labels({'layer_0': {'novelty': np.ones(1)}})


@pytest.mark.parametrize(
  'name, expected',
  [
    ('constant', [0.5, 1, 1, 1, 1]),
    ('linear', [0.5, 1, 1, 0.7, 0.4]),
    ('cosine', [0.5, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25]),
    ('rsqrt', [0.5, 1, 1, (2 / 3) ** 0.5, (2 / 4) ** 0.5]),
  ],
)
def test_schedule(name, expected):
  config = experiment.OptimizerConfig(schedule=name, warmup_steps=2)
  fraction = schedule.make(config, STEPS)
  np.testing.assert_allclose(jax.jit(fraction)(np.arange(STEPS)), expected, rtol=1e-6)


def gradients(step):
  draw = np.random.RandomState(step).normal
  return jax.tree.map(lambda p: 100 * draw(size=p.shape).astype(np.float32), PARAMS)


def test_updates_equal_adam_and_adagrad_by_hand():
  table = experiment.TableConfig(learning_rate=0.02, accumulator=3e3, epsilon=7.0)
  config = experiment.OptimizerConfig(
    schedule='constant', warmup_steps=0, clip_norm=1.0, weight_decay=0.1, table=table
  )
  optimizer = partition.make(config, STEPS, LABELS)
  params, state, update = PARAMS, optimizer.init(PARAMS), jax.jit(optimizer.update)

  dense = ('layer_0', 'attention', 'query', 'kernel'), ('ngrammer', 'ngram_norm', 'scale')
  get = lambda tree, path: get(tree[path[0]], path[1:]) if path else np.asarray(tree, np.float64)
  expected = {path: get(PARAMS, path) for path in (*dense, ('ngrammer', 'table'))}
  m, v = {p: 0.0 for p in dense}, {p: 0.0 for p in dense}
  accumulator, adam = table.accumulator, experiment.AdamConfig()

  for step in range(STEPS):
    gradient = gradients(step)
    updates, state = update(gradient, state, params)
    params = jax.tree.map(np.add, params, updates)
    # The table's gradient takes no part in the norm that clips the rest.
    norm = np.sqrt(sum((get(gradient, path) ** 2).sum() for path in dense))
    assert norm > config.clip_norm
    for path in dense:
      g = get(gradient, path) * config.clip_norm / norm
      m[path] = adam.beta1 * m[path] + (1 - adam.beta1) * g
      v[path] = adam.beta2 * v[path] + (1 - adam.beta2) * g**2
      unbiased = m[path] / (1 - adam.beta1 ** (step + 1))
      root = np.sqrt(v[path] / (1 - adam.beta2 ** (step + 1)))
      decay = config.weight_decay * expected[path]
      expected[path] = expected[path] - config.learning_rate * (
        unbiased / (root + config.epsilon) + decay
      )
    g = get(gradient, ('ngrammer', 'table'))
    accumulator = accumulator + g**2
    root = np.sqrt(accumulator + table.epsilon)
    expected['ngrammer', 'table'] -= table.learning_rate * g / root
  for path, value in expected.items():
    np.testing.assert_allclose(get(params, path), value, rtol=1e-5)


@pytest.mark.full
def test_adamw_is_adam_with_weight_decay_and_that_of_optax():
  fields = {'schedule': 'constant', 'warmup_steps': 0, 'clip_norm': None, 'weight_decay': 0.1}
  params = jax.tree.map(lambda leaf: leaf * np.float32(0.7), PARAMS)
  labels, results = all_dense(params), []
  configs = [experiment.OptimizerConfig(name, **fields) for name in ('adam', 'adamw')]
  adam, c = experiment.AdamConfig(), configs[1]
  reference = optax.adamw(c.learning_rate, adam.beta1, adam.beta2, c.epsilon, weight_decay=0.1)
  for optimizer in (*(partition.make(config, STEPS, labels) for config in configs), reference):
    state, updates = optimizer.init(params), []
    for step in range(2):
      update, state = optimizer.update(gradients(step), state, params)
      updates.append(update)
    results.append(updates)
  for other in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_the_norm_of_the_clip_is_that_of_pytorch(x64):
  """scale = clip / (norm + 1e-6): seen in digits where gradients are small."""
  config = experiment.OptimizerConfig(
    schedule='constant',
    warmup_steps=0,
    clip_norm=1e-5,
    adam=experiment.AdamConfig(0.0, 0.0),
    epsilon=1.0,
  )
  params = {'embedding': np.zeros(2)}
  optimizer = partition.make(config, STEPS, all_dense(params))
  gradient = {'embedding': np.array([3e-5, 4e-5])}
  updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
  clipped = np.array([3e-5, 4e-5]) * 1e-5 / (5e-5 + 1e-6)
  expected = -config.learning_rate * clipped / (clipped + 1)
  np.testing.assert_allclose(updates['embedding'], expected, rtol=1e-9)


def test_leaves_are_grouped_by_label():
  groups = partition.leaves_by_label(LABELS, PARAMS)
  assert [leaf.shape for leaf in groups['dense']] == [(2, 3), (2,)]
  assert [leaf.shape for leaf in groups['ngram_table']] == [(4, 2)]


def test_weights_in_boxes_can_decay():
  """As the train state is created: optimizer.init sees boxes, optimizer.update does not."""
  boxed = {'span': nn.LogicallyPartitioned(np.full(2, 0.5, np.float32), ('heads',))}
  boxed['kernel'] = nn.LogicallyPartitioned(np.ones((2, 2), np.float32), ('embed', 'mlp'))
  config = experiment.OptimizerConfig(weight_decay=0.5)
  params = nn.unbox(boxed)
  mask = weight_decay.mask(config, boxed)
  optimizer = partition.make(config, STEPS, partition.labels(boxed), decay_mask=mask)
  state, expected = nn.unbox(optimizer.init(boxed)), optimizer.init(params)
  assert jax.tree.structure(state) == jax.tree.structure(expected)


def test_the_rate_drops_for_the_last_steps():
  drop = experiment.DropConfig(steps=2, fraction=0.1)
  config = experiment.OptimizerConfig(schedule='constant', warmup_steps=2, drop=drop)
  fraction = schedule.make(config, STEPS)
  expected = [0.5, 1, 1, 0.1, 0.1]
  np.testing.assert_allclose(jax.jit(fraction)(np.arange(STEPS)), expected, rtol=1e-6)


def test_adagrad_clips_every_array_by_itself_and_after_it_was_summed():
  config = experiment.OptimizerConfig(
    algorithm='adagrad', learning_rate=0.1, schedule='constant', warmup_steps=0, clip_norm=0.5
  )
  params = {'layer_0': {'attention': {'span': {'span': jnp.array([0.05, 0.9])}}}}
  params['embedding'] = jnp.ones((2, 2))
  optimizer = partition.make(config, STEPS, all_dense(params))
  state = optimizer.init(params)
  gradient = jax.tree.map(lambda leaf: 3.0 * jnp.ones_like(leaf), params)
  for step in (1, 2):
    updates, state = optimizer.update(gradient, state, params)
    root = 3 * step**0.5 + config.epsilon
    expected = -0.1 * 0.5 / (3 * 4**0.5) * 3 / root
    np.testing.assert_allclose(updates['embedding'], np.full((2, 2), expected), rtol=1e-5)
  # A span ends at 0, however large the step.
  large = jax.tree.map(lambda leaf: -1e9 * jnp.ones_like(leaf), params)
  spans = lambda tree: tree['layer_0']['attention']['span']['span']
  config = experiment.OptimizerConfig(learning_rate=10.0, schedule='constant', warmup_steps=0)
  optimizer = partition.make(config, STEPS, all_dense(params))
  for sign, end in ((1, 1), (-1, 0)):
    gradients = jax.tree.map(lambda leaf, sign=sign: sign * leaf, large)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(spans(params) + spans(updates), [end, end], atol=1e-7)
