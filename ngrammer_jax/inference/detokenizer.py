"""From token ids to text, token by token, up to a stop string."""

from collections.abc import Iterable

from ngrammer_jax.data import vocabularies

# Incomplete UTF-8 decodes to this character, as do bytes that are not UTF-8.
REPLACEMENT = '\N{REPLACEMENT CHARACTER}'


class IncrementalDetokenizer:
  """Converts the tokens after a prompt to text, token by token; emitted text never changes.

  Special tokens are no text. A stop string that spells one ends the text before that token. The
  text ends at the end tokens of the vocabulary, and at further ones.

  Attributes:
    text: the text so far.
    tokens: the tokens so far, without the end of the document.
    has_ended: whether the document ended, or a stop string came, which is not part of the text.
    is_done: whether it has ended or the token limit is reached.
  """

  def __init__(
    self,
    vocabulary: vocabularies.Vocabulary,
    prompt: Iterable[int],
    max_tokens: int,
    stop: tuple[str, ...] = (),
    end_tokens: tuple[int, ...] = (),
  ):
    self._vocabulary = vocabulary
    self._max_tokens = max_tokens
    self._stop = stop
    self._end_tokens = (*vocabulary.end_tokens, *end_tokens)
    self._special_stop = tuple(text for text in stop if _spells_special(vocabulary, text))
    self._prompt = [int(i) for i in prompt]
    self._prompt_length = {special: len(self._decode([], special)) for special in (False, True)}
    self.text = ''
    self.tokens: list[int] = []
    self.has_ended = False
    self.is_done = False

  def add(self, token: int) -> str:
    """Adds a token and returns the new text, which may be empty."""
    self.has_ended = token in self._end_tokens
    all_tokens = [*self.tokens, token]
    if not self.has_ended:
      self.tokens = all_tokens
    self.is_done = self.has_ended or len(self.tokens) >= self._max_tokens
    text = self._continuation(self.tokens)
    if not self.is_done:  # an incomplete character waits for its other bytes
      text = text.rstrip(REPLACEMENT)
    stopped_texts = [text[: text.index(stop)] for stop in self._stop if stop in text]
    if self._special_stop:
      stopped_texts += self._texts_before_special_stops(all_tokens)
    if stopped_texts:
      text = min(stopped_texts, key=len)
      self.has_ended = True
      self.is_done = True
    elif not self.is_done:
      text = text[: len(text) - self._stop_prefix_length(text)]
    new_text = text[len(self.text) :]
    self.text = text
    return new_text

  def _texts_before_special_stops(self, tokens: list[int]) -> list[str]:
    """Returns the text before each stop string that spells a special token and is in the tokens."""
    shown = self._continuation(tokens, special=True)
    texts = []
    for stop in self._special_stop:
      start = shown.find(stop)
      if start < 0:
        continue
      # The tokens before the stop string, and the part of the next one that is before it.
      num_before = len(tokens)
      while len(self._continuation(tokens[:num_before], special=True)) > start:
        num_before -= 1
      before = tokens[:num_before]
      part = shown[len(self._continuation(before, special=True)) : start]
      texts.append(self._continuation(before) + part)
    return texts

  def _stop_prefix_length(self, text: str) -> int:
    """Returns the length of the longest end of a text that begins a stop string."""
    longest = max(map(len, self._stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
      if any(stop.startswith(text[-length:]) for stop in self._stop):
        return length
    return 0

  def _continuation(self, tokens: list[int], special: bool = False) -> str:
    """Returns the text of tokens after the prompt; `special` as of `Vocabulary.decode`."""
    return self._decode(tokens, special)[self._prompt_length[special] :]

  def _decode(self, tokens: list[int], special: bool) -> str:
    ids = [*self._prompt, *tokens]
    return self._vocabulary.decode(ids, special).decode('utf-8', 'replace')


def _spells_special(vocabulary: vocabularies.Vocabulary, text: str) -> bool:
  """Whether a text has the spelling of a special token."""
  return any(special in text for special in vocabulary.special_tokens)
