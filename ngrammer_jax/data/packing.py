"""Training batches packed with documents, which are read and tokenised on the fly.

Each batch row reads its own shards in an endless loop and concatenates their documents without
padding. What a row reads at a step is a function of the step alone, for any number of hosts. The
reader states of the rows are saved at regular steps, so that resuming does not read everything
again.

B batch rows, T segment length.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import pathlib
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import fingerprints, mixture_schedule, streams, text_files, vocabularies
from ngrammer_jax.data import shards as shard_files
from ngrammer_jax.data.formats import FilePosition
from ngrammer_jax.system import files, synced_folder

SAVE_INTERVAL = 100  # steps between saved reader states
FILE_STEPS = 5_000  # after which states are saved to another file: a bucket gets whole files
HISTORY = 8  # saved states that are searched for a step that all rows have
PREFETCH_BYTES = 6  # of text for each missing token: more than most have
BLOCK_DOCUMENTS, BLOCK_BYTES = 128, 256 << 10
SHARED_BYTES = 256 << 20  # of documents that wait for other rows, and number of their blocks
MAX_BLOCKS = 1 << 14
MAX_ROW_FILES = 64  # open files of rows that are further behind
NEAR = 1 << 15  # documents that are read on the way to a block, rather than opening its file again


class ReaderState(NamedTuple):
  """Position of the next token of a row.

  Attributes:
    epoch: number of completed passes over the shards of the row.
    shard: index of the current shard, in the order of the epoch.
    document, offset: place of a block of documents in the shard, see `formats.FilePosition`.
    tokens: number of tokens of the current document that are already consumed.
    frame: the last part of the place.
    turn: index of the current document in the order of the block.
  """

  epoch: int = 0
  shard: int = 0
  document: int = 0
  offset: int = 0
  tokens: int = 0
  frame: int = 0
  turn: int = 0


@dataclasses.dataclass
class Block:
  """Documents of a shard, one after another.

  Attributes:
    place: where the first one begins.
    records: their records, see `shards.Shards`; b'' for what is not waited for.
    size: bytes of the records.
    next: place of the next block; None at the end of the shard.
    num_waiting: number of rows that will ask for it, if several do.
  """

  place: FilePosition
  records: list[bytes]
  size: int = 0
  next: FilePosition | None = None
  num_waiting: int = 0

  def take(self, number: int) -> bytes:
    """Returns a record, which is not kept: each document is of one row."""
    record, self.records[number] = self.records[number], b''
    self.size -= len(record)
    return record


class _Source:
  """The documents of the shards, for the rows of one reader.

  They are read in blocks, once for all rows of a shard, while at most SHARED_BYTES wait for rows
  that are behind; those that are further behind read for themselves. A block has BLOCK_DOCUMENTS
  documents, or fewer that have BLOCK_BYTES, so it does not depend on who reads it.

  Args:
    shards: the shards.
    shard_fingerprints: their fingerprints.
    has_blank: whether white space is a document.
    rows: the rows of the reader; the documents of others are not kept.
  """

  def __init__(
    self,
    shards: shard_files.Shards,
    shard_fingerprints: fingerprints.ShardFingerprints,
    has_blank: bool,
    rows: Sequence[int],
  ):
    self.files, self._shards, self._rows = shards.files, shards, rows
    self._fingerprints, self._has_blank = shard_fingerprints, has_blank
    self._num_empty = 0
    self._blocks: dict[tuple[int, int, FilePosition], Block] = {}  # by epoch, shard and place
    # Place of the newest block, by epoch and shard.
    self._lead: dict[tuple[int, int], FilePosition] = {}
    # Of each epoch of a shard, and of each row that reads for itself: shard and place of what is
    # read next.
    self._open: dict[tuple[int, ...], tuple[tuple[int, FilePosition], Iterator]] = {}

  def block(
    self, shard: int, place: FilePosition, epoch: int, row: int, sharers: Sequence[int]
  ) -> Block:
    """Returns the block at a place, for which each of the rows that share the shard asks once."""
    epoch_shard = epoch, shard
    if len(sharers) == 1:
      return self._read_block(shard, place, epoch_shard)
    if (block := self._blocks.get((*epoch_shard, place))) is None:
      if place < self._lead.get(epoch_shard, FilePosition()):
        return collections.deque(self._read_up_to(shard, place, (row,)), 1).pop()
      local_turns = {sharers.index(row) for row in self._rows if row in sharers}
      for block in self._read_up_to(shard, place, epoch_shard):
        for number in range(len(block.records)):
          if (block.place.document + number) % len(sharers) not in local_turns:
            block.take(number)
        block.num_waiting = len(local_turns)
        self._blocks[*epoch_shard, block.place] = block
        excess = sum(block.size for block in self._blocks.values()) - SHARED_BYTES
        while excess > 0 or len(self._blocks) > MAX_BLOCKS:
          excess -= self._blocks.pop(next(iter(self._blocks))).size
      self._lead[epoch_shard] = place
    block.num_waiting -= 1
    if not block.num_waiting:  # nor does a row wait for an earlier one
      for key in [key for key in self._blocks if key[:2] == epoch_shard and key[2] <= place]:
        del self._blocks[key]
    return block

  def _read_up_to(self, shard, place, reader):
    """Yields blocks from where a reader (see `_open`) is, if that is near, up to a place."""
    (open_shard, begin), _ = self._open.get(reader, ((shard, place), None))
    is_near = open_shard == shard and 0 <= place.document - begin.document < NEAR
    begin, block = begin if is_near else place, None
    while block is None or block.place != place:
      yield (block := self._read_block(shard, begin, reader))
      # A place of an earlier version may be within a block.
      begin = place if block.next is None or block.next > place else block.next

  def _read_block(self, shard, place, reader):
    block = Block(place, [])
    begin, documents = self._open.pop(reader, (None, None))
    if begin != (shard, place):
      self._fingerprints.check(shard)
      documents = self._shards.read(shard, place)
    with self._fingerprints.record_damage(shard):
      for record, end in documents:
        block.records.append(record)
        block.size += len(record)
        if len(block.records) == BLOCK_DOCUMENTS or block.size >= BLOCK_BYTES:
          block.next = end
          self._open[reader] = (shard, end), documents
          of_rows = [opened for opened in self._open if len(opened) == 1]
          if len(of_rows) > MAX_ROW_FILES:
            del self._open[of_rows[0]]
          break
    return block

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """Returns the text of a document, b'' for one to be left out; empty ones are counted."""
    try:
      text = self._shards.text(shard, document, record)
    except errors.BadInput:
      with self._fingerprints.record_damage(shard):  # too slow for every document
        raise
    if text is None or text.strip() or (text and self._has_blank):
      return text or b''
    self._num_empty += 1
    if str(self._num_empty).strip('0') == '1':
      logging.info('number of empty documents that were skipped so far: %s', f'{self._num_empty:,}')
    return b''


class PackedDataset:
  """Training segments packed with documents.

  Args:
    shards: the shards of the split.
    vocabulary: tokenises the documents.
    schedule: the steps at which each of B rows reads the corpus.
    length: T.
    folder: where reader states are saved. It must not be shared by different corpora,
      vocabularies, batch sizes, lengths or schedules.
    shuffle: seed of the order of the shards of a row in each epoch, and of the documents of each
      block. None: as they are stored.
    begin_of_text: whether documents are separated by end and begin, see `Vocabulary.separator`.

  Attributes:
    epochs: number of epochs that all rows have completed which were read here.
  """

  def __init__(
    self,
    shards: shard_files.Shards,
    vocabulary: vocabularies.Vocabulary,
    schedule: mixture_schedule.PartSchedule,
    length: int,
    folder: pathlib.Path,
    shuffle: int | None,
    begin_of_text: bool,
  ):
    self.epochs, self._order = 0, [shuffle, begin_of_text]
    synced = synced_folder.SyncedFolder(folder, '*.jsonl')
    self._folder = synced.folder
    shard_fingerprints = fingerprints.ShardFingerprints(synced, shards.files)
    # The run may have begun with a version that took white space for a document.
    oldest = (next(self._saved_states(path), None) for path in self._folder.glob('[0-9]*.jsonl'))
    has_blank = any(saved is not None and saved[2] == 5 for saved in oldest)
    self._make_source = functools.partial(_Source, shards, shard_fingerprints, has_blank)
    options = schedule.batch_size, shuffle, vocabulary.separator(begin_of_text)
    self._make_row = functools.partial(_RowReader, *options)
    self._make_reader = functools.partial(_BatchReader, vocabulary, length, schedule)
    self._readers: dict[range, _BatchReader] = {}

  def rows(self, step: int, rows: range) -> dict[int, streams.Row]:
    """Returns the segments of those of the rows that read the corpus at a step.

    Raises:
      BadInput: a shard is damaged, or has no document for a row.
    """
    reader = self._readers.get(rows)
    if reader is None or reader.step != step:
      reader = self._readers[rows] = self._open_reader(step, rows)
    if step % SAVE_INTERVAL == 0:
      path = self._folder / f'{rows[0]}-{rows[-1]}.{step // FILE_STEPS}.jsonl'
      line = {'step': step, 'first': rows[0], 'places': reader.states(), 'order': self._order}
      files.append_json(path, line)
    segments = reader.next_segments()
    self.epochs = min(state.epoch for r in self._readers.values() for state in r.states())
    return segments

  def _saved_states(self, path: pathlib.Path) -> Iterator[tuple[int, dict[int, ReaderState], int]]:
    """Yields each step of a file, the state of each row, and how many values a state has.

    Those of another order of the documents are left out.
    """
    for line in files.read_json_lines(path):
      with contextlib.suppress(ValueError, TypeError, LookupError):
        step, first, places = operator.index(line['step']), line['first'], line['places']
        states = [ReaderState(*map(operator.index, place)) for place in places]
        # An earlier version did not write the order.
        if line.get('order', self._order) == self._order:
          yield step, dict(enumerate(states, first)), len(places[0])

  def _open_reader(self, step, rows):
    """Returns a reader at a step; it starts from the newest saved states and reads up to there.

    Several saved steps are searched for one that has all rows, because one host may be a few steps
    behind another. The documents of damaged lines are read again.
    """
    states_by_step = {0: {row: ReaderState() for row in rows}}
    for path in self._folder.glob('[0-9]*.jsonl'):
      for saved_step, states, _ in self._saved_states(path):
        if saved_step <= step:
          states_by_step.setdefault(saved_step, {}).update(states)
        if len(states_by_step) > HISTORY:
          del states_by_step[sorted(states_by_step)[1]]  # the oldest one but the beginning
    newest = max(saved for saved, states in states_by_step.items() if set(rows) <= set(states))
    source = self._make_source(rows)  # of this reader alone: what a row has taken is gone
    states = states_by_step[newest]
    row_readers = {row: self._make_row(source, row, states[row]) for row in rows}
    reader = self._make_reader(row_readers, newest)
    while reader.step < step:
      reader.next_segments()
    return reader


class _BatchReader:
  """Reads a range of batch rows, segment by segment."""

  def __init__(self, vocabulary, length, schedule, row_readers, step):
    self._vocabulary, self._length, self._schedule = vocabulary, length, schedule
    self._row_readers, self.step = row_readers, step

  def states(self) -> list[ReaderState]:
    """Returns the states of all rows, before the next segment."""
    return [reader.state() for reader in self._row_readers.values()]

  def next_segments(self) -> dict[int, streams.Row]:
    """Returns the next segment of each row that reads the corpus at this step."""
    is_reading_B = self._schedule.is_reading(self.step)
    readers = {row: reader for row, reader in self._row_readers.items() if is_reading_B[row]}
    self._fill_buffers(readers.values())
    self.step += 1
    return {row: reader.take(self._length) for row, reader in readers.items()}

  def _fill_buffers(self, readers):
    """Tokenises until every row has a segment: the texts of all rows in one parallel call."""
    while incomplete := [r for r in readers if r.num_buffered < self._length]:
      batch = []
      # In the order of their documents: those of a shard are read on from the first one.
      for reader in sorted(incomplete, key=lambda reader: reader.state()[:3]):
        missing_bytes = PREFETCH_BYTES * (self._length - reader.num_buffered)
        while missing_bytes > 0:
          state, text = next(reader.documents)
          batch.append((reader, state, text))
          missing_bytes -= len(text)
      for (reader, state, _), ids in zip(batch, self._encode([b[2] for b in batch]), strict=True):
        reader.add_tokens(state, ids)

  def _encode(self, texts):
    if max(map(len, texts)) <= text_files.LONG:
      return self._vocabulary.encode_all(texts)
    encode = lambda text: self._vocabulary.encode_all(list(text_files.split_long(text)))
    return [np.concatenate(encode(text)) for text in texts]


class _RowReader:
  """Reads the documents of one batch row and buffers their tokens."""

  def __init__(self, batch_size, shuffle, separator, source, row, state):
    self._shuffle, self._separator, self._source = shuffle, np.int32(separator), source
    num_shards = len(source.files)
    self._shard_indices = list(range(row, num_shards, batch_size)) or [row % num_shards]
    # With fewer shards than rows, several rows share a shard: each takes every n-th document.
    self._row, self._sharers = row, range(row % num_shards, batch_size, num_shards)
    self.documents = self._read_documents(state)
    # Documents after a document start, with the position of their next token.
    self._buffer: collections.deque[tuple[ReaderState, np.ndarray]] = collections.deque()
    self._state_if_empty = state
    self.num_buffered = 0

  def _read_documents(self, state) -> Iterator[tuple[ReaderState, bytes]]:
    """Yields the state before each document, and its text, without end."""
    tokens, first_turn = state.tokens, state.turn
    place, first_shard = FilePosition(state.document, state.offset, state.frame), state.shard
    for epoch in itertools.count(state.epoch):
      num_documents = 0
      order = self._order(len(self._source.files), epoch)
      for shard in range(first_shard, len(self._shard_indices)):
        index = order[self._shard_indices[shard]]
        while place is not None:
          block = self._source.block(index, place, epoch, self._row, self._sharers)
          turns = self._order(len(block.records), epoch, index, place.document)
          for turn, number in list(enumerate(turns))[first_turn:]:
            document = place.document + number
            if self._sharers[document % len(self._sharers)] != self._row:
              continue
            if text := self._source.text(index, document, block.take(number)):
              num_documents += 1
              yield ReaderState(epoch, shard, *place[:2], tokens, place.frame, turn), text
              tokens = 0
          place, first_turn = block.next, 0
        place = FilePosition()
      if not num_documents and epoch > state.epoch:
        names = ', '.join(str(self._source.files[index]) for index in self._shard_indices)
        raise errors.BadInput(
          f'{names} has no document for one of the {len(self._sharers)} rows that read it: reduce '
          f'training.batch_size to at most the number of documents, or add text'
        )
      first_shard = 0

  def _order(self, count: int, *position: int) -> Sequence[int]:
    """Returns the order of `count` shards or documents at a position: of the seed alone."""
    if self._shuffle is None:
      return range(count)
    # The numbers of this older class are the same in all versions of NumPy.
    return np.random.RandomState([self._shuffle, *position]).permutation(count).tolist()

  def add_tokens(self, state: ReaderState, ids: np.ndarray) -> None:
    """Appends the tokens of a document, and those that separate it, to the buffer.

    Raises:
      BadInput: a row was further in the document than its tokens.
    """
    if not len(ids):
      return
    tokens = np.concatenate([self._separator[-1:], ids, self._separator], dtype=np.int32)
    if state.tokens >= len(tokens):
      raise errors.BadInput(
        f'a row was at token {state.tokens:,} of a document that has {len(tokens) - 1:,} now: the '
        f'tokenizer was changed since; use the version that the run began with'
      )
    self._buffer.append((state, tokens))
    self.num_buffered += len(tokens) - 1 - state.tokens

  def state(self) -> ReaderState:
    """Returns the position of the next token."""
    return self._buffer[0][0] if self._buffer else self._state_if_empty

  def take(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Removes the next tokens from the buffer. Returns their inputs, targets and starts, [T]."""
    self.num_buffered -= length
    inputs, targets = np.empty((2, length), np.int32)
    starts = np.zeros(length, bool)
    position = 0
    while position < length:
      state, tokens = self._buffer.popleft()
      begin, end = state.tokens, min(state.tokens + length - position, len(tokens) - 1)
      part = slice(position, position + end - begin)
      inputs[part], targets[part] = tokens[begin:end], tokens[begin + 1 : end + 1]
      starts[position] = begin == 0
      position = part.stop
    self._state_if_empty = state._replace(tokens=end)
    if end < len(tokens) - 1:
      self._buffer.appendleft((self._state_if_empty, tokens))
    return inputs, targets, starts
