"""Positions in a file, and options of reading documents, shared by all formats."""

import dataclasses
from typing import NamedTuple


class FilePosition(NamedTuple):
  """The position of a document.

  Attributes:
    document: number of the document in its file, from 0.
    offset: bytes of text before the document, since the frame; 0 in a file of columns.
    frame: position of the compressed frame in the file, see `compression.frame_offset`.
  """

  document: int = 0
  offset: int = 0
  frame: int = 0


START = FilePosition()


class DocumentText(NamedTuple):
  """The text of a document.

  Attributes:
    text: the text, or messages of a conversation, see `conversations.parse`.
    num_replaced: number of halves of UTF-16 characters replaced by U+FFFD.
    is_null: whether the file has null in place of a text.
  """

  text: bytes
  num_replaced: int = 0
  is_null: bool = False


@dataclasses.dataclass(frozen=True)
class ReadOptions:
  """Options of reading the documents of a file.

  Attributes:
    fields: names of JSON fields or columns with the text, joined by a newline; a dot separates
      nested fields.
    separator: separator of the documents of a text.
    has_paragraphs: whether empty lines separate documents if there is no separator; otherwise a
      text is one document.
    any_bytes: whether a text may be of any bytes, see `file_formats.identify`.
    is_chat: whether the only field has conversations.
    remedy: remedy for a missing field.
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
