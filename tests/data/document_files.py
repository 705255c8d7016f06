"""Writes documents as files of all formats that a corpus may have."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
from pyarrow import parquet
import zstandard

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.rows import mixture_schedule, streamed_rows, token_batch
from ngrammer_jax.data.tokens import document_encoder

FRAME = 700  # bytes of text in a frame: several in a file, and most end within a line
COMPRESS = {
  '.gz': gzip.compress,
  '.bz2': bz2.compress,
  '.xz': lzma.compress,
  '.zst': zstandard.compress,
}
NAMES = (
  *('x.jsonl', 'x.txt', 'x.jsonl.gz', 'x.json.bz2', 'x.txt.xz', 'x.jsonl.zst', 'x.parquet'),
  *('x.arrow', 'x.stream.arrow'),
)


def compress(suffix, content):
  """The content in several frames."""
  starts = range(0, max(len(content), 1), FRAME)
  return b''.join(COMPRESS[suffix](content[i : i + FRAME]) for i in starts)


def write(path, texts, field='text'):
  """Writes the texts in the format of the suffix."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix in ('.parquet', '.arrow'):
    table = pa.table({'id': range(len(texts)), field: pa.array(texts, pa.string())})
    if path.suffix == '.parquet':
      parquet.write_table(table, path, row_group_size=7)
      return path
    new = pa.ipc.new_stream if '.stream' in path.suffixes else pa.ipc.new_file
    with pa.OSFile(str(path), 'wb') as file, new(file, table.schema) as writer:
      writer.write_table(table, max_chunksize=5)
    return path
  content = ''.join(json.dumps({'id': i, field: text}) + '\n' for i, text in enumerate(texts))
  if '.txt' in path.suffixes:
    content = '\n\n'.join(texts) + '\n'
  content = content.encode()
  path.write_bytes(compress(path.suffix, content) if path.suffix in COMPRESS else content)
  return path


def open_corpus(corpus, path=None, **settings):
  return corpora.open_corpus(data_config.DataConfig(corpus, path and str(path), **settings))


def prepare(config, **options):
  """The tokens of a single corpus."""
  return mixture.prepare(config, **options).parts['']


def whole_batch(batch_size):
  """The schedule of a single corpus, which every row reads at every step."""
  return mixture_schedule.PartSchedule(mixture_schedule.MixtureSchedule((1.0,), batch_size), 0)


class Packed(streamed_rows.StreamedRows):
  """The rows of a single corpus."""

  def __init__(self, source, vocabulary, batch_size, length, folder, shuffle=None, begin=False):
    self._all_rows, schedule = range(batch_size), whole_batch(batch_size)
    encoder = document_encoder.TextEncoder(vocabulary)
    super().__init__(source, encoder, schedule, length, folder, shuffle, begin)

  def segment(self, step, rows=slice(None)):
    return token_batch.stack_rows(self.rows(step, self._all_rows[rows]).values())
