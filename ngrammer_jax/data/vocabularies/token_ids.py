"""Token ids without text, for a model without a tokenizer."""

from collections.abc import Iterable, Sequence

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base


class TokenIds(base.Vocabulary):
  """The token ids of a published model without tokenizer; they have no text.

  Args:
    size: number of ids.
    begin: id of the begin token; None: no begin token.
    ends: ids of the end tokens.
    reason: reason for the missing text, for error messages.
  """

  kind = 'token_ids'
  fields = {}

  def __init__(self, size: int, begin: int | None, ends: Sequence[int], reason: str):
    self.size = size
    self.document_start = next((i for i in (begin, *ends) if i is not None), 0)
    self.document_end = next(iter(ends), None)
    self.adds_start = False
    self.definition = (self.kind, size)
    self._ends = tuple(ends)
    self._reason = reason

  @property
  def end_tokens(self) -> tuple[int, ...]:
    return self._ends

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    raise errors.BadInput(self._reason)

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    return b''
