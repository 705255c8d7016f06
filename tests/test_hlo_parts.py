"""The parts of a compiled step, and the estimate of its time, of stored instructions."""

import pytest

from launch import hlo, hlo_parts

LAYERS = 'jit(call)/jvp(TransformerLM)/TransformerLM._apply_layers/TransformerLM._apply_run'
ATTENTION = f'{LAYERS}/while/body/closed_call/Block/Block._attend/attention'
SCOPES = {  # of instructions, and the part of the model
  f'{ATTENTION}/attention._project/key/dot_general': 'projections',
  f'{ATTENTION}/attention._project_output/out/dot_general': 'projections',
  f'{ATTENTION}/attention._rotate_and_scale/rotary/mul': 'rotary',
  f'{LAYERS}/Block/attention/shard_map/vmap()/splash_mha_fwd/pallas_call': 'attention kernels',
  f'{LAYERS}/Block/attention/shard_map/transpose': 'layout changes',
  f'{LAYERS}/while/body/closed_call/Block/attention_norm/reduce_sum': 'norms',
  f'{LAYERS}/while/body/closed_call/Block/feed_forward/out/dot_general': 'feed-forward',
  f'{LAYERS}/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice':
    'saves of the scan',
  f'{LAYERS}/while/body/closed_call/Block/Block._residual/add': 'residual',
  'jit(call)/ngrammer/ngrammer._ids/quantizer/scatter-add': 'codebook',
  'jit(call)/ngrammer/ngrammer._look_up/gather': 'table',
  'jit(call)/ngrammer/unigram_norm/mul': 'norms',
  'jit(call)/transpose(jvp(TransformerLM.scores))/dot_general': 'cross-entropy',
  'jit(call)/jvp(TransformerLM)/TransformerLM.embed/gather': 'embedding',
  'jit(call)/optimizer/mul': 'optimizer',
  'jit(call)/cumsum': 'other',
}  # fmt: skip


@pytest.mark.parametrize('scope, part', SCOPES.items())
def test_the_part_of_an_instruction(scope, part):
  work = hlo.Work('fusion.1', 'fusion', scope, 1.0, 0.0, 0.0, 1.0, 0, None)
  assert hlo_parts.part_of(work) == part
  assert hlo_parts.part_of(work._replace(opcode='copy')) == 'layout changes'


# As libtpu writes a step, in small. At 1.024 GB/s an array takes 1 ms.
STEP = """
%sum (a: f32[256000]) -> f32[256000] {
  %a = f32[256000]{0:T(1024)} parameter(0)
  ROOT %b = f32[256000]{0:T(1024)} negate(%a)
}

ENTRY %main (x: f32[256000]) -> f32[256000] {
  %x = f32[256000]{0:T(1024)} parameter(0)
  %norm.1 = f32[256000]{0:T(1024)} fusion(%x), kind=kLoop, calls=%sum, metadata={op_name="jit(f)/Block/attention_norm/mul"}, backend_config={"window_config":{"estimated_cycles":"6000"}}
  %add.1 = f32[256000]{0:T(1024)} fusion(%norm.1), kind=kLoop, calls=%sum, metadata={op_name="jit(f)/optimizer/add"}, backend_config={"window_config":{"estimated_cycles":"2000"}}
  %norm_kernel.1 = f32[256000]{0:T(1024)} custom-call(%add.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/Block/attention_norm/pallas_call"}
  %gather.1 = f32[256000]{0:T(1024)} fusion(%norm_kernel.1), kind=kCustom, calls=%sum, metadata={op_name="jit(f)/ngrammer/gather"}
  %copy-start = (f32[256000]{0:T(1024)S(1)}, f32[256000]{0:T(1024)}, u32[]{:S(2)}) copy-start(%gather.1)
  %copied = f32[256000]{0:T(1024)S(1)} copy-done(%copy-start)
  ROOT %y = f32[256000]{0:T(1024)} all-reduce(%gather.1), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}
"""  # noqa: E501
CLOCK = 1e6


def estimates(text, kernels=None):
  rates = hlo.Rates(1e12, 1.024e9, 1.024e9)
  parts = hlo_parts.count(hlo.Program(text, {'data': 2}, rates, kernels).work, CLOCK)
  return {name: 1e3 * numbers['estimate'] for name, numbers in parts.items()}


def test_the_estimate_is_cycles_else_roofline_plus_waits():
  """Milliseconds. The kernel takes 3 times its 2 ms, as the fusion of its part; copies nothing."""
  assert estimates(STEP) == pytest.approx(
    {'norms': 6 + 3 * 2, 'optimizer': 2, 'table': 2, 'collectives': 1}
  )


def test_a_kernel_without_fusions_of_its_part_takes_the_ratio_of_all():
  """8 ms of cycles for 4 of roofline, and 1 of the copy."""
  text = STEP.replace('attention_norm/mul', 'feed_forward/mul')
  assert estimates(text)['norms'] == pytest.approx(8 / 5 * 2)


def test_a_kernel_of_products_takes_the_ratio_of_products():
  """Not that of the fusion of its part, which has none; a product has twice its roofline."""
  kernels = {('norm_kernel', (256000,)): 4e9}  # 4 ms at 1 TFLOP/s
  assert estimates(STEP, kernels)['norms'] == pytest.approx(6 + 4)
  product = """  %w = f32[1000,1000]{1,0:T(8,128)} parameter(1)
  %product = f32[1000,1000]{1,0:T(8,128)} convolution(%w, %w), dim_labels=bf_io->bf, metadata={op_name="jit(f)/feed_forward/dot"}, backend_config={"window_config":{"estimated_cycles":"16000"}}
  %norm.1"""  # noqa: E501
  with_product = STEP.replace('  %norm.1', product, 1)
  # It reads and writes 1000 x 1024 values, padded, 8 ms, and has 16 ms of cycles.
  assert estimates(with_product, kernels)['norms'] == pytest.approx(6 + 2 * 4)


def test_code_gains_nothing_by_moving_into_a_kernel():
  """The fusion of the norm, a kernel now: the other fusion of its part stands for it."""
  twice = STEP.replace('optimizer/add', 'attention_norm/add').replace('"2000"', '"6000"')
  first = twice.partition('%norm.1 = ')[2].partition('\n')[0]
  moved = twice.replace(
    first,
    'f32[256000]{0:T(1024)} custom-call(%x), custom_call_target="tpu_custom_call", '
    'metadata={op_name="jit(f)/Block/attention_norm/pallas_call"}',
  )
  assert moved != twice and estimates(moved) == pytest.approx(estimates(twice))
