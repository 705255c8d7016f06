"""Rows of a batch, packed with documents as they are read and tokenised.

Every row reads shards of its own, over and over, documents one after the other without padding:
what it sees at a step is a function of the step alone, for any number of hosts. To get there
without reading all there was before, the places of rows are written down now and then.

B rows, T segment length.
"""

from collections.abc import Iterator
import contextlib
import itertools
import json
import operator
import os
import pathlib
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors, files
from ngrammer_jax.data import shards as sharded
from ngrammer_jax.data import streams
from ngrammer_jax.data import vocabulary as vocabularies

EVERY = 100  # steps between the places that are written down
BEHIND = 8  # places of a row that are looked at for one that all have
AHEAD = 4  # bytes of text that are tokenised for a token that is wanted, about


class Place(NamedTuple):
  """Where a row stands.

  How often it has read all, which of its shards it is in, the document there and its offset, and
  how many tokens of that are behind it.
  """

  round: int = 0
  shard: int = 0
  document: int = 0
  offset: int = 0
  tokens: int = 0


class Packing:
  """The segments of training.

  A folder of places is of one corpus, vocabulary, batch size and length.

  Args:
    shards: of the split.
    vocabulary: of the tokens.
    batch_size: B.
    length: T.
    folder: where places are written down.
  """

  def __init__(
    self,
    shards: sharded.Shards,
    vocabulary: vocabularies.Vocabulary,
    batch_size: int,
    length: int,
    folder: pathlib.Path,
  ):
    self._shards, self._vocabulary = shards, vocabulary
    self._batch_size, self._length = batch_size, length
    self._folder = files.Growing(folder, '*.jsonl').folder
    self._readers: dict[range, _Reader] = {}

  def segment(self, step: int, rows: slice = slice(None)) -> streams.Segment:
    """What some rows see at a step.

    Raises:
      BadInput: a shard is damaged, or has no document for a row.
    """
    first, last, _ = rows.indices(self._batch_size)
    wanted = range(first, last)
    reader = self._readers.get(wanted)
    if reader is None or reader.step != step:
      reader = self._readers[wanted] = self._reader(step, wanted)
    if step % EVERY == 0:
      self._write(reader)
    return reader.next()

  def _reader(self, step, wanted):
    """A reader of rows at a step, which begins at the last place that is known."""
    begins = self._known(step, wanted)
    reader = _Reader(self._shards, self._vocabulary, self._batch_size, self._length, wanted, begins)
    while reader.step < step:
      reader.next()
    return reader

  def _known(self, step, wanted):
    """The step that all wanted rows have a place of, up to `step`, and the places."""
    by_step: dict[int, dict[int, Place]] = {}
    for path in self._folder.glob('*.jsonl'):
      for found, places in _last_places(path, step).items():
        by_step.setdefault(found, {}).update(places)
    usable = [s for s, places in by_step.items() if s <= step and set(wanted) <= set(places)]
    if not usable:
      return 0, {row: Place() for row in wanted}
    return max(usable), by_step[max(usable)]

  def _write(self, reader):
    path = self._folder / f'{reader.rows[0]}-{reader.rows[-1]}.jsonl'
    line = {'step': reader.step, 'first': reader.rows[0], 'places': reader.places()}
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      with path.open('a', encoding='utf-8') as file:
        # Behind what a process that was killed may have left.
        file.write('\n' * bool(file.tell()) + json.dumps(line) + '\n')
    except OSError as error:
      raise errors.BadInput(f'{path} cannot be written: {error.strerror}') from error


def _last_places(path: pathlib.Path, step: int) -> dict[int, dict[int, Place]]:
  """The last places of some rows up to a step, by step. A host may be a few behind another.

  What is damaged, by a process that was killed or a disk, is not known: it is read again.
  """
  found: dict[int, dict[int, Place]] = {}
  with contextlib.suppress(OSError), path.open(encoding='utf-8', errors='replace') as file:
    for line in file:
      with contextlib.suppress(ValueError, TypeError, KeyError):
        known = json.loads(line)
        if known['step'] <= step:
          places = (Place(*map(operator.index, place)) for place in known['places'])
          found[known['step']] = dict(enumerate(places, known['first']))
      if len(found) > BEHIND:
        del found[min(found)]
  return found


class _Reader:
  """Some rows, segment by segment."""

  def __init__(self, shards, vocabulary, batch_size, length, rows, begins):
    self.step, places = begins
    self.rows = rows
    self._vocabulary, self._length = vocabulary, length
    self._of_rows = [
      _Row(shards, row, batch_size, places[row], vocabulary.document_start) for row in rows
    ]

  def places(self) -> list[Place]:
    """Of all rows, before the next segment."""
    return [row.place() for row in self._of_rows]

  def next(self) -> streams.Segment:
    """The next segment of all rows."""
    self._tokenise()
    self.step += 1
    parts = zip(*(row.take(self._length) for row in self._of_rows), strict=True)
    inputs, targets, starts = map(np.stack, parts)
    return streams.Segment(inputs, targets, starts, np.ones(inputs.shape, np.float32))

  def _tokenise(self):
    """Until every row has a segment: texts of all of them at once, on all processors."""
    while missing := [row for row in self._of_rows if row.ready < self._length]:
      taken = []
      for row in missing:
        wanted = AHEAD * (self._length - row.ready)
        while wanted > 0:
          taken.append((row, *row.text()))
          wanted -= len(taken[-1][-1])
      texts = [text for _, _, text in taken]
      ids = vocabularies.encode_all(self._vocabulary, texts, os.cpu_count() or 1)
      for (row, place, _), of_text in zip(taken, ids, strict=True):
        row.add(place, of_text)


class _Row:
  """The documents of a row, and how far they are read."""

  def __init__(self, shards, row, batch_size, place, start):
    self._shards, self._start = shards, start
    count = len(shards.names)
    # Where there are fewer shards than rows, some rows take turns in the documents of one.
    self._own = list(range(row, count, batch_size)) or [row % count]
    self._turn = row // count if count < batch_size else 0
    self._turns = len(range(row % count, batch_size, count)) if count < batch_size else 1
    self._texts = self._documents(place)
    self._waiting: list[tuple[Place, np.ndarray]] = []
    self._skip, self._used = place.tokens, 0
    self._next = place
    self.ready, self._empty = 0, 0  # tokens, and documents without any one after the other

  def _documents(self, place) -> Iterator[tuple[Place, bytes]]:
    number, offset, first = place.document, place.offset, place.shard
    for around in itertools.count(place.round):
      found = 0
      for shard in range(first, len(self._own)):
        for stored, after in self._shards.read(self._own[shard], number, offset):
          text = b''
          if number % self._turns == self._turn:
            text = self._shards.text(self._own[shard], number, stored)
          if text:
            found += 1
            yield Place(around, shard, number, offset), text
          number, offset = number + 1, after
        number = offset = 0
      if (not found and around > place.round) or self._empty > found:
        names = ', '.join(self._shards.names[shard] for shard in self._own)
        raise errors.BadInput(
          f'{names} has no document for one of {self._turns} rows: use a training.batch_size of at '
          f'most the documents, or more text'
        )
      first = 0

  def text(self) -> tuple[Place, bytes]:
    """The next document, and where it stands."""
    return next(self._texts)

  def add(self, place: Place, ids: np.ndarray) -> None:
    """Takes the tokens of a document, which the document start will follow."""
    if not len(ids):
      self._empty += 1
      return
    self._waiting.append((place, np.append(ids, self._start).astype(np.int32)))
    self._empty = 0
    self.ready += len(ids) + 1 - self._skip
    if self._skip:
      self._used, self._skip = self._skip, 0

  def place(self) -> Place:
    """Of the next token."""
    return self._waiting[0][0]._replace(tokens=self._used) if self._waiting else self._next

  def take(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and starts of the next tokens, [T] each."""
    targets, starts = np.empty(length, np.int32), np.zeros(length, bool)
    before, filled = None, 0
    while filled < length:
      place, ids = self._waiting[0]
      if before is None:
        before = ids[self._used - 1] if self._used else self._start
      part = ids[self._used : self._used + length - filled]
      targets[filled : filled + len(part)] = part
      starts[filled] = self._used == 0
      filled, self._used = filled + len(part), self._used + len(part)
      if self._used == len(ids):
        self._next = place._replace(tokens=len(ids))
        self._waiting.pop(0)
        self._used = 0
    self.ready -= length
    return np.insert(targets[:-1], 0, before), targets, starts
