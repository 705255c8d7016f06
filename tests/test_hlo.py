"""Compares the statistics of compiled programs with expected values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import hlo, hlo_text
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


# Excerpts of programs that libtpu compiled. S(1) is on-chip memory; T(8,128) pads the last axes.
NESTED = """
%slice (stack: bf16[96,128,2731], i: s32[]) -> bf16[128,2731] {
  %stack = bf16[96,128,2731]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %one = bf16[1,128,2731]{2,1,0:T(8,128)(2,1)} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,128,2731}
  ROOT %w = bf16[128,2731]{1,0:T(8,128)(2,1)} bitcast(%one)
}

%fused (x: bf16[1024,128], stack: bf16[96,128,2731], i: s32[]) -> bf16[1024,2731] {
  %x = bf16[1024,128]{1,0:T(8,128)(2,1)} parameter(0)
  %stack = bf16[96,128,2731]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %w = bf16[128,2731]{1,0:T(8,128)(2,1)} fusion(%stack, %i), kind=kLoop, calls=%slice
  ROOT %y = bf16[1024,2731]{1,0:T(8,128)(2,1)} convolution(%x, %w), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[1024,128], stack: bf16[96,128,2731], i: s32[]) -> bf16[1024,2731] {
  %x = bf16[1024,128]{1,0:T(8,128)(2,1)} parameter(0)
  %stack = bf16[96,128,2731]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  ROOT %y = bf16[1024,2731]{1,0:T(8,128)(2,1)} fusion(%x, %stack, %i), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/Block/feed_forward/in/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
}
"""  # noqa: E501


def test_a_slice_in_a_nested_fusion_counts_as_the_slice():
  """With the padding of 2731 values to 2816."""
  (work,) = hlo.Program(NESTED, {'data': 1}, hlo.Rates(1e9, 1e6, 1)).work
  assert work.bytes == 2 * (1024 * 128 + 128 * 2816 + 1024 * 2816)
  assert work.padding == 2 * (128 + 1024) * (2816 - 2731)
  assert work.flops == 2 * 1024 * 128 * 2731
  assert work.seconds == pytest.approx(work.bytes / 1e6) and work.cycles == 1000
  assert work.scope == 'jit(f)/Block/feed_forward/in/dot_general'


def test_what_the_compiler_cannot_estimate_has_no_cycles():
  unknown = NESTED.replace('"1000"', f'"{2**64 - 1}"')
  assert hlo.Program(unknown, {'data': 1}).work[0].cycles == 0


def entry(lines, fused=''):
  """Returns a program of some instructions, after computations that they call."""
  return f'{fused}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{lines}\n}}\n'


def count(lines, fused='', **mesh):
  return hlo.Program(entry(lines, fused), mesh or {'data': 1}, hlo.Rates(1e12, 1e9, 1e9))


# fmt: off
INSTRUCTIONS = [
  # The slice is read once; its target is on the chip.
  ('slice-start(%x), slice={[0:4], [0:1024]}',
   '((f32[16,1024]{1,0:T(8,128)}), f32[4,1024]{1,0:T(8,128)S(1)}, s32[]{:S(2)})', 4 * 1024 * 4),
  ('copy-start(%x)',
   '(f32[16,1024]{1,0:T(8,128)S(1)}, f32[16,1024]{1,0:T(8,128)}, u32[]{:S(2)})', 16 * 1024 * 4),
  ('dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,1024}', 'f32[1,1024]{1,0:T(1,128)}',
   2 * 1024 * 4),
  ('dynamic-update-slice(%x, %update, %i, %i)', 'f32[16,1024]{1,0:T(8,128)}', 2 * 1024 * 4),
  ('custom-call(%x, %x), custom_call_target="ConcatBitcast"', 'f32[32,1024]{1,0:T(8,128)}', 0),
  ('custom-call(), custom_call_target="AllocateBuffer"', 'f32[32,1024]{1,0:T(8,128)}', 0),
  ('bitcast(%x)', 'f32[16384]{0:T(1024)}', 0),
  # Rows across lanes are padded to 128 values.
  ('broadcast(%i), dimensions={}', 'f32[16,32]{1,0:T(8,128)}', 16 * 128 * 4),
  ('broadcast(%i), dimensions={}', 'f32[16,32]{0,1:T(8,128)}', 128 * 32 * 4),
  ('broadcast(%i), dimensions={}', 'pred[16,128]{1,0:T(8,128)(4,1)}', 16 * 128),
]
# fmt: on


@pytest.mark.parametrize('call, shape, expected', INSTRUCTIONS)
def test_bytes_of_an_instruction(call, shape, expected):
  lines = f"""\
  %x = f32[16,1024]{{1,0:T(8,128)}} parameter(0)
  %update = f32[1,1024]{{1,0:T(1,128)}} parameter(1)
  %i = s32[]{{:T(128)S(6)}} parameter(2)
  %y = {shape} {call}"""
  assert count(lines).bytes_moved() == expected


def test_a_scatter_in_place_counts_its_updates():
  """It reads the updates and the rows, and writes the rows; rows on the chip do not count."""
  fused = """
%fused (t: f32[65536,128], i: s32[1024], u: f32[1024,128]) -> f32[65536,128] {
  %t = f32[65536,128]{1,0:T(8,128)} parameter(0)
  %i = s32[1024]{0:T(1024)S(1)} parameter(1)
  %u = f32[1024,128]{1,0:T(8,128)} parameter(2)
  ROOT %sum = f32[65536,128]{1,0:T(8,128)} scatter(%t, %i, %u), to_apply=%add
}
"""
  lines = """\
  %t = f32[65536,128]{1,0:T(8,128)} parameter(0)
  %i = s32[1024]{0:T(1024)S(1)} parameter(1)
  %u = f32[1024,128]{1,0:T(8,128)} parameter(2)
  ROOT %y = f32[65536,128]{1,0:T(8,128)} fusion(%t, %i, %u), kind=kCustom, calls=%fused"""
  assert count(lines, fused).bytes_moved() == 3 * 1024 * 128 * 4
  # A fusion that makes the array that it updates reads and writes all of it.
  made = fused.replace(
    '%t = f32[65536,128]{1,0:T(8,128)} parameter(0)',
    '%p = f32[65536,128]{1,0:T(8,128)} parameter(0)\n  '
    '%t = f32[65536,128]{1,0:T(8,128)} negate(%p)',
  )
  updates, table = 1024 * 128 * 4, 65536 * 128 * 4
  assert count(lines, made).bytes_moved() == updates + 2 * table


PRODUCT = """\
  %x = f32[{0}]{{1,0:T(8,128)}} parameter(0)
  %w = f32[{1}]{{1,0:T(8,128)}} parameter(1)
  %y = f32[{2}]{{1,0:T(8,128)}} convolution(%x, %w), {3}"""


# fmt: off
@pytest.mark.parametrize('shapes, text, expected', [
  (('64,32', '32,16', '64,16'), 'dim_labels=bf_io->bf', 64 * 32 * 16),
  # A batch of 8 products [100, 64] [64, 128].
  (('8,100,64', '8,128,64', '8,100,128'),
   'window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf', 8 * 100 * 64 * 128),
  # Sums over 8 heads of 128 features; its transpose makes the heads.
  (('16,100,8,128', '8,1024,128,1', '16,1024,100,1'),
   'window={size=1x8}, dim_labels=0b1f_1oi0->0fb1', 16 * 100 * 1024 * 8 * 128),
  (('16,100,1024,1', '8,1024,128,1', '16,100,8,128'),
   'window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_1io0->0b1f',
   16 * 100 * 1024 * 8 * 128),
])
# fmt: on
def test_flops_of_products_that_are_convolutions(shapes, text, expected):
  (work,) = count(PRODUCT.format(*shapes, text)).work
  assert work.flops == 2 * expected


def test_flops_of_a_kernel_are_found_by_name_and_shapes():
  """Its attributes take several lines. An unknown kernel is named."""
  lines = """\
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %attend.7 = (f32[8,128]{1,0:T(8,128)}, f32[8,1]{0,1:T(1,128)}) custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "512"
}}, metadata={op_name="jit(f)/attention/attend/pallas_call"}"""  # noqa: E501
  kernels = {('attend', (8, 128), (8, 1)): 5e3}
  program = hlo.Program(entry(lines), {'data': 1}, kernels=kernels)
  assert [work.flops for work in program.work] == [5e3] and not program.not_counted
  assert program.work[0].scope.endswith('pallas_call')
  assert count(lines).not_counted == ['the FLOPs of the kernel attend.7']


WAITS = """\
  %x = f32[250000]{{0:T(1024)}} parameter(0)
  %sum-start = f32[250000]{{0:T(1024)S(1)}} all-reduce-start(%x), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  {}
  %sum = f32[250000]{{0:T(1024)S(1)}} all-reduce-done(%sum-start)"""  # noqa: E501


@pytest.mark.parametrize('values, waits', [(0, 1e-3), (125_000, 0.5e-3), (375_000, 0)])
def test_a_collective_waits_for_what_no_computation_hides(values, waits):
  """1 MB is sent at 1 GB/s, beside some values that are written at the same rate."""
  lines = WAITS.format(f'%y = f32[{values}]{{0}} iota()')
  (collective,) = count(lines, data=2).collectives()
  assert collective.kind == 'all-reduce' and collective.bytes_sent == 1e6
  assert collective.exposed == pytest.approx(waits, rel=0.01)
  synchronous = lines.replace('all-reduce-start', 'all-reduce').replace('-done', '-end')
  (collective,) = count(synchronous, data=2).collectives()
  assert collective.exposed == pytest.approx(1e-3, rel=0.01)


ASYNC = """
%start (x: s32[2000]) -> (s32[2000], s32[4000]) {
  %x = s32[2000]{0:T(1024)} parameter(0)
  %all-gather.5 = s32[4000]{0:T(1024)} all-gather(%x), channel_id=42, replica_groups={{0,1}}, dimensions={0}
  ROOT %s = (s32[2000]{0:T(1024)}, s32[4000]{0:T(1024)}) custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (x: s32[2000], y: s32[4000], h: f32[512]) -> (f32[512], s32[2000], s32[4000], s32[4000]) {
  %x = s32[2000]{0:T(1024)} parameter(0)
  %y = s32[4000]{0:T(1024)} parameter(1)
  %h = f32[512]{0:T(512)} parameter(2)
  %negative = f32[512]{0:T(512)} negate(%h)
  %all-gather.7 = s32[4000]{0:T(1024)} all-gather(%x), channel_id=42, replica_groups={{0,1}}, dimensions={0}
  ROOT %both = (f32[512]{0:T(512)}, s32[2000]{0:T(1024)}, s32[4000]{0:T(1024)}, s32[4000]{0:T(1024)}) tuple(%negative, %x, %y, %all-gather.7)
}

%done (x: s32[2000], y: s32[4000]) -> s32[4000] {
  %x = s32[2000]{0:T(1024)} parameter(0)
  %y = s32[4000]{0:T(1024)} parameter(1)
  %all-gather.6 = s32[4000]{0:T(1024)} all-gather(%x), channel_id=42, replica_groups={{0,1}}, dimensions={0}
  ROOT %d = s32[4000]{0:T(1024)} custom-call(%x, %y, %all-gather.6), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (x: f32[4096]) -> f32[2048] {
  %x = f32[4096]{0:T(1024)} parameter(0)
  %sum = f32[4096]{0:T(1024)} all-reduce(%x), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %part = f32[2048]{0:T(1024)} dynamic-slice(%sum, %i), dynamic_slice_sizes={2048}
}
"""  # noqa: E501


def test_collectives_in_fusions_and_between_slices():
  """An asynchronous one is in the fusions of its start, its end and beside it; it counts once."""
  lines = """\
  %x = s32[2000]{0:T(1024)} parameter(0)
  %started = (s32[2000]{0:T(1024)}, s32[4000]{0:T(1024)}) fusion(%x), kind=kCustom, calls=%start
  %a = s32[2000]{0:T(1024)} get-tuple-element(%started), index=0
  %b = s32[4000]{0:T(1024)} get-tuple-element(%started), index=1
  %h = f32[512]{0:T(512)} parameter(2)
  %beside = (f32[512]{0:T(512)}, s32[2000]{0:T(1024)}, s32[4000]{0:T(1024)}, s32[4000]{0:T(1024)}) fusion(%a, %b, %h), kind=kCustom, calls=%async_collective_fusion.1
  %gathered = s32[4000]{0:T(1024)} fusion(%a, %b), kind=kCustom, calls=%done
  %g = f32[4096]{0:T(1024)} parameter(1)
  %own = f32[2048]{0:T(1024)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %token = token[] after-all()
  %send = (f32[2048]{0:T(1024)}, u32[], token[]) send(%own, %token), channel_id=2, is_host_transfer=true
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true"""  # noqa: E501
  program = count(lines, ASYNC, data=2)
  found = {c.kind: c.bytes_sent for c in program.collectives()}
  assert found == {
    'all-gather': 4000 * 4 / 2, 'reduce-scatter': 4096 * 4 / 2, hlo.BETWEEN_SLICES: 2048 * 4,
  }  # fmt: skip
  (beside,) = (work for work in program.work if work.name == 'beside')
  assert beside.bytes == 2 * 512 * 4  # what it passes on stays where it is
  (gather,) = (work for work in program.work if work.name == 'started')
  assert gather.exposed == pytest.approx(4000 * 4 / 2 / 1e9 - beside.seconds)


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
  unknown = LOOPS.replace('s32[] constant(3)', 's32[] get-tuple-element(%x), index=0')
  program = hlo.Program(unknown, {'data': 2})
  assert program.collectives()[0].times == 5
  assert program.not_counted == ['the trips of the loops of loop, which count once']


@pytest.mark.parametrize(
  'text, groups',
  [
    ('replica_groups={{0,1},{2,3}}, x', [[0, 1], [2, 3]]),
    ('replica_groups=[2,2]<=[4], x', [[0, 1], [2, 3]]),
    ('replica_groups=[2,2]<=[2,2]T(1,0), x', [[0, 2], [1, 3]]),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, x", [[0, 2], [1, 3]]),
    (
      "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_0'}",
      [[0, 1], [2, 3]],
    ),
    ('source_target_pairs={{0,0},{1,3}}, x', [[1, 3]]),
    ('replica_groups={}, x', [[0, 1, 2, 3]]),
  ],
)
def test_device_groups(text, groups):
  assert hlo_text.device_group(text, 4) == groups[0]
