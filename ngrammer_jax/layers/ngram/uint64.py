"""64-bit integers as pairs of 32-bit words, for devices and programs without 64-bit integers.

Results wrap modulo 2^64. A signed integer is its two's complement, with the same sums and products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class UInt64(NamedTuple):
  """high 2^32 + low, both words uint32 of shapes that broadcast."""

  high: jax.Array
  low: jax.Array


def split_words(values: np.ndarray) -> np.ndarray:
  """Returns the words of uint64 values on the host, uint32 [..., 2], the high word first."""
  values = np.asarray(values, np.uint64)
  return np.stack([values >> np.uint64(32), values], axis=-1).astype(np.uint32)


def from_words(words: jax.Array) -> UInt64:
  """Returns the integers of uint32 words [..., 2], the high word first."""
  return UInt64(words[..., 0], words[..., 1])


def from_int32(values: jax.Array) -> UInt64:
  """Returns integers of at most 32 bits, with their sign extended to the high word."""
  values = jnp.asarray(values, jnp.int32)
  high = jax.lax.bitcast_convert_type(values >> 31, jnp.uint32)
  low = jax.lax.bitcast_convert_type(values, jnp.uint32)
  return UInt64(high, low)


def xor(a: UInt64, b: UInt64) -> UInt64:
  """Returns a XOR b."""
  return UInt64(a.high ^ b.high, a.low ^ b.low)


def add(a: UInt64, b: UInt64) -> UInt64:
  """Returns a + b mod 2^64."""
  low = a.low + b.low
  carry = (low < a.low).astype(jnp.uint32)
  return UInt64(a.high + b.high + carry, low)


def multiply(a: UInt64, b: UInt64) -> UInt64:
  """Returns a b mod 2^64."""
  carry = _high_word(a.low, b.low)
  return UInt64(a.high * b.low + a.low * b.high + carry, a.low * b.low)


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the upper 32 bits of the product of two words, from the products of their halves."""
  a1 = a >> 16
  a0 = a & 0xFFFF
  b1 = b >> 16
  b0 = b & 0xFFFF
  middle = a1 * b0 + (a0 * b0 >> 16)  # at most 2^32 - 1
  other_middle = a0 * b1 + (middle & 0xFFFF)
  return a1 * b1 + (middle >> 16) + (other_middle >> 16)


def signed_remainder(value: UInt64, divisors: np.ndarray) -> jax.Array:
  """Returns the signed value mod the divisors, int32, at least 0 as in Python.

  Appends the bits of the low word to the high word, as many at a time as fit into 32 bits with a
  remainder: 4 for divisors up to 2^28.

  Args:
    value: the dividend, two's complement.
    divisors: integers from 1 to 2^31 - 1 on the host, of a shape that broadcasts with the value.
  """
  high = jax.lax.bitcast_convert_type(value.high, jnp.int32) % np.int32(divisors)
  free_bits = 32 - (int(np.max(divisors)) - 1).bit_length()
  if free_bits == 32:  # all divisors are 1
    return jnp.zeros_like(high)
  bits = 2 ** (free_bits.bit_length() - 1)  # divides 32

  def append_digit(i, result):
    digit = (value.low >> (32 - bits * (i + 1)).astype(jnp.uint32)) & np.uint32(2**bits - 1)
    return (result << bits | digit) % np.uint32(divisors)

  # Without the loop XLA fuses a hash with the lookup, and computes it for every value of a row.
  result = jax.lax.fori_loop(0, 32 // bits, append_digit, high.astype(jnp.uint32))
  return result.astype(jnp.int32)
