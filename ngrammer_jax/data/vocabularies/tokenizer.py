"""The tokens of a Hugging Face tokenizer."""

from collections.abc import Iterable, Sequence
import functools
import json
import typing

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base

if typing.TYPE_CHECKING:
  import tokenizers

# Special tokens of a tokenizer.json that separate documents, the first that it has.
DOCUMENT_SEPARATORS = (
  '<s>',
  '<bos>',
  '<|bos|>',
  '[BOS]',
  '<|begin_of_text|>',
  '<|startoftext|>',
  '<｜begin▁of▁sentence｜>',
  '</s>',
  '<eos>',
  '<|eos|>',
  '[EOS]',
  '<|end_of_text|>',
  '<|endoftext|>',
  '<｜end▁of▁sentence｜>',
)


class TokenizerVocabulary(base.Vocabulary):
  """A Hugging Face tokenizer, from its file `tokenizer.json`.

  No ordinary text contains the document start.

  Args:
    content: the content of the file.
    size: number of ids with unused ones after those of the tokenizer, as the embeddings of
      published models have them. None: those of the tokenizer.
    document_start: id of the document start. None: the first of the end tokens. Without these too,
      the first special token that the tokenizer itself adds to a text; if it adds none, the first
      of DOCUMENT_SEPARATORS that is one of its special tokens.
    end_tokens: ids that end a text that the model generates. Empty: the document start.
    adds_start: whether a text that is scored or continued begins with the document start.
    chat_template: the Jinja template of a conversation, if the model has one.

  Attributes:
    has_begin_token: whether the document start is a begin token of the model; False: an end token.

  Raises:
    ValueError: the file is not a tokenizer.
    BadInput: no special token separates documents, or the tokenizer has more ids than `size`.
  """

  kind = 'tokenizer'
  file = 'vocabulary.tokenizer.json'

  def __init__(
    self,
    content: bytes,
    size: int | None = None,
    document_start: int | None = None,
    end_tokens: Sequence[int] = (),
    adds_start: bool = True,
    chat_template: str | None = None,
  ):
    self.content = content
    self.adds_start = adds_start
    self.chat_template = chat_template
    self._tokenizer = self._make_tokenizer()
    self._tokenizer.encode_special_tokens = True  # as ordinary text
    self.has_begin_token = document_start is not None or not end_tokens
    if document_start is not None:
      self.document_start = document_start
    elif end_tokens:
      self.document_start = end_tokens[0]
    else:
      self.document_start = self._find_separator()
    self._ends = tuple(end_tokens or (self.document_start,))
    self.document_end = self._ends[0]
    own_size = 1 + max(self._tokenizer.get_vocab().values())  # some tokenizers leave ids out
    self.size = own_size if size is None else size
    if own_size > self.size:
      raise errors.BadInput(
        f'the tokenizer has {own_size:,} ids, but the model {self.size:,}: it is of another model'
      )
    self.definition = (self.kind, content, self.size)
    fields = {
      'size': self.size,
      'document_start': document_start,
      'end_tokens': end_tokens or None,
      'adds_start': None if adds_start else False,
      'chat_template': chat_template,
    }
    self.fields = {name: value for name, value in fields.items() if value is not None}

  def _make_tokenizer(self) -> 'tokenizers.Tokenizer':
    """Returns a tokenizer, in whose texts the spelling of a special token is that token."""
    import tokenizers  # other vocabularies do not need it

    tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
    # A tokenizer of a model with short inputs cuts and pads texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

  _special_tokenizer = functools.cached_property(_make_tokenizer)

  @functools.cached_property
  def unknown(self) -> int | None:
    """Id of text that is not in the vocabulary; None if there is no such id."""
    model = json.loads(self.content)['model']
    token = model.get('unk_token')
    if token is None:
      return model.get('unk_id')
    return self._tokenizer.token_to_id(token)

  @property
  def end_tokens(self) -> tuple[int, ...]:
    """Ids at which a generated text ends: the start of another document is one of them."""
    return (*self._ends, self.document_start)

  @functools.cached_property
  def special_tokens(self) -> tuple[str, ...]:
    """The spellings of the special tokens."""
    added = self._tokenizer.get_added_tokens_decoder()
    return tuple(token.content for token in added.values() if token.special)

  @functools.cached_property
  def added_ids(self) -> frozenset[int]:
    """Ids of the tokens that are found in a text before all others: special ones, and others."""
    return frozenset(self._tokenizer.get_added_tokens_decoder())

  def _find_separator(self) -> int:
    """Returns the id of the document start. Raises BadInput if there is none."""
    added = self._tokenizer.get_added_tokens_decoder()
    special = {t.content: i for i, t in added.items() if t.special and i != self.unknown}
    added_ids = [i for i in self._tokenizer.encode('').ids if i in special.values()]
    separator_ids = [special[name] for name in DOCUMENT_SEPARATORS if name in special]
    if not added_ids and not separator_ids:
      raise errors.BadInput(
        f'the tokenizer has no special token that separates documents: it adds none to a text, and '
        f'none of {", ".join(DOCUMENT_SEPARATORS)} is among its special tokens '
        f'({", ".join(special) or "none"}); add one of them to its added_tokens'
      )
    return (added_ids or separator_ids)[0]

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    return self.encode_all([text], special)[0]

  def encode_all(self, texts: Sequence[bytes], special: bool = False) -> list[np.ndarray]:
    decoded = [text.decode() for text in texts]
    tokenizer = self._select_tokenizer(special)
    encodings = tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
    id_arrays = [np.array(encoding.ids, np.int32) for encoding in encodings]
    if special:
      return id_arrays
    # Some models have pieces that are spelled as special tokens: T5's Unigram, for example.
    return [ids[~self._is_reserved[ids]] for ids in id_arrays]

  @functools.cached_property
  def _is_reserved(self) -> np.ndarray:
    """Whether an id is a special token, which ordinary text cannot have, bool [ids]."""
    added = self._tokenizer.get_added_tokens_decoder()
    is_reserved = np.zeros(1 + max(self._tokenizer.get_vocab().values()), bool)
    for i, token in added.items():
      is_reserved[i] = token.special and i != self.unknown
    is_reserved[self.document_start] = True
    return is_reserved

  def encode_with_ranges(
    self, texts: Sequence[str], special: bool = False
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the ids of each text, as `encode_all`, and the range of characters of each id.

    The ranges are [N, 2]. Tokens that are pieces of one character have the same range.
    """
    encodings = self._select_tokenizer(special).encode_batch(texts, add_special_tokens=False)
    results = []
    for encoding in encodings:
      ids = np.array(encoding.ids, np.int32)
      ranges_Nx2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
      if not special:
        is_text = ids != self.document_start
        ids = ids[is_text]
        ranges_Nx2 = ranges_Nx2[is_text]
      results.append((ids, ranges_Nx2))
    return results

  def _select_tokenizer(self, special: bool) -> 'tokenizers.Tokenizer':
    """Returns the tokenizer that reads the spellings of special tokens as such, or as text."""
    return self._special_tokenizer if special else self._tokenizer

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special).encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    single_ids = [[i] for i in range(self.size)]
    texts = self._tokenizer.decode_batch(single_ids, skip_special_tokens=False)
    return texts, list(map(self.token, range(self.size)))

  def token(self, i: int) -> str:
    """Returns the spelling of a token."""
    return self._tokenizer.id_to_token(i) or ''
