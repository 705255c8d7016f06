"""Rows of 8-bit floats (e4m3), of which every 32 values share a scale, a power of 2 (e8m0).

R rows, E values of a row, S = E / 32 scales of a row.
"""

import ml_dtypes
import numpy as np

SCALED_VALUES = 32  # values that share a scale
# The number of each byte: looking up is five times as fast as `astype`.
_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LARGEST = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def dequantize(values_RxE: np.ndarray, scales_RxS: np.ndarray) -> np.ndarray:
  """Returns the products of values and scales, float32 [R, E], which are exact."""
  blocks = _NUMBERS[values_RxE.view(np.uint8)].reshape(*scales_RxS.shape, SCALED_VALUES)
  return (blocks * scales_RxS.astype(np.float32)[..., None]).reshape(values_RxE.shape)


def quantize(rows_RxE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns values [R, E] and scales [R, S] of finite rows [R, E].

  The scales are the smallest with which no value overflows, and 1 for zeros. So the products of
  any values and scales are returned without loss, although the scales may differ.
  """
  rows_RxE = np.asarray(rows_RxE, np.float32)
  blocks = rows_RxE.reshape(len(rows_RxE), -1, SCALED_VALUES)
  fraction, exponent = np.frexp(np.abs(blocks).max(axis=-1) / _LARGEST)
  exponent = np.clip(exponent - (fraction == 0.5), -127, 127)  # fractions are at least 0.5
  scales_RxS = (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
  values = np.ldexp(blocks, -exponent[..., None]).astype(ml_dtypes.float8_e4m3fn)
  return values.reshape(rows_RxE.shape), scales_RxS
