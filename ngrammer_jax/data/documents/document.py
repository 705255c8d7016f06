"""A document: a name, and bytes to read in chunks."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import pathlib

from ngrammer_jax.data.files import text_files


@dataclasses.dataclass(frozen=True)
class Document:
  """A document of a corpus.

  Attributes:
    name: the file, and the part of it if the file holds several documents.
    read_chunks: yields the bytes in chunks; may be called any number of times.
  """

  name: str
  read_chunks: Callable[[], Iterator[bytes]]


def whole_file(path: pathlib.Path) -> Document:
  """Returns a file as one document."""
  return Document(str(path), functools.partial(text_files.read_chunks, path))
