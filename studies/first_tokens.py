"""The first tokens of a text, for evaluations of a pretrained model."""

from collections.abc import Iterable
import gzip
import pathlib

import numpy as np

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.tokens import token_split

MAX_BYTES_PER_TOKEN = 8  # on average, in the first tokens of a text


def read(path: pathlib.Path, first: int, tokens: int) -> bytes:
  """Returns bytes of a text compressed with gzip, enough for some tokens.

  Args:
    path: the file.
    first: the first byte.
    tokens: number of tokens.
  """
  with gzip.open(path) as file:
    file.seek(first)
    return file.read(MAX_BYTES_PER_TOKEN * tokens)


def encode(
  documents: Iterable[bytes], vocabulary: vocabularies.Vocabulary, count: int
) -> token_split.TokenSplit:
  """Returns the first tokens of documents, separated by the document start."""
  parts = []
  first = []
  length = 0
  for document in documents:
    first.append(length)
    separator = [vocabulary.document_start] if length else []
    parts.append(np.append(np.array(separator, np.int32), vocabulary.encode(document)))
    length += len(parts[-1])
    if length >= count:
      break
  tokens = np.concatenate(parts)[:count].astype(np.int32)
  is_text = np.ones(len(tokens), bool)
  is_text[[place for place in first if 0 < place < count]] = False
  text_bytes = len(vocabulary.decode(tokens[is_text]))
  starts = np.array([place for place in first if place < count], np.int64)
  return token_split.TokenSplit(tokens, starts, text_bytes, vocabulary.document_start)
