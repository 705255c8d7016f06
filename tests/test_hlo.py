"""Compares the statistics of compiled programs with expected values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import hlo
from ngrammer_jax import sharding
from tests import jaxprs

L, B, D = 6, 4096, 64


def compile_layers(loop, mesh, x_spec, w_spec):
  named = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  abstract = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=named(*spec))
  x, w = abstract((B, D), *x_spec), abstract((L, D, D), *w_spec)
  run = jax.jit(lambda x, w: jaxprs.tanh_layers(x, w, loop), out_shardings=named(*x_spec))
  return run.lower(x, w).compile()


@pytest.mark.parametrize('loop', [True, False])
def test_collectives_have_their_mesh_axes_and_loop_iterations(loop):
  """The columns of x are sharded over `model`, so each product is reduced over `model`."""
  mesh = sharding.make_mesh(2, 1, 4)
  program = compile_layers(loop, mesh, ('data', 'model'), (None, 'model', None))
  collectives = hlo.Program(program.as_text(), dict(mesh.shape)).collectives()
  reductions = [c for c in collectives if c.kind in ('all-reduce', 'reduce-scatter')]
  assert {c.axes for c in reductions} == {('model',)} and {c.devices for c in reductions} == {4}
  assert sum(c.times for c in reductions) == L
  (size,) = {c.size for c in reductions}
  assert size == B // 2 * D * 4
  all_reduce = next(c for c in reductions if c.kind == 'all-reduce')
  assert all_reduce.bytes_sent == 2 * 3 / 4 * size * all_reduce.times


def test_weights_sharded_over_fsdp_are_gathered_over_fsdp():
  mesh = sharding.make_mesh(1, 8, 1)
  program = compile_layers(False, mesh, (('data', 'fsdp'), None), (None, 'fsdp', None))
  collectives = hlo.Program(program.as_text(), dict(mesh.shape)).collectives()
  gathers = [c for c in collectives if c.kind == 'all-gather']
  assert {c.axes for c in gathers} == {('fsdp',)}
  assert sum(c.times * c.size for c in gathers) == L * D * D * 4


def test_bytes_moved_match_the_compiler_and_include_loop_iterations():
  single_device = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES)
  bytes_by_loop = {}
  for loop in (True, False):
    program = compile_layers(loop, single_device, (), ())
    bytes_by_loop[loop] = hlo.Program(program.as_text(), dict(single_device.shape)).bytes_moved()
    if not loop:
      assert bytes_by_loop[loop] == pytest.approx(
        program.cost_analysis()['bytes accessed'], rel=0.2
      )
  assert bytes_by_loop[True] == pytest.approx(bytes_by_loop[False], rel=0.5)
  assert bytes_by_loop[True] > L * D * D * 4  # all weights


LOOPS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]) parameter(0)
  %y = f32[8] get-tuple-element(%x), index=1
  %i = s32[] get-tuple-element(%x), index=0
  %reduced = f32[8] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[8]) tuple(%i, %reduced)
}

%outer (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]) parameter(0)
  ROOT %loop = (s32[], f32[8]) while(%x), condition=%bound, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%bound (x: (s32[], f32[8])) -> pred[] {
  %x = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]) parameter(0)
  ROOT %loop = (s32[], f32[8]) while(%x), condition=%bound, body=%outer
}
"""  # noqa: E501


def test_trip_counts_of_nested_loops_multiply():
  """The outer trip count is read from the condition, the inner one from the backend config."""
  (collective,) = hlo.Program(LOOPS, {'data': 2}).collectives()
  assert (collective.kind, collective.axes) == ('all-reduce', ('data',))
  assert (collective.size, collective.times) == (32, 15)
  # Each inner iteration reads the operand and writes the result of the all-reduce.
  assert hlo.Program(LOOPS, {'data': 2}).bytes_moved() == 15 * 2 * 32


@pytest.mark.parametrize(
  'text, groups',
  [
    ('replica_groups={{0,1},{2,3}}, x', [[0, 1], [2, 3]]),
    ('replica_groups=[2,2]<=[4], x', [[0, 1], [2, 3]]),
    ('replica_groups=[2,2]<=[2,2]T(1,0), x', [[0, 2], [1, 3]]),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, x", [[0, 2], [1, 3]]),
    ('source_target_pairs={{0,0},{1,3}}, x', [[1, 3]]),
    ('replica_groups={}, x', [[0, 1, 2, 3]]),
  ],
)
def test_device_groups(text, groups):
  assert hlo._device_groups(text, 4) == groups
