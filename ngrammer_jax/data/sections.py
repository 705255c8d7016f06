"""Documents that are sections of one file: books of a collection, articles of WikiText."""

from collections.abc import Callable, Iterator
import functools
import pathlib
import re
from typing import NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.data import compression, text_files
from ngrammer_jax.system import files

BOOK_MARKER = b'_BOOK_TITLE_'
HEADING = re.compile(rb'^ = (?!= )(.*\S.*)(?<! =) = $')


class Section(NamedTuple):
  """A named byte range [start, stop) of a file."""

  name: str
  start: int
  stop: int


class SectionedFile:
  """The sections of a file as documents. They are located on first use.

  Args:
    path: the file, plain or compressed.
    find_sections: yields the sections of the file, in order.
  """

  def __init__(
    self, path: pathlib.Path, find_sections: Callable[[pathlib.Path], Iterator[Section]]
  ):
    self._path, self._find_sections = path, find_sections

  @functools.cached_property
  def _sections(self):
    return list(self._find_sections(self._path))

  @functools.cached_property
  def _file(self):
    # All sections share one open file: read in order, a compressed one is decompressed only once.
    return compression.open_binary(self._path)

  def __iter__(self) -> Iterator[text_files.Document]:
    for section in self._sections:
      name = f'{self._path}, {section.name}'
      read = lambda section=section: text_files.split_chunks(self._read_blocks(section))
      yield text_files.Document(name, read)

  def _read_blocks(self, section):
    with files.translate_damage(self._path):
      offset = section.start
      while offset < section.stop:
        self._file.seek(offset)
        block = self._file.read(min(text_files.CHUNK_SIZE, section.stop - offset))
        if not block:
          raise EOFError(f'{section.stop - offset:,} bytes are missing')
        offset += len(block)
        yield block


def find_books(path: pathlib.Path) -> Iterator[Section]:
  """Yields the books of a Children's Book Test file, without the title lines and empty books.

  Raises:
    BadInput: the first line is not a title.
  """
  title = start = None
  offset = 0
  for line in text_files.read_lines(path):
    if line.startswith(BOOK_MARKER):
      if start is not None:
        yield Section(title, start, offset)
      title = line.decode(errors='replace').partition(':')[2].strip().removesuffix('.txt.out')
      start = None
    elif title is None:
      raise errors.BadInput(
        f'{path}, line 1: expected a title, as in "_BOOK_TITLE_ : Author___Title.txt.out", found '
        f"{text_files.quote_line(line)}: this is not a raw text file of the Children's Book Test"
      )
    elif start is None:
      start = offset
    offset += len(line)
  if start is not None:
    yield Section(title, start, offset)


def find_articles(path: pathlib.Path) -> Iterator[Section]:
  """Yields the articles of WikiText. Text before the first heading belongs to the first article.

  A line such as ` = Title = ` is a heading only between two blank lines. This excludes table
  legends, which contain lines such as ` = Wins ; L = `. WikiText-2 has 600, 60 and 60 articles by
  this rule, as published.

  Raises:
    BadInput: there is no heading.
  """
  name, start, offset = None, 0, 0
  previous_line = b''
  candidate = None  # name and offset of the previous line, if it may be a heading
  for line in text_files.read_lines(path):
    if candidate is not None and not line.strip():
      candidate_name, candidate_offset = candidate
      if name is not None:
        yield Section(name, start, candidate_offset)
        start = candidate_offset
      name = candidate_name
    match = HEADING.match(line.rstrip(b'\r\n')) if not previous_line.strip() else None
    candidate = None if match is None else (match[1].decode(errors='replace'), offset)
    previous_line, offset = line, offset + len(line)
  if offset and name is None:
    raise errors.BadInput(
      f'{path} has no article headings, which are lines " = Title = " between blank lines; '
      f'data.corpus=wikitext does not need them'
    )
  if offset:
    yield Section(name, start, offset)
