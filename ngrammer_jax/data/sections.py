"""Documents that are parts of one file: the books of a collection, the articles of WikiText."""

from collections.abc import Callable, Iterator
import functools
import pathlib
import re
from typing import NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.data import text_files

BOOK = b'_BOOK_TITLE_'
HEADING = re.compile(rb'^ = (?!= )(.*\S.*)(?<! =) = $')


class Section(NamedTuple):
  """A name, and the bytes [first, last) of a file."""

  name: str
  first: int
  last: int


class Sections:
  """The parts of a file as documents, which are found when they are first asked for.

  Args:
    path: of the file.
    find: the parts of it, in their order.
  """

  def __init__(self, path: pathlib.Path, find: Callable[[pathlib.Path], Iterator[Section]]):
    self._path, self._find, self._file = path, find, None

  @functools.cached_property
  def _sections(self):
    return list(self._find(self._path))

  def __iter__(self) -> Iterator[text_files.Document]:
    for section in self._sections:
      name = f'{self._path}, {section.name}'
      yield text_files.Document(name, functools.partial(self._pieces, section))

  def _pieces(self, section):
    return text_files.split_chunks(self._blocks(section))

  def _blocks(self, section):
    # One open file for all: a compressed one is unpacked once where they are read in order.
    with text_files.translate_read_errors(self._path):
      if self._file is None:
        self._file = text_files.open_binary(self._path)
      at = section.first
      while at < section.last:
        self._file.seek(at)
        block = self._file.read(min(text_files.CHUNK_SIZE, section.last - at))
        if not block:
          raise EOFError(f'{section.last - at:,} bytes are no longer there')
        at += len(block)
        yield block


def books(path: pathlib.Path) -> Iterator[Section]:
  """The books of a file of the Children's Book Test; a title is no text of them.

  Raises BadInput where the first line is no title.
  """
  name, first, at = None, 0, 0
  for line in text_files.read_lines(path):
    if line.startswith(BOOK):
      if at > first:
        yield Section(name, first, at)
      name, first = title(line), at + len(line)
    elif name is None:
      raise errors.BadInput(
        f'{path}, line 1: expected a title, as in "_BOOK_TITLE_ : Author___Title.txt.out", found '
        f"{excerpt(line)}: this is no raw text of the Children's Book Test"
      )
    at += len(line)
  if at > first:
    yield Section(name, first, at)


def title(line: bytes) -> str:
  """What a line with the title of a book says."""
  return line.decode(errors='replace').partition(':')[2].strip().removesuffix('.txt.out')


def articles(path: pathlib.Path) -> Iterator[Section]:
  """The articles of WikiText; what stands before the first heading belongs to the first.

  A heading stands between blank lines: without that, explanations of tables, which contain lines
  such as ` = Wins ; L = `, would count. So the 600, 60 and 60 articles of WikiText-2 are found.

  Raises BadInput where there is no heading.
  """
  name, first, at = None, 0, 0
  before, heading = b'', None  # the line before, and a heading if that is one: its name and place
  for line in text_files.read_lines(path):
    if heading is not None and not line.strip():
      if name is not None:
        yield Section(name, first, heading[1])
        first = heading[1]
      name = heading[0]
    match = HEADING.match(line.rstrip(b'\r\n')) if not before.strip() else None
    heading = None if match is None else (match[1].decode(errors='replace'), at)
    before, at = line, at + len(line)
  if at and name is None:
    raise errors.BadInput(
      f'{path}: no article begins here, with a line " = Title = " between blank ones; '
      f'use data.corpus=wikitext, which needs none'
    )
  if at:
    yield Section(name, first, at)


def excerpt(line: bytes | str) -> str:
  """The beginning of a line, to be quoted."""
  text = (line.decode(errors='replace') if isinstance(line, bytes) else line).rstrip('\r\n')
  return f'"{text[:40]}..."' if len(text) > 43 else f'"{text}"'
