"""The table of kernels, and the choice between them."""

import pytest

from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config

WORKLOAD = kernels.Workload(
  128,
  0,
  64,
  'bfloat16',
  'cpu',
  'cpu',
  is_divisible=True,
  cudnn=('causal',),
  cudnn_window=('causal',),
)


def test_the_scores_satisfy_every_need():
  assert kernels.KERNELS['xla'] == frozenset(kernels.NEEDS)
  assert all(needs <= frozenset(kernels.NEEDS) for needs in kernels.KERNELS.values())


@pytest.mark.parametrize('kernel', kernels.NAMES)
def test_what_a_kernel_cannot_compute_is_left_to_the_scores(kernel):
  platform = {'cudnn': 'gpu', 'xla': 'cpu', 'blocks': 'cpu'}.get(kernel, 'tpu')
  workload = WORKLOAD._replace(platform=platform, device='TPU v5 lite')
  for need, text in kernels.NEEDS.items():
    needs = frozenset({need})
    reason = kernels.unsupported_reason(kernel, needs, workload)
    can_compute = need in kernels.KERNELS[kernel]
    assert reason == (None if can_compute else f'does not support {text}')
    expected = kernel if can_compute and kernel != 'blocks' else 'xla'
    assert kernels.select(kernel, needs, workload) == expected
    in_blocks = kernels.uses_blocks(kernel, needs, workload)
    assert in_blocks == (kernel == 'blocks' and can_compute)


def test_kernels_are_for_their_devices():
  reason = lambda kernel, **fields: kernels.unsupported_reason(
    kernel, frozenset(), WORKLOAD._replace(**fields)
  )
  assert reason('splash', is_divisible=False) == 'needs rows and heads that the mesh divides'
  assert reason('splash', platform='tpu', device='TPU v3').startswith('is for TPUs from v4 on')
  assert reason('cudnn', platform='gpu') is None
  missing = reason('cudnn', platform='gpu', cudnn=(), cudnn_problem='it is not installed')
  assert missing == 'cannot be used: it is not installed'
  assert 'not for cpu, float32 and 64' in reason('cudnn', dtype='float32')
  odd = reason('cudnn', platform='gpu', T=127)
  assert odd == 'is for segments of an even number of tokens, not for 127'


def test_windows_of_cudnn_need_a_call_that_has_them():
  workload = WORKLOAD._replace(platform='gpu', cudnn_window=())
  select = lambda *needs: kernels.select(None, frozenset(needs), workload)
  assert (select(), select('window')) == ('cudnn', 'xla')


def test_cudnn_is_looked_for_only_where_it_would_be_used():
  asks = lambda kernel, *needs: kernels.asks_for_cudnn(kernel, frozenset(needs))
  assert asks(None) and asks('cudnn', 'window', 'grouped')
  assert not asks('xla') and not asks(None, 'cache') and not asks(None, 'dropout')


def test_equal_calls_are_avoided_where_operations_are_deterministic():
  workload = WORKLOAD._replace(platform='gpu', is_deterministic=True)
  repeats = lambda kernel, workload: kernels.repeats_calls(kernel, frozenset(), workload)
  assert repeats(None, workload) and not repeats('xla', workload)
  assert not repeats(None, workload._replace(is_deterministic=False))
  assert not repeats(None, workload._replace(platform='tpu', device='TPU v5 lite'))


def test_blocks_need_a_generator_that_draws_a_part_of_the_dropout():
  needs = frozenset({'dropout'})
  assert kernels.uses_blocks('blocks', needs, WORKLOAD)
  assert not kernels.uses_blocks('blocks', needs, WORKLOAD._replace(generator='rbg'))
  assert kernels.uses_blocks('blocks', frozenset(), WORKLOAD._replace(generator='rbg'))


def test_few_scores_are_not_computed_in_blocks():
  limit, block = kernels.MIN_SCORES, kernels.MIN_QUERIES
  faster = lambda T, M: kernels.blocks_are_faster(WORKLOAD._replace(T=T, M=M), has_spans=True)
  assert not faster(block - 1, limit)
  assert faster(block, limit // block) and not faster(block, limit // block - block - 1)


def test_without_spans_blocks_are_for_cpus_and_long_memories():
  def faster(T, M, has_spans, platform='cpu'):
    return kernels.blocks_are_faster(WORKLOAD._replace(T=T, M=M, platform=platform), has_spans)

  T = 128
  assert T * 2 * T == 2 * kernels.MIN_SCORES
  assert faster(T, T, has_spans=False) and not faster(T, T - 1, has_spans=False)
  assert not faster(2 * T, T, has_spans=False) and faster(2 * T, T, has_spans=True)
  # Without a memory, from 2^19 scores on.
  assert faster(725, 0, has_spans=False) and not faster(724, 0, has_spans=False)
  for platform in ('tpu', 'gpu'):
    assert not faster(T, T, has_spans=False, platform=platform)
    assert faster(T, T, has_spans=True, platform=platform)


def test_kernels_for_tpus_and_blocks_leave_the_rest_to_the_scores():
  missing = lambda kernel: set(kernels.NEEDS) - kernels.KERNELS[kernel]
  assert missing('blocks') == {'all_keys', 'joint_norm', 'value_rows', 'prefix', 'probabilities'}
  assert missing('splash') == set(kernels.NEEDS) - {'cap', 'grouped', 'short_prompt'}


@pytest.mark.parametrize(
  'limit, kernel, epsilon_keys, counts_all',
  [
    (63, None, None, True),
    (64, None, None, False),
    (63, 'xla', None, True),
    (63, 'blocks', None, False),  # the kernel is named, so it has to be used
    (63, None, 'span', False),
    (64, None, 'all', True),
  ],
)
def test_the_keys_of_epsilon_follow_from_the_config(limit, kernel, epsilon_keys, counts_all):
  span = model_config.SpanConfig(limit=limit, ramp=4, epsilon_keys=epsilon_keys)
  memory = model_config.MemoryConfig(limit, same_length='memory_alone')
  model = model_config.ModelConfig(span=span, memory=memory, kernel=kernel)
  model.check()
  assert span.counts_all_keys(kernel) == counts_all
  assert ('all_keys' in model.attention_needs()) == counts_all
