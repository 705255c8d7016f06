"""Blocks of consecutive documents of a shard, read once for all rows of a host."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging

from ngrammer_jax import errors
from ngrammer_jax.data.documents.corpus import DocumentCounts, Shards
from ngrammer_jax.data.files import fingerprints
from ngrammer_jax.data.formats.interface import DocumentText, FilePosition

BLOCK_DOCUMENTS = 128
BLOCK_BYTES = 256 << 10
SHARED_BYTES = 256 << 20  # of blocks waiting for slower rows
MAX_SHARED_BLOCKS = 1 << 14
MAX_ROW_FILES = 64  # open files of rows further behind
NEAR = 1 << 15  # documents read on the way to a block, rather than opening its file again

Documents = Iterator[tuple[bytes, FilePosition]]  # see `Shards.read`


@dataclasses.dataclass
class DocumentBlock:
  """Consecutive documents of a shard.

  Attributes:
    position: position of the first document.
    records: their records, see `Shards`; b'' if no row waits for the document.
    size: bytes of the records.
    next_position: position of the next block; None at the end of the shard.
    num_waiting: number of rows that still need the block, if several rows share the shard.
  """

  position: FilePosition
  records: list[bytes]
  size: int = 0
  next_position: FilePosition | None = None
  num_waiting: int = 0

  def take(self, number: int) -> bytes:
    """Returns a record and drops it: each document belongs to one row."""
    record = self.records[number]
    self.records[number] = b''
    self.size -= len(record)
    return record


@dataclasses.dataclass
class _OpenFile:
  """An open shard.

  Attributes:
    shard: its number.
    position: position of the next document.
    documents: the remaining documents.
  """

  shard: int
  position: FilePosition
  documents: Documents


class BlockReader:
  """Reads the documents of shards in blocks, for some rows of the batch.

  Rows of one shard share its blocks in a cache of SHARED_BYTES; slower rows re-read the file. A
  block has BLOCK_DOCUMENTS documents, or fewer with BLOCK_BYTES, so its content does not depend on
  the reader.

  Args:
    shards: the shards.
    shard_fingerprints: their fingerprints.
    keeps_blank: whether white space is a document.
    rows: the rows of this reader; documents of other rows are dropped.
    prepare: see `DocumentEncoder.prepare`.
  """

  def __init__(
    self,
    shards: Shards,
    shard_fingerprints: fingerprints.ShardFingerprints,
    keeps_blank: bool,
    rows: Sequence[int],
    prepare: Callable[[bytes], bytes],
  ):
    self.files = shards.files
    self._shards = shards
    self._rows = rows
    self._fingerprints = shard_fingerprints
    self._keeps_blank = keeps_blank
    self._prepare = prepare
    self._counts = DocumentCounts()
    self._num_unusual = 0  # null documents, or with replaced characters
    # Blocks that rows wait for, by epoch, shard and position.
    self._shared_blocks: dict[tuple[int, int, FilePosition], DocumentBlock] = {}
    # Position of the newest shared block, by epoch and shard.
    self._newest: dict[tuple[int, int], FilePosition] = {}
    # Open shards: by epoch and shard if shared by rows, by row otherwise.
    self._shared_files: dict[tuple[int, int], _OpenFile] = {}
    self._row_files: dict[int, _OpenFile] = {}

  def read(
    self, shard: int, position: FilePosition, epoch: int, row: int, sharing_rows: Sequence[int]
  ) -> DocumentBlock:
    """Returns the block at a position. Each row of the shard requests each block once."""
    if len(sharing_rows) == 1:
      return self._read_block(shard, position, self._shared_files, (epoch, shard))
    block = self._shared_blocks.get((epoch, shard, position))
    if block is None:
      if position < self._newest.get((epoch, shard), FilePosition()):
        return self._read_alone(shard, position, row)
      block = self._read_shared(shard, position, epoch, sharing_rows)
    block.num_waiting -= 1
    if not block.num_waiting:  # then no row waits for an earlier one either
      self._drop_blocks(shard, position, epoch)
    return block

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """Returns the text of a document for its encoder, b'' for an omitted one.

    Empty documents, and those with replaced characters, are counted in the log.
    """
    try:
      return self._parse(shard, document, record)
    except errors.BadInput:
      with self._fingerprints.record_damage(shard):  # too slow for every document
        raise

  def _parse(self, shard: int, document: int, record: bytes) -> bytes:
    """See `text`."""
    parsed = self._shards.text(shard, document, record)
    if parsed is None:  # a document of another split
      return b''
    if parsed.num_replaced or parsed.is_null:
      self._warn(shard, document, parsed)
    text = parsed.text
    if text.strip() or (text and self._keeps_blank):
      with errors.named(f'{self.files[shard]}, document {document + 1:,}'):
        return self._prepare(text)
    self._counts.empty += 1
    if _is_power_of_ten(self._counts.empty):
      count = f'{self._counts.empty:,}'
      logging.info('number of empty documents that were skipped so far: %s', count)
    return b''

  def _warn(self, shard: int, document: int, parsed: DocumentText) -> None:
    """Logs a warning about the 1st, 10th, 100th, ... unusual document."""
    self._num_unusual += 1
    self._counts.add(parsed)
    if _is_power_of_ten(self._num_unusual):
      warnings = '; '.join(self._counts.warnings())
      location = f'{self.files[shard]}, document {document + 1:,}'
      logging.warning('training text so far, up to %s: %s', location, warnings)

  def _read_alone(self, shard: int, position: FilePosition, row: int) -> DocumentBlock:
    """Reads a block for one row behind the shared blocks."""
    block = None
    for block in self._read_up_to(shard, position, self._row_files, row):
      if block.position == position:
        break
    while len(self._row_files) > MAX_ROW_FILES:
      del self._row_files[next(iter(self._row_files))]
    return block

  def _read_shared(
    self, shard: int, position: FilePosition, epoch: int, sharing_rows: Sequence[int]
  ) -> DocumentBlock:
    """Reads up to a new block; keeps documents needed by other rows."""
    # Document d is read by the row at d % len(sharing_rows).
    local_remainders = {sharing_rows.index(row) for row in self._rows if row in sharing_rows}
    block = None
    for block in self._read_up_to(shard, position, self._shared_files, (epoch, shard)):
      for number in range(len(block.records)):
        if (block.position.document + number) % len(sharing_rows) not in local_remainders:
          block.take(number)
      block.num_waiting = len(local_remainders)
      self._shared_blocks[epoch, shard, block.position] = block
      self._limit_shared_blocks()
    self._newest[epoch, shard] = position
    return block

  def _limit_shared_blocks(self) -> None:
    """Drops the oldest blocks beyond the limits; slower rows read them again."""
    size = sum(block.size for block in self._shared_blocks.values())
    while size > SHARED_BYTES or len(self._shared_blocks) > MAX_SHARED_BLOCKS:
      oldest = next(iter(self._shared_blocks))
      size -= self._shared_blocks.pop(oldest).size

  def _drop_blocks(self, shard: int, last: FilePosition, epoch: int) -> None:
    """Drops the blocks of a shard up to a position."""
    for key in list(self._shared_blocks):
      if key[:2] == (epoch, shard) and key[2] <= last:
        del self._shared_blocks[key]

  def _read_up_to(
    self, shard: int, position: FilePosition, open_files: dict, key: object
  ) -> Iterator[DocumentBlock]:
    """Yields the blocks up to a position, from the position of an open file if it is near."""
    begin = position
    opened = open_files.get(key)
    if opened is not None and opened.shard == shard:
      distance = position.document - opened.position.document
      if 0 <= distance < NEAR:
        begin = opened.position
    while True:
      block = self._read_block(shard, begin, open_files, key)
      yield block
      if block.position == position:
        return
      begin = block.next_position
      if begin is None or begin > position:  # a position of an earlier version, within a block
        begin = position

  def _read_block(
    self, shard: int, position: FilePosition, open_files: dict, key: object
  ) -> DocumentBlock:
    """Reads a block, from an open file if it is at the position; the file stays open."""
    opened = open_files.pop(key, None)
    if opened is None or (opened.shard, opened.position) != (shard, position):
      self._fingerprints.check(shard)
      opened = _OpenFile(shard, position, self._shards.read(shard, position))
    block = DocumentBlock(position, [])
    with self._fingerprints.record_damage(shard):
      for record, next_position in opened.documents:
        block.records.append(record)
        block.size += len(record)
        if len(block.records) == BLOCK_DOCUMENTS or block.size >= BLOCK_BYTES:
          block.next_position = next_position
          opened.position = next_position
          open_files[key] = opened
          break
    return block


def _is_power_of_ten(count: int) -> bool:
  return str(count).strip('0') == '1'
