"""What is read from compiled programs is what they do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.analysis import hlo
from ngrammer_jax.layers import flash

L, B, D = 6, 4096, 64


def layers(x_BxD, w_LxDxD, loop):
  """As many matrix products, in a loop or one after the other."""
  layer = lambda x_BxD, w_DxD: jnp.tanh(x_BxD @ w_DxD)
  if loop:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BxD, w_LxDxD)[0]
  for w_DxD in w_LxDxD:
    x_BxD = layer(x_BxD, w_DxD)
  return x_BxD


@pytest.mark.parametrize('loop', [True, False])
def test_flops_are_those_of_all_turns_of_a_loop_and_of_what_is_computed_again(loop):
  x, w = jnp.zeros((B, D)), jnp.zeros((L, D, D))
  one = 2 * B * D * D
  count = lambda function: hlo.flops(jax.make_jaxpr(function)(x, w).jaxpr)
  forward = lambda x, w: layers(x, w, loop).sum()
  assert count(forward) == L * one
  assert count(jax.grad(forward, 1)) == pytest.approx(3 * L * one, rel=1 / L)
  again = jax.grad(jax.checkpoint(forward), 1)
  assert count(again) == pytest.approx(4 * L * one, rel=1 / L)


def test_of_a_choice_the_most_expensive_counts():
  x, w = jnp.zeros((B, D)), jnp.zeros((D, D))
  either = lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)
  assert hlo.flops(jax.make_jaxpr(either)(x, w).jaxpr) == 4 * B * D * D


def test_of_a_kernel_every_block_counts():
  """Forward two products; backward five, and the two of before again by each of its kernels."""
  q = jnp.zeros((2, 1024, 4, 128))
  attend = lambda q: flash.attend('splash', q, q, q, jnp.zeros((2, 1024), int)).sum()
  product = 2 * 2 * 4 * 1024 * 1024 * 128
  count = lambda function: hlo.flops(jax.make_jaxpr(function)(q).jaxpr)
  assert count(attend) == 2 * product
  assert count(jax.grad(attend)) == pytest.approx((2 + 7) * product, rel=0.001)


def compiled(loop, mesh, spec_of_x, spec_of_w):
  place = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  like = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(*spec))
  given = like((B, D), *spec_of_x), like((L, D, D), *spec_of_w)
  run = jax.jit(lambda x, w: layers(x, w, loop), out_shardings=place(*spec_of_x))
  return run.lower(*given).compile()


@pytest.mark.parametrize('loop', [True, False])
def test_collectives_and_the_axes_and_turns_of_loops_they_belong_to(loop):
  """The columns of x are spread over `model`: each product is summed there."""
  mesh = sharding.make_mesh(2, 1, 4)
  made = compiled(loop, mesh, ('data', 'model'), (None, 'model', None))
  found = hlo.Program(made.as_text(), dict(mesh.shape)).collectives()
  summed = [each for each in found if each.kind in ('all-reduce', 'reduce-scatter')]
  assert {each.axes for each in summed} == {('model',)} and {each.devices for each in summed} == {4}
  assert sum(each.times for each in summed) == L
  (reduced,) = {each.size for each in summed}
  assert reduced == B // 2 * D * 4
  whole = next(each for each in summed if each.kind == 'all-reduce')
  assert whole.sent == 2 * 3 / 4 * reduced * whole.times


def test_a_weight_that_is_spread_over_the_batch_is_gathered_there():
  mesh = sharding.make_mesh(1, 8, 1)
  made = compiled(False, mesh, (('data', 'fsdp'), None), (None, 'fsdp', None))
  gathers = hlo.Program(made.as_text(), dict(mesh.shape)).collectives()
  gathers = [each for each in gathers if each.kind == 'all-gather']
  assert {each.axes for each in gathers} == {('fsdp',)}
  assert sum(each.times * each.size for each in gathers) == L * D * D * 4


def test_bytes_are_those_of_the_compiler_and_loops_count_as_often_as_they_run():
  alone = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES)
  moved = {}
  for loop in (True, False):
    made = compiled(loop, alone, (), ())
    moved[loop] = hlo.Program(made.as_text(), dict(alone.shape)).bytes_moved()
    if not loop:
      assert moved[loop] == pytest.approx(made.cost_analysis()['bytes accessed'], rel=0.2)
  assert moved[True] == pytest.approx(moved[False], rel=0.5)
  assert moved[True] > L * D * D * 4  # all weights


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


def test_a_loop_in_a_loop_runs_as_often_as_both_together():
  """The outer one as its condition says, the inner one as the compiler knows."""
  (found,) = hlo.Program(LOOPS, {'data': 2}).collectives()
  assert (found.kind, found.axes, found.size, found.times) == ('all-reduce', ('data',), 32, 15)
  # Of the inner one what is summed is read, and the sum written.
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
def test_who_is_in_a_group(text, groups):
  assert hlo._groups(text, 4) == groups
