"""Attention kernels that never materialize the full score matrix.

They support one mask: causal within documents. `splash` is for TPUs; on a CPU it is interpreted,
which is slow and only for tests. `cudnn` is for GPUs; its mask is as large as the scores of one
head. Three other names select attention elsewhere: `xla` is `layers.attention.full`, `blocks` is
`layers.attention.blocks`, and `pallas` is `layers.attention.pallas`, for any mask.

B batch, T segment length, N heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import mesh_axes

NO_KERNEL = (None, 'xla', 'blocks')
ELSEWHERE = (*NO_KERNEL, 'pallas')
LANES = 128  # vector lanes of a TPU, which must divide the segment length
UNSUPPORTED_TPUS = ('TPU v2', 'TPU v3')  # splash needs larger matrix units
BLOCK_SIZES = (512, 256, LANES)  # queries and keys at a time


def choose(
  kernel: str | None, shape: tuple[int, ...], dtype: jnp.dtype, logit_cap: float | None = None
) -> str:
  """Returns the kernel for queries of a shape [B, T, N, H]; `xla` if it does not support them.

  Args:
    kernel: `xla`, `splash` or `cudnn`; None: splash on TPUs, else xla.
    shape, dtype: shape and dtype of the queries.
    logit_cap: cap of the scores (see `full.cap_logits`). None: not capped.
  """
  if kernel is None:
    kernel = 'splash' if mesh_axes.device()[0] == 'tpu' else 'xla'
  if kernel in ELSEWHERE or unsupported_reason(kernel, shape, dtype, logit_cap):
    return 'xla'
  return kernel


def unsupported_reason(
  kernel: str, shape: tuple[int, ...], dtype: jnp.dtype, logit_cap: float | None = None
) -> str | None:
  """Returns why a kernel does not support queries of a shape [B, T, N, H], None if it does."""
  (_, T, _, H), (platform, kind) = shape, mesh_axes.device()
  if kernel in NO_KERNEL:
    return None
  if kernel == 'pallas':
    return f'is for TPUs, not for {kind}' if platform == 'gpu' else None
  if _mesh_axes(shape) is None:
    return 'needs rows and heads that the mesh divides'
  if kernel == 'cudnn':
    if logit_cap is not None:
      return 'cannot cap the scores'
    if platform != 'gpu' or jnp.dtype(dtype).itemsize != 2 or H % 8:
      actual = f'{platform}, {jnp.dtype(dtype).name} and {H}'
      return f'is for GPUs, bfloat16 and head widths that 8 divides, not for {actual}'
    return None
  if kind in UNSUPPORTED_TPUS or platform == 'gpu':
    return f'is for TPUs from v4 on, not for {kind}'
  if T % LANES:
    return f'is for segments that {LANES} divides, not for {T} tokens'
  return 'has no float64' if dtype == jnp.float64 else None


def attend(
  kernel: str,
  q_BxTxNxH: jax.Array,
  k_BxTxNxH: jax.Array,
  v_BxTxNxH: jax.Array,
  documents_BxT: jax.Array,
  logit_cap: float | None = None,
) -> jax.Array:
  """Returns the causal softmax(q k^T) v within documents, [B, T, N, H], for scaled queries.

  `splash` caps the products q k^T if there is a cap.
  """
  run = {'splash': functools.partial(_splash, logit_cap), 'cudnn': _cudnn}[kernel]
  rows, heads = _mesh_axes(q_BxTxNxH.shape)
  if rows or heads:
    spec = jax.P(rows, None, heads)
    run = jax.shard_map(run, in_specs=(spec,) * 3 + (jax.P(rows),), out_specs=spec, check_vma=False)
  return run(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, documents_BxT)


def _splash(logit_cap, q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, documents_BxT):
  from jax.experimental.pallas.ops.tpu import splash_attention  # slow to import

  T, N = q_BxTxNxH.shape[1:3]
  block = next(size for size in BLOCK_SIZES if T % size == 0)
  names = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq', 'kv_dq')
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * N),
    block_sizes=splash_attention.BlockSizes(**{f'block_{name}': block for name in names}),
    head_shards=1,
    q_seq_shards=1,
    attn_logits_soft_cap=logit_cap,
    interpret=mesh_axes.device()[0] == 'cpu',
  )
  ids = splash_attention.SegmentIds(documents_BxT, documents_BxT)
  by_head = (x.swapaxes(1, 2) for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH))
  return jax.vmap(attend)(*by_head, ids).swapaxes(1, 2)


def _cudnn(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, documents_BxT):
  T = documents_BxT.shape[1]
  same_BxTxT = documents_BxT[:, :, None] == documents_BxT[:, None, :]
  visible_Bx1xTxT = (same_BxTxT & jnp.tri(T, dtype=bool))[:, None]
  return jax.nn.dot_product_attention(
    q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, mask=visible_Bx1xTxT, scale=1.0, implementation='cudnn'
  )


def _mesh_axes(shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
  """Returns the mesh axes of rows and heads, None if they do not divide these."""
  axes = mesh_axes.axes('batch', shape[0]), mesh_axes.axes('heads', shape[2])
  return None if None in axes else axes
