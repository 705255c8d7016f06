"""Compressed token ids: tokens that spell the same text in lower case share one class.

From the tokenizer compression of Engram (Cheng et al. 2026, arXiv 2601.07372, and its demo code).
"""

from collections.abc import Sequence
import re
import unicodedata

import numpy as np

REPLACEMENT = '\N{REPLACEMENT CHARACTER}'  # the text of an incomplete UTF-8 character
PRIVATE = '\ue000'  # stands for a single space while white space is stripped
# White_Space of Unicode. Python also strips the separators U+001C to U+001F.
WHITE_SPACE = ''.join(
  c for c in map(chr, range(0x3001)) if c.isspace() and not '\x1c' <= c <= '\x1f'
)


def normalize(text: str) -> str:
  """Returns the normalised text of a token, which can be empty.

  Compatible characters are unified (NFKC), accents and other marks are dropped, letters become
  lower case, and white space around the text is dropped. Blanks alone become one space.
  """
  decomposed = unicodedata.normalize('NFD', unicodedata.normalize('NFKC', text))
  # All marks, as in the library of the demo: accents, and the vowel signs of Indic scripts.
  base = ''.join(c for c in decomposed if unicodedata.category(c)[0] != 'M')
  lower = ''.join(c.lower() for c in base)  # one by one: no special rule for a final sigma
  spaced = re.sub(r'[ \t\r\n]+', ' ', lower)
  marked = PRIVATE if spaced == ' ' else spaced
  return marked.strip(WHITE_SPACE).replace(PRIVATE, ' ')


def token_classes(texts: Sequence[str], raw_tokens: Sequence[str]) -> np.ndarray:
  """Returns the class of every token id, int32 [V], numbered in the order of first occurrence.

  The class is that of the normalised text, or of the text itself if nothing is left of it. A piece
  of an incomplete UTF-8 character has no text: its class is that of the raw token.

  Args:
    texts: the text of every token id; U+FFFD stands for an incomplete character.
    raw_tokens: the token itself, as the vocabulary writes it, of every token id.
  """
  classes: dict[str, int] = {}
  keys = (
    raw if REPLACEMENT in text else normalize(text) or text
    for text, raw in zip(texts, raw_tokens, strict=True)
  )
  return np.array([classes.setdefault(key, len(classes)) for key in keys], np.int32)
