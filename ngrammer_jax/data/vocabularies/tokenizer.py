"""The tokens of a Hugging Face tokenizer."""

from collections.abc import Iterable, Sequence
import json
import pathlib

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base
from ngrammer_jax.system import files

# Special tokens of a tokenizer.json that separate documents, the first that it has.
DOCUMENT_SEPARATORS = (
  *('<s>', '<bos>', '<|bos|>', '[BOS]', '<|begin_of_text|>', '<|startoftext|>'),
  '<｜begin▁of▁sentence｜>',
  *('</s>', '<eos>', '<|eos|>', '[EOS]', '<|end_of_text|>', '<|endoftext|>'),
  '<｜end▁of▁sentence｜>',
)


class TokenizerVocabulary(base.Vocabulary):
  """A Hugging Face tokenizer, from its file `tokenizer.json`.

  The document start is the first special token that the tokenizer itself adds to a text; if it adds
  none, the first of DOCUMENT_SEPARATORS that is one of its special tokens. A text that spells a
  special token is ordinary text, so no text contains the document start.

  Args:
    content: the content of the file.
    size: number of ids with unused ones after those of the tokenizer, as the embeddings of
      published models have them. None: those of the tokenizer.

  Raises:
    ValueError: the file is not a tokenizer.
    BadInput: no special token separates documents, or the tokenizer has more ids than `size`.
  """

  def __init__(self, content: bytes, size: int | None = None):
    import tokenizers  # other vocabularies do not need it

    self.content = content
    self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # A tokenizer of a model with short inputs cuts and pads texts.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    model = json.loads(content)['model']
    self.unknown = model.get('unk_id')
    if model.get('unk_token') is not None:
      self.unknown = self._tokenizer.token_to_id(model['unk_token'])
    self.document_start = self.document_end = self._find_separator()
    own_size = 1 + max(self._tokenizer.get_vocab().values())  # some tokenizers leave ids out
    self.size = own_size if size is None else size
    if own_size > self.size:
      raise errors.BadInput(
        f'the tokenizer has {own_size:,} ids, but the model {self.size:,}: it is of another model'
      )
    self.definition = ('tokenizer', content, self.size)

  def _find_separator(self) -> int:
    """Returns the id of the document start. Raises BadInput if there is none."""
    added = self._tokenizer.get_added_tokens_decoder()
    special = {t.content: i for i, t in added.items() if t.special and i != self.unknown}
    own = [i for i in self._tokenizer.encode('').ids if i in special.values()]
    named = [special[name] for name in DOCUMENT_SEPARATORS if name in special]
    if not own and not named:
      raise errors.BadInput(
        f'the tokenizer has no special token that separates documents: it adds none to a text, and '
        f'none of {", ".join(DOCUMENT_SEPARATORS)} is among its special tokens '
        f'({", ".join(special) or "none"}); add one of them to its added_tokens'
      )
    return (own or named)[0]

  def encode(self, text: bytes) -> np.ndarray:
    return self.encode_all([text])[0]

  def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode() for text in texts]
    encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
    id_arrays = [np.array(encoding.ids, np.int32) for encoding in encodings]
    # Some models have a piece that is spelled as the document start: T5's Unigram, for example.
    return [ids[ids != self.document_start] for ids in id_arrays]

  def decode(self, ids: Iterable[int]) -> bytes:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True).encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    single_ids = [[i] for i in range(self.size)]
    texts = self._tokenizer.decode_batch(single_ids, skip_special_tokens=False)
    return texts, [self._tokenizer.id_to_token(i) or '' for i in range(self.size)]

  def save(self, folder: pathlib.Path) -> None:
    files.write(folder / 'vocabulary.tokenizer.json', self.content)
    base.write_fields(folder, 'tokenizer', size=self.size)
