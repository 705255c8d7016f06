"""Attention kernels: supported features, and the choice for a model and device.

This file imports no JAX, because the check of `model.kernel` uses the table of supported features
before JAX is imported. The choice of a kernel uses the same table.

  xla      all scores at once (`layers.attention.full`), or of windows and blocks (`local`)
  blocks   a running softmax over blocks of keys (`layers.attention.blocks`)
  splash   splash attention of JAX, for TPUs from v4 on (`layers.attention.fused`)
  cudnn    attention of cuDNN, for GPUs (`layers.attention.cudnn`)

T queries, M memory, H head width.
"""

from typing import NamedTuple

# With fewer tokens, a prompt is not worth the seconds of the cuDNN comparison.
MIN_PROMPT = 1024

# What attention may need, and how an error names it.
NEEDS = {
  'mask': 'a memory, or another mask than causality within documents',
  'window': 'a sliding window',
  'grouped': 'fewer key heads than query heads',
  'joint_norm': 'a norm of all key heads together, with a segment memory',
  'value_rows': 'n-gram rows in the values of a segment memory',
  'distances': 'scores of distances',
  'spans': 'learned spans',
  'all_keys': 'spans with epsilon_keys="all"',
  'persistent': 'persistent vectors',
  'cap': 'capped scores',
  'dropout': 'dropout',
  'pairs': 'the keys with the most attention',
  'cache': 'a KV cache',
  'prefix': 'a bidirectional prefix',
  'short_prompt': f'a prompt of fewer than {MIN_PROMPT:,} tokens',
  'probabilities': 'all probabilities',
}
OF_PROJECTED_MEMORY = {'joint_norm', 'value_rows'}  # not of a KV cache
# The needs that each kernel can satisfy.
KERNELS = {
  'xla': frozenset(NEEDS),
  'blocks': frozenset(NEEDS) - {'all_keys', 'joint_norm', 'value_rows', 'prefix', 'probabilities'},
  'splash': frozenset({'cap', 'grouped', 'short_prompt'}),
  'cudnn': frozenset({'grouped', 'window'}),
}
NAMES = tuple(KERNELS)
FASTEST = {'tpu': 'splash', 'gpu': 'cudnn'}  # by platform; on others full scores

LANES = 128  # vector lanes of a TPU, which must divide the segments of splash
HALF_PRECISION = ('bfloat16', 'float16')  # of cudnn
UNSUPPORTED_TPUS = ('TPU v2', 'TPU v3')  # splash needs larger matrix units
GENERATOR = 'threefry2x32'  # blocks need a generator that can draw a part of the dropout mask
# Of a head; with fewer, full scores are faster on a CPU.
MIN_QUERIES = 64
MIN_SCORES = 2**14


class Workload(NamedTuple):
  """The sizes, the dtype and the devices of attention.

  Attributes:
    T, M, H: queries, earlier keys and head width.
    dtype: of the activations.
    platform, device: `tpu`, `gpu` or `cpu`, and the kind of the devices.
    is_divisible: whether the mesh divides rows and heads.
    generator: random number generator, as in `jax_default_prng_impl`.
    is_deterministic: whether XLA_FLAGS ask for deterministic GPU operations.
    cudnn, cudnn_window: the calls of cuDNN, without and with a window, that agree with full scores
      on this device (see `layers.attention.cudnn`). Empty: cuDNN is unavailable.
    cudnn_problem: reason for unused calls.
  """

  T: int
  M: int
  H: int
  dtype: str
  platform: str
  device: str
  is_divisible: bool
  generator: str = GENERATOR
  is_deterministic: bool = False
  cudnn: tuple[str, ...] = ()
  cudnn_window: tuple[str, ...] = ()
  cudnn_problem: str = ''


def unsupported_reason(kernel: str, needs: frozenset[str], workload: Workload) -> str | None:
  """Returns the reason why a kernel does not support this attention; None if it does."""
  missing = [text for need, text in NEEDS.items() if need in needs - KERNELS[kernel]]
  if missing:
    return f'does not support {missing[0]}'
  w = workload
  if kernel == 'blocks' and 'dropout' in needs and w.generator != GENERATOR:
    return f'needs the generator {GENERATOR} for dropout, not {w.generator}'
  if kernel in ('splash', 'cudnn') and not w.is_divisible:
    return 'needs rows and heads that the mesh divides'
  if kernel == 'cudnn' and (w.platform != 'gpu' or w.dtype not in HALF_PRECISION or w.H % 8):
    actual = f'{w.platform}, {w.dtype} and {w.H}'
    return f'is for GPUs, bfloat16 and head widths that 8 divides, not for {actual}'
  if kernel == 'cudnn' and w.T % 2:
    return f'is for segments of an even number of tokens, not for {w.T}'
  if kernel == 'cudnn' and not (w.cudnn_window if 'window' in needs else w.cudnn):
    return f'cannot be used: {w.cudnn_problem}'
  if kernel == 'splash':
    if w.device in UNSUPPORTED_TPUS or w.platform == 'gpu':
      return f'is for TPUs from v4 on, not for {w.device}'
    if w.T % LANES:
      return f'is for segments that {LANES} divides, not for {w.T} tokens'
    if w.dtype == 'float64':
      return 'has no float64'
  return None


def asks_for_cudnn(kernel: str | None, needs: frozenset[str]) -> bool:
  """Whether a GPU would use cuDNN if it agrees with full scores; see `select`."""
  return kernel in (None, 'cudnn') and needs <= KERNELS['cudnn']


def uses_blocks(kernel: str | None, needs: frozenset[str], workload: Workload) -> bool:
  """Whether attention works in blocks; the context of a segment then has no mask.

  For the arguments see `select`.
  """
  if kernel not in (None, 'blocks') or unsupported_reason('blocks', needs, workload):
    return False
  return kernel == 'blocks' or blocks_are_faster(workload, 'spans' in needs)


def blocks_are_faster(workload: Workload, has_spans: bool) -> bool:
  """Whether blocks are faster than full scores.

  With learned spans, blocks skip most of the scores. Without them, the scores of a block stay in
  the cache of a CPU: of the CPU time over full scores, a training step takes 1.0 with T = M = 128,
  0.9 with 512, and 0.8 with T = 512 and M = 2048, and evaluation 0.8, 0.6 and 0.4. With a shorter
  memory or none, half of the scores are masked: a training step takes 0.8 to 1.2 with T = 1024 and
  0.4 to 0.6 with 2048, and evaluation 0.6 with 800 and 0.5 with 1800. Other devices prefer few
  large products.
  """
  T = workload.T
  M = workload.M
  scores = T * (M + T)
  if T < MIN_QUERIES or scores < MIN_SCORES:
    return False
  if has_spans:
    return True
  has_long_memory = M >= T - 1  # of a context of T tokens, a KV cache has T - 1
  least = 2 * MIN_SCORES if has_long_memory else 32 * MIN_SCORES
  return workload.platform == 'cpu' and scores >= least


def select(kernel: str | None, needs: frozenset[str], workload: Workload) -> str:
  """Returns the attention kernel, if not blocks.

  Args:
    kernel: kernel of the config. None: the fastest of the platform.
    needs: required features, see NEEDS.
    workload: the sizes, the dtype and the devices.
  """
  kernel = kernel or FASTEST.get(workload.platform, 'xla')
  if kernel == 'blocks' or unsupported_reason(kernel, needs, workload):
    return 'xla'
  return kernel


def repeats_calls(kernel: str | None, needs: frozenset[str], workload: Workload) -> bool:
  """Whether equal calls of attention in one program would fail.

  With deterministic operations, XLA (jax 0.11.2) compiles the gradient of only the first of several
  equal cuDNN calls, and fails for the others; docs/gpus.md has the details.
  """
  return workload.is_deterministic and select(kernel, needs, workload) == 'cudnn'


def speed_notes(
  kernel: str | None,
  needs: frozenset[str],
  workload: Workload,
  scan_layers: bool | int | None,
) -> list[str]:
  """Returns one sentence for each option that slows an accelerator down."""
  fastest = FASTEST.get(workload.platform)
  if fastest is None or uses_blocks(kernel, needs, workload):
    return []
  kernel = kernel or fastest
  if select(kernel, needs, workload) == 'xla':
    reason = "of model.kernel='xla'"
    if kernel != 'xla':
      reason = f'{kernel} {unsupported_reason(kernel, needs, workload)}'
    return [f'attention: plain, because {reason}']
  notes = []
  if kernel == 'cudnn' and workload.cudnn_problem:
    calls = workload.cudnn
    if 'window' in needs:
      calls = workload.cudnn_window
    notes.append(f'attention: cudnn ({", ".join(calls)}) alone, because {workload.cudnn_problem}')
  if scan_layers is None and repeats_calls(kernel, needs, workload):
    notes.append(
      'layers: scanned, because XLA may fail with equal calls of cuDNN and deterministic '
      'operations; model.scan_layers=False tries it'
    )
  return notes
