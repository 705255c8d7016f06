"""The rows of a batch that other processes have read.

B batch, T segment length.
"""

from collections.abc import Mapping, Sequence
import io

import numpy as np

from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.system import hosts

Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens_BxT, starts_BxT, valid_BxT


def gather(
  mailbox: hosts.Mailbox, number: int, parts: Mapping[int, token_batch.Batch]
) -> token_batch.Batch:
  """Returns the segment of all rows of the batch, without targets.

  Args:
    mailbox: of all processes.
    number: of the exchange, see `Mailbox.exchange`.
    parts: the rows that this process has read, as NumPy arrays, by the number of the first row.
  """
  own = {first: (b.tokens_BxT, b.starts_BxT, b.valid_BxT) for first, b in parts.items()}
  by_first: dict[int, Sequence[np.ndarray]] = dict(own)
  if hosts.is_multiprocess():
    for content in mailbox.exchange(number, _to_bytes(own)):
      by_first |= _from_bytes(content)
  in_order = [by_first[first] for first in sorted(by_first)]
  tokens, starts, valid = (np.concatenate(arrays) for arrays in zip(*in_order, strict=True))
  return token_batch.Batch(tokens, None, starts, valid)


def _to_bytes(parts: Mapping[int, Part]) -> bytes:
  """Returns arrays by number as bytes."""
  file = io.BytesIO()
  arrays = {f'{number}_{i}': each for number, part in parts.items() for i, each in enumerate(part)}
  np.savez(file, **arrays)
  return file.getvalue()


def _from_bytes(content: bytes) -> dict[int, list[np.ndarray]]:
  """The inverse of `_to_bytes`."""
  parts: dict[int, list[np.ndarray]] = {}
  with np.load(io.BytesIO(content)) as arrays:
    for name in arrays.files:
      parts.setdefault(int(name.partition('_')[0]), []).append(arrays[name])
  return parts
