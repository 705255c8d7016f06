"""Files of documents: one module for each format, which reads them from any place on."""

from collections.abc import Iterator
import dataclasses
import pathlib

from ngrammer_jax.data import kinds, text_files
from ngrammer_jax.data.formats import arrow, columns, lines, parquet
from ngrammer_jax.data.formats.positions import ANY, START, FilePosition, Layout
from ngrammer_jax.system import file_errors

COLUMNS = {kinds.PARQUET: parquet.read_batches, kinds.ARROW: arrow.read_batches}


@dataclasses.dataclass(frozen=True)
class DocumentFile:
  """A file of documents.

  Attributes:
    path: the file.
    format: its format, see `kinds.identify`.
    layout: where the text of a document is.
  """

  path: pathlib.Path
  format: str
  layout: Layout = ANY

  @classmethod
  def open(cls, path: pathlib.Path, layout: Layout) -> 'DocumentFile':
    """Returns a file, whose format is looked at. Raises BadInput if it cannot be read."""
    return cls(path, kinds.identify(path, layout.any_bytes), layout)

  def read(self, place: FilePosition = START) -> Iterator[tuple[bytes, FilePosition]]:
    """Yields the record of each document from a place on, and the place of the next document.

    Args:
      place: one that this method yielded, or that of the first document.

    Raises:
      BadInput: the file is damaged, or lacks the column of the text.
    """
    with file_errors.translate_damage(self.path):
      if self.format in COLUMNS:
        yield from columns.read(self.path, place, self.layout, COLUMNS[self.format])
      else:
        yield from lines.read(self.path, place, self.layout, self.format == kinds.LINES)

  def text(self, document: int, record: bytes) -> bytes:
    """Returns the text of a document.

    Raises:
      BadInput: the record has no text, or it is not UTF-8.
    """
    if self.format == kinds.LINES:
      return lines.parse(record, f'{self.path}, line {document + 1:,}', self.layout)
    if not self.layout.any_bytes:
      unit = 'document' if self.format == kinds.TEXT else 'row'
      text_files.decode(record, f'{self.path}, {unit} {document + 1:,}')
    if self.format == kinds.TEXT:
      record = record.removesuffix((self.layout.separator or '').encode()).strip(b'\r\n')
    return record
