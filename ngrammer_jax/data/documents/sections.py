"""Sections of one file as documents: books of a collection, articles of WikiText."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.data.documents.corpus import Document
from ngrammer_jax.data.files import text_files

BOOK_MARKER = b'_BOOK_TITLE_'
HEADING = re.compile(rb'^ = (?!= )(.*\S.*)(?<! =) = $')


ReadSections = Callable[[pathlib.Path], Iterator[tuple[str, bytes]]]  # yields names and texts


@dataclasses.dataclass(frozen=True)
class SectionedFile:
  """The sections of a file as documents.

  Attributes:
    path: the file, plain or compressed.
    read: yields the name and the text of each section of the file.
  """

  path: pathlib.Path
  read: ReadSections

  def __iter__(self) -> Iterator[Document]:
    for name, text in self.read(self.path):
      read_chunks = functools.partial(text_files.split_chunks, [text])
      yield Document(f'{self.path}, {name}', read_chunks)


def read_books(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  """Yields the books of a Children's Book Test file, without the title lines and empty books.

  Raises:
    BadInput: the first line is not a title.
  """
  title = None
  book: list[bytes] = []
  for line in text_files.read_lines(path):
    if line.startswith(BOOK_MARKER):
      if book:
        yield title, b''.join(book)
        book = []
      title = line.decode(errors='replace').partition(':')[2].strip().removesuffix('.txt.out')
    elif title is None:
      raise errors.BadInput(
        f'{path}, line 1: expected a title, as in "_BOOK_TITLE_ : Author___Title.txt.out", found '
        f"{text_files.quote_line(line)}: this is not a raw text file of the Children's Book Test"
      )
    else:
      book.append(line)
  if book:
    yield title, b''.join(book)


def read_articles(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  """Yields the articles of WikiText. Text before the first heading belongs to the first article.

  A line such as ` = Title = ` is a heading only between two blank lines. This excludes table
  legends, which contain lines such as ` = Wins ; L = `. WikiText-2 has 600, 60 and 60 articles by
  this rule, as published.

  Raises:
    BadInput: there is no heading.
  """
  name = None
  article: list[bytes] = []
  before = b''
  lines = itertools.chain(text_files.read_lines(path), [b'end'])  # no heading is the last line
  for line, after in itertools.pairwise(lines):
    match = HEADING.match(line.rstrip(b'\r\n'))
    if match and not before.strip() and not after.strip():
      if name is not None:
        yield name, b''.join(article)
        article = []
      name = match[1].decode(errors='replace')
    article.append(line)
    before = line
  if article and name is None:
    raise errors.BadInput(
      f'{path} has no article headings (lines " = Title = " between blank lines); '
      f'data.corpus=wikitext does not need them'
    )
  if article:
    yield name, b''.join(article)
