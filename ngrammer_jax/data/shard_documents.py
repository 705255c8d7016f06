"""The documents of shards, one after another."""

from collections.abc import Iterator
import dataclasses
import functools
import logging
import math

from ngrammer_jax.data import shards as shard_files
from ngrammer_jax.data import text_files


@dataclasses.dataclass
class ShardDocuments:
  """Iterates over the documents of shards, which are read again each time.

  Attributes:
    shards: the shards.
    has_blank: whether documents of white space are read.
    max_bytes: no document is read after so much text.
    num_empty: number of empty documents in the last iteration.
  """

  shards: shard_files.Shards
  has_blank: bool = False
  max_bytes: float = math.inf
  num_empty: int = 0

  def __iter__(self) -> Iterator[text_files.Document]:
    self.num_empty = 0
    num_bytes = 0
    for shard, file in enumerate(self.shards.files):
      for document, (record, _) in enumerate(self.shards.read(shard)):
        text = self.shards.text(shard, document, record)
        if text is None:  # of another split
          continue
        if not text or not (self.has_blank or text.strip()):
          self.num_empty += 1
          continue
        num_bytes += len(text)
        read = functools.partial(text_files.split_long, text)
        yield text_files.Document(f'{file}, document {document + 1:,}', read)
        if num_bytes >= self.max_bytes:
          logging.info('only the first %s bytes are read, the last of %s', f'{num_bytes:,}', file)
          return
