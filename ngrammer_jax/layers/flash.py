"""Attention in kernels that never have all scores at once.

They know one mask: a token sees its own document, up to and including itself. `splash` is of TPUs
(on a CPU it is interpreted, which is slow and for tests), `cudnn` of GPUs; `xla` stands for none.

B batch, T segment length, N heads, H head width.
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from ngrammer_jax.layers import placement

KERNELS = ('xla', 'splash', 'cudnn')
LANES = 128  # of a TPU; segments have to be multiples
OLD = ('TPU v2', 'TPU v3')  # whose matrix units the kernel does not know
BLOCKS = (512, 256, LANES)  # queries and keys at a time


def choose(kernel: str | None, shape: tuple[int, ...], dtype: jnp.dtype) -> str:
  """The kernel for queries of a shape [B, T, N, H].

  Args:
    kernel: one of KERNELS; None: splash on TPUs where it can.
    shape, dtype: of the queries.

  Raises:
    ValueError: the kernel that is asked for cannot do this.
  """
  (_, T, _, H), (platform, kind) = shape, placement.device()
  if kernel is None:
    new = platform == 'tpu' and kind not in OLD
    kernel = 'splash' if new and T % LANES == 0 and _spread(shape) else 'xla'
  if kernel == 'splash' and kind in OLD:
    raise ValueError(f'kernel "splash" is for TPUs from v4 on, not for {kind}')
  if kernel == 'splash' and T % LANES:
    raise ValueError(f'kernel "splash" is for segments of {LANES} tokens or multiples, not {T}')
  if kernel == 'splash' and dtype == jnp.float64:
    raise ValueError('kernel "splash" has no float64')
  if kernel == 'cudnn' and (platform != 'gpu' or jnp.dtype(dtype).itemsize != 2 or H % 8):
    raise ValueError(
      f'kernel "cudnn" is for GPUs, bfloat16 and a head width of 8 or multiples, not for '
      f'{platform}, {jnp.dtype(dtype).name} and {H}'
    )
  if kernel != 'xla' and not _spread(shape):
    raise ValueError(f'kernel "{kernel}" needs rows and heads that the mesh divides, not {shape}')
  return kernel


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
