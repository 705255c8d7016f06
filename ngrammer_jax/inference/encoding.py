"""From texts to token ids, for all of inference.

With `special=True` the text of a special token is read as the token, otherwise as ordinary text.
Token ids can replace a text everywhere, and are used unchanged.
"""

from collections.abc import Iterable, Sequence
import logging
from typing import Any, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies

TextOrIds = str | Sequence[int] | np.ndarray


class EncodedText(NamedTuple):
  """A text and its token ids.

  Attributes:
    text: the text, its token ids, or the messages of a chat.
    ids: its token ids, int32.
  """

  text: str | list[int] | list[dict[str, Any]]
  ids: np.ndarray


def encode(
  vocabulary: vocabularies.Vocabulary, text: TextOrIds, name: str, special: bool
) -> EncodedText:
  """Encodes a text, or checks token ids.

  Args:
    vocabulary: vocabulary of the model.
    text: the text, or its token ids.
    name: name of the text, for error messages.
    special: whether the text of a special token is read as the token.

  Raises:
    BadInput: another type, or a character or id outside the vocabulary.
  """
  if not isinstance(text, str) and is_ids(text):
    ids = check_ids(text, vocabulary.size, name)
    return EncodedText(ids.tolist(), ids)
  content = to_bytes(text, name)
  with errors.named(name):
    return EncodedText(text, vocabulary.encode(content, special).astype(np.int32))


def to_bytes(text: str, name: str) -> bytes:
  """Returns a text as UTF-8. Raises BadInput with its name for other types."""
  if not isinstance(text, str):
    raise errors.BadInput(f'{name} is of type {type(text).__name__}, expected a text')
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise errors.BadInput(f'{name} is not valid Unicode: {error.reason}') from error


def is_ids(text: Any) -> bool:
  """Whether a value is a list of token ids, not a text or a list of texts."""
  if isinstance(text, np.ndarray):
    return text.ndim == 1 and text.dtype.kind in 'iu'
  if isinstance(text, str) or not isinstance(text, Sequence):
    return False
  return all(isinstance(i, int | np.integer) for i in text)


def check_ids(ids: Any, size: int, name: str) -> np.ndarray:
  """Returns token ids as int32. Raises BadInput with their name unless all are below `size`."""
  array = np.asarray(ids)
  is_list = array.ndim == 1 and (not array.size or array.dtype.kind in 'iu')
  if not is_list or (array.size and not 0 <= array.min() <= array.max() < size):
    raise errors.BadInput(f'{name}: expected a text, or a list of token ids from 0 to {size - 1:,}')
  return array.astype(np.int32)


def as_list(texts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
  """Returns several texts as a list, and a single one as a list of one.

  Raises:
    BadInput: another type.
  """
  if isinstance(texts, str):
    return [texts]
  if not isinstance(texts, Iterable):
    raise errors.BadInput(
      f'the prompts or texts are of type {type(texts).__name__}: expected a text, a list of token '
      f'ids, or a list of these'
    )
  is_single = is_ids(texts) and len(texts) > 0
  return [texts] if is_single else list(texts)


def check_special(vocabulary: vocabularies.Vocabulary, texts: Iterable[Any], special: bool) -> None:
  """Checks the option `special` before texts are encoded.

  Logs special tokens in the texts if they are read as ordinary text.

  Raises:
    BadInput: `special` is set, but the vocabulary has no special tokens.
  """
  if special:
    if not vocabulary.special_tokens:
      raise errors.BadInput(
        'special=True (--special) reads special tokens in a text, but the vocabulary of this model '
        'has none: leave it out'
      )
    return
  texts = [text for text in texts if isinstance(text, str)]
  spelled = [s for s in vocabulary.special_tokens if any(s in text for text in texts)]
  if spelled:
    logging.warning(
      'the text spells special tokens, read as ordinary text: %s; --special (special=True) reads '
      'them as special tokens',
      ', '.join(spelled),
    )
