"""Rows of shards: documents are read and tokenised during training.

Row b of B reads the shards b, b + B, ... of the order of an epoch, without end. With fewer shards
than rows, several rows share a shard, and each reads every n-th document. A row concatenates its
documents without padding.

The tokens of a step do not depend on the number of hosts, but reaching them requires reading all
earlier documents. So a checkpoint has the state of each row for a resumed run.

B batch rows, T segment length.
"""

from collections.abc import Collection, Mapping
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.documents.corpus import Shards
from ngrammer_jax.data.files import fingerprints
from ngrammer_jax.data.rows import (
  document_blocks,
  mixture_schedule,
  row_reader,
  saved_places,
)
from ngrammer_jax.data.tokens import document_encoder, token_split
from ngrammer_jax.system import synced_folder

BYTES_PER_TOKEN = 6  # of text to read for each missing token: more than most tokens have


class StreamedRows:
  """The training rows of shards, packed with documents; see `interface.TrainRows`.

  Args:
    shards: the shards of the split.
    encoder: tokenises the documents.
    schedule: the steps at which each of B rows reads the corpus.
    length: T.
    folder: folder of the shard fingerprints, a separate one for each corpus.
    shuffle: shuffle seed for the shards of each epoch and the documents of each block. None: stored
      order.
    begin_of_text: whether documents are separated by end and begin, see `Vocabulary.separator`.
    old_folder: `places/` of version 0.3.0, with row states and fingerprints; None: `folder`.

  Attributes:
    epochs: number of epochs completed by all rows read here.
  """

  def __init__(
    self,
    shards: Shards,
    encoder: document_encoder.DocumentEncoder,
    schedule: mixture_schedule.PartSchedule,
    length: int,
    folder: pathlib.Path,
    shuffle: int | None,
    begin_of_text: bool,
    old_folder: pathlib.Path | None = None,
  ):
    self.epochs = 0
    self._shards = shards
    self._encoder = encoder
    self._schedule = schedule
    self._length = length
    self._order = row_reader.ShuffledOrder(shuffle)
    self._separator = encoder.vocabulary.separator(begin_of_text)
    synced = synced_folder.SyncedFolder(folder, '*.jsonl')
    self._fingerprints = fingerprints.ShardFingerprints(synced, shards.files, old_folder)
    self._places = saved_places.SavedPlaces(old_folder or folder, [shuffle, begin_of_text])
    # The oldest versions read documents of white space, so their runs do to their end.
    self._keeps_blank = self._places.keeps_blank
    # The states of all rows before the step of the checkpoint.
    self._restored_step = 0
    self._restored = dict.fromkeys(range(schedule.batch_size), row_reader.RowState())
    self._readers: dict[range, _BatchReader] = {}

  def rows(self, step: int, rows: range) -> dict[int, token_split.Row]:
    """Returns the segments of the rows that read the corpus at a step.

    Raises:
      BadInput: a damaged shard, or a shard without a document for a row.
    """
    reader = self._readers.get(rows)
    if reader is None or reader.step != step:
      reader = self._open_reader(step, rows)
      self._readers[rows] = reader
    segments = reader.next_segments()
    self.epochs = min(state.epoch for r in self._readers.values() for state in r.states().values())
    return segments

  def states(self, step: int) -> dict[str, Any]:
    """Returns the states, before a step, of the rows read here, as a JSON value."""
    states = {}
    for reader in self._readers.values():
      if reader.step == step:
        states |= {str(row): list(state) for row, state in reader.states().items()}
    return {'keeps_blank': self._keeps_blank, 'rows': states}

  def restore(self, step: int, saved: Mapping[str, Any]) -> None:
    """Continues at a step, with the `states` of all rows before it."""
    self._keeps_blank = saved['keeps_blank']
    self._restored_step = step
    self._restored = {int(r): row_reader.RowState(*state) for r, state in saved['rows'].items()}

  def epochs_before(self, step: int) -> None:
    """Returns None: the number of tokens of an epoch is unknown."""

  def _open_reader(self, step: int, rows: range) -> '_BatchReader':
    """Returns a reader at a step, read forward from the nearest known states."""
    first_step = self._restored_step
    states = self._restored
    if first_step > step:
      first_step = 0
      states = dict.fromkeys(rows, row_reader.RowState())
    if first_step < step:
      saved = self._places.newest(step, rows)
      if saved is not None and saved[0] > first_step:
        first_step, states = saved
    # Each reader has its own, because rows remove their documents from a block.
    blocks = document_blocks.BlockReader(
      self._shards, self._fingerprints, self._keeps_blank, rows, self._encoder.prepare
    )
    row_readers = {}
    for row in rows:
      row_readers[row] = row_reader.RowReader(
        row, self._schedule.batch_size, blocks, self._order, self._separator, states[row]
      )
    reader = _BatchReader(row_readers, self._encoder, self._length, self._schedule, first_step)
    while reader.step < step:
      reader.next_segments()
    return reader


def _document_of(reader: row_reader.RowReader) -> tuple[int, int, int]:
  """Returns epoch, shard and block of the current document of a row."""
  return reader.state[:3]


class _BatchReader:
  """Reads a range of batch rows, segment by segment."""

  def __init__(
    self,
    row_readers: dict[int, row_reader.RowReader],
    encoder: document_encoder.DocumentEncoder,
    length: int,
    schedule: mixture_schedule.PartSchedule,
    step: int,
  ):
    self._row_readers = row_readers
    self._encoder = encoder
    self._length = length
    self._schedule = schedule
    self.step = step

  def states(self) -> dict[int, row_reader.RowState]:
    """Returns the state of each row before the next segment."""
    return {row: reader.state for row, reader in self._row_readers.items()}

  def next_segments(self) -> dict[int, token_split.Row]:
    """Returns the next segment of each row that reads the corpus at this step."""
    is_reading_B = self._schedule.is_reading(self.step)
    readers = {row: reader for row, reader in self._row_readers.items() if is_reading_B[row]}
    self._fill_buffers(readers.values())
    self.step += 1
    return {row: reader.take(self._length) for row, reader in readers.items()}

  def _fill_buffers(self, readers: Collection[row_reader.RowReader]) -> None:
    """Tokenises until every row has a segment: the texts of all rows in one parallel call."""
    while incomplete := [r for r in readers if r.num_buffered < self._length]:
      documents = []  # reader, state and text
      # In the order of their documents, so that rows of one shard read it forward.
      for reader in sorted(incomplete, key=_document_of):
        missing_bytes = BYTES_PER_TOKEN * (self._length - reader.num_buffered)
        while missing_bytes > 0:
          state, text = next(reader.documents)
          documents.append((reader, state, text))
          missing_bytes -= len(text)
      encoded = self._encode(documents)
      for (reader, state, _), document in zip(documents, encoded, strict=True):
        reader.add_tokens(state, document)

  def _encode(
    self, documents: list[tuple[row_reader.RowReader, row_reader.RowState, bytes]]
  ) -> list[document_encoder.EncodedDocument]:
    """Encodes the texts of documents. Raises BadInput with the file of an invalid text."""
    try:
      return self._encoder.encode_all([text for _, _, text in documents])
    except errors.BadInput:
      for reader, state, text in documents:
        with errors.named(reader.file_of(state)):
          self._encoder.encode_all([text])
      raise
