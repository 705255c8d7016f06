"""Each of the devices along `data` updates its share of the parameters: `mesh.zero=1`."""

import re
import shutil

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config.mesh import MeshConfig
from ngrammer_jax.training import loop, programs
from tests.checks import mesh_of
from tests.training.helpers import records

ZERO = MeshConfig(data=4, model=2, zero=1)


def losses(workdir):
  return [line['loss'] for line in records(workdir) if 'loss' in line]


@pytest.mark.slow
def test_a_run_resumes_with_it_and_without_it_again(tiny, tmp_path):
  """In each direction from a checkpoint, with the same losses."""
  not_split = tiny(mesh=MeshConfig(data=4, model=2))
  loop.train(not_split, tmp_path / 'not_split')
  mixed = shutil.copytree(tmp_path / 'not_split', tmp_path / 'mixed')
  for steps, config in (((8, 12), tiny(mesh=ZERO)), ((12,), not_split)):
    for step in steps:
      shutil.rmtree(mixed / 'checkpoints' / str(step))
    loop.train(config, mixed)
  assert losses(mixed) == pytest.approx(losses(tmp_path / 'not_split'), rel=1e-6)


def test_a_step_gathers_updated_parameters_and_nothing_else(tiny):
  """Activations, products and gradients stay as without it."""
  run = programs.Programs(tiny({'layers': 1}, mesh=ZERO), 256, mesh_of(8))
  traced, _ = run.trace_program('train')
  with sharding.use(run.mesh):
    text = traced.lower().compile().as_text()
  gathers = re.findall(r' all-gather\(.*op_name="([^"]*)"', text)
  assert all(name.endswith('/optimizer/sharding_constraint') for name in gathers)
  assert len(gathers) == len(re.findall(r' all-gather\(', text)) == 10  # arrays with two axes


def test_the_optimizer_state_of_dense_parameters_is_split_and_nothing_else(tiny):
  run = programs.Programs(tiny(mesh=ZERO), 260, mesh_of(2, 2, 2))
  shares = {}
  for path, leaf in jax.tree.leaves_with_path((run.abstract.params, run.abstract.opt_state)):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    share = np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size
    shares.setdefault(('table' in name, name.startswith('1'), leaf.ndim > 1), set()).add(share)
  # Parameters are split over fsdp and model, or one of them, as far as they have such an axis.
  assert shares[False, True, True] == {share / 2 for share in shares[False, False, True]}
  assert shares[True, True, True] == shares[True, False, True] == {0.25}
  assert shares[False, True, False] == {1.0}
