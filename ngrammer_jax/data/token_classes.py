"""Compressed token ids: tokens with the same lower-case text share a class.

The tokenizer compression of Engram (Cheng et al. 2026, arXiv 2601.07372, and its demo code).
"""

from collections.abc import Sequence
import functools
from typing import Any

import numpy as np

REPLACEMENT = '\N{REPLACEMENT CHARACTER}'  # the text of an incomplete UTF-8 character
PRIVATE = '\ue000'  # stands for a single space while white space is stripped


@functools.cache
def normalizer() -> Any:
  """Returns the normaliser of token texts in the Engram demo.

  Compatible characters are unified (NFKC), accents and other marks are dropped, letters become
  lower case, and white space around the text is dropped. Blanks alone become one space.
  """
  from tokenizers import Regex, normalizers  # other vocabularies do not need it

  return normalizers.Sequence(
    [
      normalizers.NFKC(),
      normalizers.NFD(),
      normalizers.StripAccents(),
      normalizers.Lowercase(),
      normalizers.Replace(Regex(r'[ \t\r\n]+'), ' '),
      normalizers.Replace(Regex(r'^ $'), PRIVATE),
      normalizers.Strip(),
      normalizers.Replace(PRIVATE, ' '),
    ]
  )


def token_classes(texts: Sequence[str], raw_tokens: Sequence[str]) -> np.ndarray:
  """Returns the class of every token id, int32 [V], numbered in the order of first occurrence.

  A run stores its classes and never recomputes them: another version of `tokenizers` may give other
  classes for new Unicode characters.

  The class depends on the normalised text, or on the text itself if normalisation leaves nothing. A
  piece of an incomplete UTF-8 character has no text: its class depends on the raw token.

  Args:
    texts: the text of every token id; U+FFFD stands for an incomplete character.
    raw_tokens: the token of every token id, in the notation of the vocabulary.
  """
  classes: dict[str, int] = {}
  normalize = normalizer().normalize_str
  numbers = []
  for text, raw_token in zip(texts, raw_tokens, strict=True):
    key = raw_token
    if REPLACEMENT not in text:
      key = normalize(text) or text
    numbers.append(classes.setdefault(key, len(classes)))
  return np.array(numbers, np.int32)
