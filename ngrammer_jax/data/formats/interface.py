"""What the formats of files share: positions in a file, and how its documents are read."""

import dataclasses
from typing import NamedTuple


class FilePosition(NamedTuple):
  """Where a document begins.

  Attributes:
    document: number of the document in its file, from 0.
    offset: bytes of text before the document, since the frame; 0 in a file of columns.
    frame: byte of the file where the compressed frame begins, see `compression.frame_offset`.
  """

  document: int = 0
  offset: int = 0
  frame: int = 0


START = FilePosition()


class DocumentText(NamedTuple):
  """The text of a document.

  Attributes:
    text: the text; of a conversation its messages, see `conversations.parse`.
    num_replaced: number of halves of UTF-16 characters in it that were replaced by U+FFFD.
    is_null: whether the file has null in place of a text.
  """

  text: bytes
  num_replaced: int = 0
  is_null: bool = False


@dataclasses.dataclass(frozen=True)
class ReadOptions:
  """How the documents of a file are read.

  Attributes:
    fields: names of the fields of a JSON object or of columns that hold the text, joined by a
      newline; a dot is for a field within a field.
    separator: what separates the documents of a text.
    has_paragraphs: whether empty lines do, if there is no separator; else a text is one document.
    any_bytes: whether a text may be of any bytes, see `file_formats.identify`.
    is_chat: whether the only field holds conversations.
    remedy: what to do if there is no such field.
    can_be_chat: whether `data.chat` is a remedy too.
  """

  fields: tuple[str, ...] = ('text',)
  separator: str | None = None
  has_paragraphs: bool = True
  any_bytes: bool = False
  is_chat: bool = False
  remedy: str = 'set data.text_field to the name of the one with the text'
  can_be_chat: bool = True


DEFAULT_OPTIONS = ReadOptions()
