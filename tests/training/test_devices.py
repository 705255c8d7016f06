"""The same numbers on any mesh, and lookups that leave the tables where they are."""

import dataclasses
import functools
import math
import re

from flax import linen as nn
import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import span as span_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.layers.attention import blocks
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import accumulation
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step
from tests.checks import mesh_of

V, B, T, STEPS = 64, 8, 16, 2
TABLE = (4 * 512, 4)
CONFIG = model_config.ModelConfig(
  layers=2,
  width=32,
  heads=4,
  feed_forward_width=64,
  vocabulary_chunk=16,
  ngram=model_config.NGramConfig(clusters=16, vocabulary_size=512, dim=4, decay=0.9),
)


@functools.cache
def step_of(config):
  """The training step of a config, and the abstract variables of its model."""
  model = language_model.build(config, V)
  variables = model_variables.abstract(model)
  memories = config.table_memories()
  labels = partition.labels(variables['params'], memories)
  optimizer = partition.make(experiment.OptimizerConfig(epsilon=1e-3), 10, labels, memories)
  return train_step.TrainStep(model, optimizer, labels, seed=0), variables


@functools.cache
def initializer(config, mesh):
  """A function that creates the first state, and the abstract state."""
  step, variables = step_of(config)
  return train_state.make_initializer(step.model, variables, step.optimizer, B, 0, mesh)


def run(shape, config=CONFIG, parts=1, first=None):
  """The compiled program, and state and metrics after two steps, by default from a new state."""
  mesh = mesh_of(*shape)
  create, abstract = initializer(config, mesh)
  random = np.random.RandomState(0)
  segments = token_batch.Batch(
    random.randint(0, V, (STEPS, B, T), dtype=np.int32),
    random.randint(0, V, (STEPS, B, T), dtype=np.int32),
    random.rand(STEPS, B, T) < 0.1,
    (random.rand(STEPS, B, T) < 0.9).astype(np.float32),
  )
  leaf_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  state = create() if first is None else jax.device_put(first, leaf_shardings)
  with sharding.use(mesh):
    rows = lambda row_slice: token_batch.map_batches(lambda array: array[:, row_slice], segments)
    placed = sharding.global_rows(mesh, B, rows, axis=1)
    step, _ = step_of(config)
    if parts > 1:
      step = dataclasses.replace(step, microbatches=accumulation.GradientAccumulation(parts, mesh))
    call = train_step.make_call(step, abstract)
    call = call.lower(state, placed, np.int32(0)).compile()
    state, metrics = call(state, placed, np.int32(STEPS))
  return call.as_text(), jax.device_get(state), jax.device_get(metrics)


# One model with many options, to compile one program for each mesh.
RICH = dataclasses.replace(
  CONFIG,
  layers=1,
  ngram=dataclasses.replace(CONFIG.ngram, empty='revive', distinct_start=True),
  position='relative',
  memory=model_config.MemoryConfig(length=24),
  ngram_memories=(
    # 31 rows, which no mesh divides, and 272.
    NGramMemoryConfig(layers=(0,), orders=(2,), heads=1, rows=(31,), width=4, convolution=2),
    NGramMemoryConfig(
      key='clusters', clusters=4, layers=(0,), heads=2, rows=(61,), width=4, row_multiple=8
    ),
  ),
)


def assert_alike(one, other):
  """Adam's moments are in the state, so this compares the gradients too."""
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
  jax.tree.map(compare, one, other)


@functools.cache
def first_state():
  """Drawn parameters and centroids, all used alike; to compile `create` takes much longer."""
  _, abstract = initializer(RICH, mesh_of(1, 1, 1))
  random = np.random.default_rng(0)
  draw = lambda leaf: random.normal(0, 0.3, leaf.shape).astype(leaf.dtype)
  zeros = lambda leaf: np.zeros(leaf.shape, leaf.dtype)

  def codebook(path, leaf):
    match path[-1].key:
      case 'usage':
        return np.full(leaf.shape, 1 / leaf.shape[-1], leaf.dtype)
      case 'changed':
        return zeros(leaf)
      case 'centroids':
        return draw(leaf)

  return jax.tree.map(zeros, abstract).replace(
    params=jax.tree.map(draw, abstract.params),
    codebook=jax.tree_util.tree_map_with_path(codebook, abstract.codebook),
    memory=jax.device_get(language_model.empty_memory(RICH, B)),
  )


@functools.cache
def single_device_run():
  return run((1, 1, 1), RICH, first=first_state())


def check_accumulation(shape, parts, config, one, first=None):
  """Gradients are weighted by tokens, the codebook is updated once, memories keep their rows."""
  _, state, metrics = one
  program, state_n, metrics_n = run(shape, config, parts=parts, first=first)
  assert set(metrics) - set(metrics_n) == {'codebook/changed'}
  # What the last step as a whole has changed is not known.
  keep = lambda path, new, old: old if path[-1].key == 'changed' else new
  codebook = jax.tree_util.tree_map_with_path(keep, state_n.codebook, state.codebook)
  state_n = state_n.replace(codebook=codebook)
  assert_alike([state_n, metrics_n], [state, {name: metrics[name] for name in metrics_n}])
  if (shards := shape[1] * shape[2]) > 1:
    check_lookups(program, shards)


def test_rows_in_parts_on_eight_devices_train_as_all_on_one():
  """With clusters that some of the devices see not at all."""
  _, state, _ = single_device_run()
  usage = state.codebook['ngrammer']['quantizer']['usage']
  remaining_share = quantizer.USAGE_DECAY**STEPS  # of what it was before any step
  tokens = (usage - remaining_share / usage.shape[1]) / (1 - remaining_share) * B * T  # of a step
  assert tokens.min() < 4 < tokens.max()  # rows are spread over four devices
  check_accumulation((2, 2, 2), 2, RICH, single_device_run(), first_state())


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(2, 1, 1), (1, 1, 4), (8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_an_ngrammer_trains_alike_on_every_mesh(shape):
  _, *one = run((1, 1, 1))
  program, *other = run(shape)
  assert_alike(other, one)
  if (shards := shape[1] * shape[2]) > 1:
    check_lookups(program, shards)


@pytest.mark.slow
@pytest.mark.parametrize('shape, parts', [((1, 1, 1), 8), ((2, 1, 2), 2)])
def test_rows_in_other_parts_make_the_same_update(shape, parts):
  check_accumulation(shape, parts, CONFIG, run((1, 1, 1)))


NGRAM = dataclasses.replace(CONFIG.ngram, empty='revive', distinct_start=True)
SWITCHES = {
  'tri-grams in the middle of a full Primer': dataclasses.replace(
    CONFIG,
    ngram=dataclasses.replace(NGRAM, orders=(2, 3), layer='middle', initial='normal'),
    convolution=3,
    shared_query_key=True,
    norm='primer',
  ),
  'pairs of attention, hybrid norms': dataclasses.replace(
    CONFIG,
    ngram=dataclasses.replace(
      NGRAM, layer='attention', pairing=('previous', 'attended'), empty='keep'
    ),
    norm='hybrid',
  ),
  'Transformer-XL on an N-Grammer': dataclasses.replace(
    CONFIG,
    ngram=dataclasses.replace(NGRAM, layer='attention', pairing=('attended',)),
    position='relative',
    norm='post_skip',
    memory=model_config.MemoryConfig(length=24),
  ),
  'learned distances, adaptive softmax, Primer': dataclasses.replace(
    CONFIG,
    position='shaw',
    positional=model_config.PositionalConfig(max_length=20),
    memory=model_config.MemoryConfig(length=10, same_length='memory'),
    convolution=3,
    adaptive_softmax=model_config.AdaptiveSoftmaxConfig((8, 32), divisor=2),
  ),
  'all-attention of dynamic spans': dataclasses.replace(
    CONFIG,
    position='relative',
    memory=model_config.MemoryConfig(length=24, same_length='memory'),
    span=model_config.SpanConfig(kind='dynamic', limit=24, ramp=4, penalty=0.01),
    persistent=model_config.PersistentConfig(16),
    feed_forward_width=0,
  ),
  'all-attention of adaptive spans': dataclasses.replace(
    CONFIG,
    position='table',
    positional=model_config.PositionalConfig(max_length=32),
    memory=model_config.MemoryConfig(length=32, same_length='memory_alone'),
    span=model_config.SpanConfig(limit=32, ramp=4, penalty=0.01, initial=0.1),
    persistent=model_config.PersistentConfig(16, 'attention_split'),
  ),
  'scanned blocks that read one table': dataclasses.replace(
    CONFIG,
    ngram=None,
    ngram_memories=(
      dataclasses.replace(
        NGramMemoryConfig.from_preset('bigram_hash'),
        rows=(512,),
        width=32,
        learning_rate_factor=1.0,
      ),
      NGramMemoryConfig(layers=(0, 1), table='grams', sliced=True, rows=(64,), width=4),
    ),
    scan_layers=True,
  ),
  'rows in the values of a segment memory': dataclasses.replace(
    CONFIG,
    ngram=None,
    memory=model_config.MemoryConfig(length=24),
    ngram_memories=(
      dataclasses.replace(
        NGramMemoryConfig.from_preset('nanochat_values'), learning_rate_factor=1.0
      ),
      dataclasses.replace(
        NGramMemoryConfig.from_preset('ngram_values'), layers=(0, 1), rows=(64,), width=4
      ),
    ),
  ),
  'scanned blocks with copies and token shifts': dataclasses.replace(
    CONFIG,
    ngram=None,
    copy_memory=model_config.CopyMemoryConfig(window=6, lengths=(1, 2, 3)),
    token_shift=model_config.TokenShiftConfig(),
    scan_layers=True,
  ),
  'product keys in scanned blocks': dataclasses.replace(
    CONFIG,
    ngram=None,
    product_memory=ProductMemoryConfig(
      layers=(0, 1), sub_keys=8, heads=2, top=4, key_width=8, swilu=True
    ),
    scan_layers=True,
  ),
  'rows clustered once, norms after the residual': dataclasses.replace(
    CONFIG, ngram=dataclasses.replace(NGRAM, initial='data', prenormalize=True), norm='post_skip'
  ),
}


@pytest.mark.slow  # for the quick tier see tests/models/test_grouped_heads.py
def test_attention_in_blocks_trains_alike_on_eight_devices(monkeypatch):
  monkeypatch.setattr(blocks, 'BLOCK', 8)
  monkeypatch.setattr(span_config, 'MIN_LIMIT', 1)
  config = SWITCHES['all-attention of dynamic spans']
  config = dataclasses.replace(config, layers=1, kernel='blocks', ngram=None, convolution=3)
  _, *one = run((1, 1, 1), config)
  _, *eight = run((2, 2, 2), config)
  assert_alike(eight, one)


@pytest.mark.slow
@pytest.mark.parametrize('switches', SWITCHES)
def test_any_switch_trains_alike_on_eight_devices(switches):
  _, *one = run((1, 1, 1), SWITCHES[switches])
  _, *eight = run((2, 2, 2), SWITCHES[switches])
  assert_alike(eight, one)


@pytest.mark.slow
@pytest.mark.parametrize('switches', SWITCHES)
def test_any_switch_trains_alike_check_accumulation(switches):
  _, *reference = run((1, 1, 1), SWITCHES[switches])
  _, state, metrics = run((2, 2, 2), SWITCHES[switches], parts=2)
  mean = [name for name in metrics if name.startswith('span/average')]  # of tokens, by part
  assert_alike(
    metrics | dict.fromkeys(mean, 0),
    {name: 0 if name in mean else reference[1][name] for name in metrics},
  )
  trained = lambda state: (state.params, {k: v for k, v in state.memory.items() if k != 'spans'})
  assert_alike(trained(state), trained(reference[0]))


def check_lookups(program, shards):
  """A gather from the device's own rows, and no all-gather as large as a table."""
  own_rows = rf'f32\[{TABLE[0] // shards},{TABLE[1]}\]'
  looked_into = re.findall(r' gather\((%[\w.-]+)', program)
  assert any(re.search(rf'{re.escape(name)} = {own_rows}', program) for name in looked_into)
  sizes = [
    math.prod(int(n) for n in dims.split(',') if n)
    for line in program.splitlines()
    if (match := re.search(r' = (.*?) all-gather(-start)?\(', line))
    for dims in re.findall(r'\w+\[([\d,]*)\]', match.group(1))  # of each part of a tuple
  ]
  assert sizes and max(sizes) < math.prod(TABLE)


@pytest.mark.full
def test_evaluation_leaves_the_tables_where_they_are():
  mesh, model = mesh_of(2, 2, 2), language_model.build(CONFIG, V)
  _, abstract = initializer(CONFIG, mesh)
  variables = {'params': abstract.params, 'codebook': abstract.codebook}
  traced = inference.Engine(model, mesh).trace_score(variables, B, T)
  with sharding.use(mesh):
    check_lookups(traced.lower().compile().as_text(), shards=4)


def test_an_axis_that_does_not_divide_stays_whole_and_is_logged(caplog):
  config = model_config.ModelConfig(layers=1, width=30, heads=3, feed_forward_width=64)
  with caplog.at_level('INFO'):
    _, abstract = initializer(config, mesh_of(1, 4, 2))
  kernel = abstract.params['layer_0']['attention']['query']['kernel']
  assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, None, None)
  assert (
    'params/layer_0/attention/key/kernel and 11 others: axis heads of size 3 is not divisible by 2 '
    in caplog.text
  )


@pytest.mark.parametrize('rows, spread', [(6, None), (8, ('fsdp', 'model'))])
def test_rows_that_two_axes_divide_only_apart_stay_whole(rows, spread):
  names = ('ngram_vocab', 'ngram_embed')
  init = nn.with_logical_partitioning(nn.initializers.zeros, names)
  shapes = jax.eval_shape(lambda: init(jax.random.key(0), (rows, 4)))
  leaf_shardings = sharding.shardings(shapes, mesh_of(2, 2, 2))
  assert leaf_shardings.spec == jax.sharding.PartitionSpec(spread, None)
