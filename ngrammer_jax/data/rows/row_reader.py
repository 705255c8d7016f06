"""One row of the batch, streamed from shards: its tokens and its state."""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import pathlib
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.formats.interface import FilePosition
from ngrammer_jax.data.rows import document_blocks
from ngrammer_jax.data.tokens import document_encoder, token_split


class RowState(NamedTuple):
  """The position of the next token of a row.

  Checkpoints hold these values in this order. `document`, `offset` and `frame` are one position.

  Attributes:
    epoch: number of completed passes over the shards.
    shard: index of the current shard, among those of the row in this epoch.
    document, offset: position of the block of documents, see `formats.FilePosition`.
    tokens: number of consumed tokens of the current document.
    frame: the rest of the position of the block.
    index: index of the current document in the order of the block.
  """

  epoch: int = 0
  shard: int = 0
  document: int = 0
  offset: int = 0
  tokens: int = 0
  frame: int = 0
  index: int = 0

  @property
  def position(self) -> FilePosition:
    """The position of the block of documents."""
    return FilePosition(self.document, self.offset, self.frame)


@dataclasses.dataclass(frozen=True)
class ShuffledOrder:
  """The order of the shards of an epoch, and of the documents of a block (`data.shuffle`).

  It is a function of the seed, the epoch and the block alone.

  Attributes:
    seed: random seed; None: stored order.
  """

  seed: int | None = None

  def permutation(self, count: int, *indices: int) -> Sequence[int]:
    """Returns the order of `count` shards or documents.

    Args:
      count: their number.
      **indices: the epoch; for documents also the shard and the first document of the block.
    """
    if self.seed is None:
      return range(count)
    # The numbers of this older class are the same in all versions of NumPy.
    return np.random.RandomState([self.seed, *indices]).permutation(count).tolist()


class RowReader:
  """Reads the documents of one batch row and buffers their tokens.

  Row b of B reads the shards b, b + B, ... in an endless loop. With fewer shards than rows, the
  rows b, b + S, ... share a shard of S, and each reads every n-th document.

  Args:
    row: number of the row in the global batch.
    batch_size: B.
    blocks: reads the documents.
    order: order of shards and documents.
    separator: tokens between two documents.
    state: start state.
  """

  def __init__(
    self,
    row: int,
    batch_size: int,
    blocks: document_blocks.BlockReader,
    order: ShuffledOrder,
    separator: Sequence[int],
    state: RowState,
  ):
    self._row = row
    self._blocks = blocks
    self._order = order
    self._separator = np.int32(separator)
    num_shards = len(blocks.files)
    self._shard_indices = list(range(row, num_shards, batch_size)) or [row % num_shards]
    self._sharing_rows = range(row % num_shards, batch_size, num_shards)
    self.documents = self._read_documents(state)
    # Tokens of documents after a document start, with the state before their next token, and
    # whether they count.
    self._buffer: collections.deque[tuple[RowState, np.ndarray, np.ndarray | None]]
    self._buffer = collections.deque()
    self._state_if_empty = state
    self.num_buffered = 0

  @property
  def state(self) -> RowState:
    """The state before the next token."""
    if not self._buffer:
      return self._state_if_empty
    return self._buffer[0][0]

  def file_of(self, state: RowState) -> pathlib.Path:
    """Returns the file of a document yielded with this state."""
    order = self._order.permutation(len(self._blocks.files), state.epoch)
    return self._blocks.files[order[self._shard_indices[state.shard]]]

  def _read_documents(self, state: RowState) -> Iterator[tuple[RowState, bytes]]:
    """Yields the state before each document, and its text, without end."""
    for epoch in itertools.count(state.epoch):
      begin = RowState(epoch)
      if epoch == state.epoch:
        begin = state
      has_documents = False
      for document in self._read_epoch(begin):
        has_documents = True
        yield document
      if not has_documents and epoch > state.epoch:
        shuffled = self._order.permutation(len(self._blocks.files), epoch)
        files = [self._blocks.files[shuffled[index]] for index in self._shard_indices]
        names = ', '.join(map(str, files))
        raise errors.BadInput(
          f'{names} has no document for one of the {len(self._sharing_rows)} rows that read it: '
          f'reduce training.batch_size to at most the number of documents, or add text'
        )

  def _read_epoch(self, state: RowState) -> Iterator[tuple[RowState, bytes]]:
    """Yields the state before each document of an epoch from a state on, and its text."""
    epoch = state.epoch
    tokens = state.tokens
    order = self._order.permutation(len(self._blocks.files), epoch)
    for shard in range(state.shard, len(self._shard_indices)):
      file = order[self._shard_indices[shard]]
      begin = state if shard == state.shard else RowState()
      position = begin.position
      first_index = begin.index
      while position is not None:
        block = self._blocks.read(file, position, epoch, self._row, self._sharing_rows)
        documents = self._order.permutation(len(block.records), epoch, file, position.document)
        for index in range(first_index, len(documents)):
          document = position.document + documents[index]
          if self._sharing_rows[document % len(self._sharing_rows)] != self._row:
            continue
          text = self._blocks.text(file, document, block.take(documents[index]))
          if text:
            before = RowState(epoch, shard, *position[:2], tokens, position.frame, index)
            yield before, text
            tokens = 0
        position = block.next_position
        first_index = 0

  def add_tokens(self, state: RowState, document: document_encoder.EncodedDocument) -> None:
    """Appends the tokens of a document and its separator to the buffer.

    If some of its tokens have no loss, neither have the separators around it.

    Raises:
      BadInput: the state of the row is beyond the tokens of the document.
    """
    if not len(document.ids):
      return
    tokens = np.concatenate([self._separator[-1:], document.ids, self._separator], dtype=np.int32)
    counts = None
    if document.counts is not None:
      counts = np.zeros(len(tokens), bool)
      counts[1 : 1 + len(document.ids)] = document.counts
    if state.tokens >= len(tokens):
      raise errors.BadInput(
        f'a row was at token {state.tokens:,} of a document that has {len(tokens) - 1:,} now: the '
        f'tokenizer has changed; use the version of the start of the run'
      )
    self._buffer.append((state, tokens, counts))
    self.num_buffered += len(tokens) - 1 - state.tokens

  def take(self, length: int) -> token_split.Row:
    """Removes the next tokens from the buffer, and returns them."""
    self.num_buffered -= length
    inputs = np.empty(length, np.int32)
    targets = np.empty(length, np.int32)
    starts = np.zeros(length, bool)
    is_counted = np.ones(length, bool)
    has_counts = False
    filled = 0
    while filled < length:
      state, tokens, counts = self._buffer.popleft()
      begin = state.tokens
      end = min(begin + length - filled, len(tokens) - 1)
      part = slice(filled, filled + end - begin)
      inputs[part] = tokens[begin:end]
      targets[part] = tokens[begin + 1 : end + 1]
      if counts is not None:
        is_counted[part] = counts[begin + 1 : end + 1]
        has_counts = True
      starts[filled] = begin == 0
      filled = part.stop
    self._state_if_empty = state._replace(tokens=end)
    if end < len(tokens) - 1:
      self._buffer.appendleft((self._state_if_empty, tokens, counts))
    if not has_counts:
      is_counted = None
    return token_split.Row(inputs, targets, starts, is_counted)
