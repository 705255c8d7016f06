"""The tokens of a Hugging Face tokenizer."""

from collections.abc import Iterable, Sequence
import functools
import json
import typing

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base, post_processor

if typing.TYPE_CHECKING:
  import tokenizers

# Special tokens that separate documents, the first one in a tokenizer.json.
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
    size: number of ids, the rows of a published model: some may be unused, and added tokens of the
      tokenizer may have no row. None: the number of ids of the tokenizer.
    document_start: id of the document start. None: the first of the end tokens. Without end tokens,
      the first special token added to a text by the tokenizer; otherwise the first special token in
      DOCUMENT_SEPARATORS.
    end_tokens: ids that end a generated text. Empty: the document start.
    adds_start: whether scored or continued texts begin with the document start.
    chat_template: the Jinja template of a conversation, if the model has one.

  Attributes:
    has_begin_token: whether the document start is a begin token of the model; False: an end token.
    tokens_without_row: the added tokens with ids from `size` on. No text may contain them.

  Raises:
    ValueError: the file is not a tokenizer.
    BadInput: no special token separates documents, or a regular token has an id from `size` on.
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
    ids = self._tokenizer.get_vocab()
    own_size = 1 + max(ids.values())  # some tokenizers leave ids out
    self.size = own_size if size is None else size
    ids_without_row = sorted(i for i in ids.values() if i >= self.size)
    self.tokens_without_row = tuple(map(self.token, ids_without_row))
    if not self._added_tokens.keys() >= set(ids_without_row):
      raise errors.BadInput(
        f'the tokenizer has {own_size:,} ids, but the model {self.size:,}: it is of another model'
      )
    self.has_begin_token = document_start is not None or not end_tokens
    if document_start is not None:
      self.document_start = document_start
    elif end_tokens:
      self.document_start = end_tokens[0]
    else:
      self.document_start = self._find_separator()
    self._ends = tuple(end_tokens or (self.document_start,))
    self.document_end = self._ends[0]
    self.definition = (self.kind, content, self.size)
    stored_adds_start = None  # true is the default
    if not adds_start:
      stored_adds_start = False
    fields = {
      'size': self.size,
      'document_start': document_start,
      'end_tokens': end_tokens or None,
      'adds_start': stored_adds_start,
      'chat_template': chat_template,
    }
    self.fields = {name: value for name, value in fields.items() if value is not None}

  def _make_tokenizer(self) -> 'tokenizers.Tokenizer':
    """Returns a tokenizer that reads the text of a special token as the token."""
    import tokenizers  # other vocabularies do not need it

    tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
    # A tokenizer of a model with short inputs cuts and pads texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

  _special_tokenizer = functools.cached_property(_make_tokenizer)

  @functools.cached_property
  def _added_tokens(self) -> dict[int, 'tokenizers.AddedToken']:
    """The added tokens by id, matched before all others."""
    return self._tokenizer.get_added_tokens_decoder()

  @functools.cached_property
  def unknown(self) -> int | None:
    """Id of text outside the vocabulary; None without such an id."""
    model = json.loads(self.content)['model']
    token = model.get('unk_token')
    if token is None:
      return model.get('unk_id')
    return self._tokenizer.token_to_id(token)

  @property
  def end_tokens(self) -> tuple[int, ...]:
    """Ids that end a generated text, including the start of another document."""
    return (*self._ends, self.document_start)

  @functools.cached_property
  def special_tokens(self) -> tuple[str, ...]:
    """The texts of the special tokens."""
    return tuple(token.content for token in self._added_tokens.values() if token.special)

  @functools.cached_property
  def added_ids(self) -> frozenset[int]:
    """Ids of the added tokens, special or not, matched in a text before all others."""
    return frozenset(self._added_tokens)

  def _find_separator(self) -> int:
    """Returns the id of the document start. Raises BadInput if there is none."""
    special = {
      token.content: i
      for i, token in self._added_tokens.items()
      if token.special and i != self.unknown and i < self.size
    }
    added = post_processor.added_ids(json.loads(self.content).get('post_processor'))
    added_ids = [i for i in (*added.before, *added.after) if i in special.values()]
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
    if not special:
      # Some models have pieces with texts of special tokens: T5's Unigram, for example.
      id_arrays = [ids[~self._is_reserved[ids]] for ids in id_arrays]
    self._check_rows(id_arrays)
    return id_arrays

  @functools.cached_property
  def _is_reserved(self) -> np.ndarray:
    """Whether an id is a special token, never in ordinary text, bool [ids]."""
    is_reserved = np.zeros(1 + max(self._tokenizer.get_vocab().values()), bool)
    for i, token in self._added_tokens.items():
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
        is_text = ~self._is_reserved[ids]
        ids = ids[is_text]
        ranges_Nx2 = ranges_Nx2[is_text]
      self._check_rows([ids])
      results.append((ids, ranges_Nx2))
    return results

  def _select_tokenizer(self, special: bool) -> 'tokenizers.Tokenizer':
    """Returns the tokenizer that reads texts of special tokens as tokens, or as text."""
    return self._special_tokenizer if special else self._tokenizer

  def _check_rows(self, id_arrays: Sequence[np.ndarray]) -> None:
    """Raises BadInput if a text contains one of `tokens_without_row`."""
    if not self.tokens_without_row:
      return
    largest = max((ids.max(initial=0) for ids in id_arrays), default=0)
    if largest >= self.size:
      raise errors.BadInput(
        f'the token {self.token(largest)} has the id {largest:,}, but the model has {self.size:,} '
        f'rows: use a text without it'
      )

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special).encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    single_ids = [[i] for i in range(self.size)]
    texts = self._tokenizer.decode_batch(single_ids, skip_special_tokens=False)
    return texts, list(map(self.token, range(self.size)))

  def token(self, i: int) -> str:
    """Returns the text of a token."""
    return self._tokenizer.id_to_token(i) or ''
