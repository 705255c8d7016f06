"""Attention within a window: queries in blocks, each with the keys that one of them can see.

With M keys before a segment of T, and no query seeing further than M back, a block of b queries
needs M + b of the M + T keys. Blocks become rows of the batch: what computes a segment computes
them, at a cost that grows with the window and not with the segment.

B batch, T queries, M memory, S = M + T keys, b queries of a block, F = T / b blocks.
"""

import math

import jax
import jax.numpy as jnp

BLOCK = 64  # queries of a block at least, where there are as many


def blocks(T: int, M: int) -> int:
  """F: blocks of about a quarter of the window, whose length divides both lengths."""
  longest, common = max(M // 4, BLOCK), math.gcd(T, M)
  b = next((n for n in range(min(longest, common), 0, -1) if common % n == 0), T)
  return 1 if b * 2 < min(BLOCK, T) else T // b  # no small pieces: one block


def of_queries(x_BxTx: jax.Array, F: int) -> jax.Array:
  """[B F, b, ...] of [B, T, ...]."""
  B, T = x_BxTx.shape[:2]
  return x_BxTx.reshape(B * F, T // F, *x_BxTx.shape[2:])


def of_keys(x_BxSx: jax.Array, F: int, T: int) -> jax.Array:
  """[B F, M + b, ...] of [B, S, ...]: of each block what is before it, and itself."""
  if F == 1:
    return x_BxSx
  (B, S), b = x_BxSx.shape[:2], T // F
  pieces = x_BxSx.reshape(B, S // b, b, *x_BxSx.shape[2:])
  before = (S - T) // b
  seen = jnp.stack([pieces[:, first : first + F] for first in range(before + 1)], axis=2)
  return seen.reshape(B * F, S - T + b, *x_BxSx.shape[2:])


def joined(x_: jax.Array, F: int) -> jax.Array:
  """[B, T, ...] of [B F, b, ...]."""
  return x_.reshape(x_.shape[0] // F, F * x_.shape[1], *x_.shape[2:])
