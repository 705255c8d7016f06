"""Files of documents: one module for each format, to read from any position on."""

from collections.abc import Iterator
import dataclasses
import json
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data.files import file_formats, text_files
from ngrammer_jax.data.formats import arrow, columns, conversations, lines, parquet
from ngrammer_jax.data.formats.interface import DEFAULT_OPTIONS as DEFAULT_OPTIONS
from ngrammer_jax.data.formats.interface import START as START
from ngrammer_jax.data.formats.interface import DocumentText as DocumentText
from ngrammer_jax.data.formats.interface import FilePosition as FilePosition
from ngrammer_jax.data.formats.interface import ReadOptions as ReadOptions
from ngrammer_jax.system import file_errors

READ_BATCHES = {
  file_formats.PARQUET: parquet.read_batches,
  file_formats.ARROW: arrow.read_batches,
}


@dataclasses.dataclass(frozen=True)
class DocumentFile:
  """A file of documents.

  Attributes:
    path: the file.
    format: its format, see `file_formats.identify`.
    options: options of reading its documents.
  """

  path: pathlib.Path
  format: str
  options: ReadOptions = DEFAULT_OPTIONS

  @classmethod
  def open(cls, path: pathlib.Path, options: ReadOptions) -> 'DocumentFile':
    """Returns a file after identifying its format.

    Raises:
      BadInput: an unreadable file, or text in place of conversations.
    """
    file_format = file_formats.identify(path, options.any_bytes)
    if options.is_chat and file_format == file_formats.TEXT:
      raise errors.BadInput(
        f'{path} is text, but data.chat=True reads conversations, which are JSON lines, Parquet or '
        f'Arrow with a field "{options.fields[0]}": use data.chat=False and '
        f'data.loss_on=all to read text'
      )
    return cls(path, file_format, options)

  def read(self, position: FilePosition = START) -> Iterator[tuple[bytes, FilePosition]]:
    """Yields the record of each document from a position on, and the position of the next one.

    Args:
      position: yielded by this method, or the first one.

    Raises:
      BadInput: a damaged file, or a missing text column.
    """
    with file_errors.translate_damage(self.path):
      if self.format in READ_BATCHES:
        yield from columns.read(self.path, position, self.options, READ_BATCHES[self.format])
      else:
        is_json = self.format == file_formats.LINES
        yield from lines.read(self.path, position, self.options, is_json)

  def text(self, document: int, record: bytes) -> DocumentText:
    """Returns the text of a document, or the messages of a conversation.

    Raises:
      BadInput: a record without text, or text that is not UTF-8.
    """
    if self.format == file_formats.LINES:
      return lines.parse(record, f'{self.path}, line {document + 1:,}', self.options)
    if self.options.is_chat:
      location = f'{self.path}, row {document + 1:,}'
      return conversations.parse(json.loads(record), location, self.options)
    is_text = self.format == file_formats.TEXT
    if not self.options.any_bytes:
      unit = 'document' if is_text else 'row'
      text_files.decode(record, f'{self.path}, {unit} {document + 1:,}')
    if not is_text:
      return DocumentText(record)
    separator = self.options.separator or ''
    return DocumentText(record.removesuffix(separator.encode()).strip(b'\r\n'))
