"""All memories in one model, trained by all that is new in optimizers at once."""

import dataclasses

import flax
import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import programs
from tests.checks import mesh_of
from tests.models import drawn

STEPS, B, T, V = 2, 4, 8, drawn.V
OPTIMIZER = experiment.OptimizerConfig(
  algorithm='muon',
  schedule='wsd',
  warmup_steps=1,
  decay_steps=1,
  width_rule='mup',
  base_width=8,
  weight_decay=0.1,
)


def config_of(name):
  """A model of `drawn.TOGETHER` whose tables have one accumulator a row."""
  model = drawn.config_of(drawn.together(name))
  by_row = lambda memory: dataclasses.replace(memory, optimizer='row_adagrad')
  model = dataclasses.replace(
    model,
    dtype='float32',
    ngram_memories=tuple(map(by_row, model.ngram_memories)),
    product_memory=by_row(model.product_memory),
  )
  training = experiment.TrainingConfig(steps=STEPS, batch_size=B, segment_length=T)
  return experiment.Config(model=model, optimizer=OPTIMIZER, training=training)


@pytest.mark.parametrize('name', drawn.TOGETHER)
def test_no_memory_excludes_an_optimizer(name):
  config = config_of(name)
  config.check()
  run = programs.Programs(config, V, mesh_of(1))
  optimizers = partition.table_optimizers(config.model.table_memories())
  by_row = {label for label, name in optimizers.items() if name == 'row_adagrad'}
  assert len(by_row) > 1 and {partition.DENSE, *by_row} <= set(jax.tree.leaves(run.labels))
  assert any(jax.tree.leaves(run.matrices))


@pytest.mark.full
@pytest.mark.parametrize('name', drawn.TOGETHER)
def test_every_parameter_learns(name):
  run = programs.Programs(config_of(name), V, mesh_of(1))
  tokens = np.random.default_rng(0).integers(0, V, (STEPS, B, T + 1)).astype(np.int32)
  inputs, targets = tokens[..., :-1], tokens[..., 1:]
  segments = token_batch.Batch(
    inputs, targets, np.zeros(inputs.shape, bool), np.ones(inputs.shape, np.float32)
  )
  state = run.create()
  before = flax.traverse_util.flatten_dict(jax.device_get(state.params), sep='/')
  run.compile(state, segments)
  state, metrics = run.call(state, segments, STEPS)
  after = flax.traverse_util.flatten_dict(jax.device_get(state.params), sep='/')
  assert np.isfinite(metrics['loss']).all()
  assert {name for name in after if np.array_equal(after[name], before[name])} == set()
