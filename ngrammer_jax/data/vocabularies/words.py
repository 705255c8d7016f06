"""Words separated by spaces as tokens."""

import collections
from collections.abc import Iterable
import re

import numpy as np

from ngrammer_jax.data.vocabularies import base

UNKNOWN = '<unk>'
LINE_END = '<eos>'


class WordVocabulary(base.Vocabulary):
  """Words separated by spaces; a newline is `<eos>`, a word outside the vocabulary `<unk>`.

  Args:
    words: the words, most frequent first, including `<eos>` and `<unk>`.
  """

  kind = 'words'

  def __init__(self, words: list[str]):
    self._words = words
    self.fields = {'words': words}
    self._ids = {word: i for i, word in enumerate(words)}
    self.size = len(words)
    self.document_start = self._ids[LINE_END]
    self.document_end = None
    self.line_end = self._ids[LINE_END]
    self.unknown = self._ids[UNKNOWN]
    self.definition = ('words', words)

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    ids, unknown = self._ids, self.unknown
    words = split_words(text)
    return np.fromiter((ids.get(w, unknown) for w in words), np.int64, len(words))

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    text = ' '.join(self._words[i] for i in ids)
    return re.sub(f' ?{LINE_END} ?', '\n', text).encode()


def split_words(text: bytes) -> list[str]:
  """Returns the words of a text, with `<eos>` for each newline."""
  return text.decode().replace('\n', f' {LINE_END} ').split()


def learn_words(texts: Iterable[bytes], size: int | None) -> WordVocabulary:
  """Returns the most frequent words, ties in order of appearance. A size of None: all words."""
  counts: collections.Counter[str] = collections.Counter()
  for text in texts:
    counts.update(split_words(text))
  counts.update({UNKNOWN: 0, LINE_END: 0})
  words = [word for word, _ in counts.most_common()]
  if size is not None and size < len(words):
    frequent = [w for w in words if w not in (UNKNOWN, LINE_END)][: size - 2]
    selected = {*frequent, UNKNOWN, LINE_END}
    words = [w for w in words if w in selected]
  return WordVocabulary(words)
