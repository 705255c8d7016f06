"""Attention in kernels that never have all scores at once.

They know one mask: a token sees its own document, up to and including itself. `splash` is of TPUs
(on a CPU it is interpreted, which is slow and for tests), `cudnn` of GPUs, where the mask is as
large as the scores of one head; `xla` stands for all scores at once, `blocks` for
`layers.blocked_attention`.

B batch, T segment length, N heads, H head width.
"""

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import placement

WITHOUT = (None, 'xla', 'blocks')  # those that are not in this file
LANES = 128  # of a TPU; segments have to be multiples
OLD = ('TPU v2', 'TPU v3')  # whose matrix units the kernel does not know
BLOCKS = (512, 256, LANES)  # queries and keys at a time


def choose(kernel: str | None, shape: tuple[int, ...], dtype: jnp.dtype) -> str:
  """The kernel for queries of a shape [B, T, N, H]: where it cannot do that, `xla`.

  Args:
    kernel: `xla`, `splash` or `cudnn`; None: splash, on TPUs.
    shape, dtype: of the queries.
  """
  if kernel is None:
    kernel = 'splash' if placement.device()[0] == 'tpu' else 'xla'
  return 'xla' if kernel in WITHOUT or why_not(kernel, shape, dtype) else kernel


def why_not(kernel: str, shape: tuple[int, ...], dtype: jnp.dtype) -> str | None:
  """What a kernel has against queries of a shape [B, T, N, H], None if nothing."""
  (_, T, _, H), (platform, kind) = shape, placement.device()
  if kernel in WITHOUT:
    return None
  if _spread(shape) is None:
    return 'needs rows and heads that the mesh divides'
  if kernel == 'cudnn':
    if platform != 'gpu' or jnp.dtype(dtype).itemsize != 2 or H % 8:
      what = f'{platform}, {jnp.dtype(dtype).name} and {H}'
      return f'is for GPUs, bfloat16 and head widths that 8 divides, not for {what}'
    return None
  if kind in OLD or platform == 'gpu':
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
) -> jax.Array:
  """softmax(q k^T) v within documents, [B, T, N, H]. Queries come scaled."""
  part = {'splash': _splash, 'cudnn': _cudnn}[kernel]
  rows, heads = _spread(q_BxTxNxH.shape)
  if rows or heads:
    of_heads, of_tokens = jax.P(rows, None, heads), jax.P(rows)
    part = jax.shard_map(
      part, in_specs=(of_heads,) * 3 + (of_tokens,), out_specs=of_heads, check_vma=False
    )
  return part(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, documents_BxT)


def _splash(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, documents_BxT):
  from jax.experimental.pallas.ops.tpu import splash_attention  # not needed elsewhere

  T, N = q_BxTxNxH.shape[1:3]
  block = next(size for size in BLOCKS if T % size == 0)
  names = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq', 'kv_dq')
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * N),
    block_sizes=splash_attention.BlockSizes(**{f'block_{name}': block for name in names}),
    head_shards=1,
    q_seq_shards=1,
    interpret=placement.device()[0] == 'cpu',
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


def _spread(shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
  """The mesh axes of rows and heads; None where they do not divide."""
  found = placement.axes('batch', shape[0]), placement.axes('heads', shape[2])
  return None if None in found else found
