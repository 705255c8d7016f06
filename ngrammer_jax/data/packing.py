"""Training batches packed with documents, which are read and tokenised on the fly.

Each batch row reads its own shards in an endless loop and concatenates their documents without
padding. What a row reads at a step is a function of the step alone, for any number of hosts. The
reader states of the rows are saved at regular steps, so that resuming does not read everything
again.

B batch rows, T segment length.
"""

import collections
from collections.abc import Iterator
import contextlib
import itertools
import json
import operator
import pathlib
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import mixture_schedule, streams, vocabularies
from ngrammer_jax.data import shards as shard_files
from ngrammer_jax.system import files

SAVE_INTERVAL = 100  # steps between saved reader states
HISTORY = 8  # saved steps of a file that are searched for a step that all rows have
PREFETCH_BYTES = 4  # bytes of text to tokenise per missing token, an estimate


class ReaderState(NamedTuple):
  """Position of the next token of a row.

  Attributes:
    epoch: number of completed passes over the shards of the row.
    shard: index of the current shard, among the shards of the row.
    document: index of the current document in the shard.
    offset: offset of the document, see `shards.Shards.read`.
    tokens: number of tokens of the document that are already consumed.
  """

  epoch: int = 0
  shard: int = 0
  document: int = 0
  offset: int = 0
  tokens: int = 0


class PackedDataset:
  """Training segments packed with documents.

  Args:
    shards: the shards of the split.
    vocabulary: tokenises the documents.
    batch_size: B.
    length: T.
    folder: where reader states are saved. It must not be shared by different corpora,
      vocabularies, batch sizes, lengths or schedules.
    schedule: the steps at which each row reads the corpus. None: every step.

  Attributes:
    epochs: number of epochs that all rows have completed which were read here.
  """

  def __init__(
    self,
    shards: shard_files.Shards,
    vocabulary: vocabularies.Vocabulary,
    batch_size: int,
    length: int,
    folder: pathlib.Path,
    schedule: mixture_schedule.PartSchedule | None = None,
  ):
    self._shards, self._vocabulary, self.epochs = shards, vocabulary, 0
    self._schedule = schedule or mixture_schedule.whole_batch(batch_size)
    self._batch_size, self._length = batch_size, length
    self._folder = files.SyncedDir(folder, '*.jsonl').folder
    self._readers: dict[range, _BatchReader] = {}

  def segment(self, step: int, rows: slice = slice(None)) -> streams.Segment:
    """Returns the segment of a step, for a slice of the batch rows, if all of them read it."""
    return streams.stack_rows(self.rows(step, range(self._batch_size)[rows]).values())

  def rows(self, step: int, rows: range) -> dict[int, streams.Row]:
    """Returns the segments of those of the rows that read the corpus at a step.

    Raises:
      BadInput: a shard is damaged, or has no document for a row.
    """
    reader = self._readers.get(rows)
    if reader is None or reader.step != step:
      reader = self._readers[rows] = self._open_reader(step, rows)
    if step % SAVE_INTERVAL == 0:
      self._save_states(reader)
    segments = reader.next_segments()
    self.epochs = min(state.epoch for r in self._readers.values() for state in r.states())
    return segments

  def _open_reader(self, step, rows):
    """Returns a reader at a step; it starts from the newest saved states and reads up to there."""
    saved_step, states = self._load_states(step, rows)
    source = self._shards, self._vocabulary, self._batch_size, self._length, self._schedule
    reader = _BatchReader(*source, saved_step, states)
    while reader.step < step:
      reader.next_segments()
    return reader

  def _load_states(self, step, rows):
    """Returns the newest saved step up to `step` that has all rows, and their states."""
    states_by_step: dict[int, dict[int, ReaderState]] = {}
    for path in self._folder.glob('*.jsonl'):
      for saved_step, states in _read_states(path, step).items():
        states_by_step.setdefault(saved_step, {}).update(states)
    complete = [s for s, states in states_by_step.items() if s <= step and set(rows) <= set(states)]
    if not complete:
      return 0, {row: ReaderState() for row in rows}
    states = states_by_step[max(complete)]
    return max(complete), {row: states[row] for row in rows}

  def _save_states(self, reader):
    path = self._folder / f'{reader.rows[0]}-{reader.rows[-1]}.jsonl'
    line = {'step': reader.step, 'first': reader.rows[0], 'places': reader.states()}
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      with path.open('a', encoding='utf-8') as file:
        # A killed process may have left an incomplete line: start a new one.
        file.write('\n' * bool(file.tell()) + json.dumps(line) + '\n')
    except OSError as error:
      raise errors.BadInput(f'{path} cannot be written: {error.strerror}') from error


def _read_states(path: pathlib.Path, max_step: int) -> dict[int, dict[int, ReaderState]]:
  """Returns the last saved states up to a step, by step and row.

  Several steps are returned, because one host may be a few steps behind another. Lines that a
  killed process or a disk has damaged are ignored: those documents are read again.
  """
  states_by_step: dict[int, dict[int, ReaderState]] = {}
  with contextlib.suppress(OSError), path.open(encoding='utf-8', errors='replace') as file:
    for line in file:
      with contextlib.suppress(ValueError, TypeError, KeyError):
        fields = json.loads(line)
        if fields['step'] <= max_step:
          states = (ReaderState(*map(operator.index, state)) for state in fields['places'])
          states_by_step[fields['step']] = dict(enumerate(states, fields['first']))
      if len(states_by_step) > HISTORY:
        del states_by_step[min(states_by_step)]
  return states_by_step


class _BatchReader:
  """Reads a range of batch rows, segment by segment."""

  def __init__(self, shards, vocabulary, batch_size, length, schedule, step, states):
    self.step = step
    self.rows = list(states)
    self._vocabulary, self._length, self._schedule = vocabulary, length, schedule
    self._row_readers = {
      row: _RowReader(shards, row, batch_size, state, vocabulary.document_start)
      for row, state in states.items()
    }

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
      for reader in incomplete:
        missing_bytes = PREFETCH_BYTES * (self._length - reader.num_buffered)
        while missing_bytes > 0:
          state, text = next(reader.documents)
          batch.append((reader, state, text))
          missing_bytes -= len(text)
      texts = [text for _, _, text in batch]
      ids_per_text = self._vocabulary.encode_all(texts)
      for (reader, state, _), ids in zip(batch, ids_per_text, strict=True):
        reader.add_tokens(state, ids)


class _RowReader:
  """Reads the documents of one batch row and buffers their tokens."""

  def __init__(self, shards, row, batch_size, state, document_start):
    self._shards, self._document_start = shards, document_start
    num_shards = len(shards.files)
    self._shard_indices = list(range(row, num_shards, batch_size)) or [row % num_shards]
    # With fewer shards than rows, several rows share a shard: each takes every n-th document.
    self._num_sharers = len(range(row % num_shards, batch_size, num_shards))
    self._sharer_index = row // num_shards
    self.documents = self._read_documents(state)
    # Documents with the position of their next token.
    self._buffer: collections.deque[tuple[ReaderState, np.ndarray]] = collections.deque()
    self._state_if_empty = state
    self.num_buffered = 0

  def _read_documents(self, state) -> Iterator[tuple[ReaderState, bytes]]:
    """Yields the state before each document, and its text, without end."""
    _, first_shard, document, offset, tokens = state
    for epoch in itertools.count(state.epoch):
      num_documents = 0
      for shard in range(first_shard, len(self._shard_indices)):
        shard_index = self._shard_indices[shard]
        for record, next_offset in self._shards.read(shard_index, document, offset):
          text = b''
          if document % self._num_sharers == self._sharer_index:
            text = self._shards.text(shard_index, document, record)
          if text:
            num_documents += 1
            yield ReaderState(epoch, shard, document, offset, tokens), text
            tokens = 0
          document, offset = document + 1, next_offset
        document = offset = 0
      if not num_documents and epoch > state.epoch:
        names = ', '.join(str(self._shards.files[index]) for index in self._shard_indices)
        raise errors.BadInput(
          f'{names} has no document for one of the {self._num_sharers} rows that read it: reduce '
          f'training.batch_size to at most the number of documents, or add text'
        )
      first_shard = 0

  def add_tokens(self, state: ReaderState, ids: np.ndarray) -> None:
    """Appends the tokens of a document, and a document start, to the buffer."""
    if not len(ids):
      return
    self._buffer.append((state, np.append(ids, self._document_start).astype(np.int32)))
    self.num_buffered += len(ids) + 1 - state.tokens

  def state(self) -> ReaderState:
    """Returns the position of the next token."""
    return self._buffer[0][0] if self._buffer else self._state_if_empty

  def take(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Removes the next tokens from the buffer. Returns their inputs, targets and starts, [T]."""
    targets, starts = np.empty(length, np.int32), np.zeros(length, bool)
    first_input, num_filled = None, 0
    while num_filled < length:
      state, ids = self._buffer.popleft()
      if first_input is None:
        first_input = ids[state.tokens - 1] if state.tokens else self._document_start
      part = ids[state.tokens : state.tokens + length - num_filled]
      targets[num_filled : num_filled + len(part)] = part
      starts[num_filled] = state.tokens == 0
      num_filled += len(part)
      state = state._replace(tokens=state.tokens + len(part))
      if state.tokens < len(ids):
        self._buffer.appendleft((state, ids))
      self._state_if_empty = state
    self.num_buffered -= length
    return np.insert(targets[:-1], 0, first_input), targets, starts
