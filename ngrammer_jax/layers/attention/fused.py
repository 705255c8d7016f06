"""Attention kernels of JAX that never materialize the full score matrix.

They support one mask: causal within documents. `splash` is for TPUs; on a CPU it is interpreted
(slow, only for tests). `cudnn` is for GPUs, also with a window (see `layers.attention.cudnn`).
`config.kernels` selects them.

B batch, T segment length, N query heads, C key heads, H head width.
"""

import os
import re
from typing import Any

import jax

from ngrammer_jax.config.kernels import LANES, Workload
from ngrammer_jax.layers import mesh_axes
from ngrammer_jax.layers.attention import cudnn, cudnn_support
from ngrammer_jax.layers.attention.full import Heads, PartialAttention
from ngrammer_jax.layers.context import Keys

BLOCK_SIZES = (512, 256, LANES)  # queries and keys at a time


def workload(
  query: jax.Array | jax.ShapeDtypeStruct,
  M: int = 0,
  key_heads: int | None = None,
  asks_for_cudnn: bool = False,
) -> Workload:
  """Returns the sizes, the dtype and the devices of attention, under the current mesh.

  Args:
    query: queries [B, T, N, H].
    M: number of earlier keys.
    key_heads: number of key heads. None: N.
    asks_for_cudnn: whether to find the usable calls of cuDNN; the first time takes seconds.
  """
  B, T, N, H = query.shape
  axes = mesh_axes.axes('batch', B), *mesh_axes.head_axes(N, key_heads or N)
  platform, device = mesh_axes.device()
  usable = cudnn_support.UsableCalls()
  is_possible = platform == 'gpu' and None not in axes and query.dtype.name in cudnn.HIDDEN
  if asks_for_cudnn and is_possible:
    devices = mesh_axes.shards('heads')
    own_key_heads = max(1, (key_heads or N) // devices)
    usable = cudnn_support.usable_calls(N // devices, own_key_heads, H, query.dtype.name)
  return Workload(
    T=T,
    M=M,
    H=H,
    dtype=query.dtype.name,
    platform=platform,
    device=device,
    is_divisible=None not in axes,
    generator=jax.config.jax_default_prng_impl,
    is_deterministic=_has_deterministic_ops(),
    cudnn=usable.calls,
    cudnn_window=usable.window_calls,
    cudnn_problem=usable.problem,
  )


def _has_deterministic_ops() -> bool:
  """Whether XLA_FLAGS ask for deterministic GPU operations; the last value of a flag counts."""
  flags = os.environ.get('XLA_FLAGS', '')
  for name in ('deterministic_ops', 'exclude_nondeterministic_ops'):
    values = re.findall(rf'--xla_gpu_{name}=(\w+)', flags)
    if values and values[-1].lower() in ('true', '1'):
      return True
  return False


def attend(
  kernel: str,
  number: int,
  heads: Heads,
  span_mask: None,
  keys: Keys,
  *options: Any,
) -> PartialAttention:
  """Returns the causal softmax(q k^T) v within documents.

  Args:
    kernel: `splash`, which caps the products q k^T if there is a cap, or `cudnn`.
    number: of the call of `cudnn`, see `cudnn.Options`.
    heads: scaled queries, keys and values.
    span_mask: not supported.
    keys: with the document number of each query.
    *options: the other arguments of `full.attend`, all inactive here.
  """
  del span_mask, options
  B, _, N, _ = heads.query_BxTxNxH.shape
  C = heads.key_BxSxCxH.shape[2]
  row_axes = mesh_axes.axes('batch', B)
  head_axes, key_head_axes = mesh_axes.head_axes(N, C)
  attention = workload(heads.query_BxTxNxH, key_heads=C, asks_for_cudnn=kernel == 'cudnn')
  calls = attention.cudnn if keys.window is None else attention.cudnn_window
  cudnn_options = cudnn.Options(calls, keys.window, number)

  def attend_own(query_BxTxNxH, key_BxTxCxH, value_BxTxCxH, documents_BxT):
    if head_axes != key_head_axes:
      key_BxTxCxH, value_BxTxCxH = mesh_axes.local_key_heads(
        head_axes, N, (key_BxTxCxH, value_BxTxCxH), 2
      )
    if kernel == 'splash':
      return _splash(query_BxTxNxH, key_BxTxCxH, value_BxTxCxH, documents_BxT, heads.logit_cap)
    return cudnn.attend(cudnn_options, query_BxTxNxH, key_BxTxCxH, value_BxTxCxH, documents_BxT)

  if row_axes or head_axes:
    query_spec = jax.P(row_axes, None, head_axes)
    key_spec = jax.P(row_axes, None, key_head_axes)
    attend_own = jax.shard_map(
      attend_own,
      in_specs=(query_spec, key_spec, key_spec, jax.P(row_axes)),
      out_specs=query_spec,
      check_vma=False,
    )
  values_BxTxNxH = attend_own(
    heads.query_BxTxNxH, heads.key_BxSxCxH, heads.value_BxSxCxH, keys.query_documents_BxT
  )
  return PartialAttention(values_BxTxNxH)


def _splash(
  q_BxTxNxH: jax.Array,
  k_BxTxNxH: jax.Array,
  v_BxTxNxH: jax.Array,
  documents_BxT: jax.Array,
  logit_cap: float | None,
) -> jax.Array:
  from jax.experimental.pallas.ops.tpu import splash_attention  # slow to import

  T, N = q_BxTxNxH.shape[1:3]
  block = next(size for size in BLOCK_SIZES if T % size == 0)
  block_sizes = splash_attention.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * N),
    block_sizes=block_sizes,
    head_shards=1,
    q_seq_shards=1,
    attn_logits_soft_cap=logit_cap,
    interpret=mesh_axes.device()[0] == 'cpu',
    residual_checkpoint_name='attended',
  )
  ids = splash_attention.SegmentIds(documents_BxT, documents_BxT)
  by_head = [x.swapaxes(1, 2) for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)]
  return jax.vmap(attend)(*by_head, ids).swapaxes(1, 2)
