"""From token ids to text, token by token, up to a stop string."""

from collections.abc import Iterable

from ngrammer_jax.data import vocabularies

# Incomplete UTF-8 decodes to this character, as do bytes that are not UTF-8.
REPLACEMENT = '\N{REPLACEMENT CHARACTER}'
WINDOW = 32  # tokens before a new one that its text may depend on


class _GrowingText:
  """The text of the tokens after a prompt; only the last ones are decoded again.

  Attributes:
    text: the text so far.
  """

  def __init__(self, vocabulary: vocabularies.Vocabulary, prompt: list[int], special: bool):
    self._vocabulary = vocabulary
    self._special = special  # see `Vocabulary.decode`
    self.text = ''
    self._start_window(prompt)

  def _start_window(self, tokens: list[int]) -> None:
    """Starts a window of last tokens: earlier text is final."""
    self._settled_text = self.text
    size = WINDOW
    # Some vocabularies drop a space before the first token, so there has to be a text before it.
    while size < len(tokens) and not self._decode(tokens[-size:]):
      size *= 2
    self._window = tokens[-size:]
    self._max_window = 2 * size
    self._settled_length = len(self._decode(self._window))

  def add(self, token: int) -> None:
    """Adds a token."""
    self._window.append(token)
    self.text = self._settled_text + self._decode(self._window)[self._settled_length :]
    is_complete = not self.text.endswith(REPLACEMENT)
    if len(self._window) >= self._max_window and is_complete:
      self._start_window(self._window)

  def _decode(self, tokens: list[int]) -> str:
    return self._vocabulary.decode(tokens, self._special).decode('utf-8', 'replace')


class IncrementalDetokenizer:
  """Converts the tokens after a prompt to text, token by token; emitted text never changes.

  Special tokens are not part of the text. A stop string equal to a special token ends the text
  before the token. The text also ends at the end tokens of the vocabulary, and at further ones.

  Attributes:
    text: the text so far.
    tokens: the tokens so far, without the end of the document.
    has_ended: whether the document ended, or a stop string came (not part of the text).
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
    self._end_tokens = (*vocabulary.end_tokens, *end_tokens)
    self._max_tokens = max_tokens
    self._stop = stop
    self._special_stop = tuple(text for text in stop if _spells_special(vocabulary, text))
    prompt_ids = [int(i) for i in prompt]
    self._plain = _GrowingText(vocabulary, prompt_ids, special=False)
    self._shown = _GrowingText(vocabulary, prompt_ids, special=True)
    self._lengths = [(0, 0)]  # of the shown and the plain text after each token
    self.text = ''
    self.tokens: list[int] = []
    self.has_ended = False
    self.is_done = False

  @property
  def has_all_text(self) -> bool:
    """Whether the text covers all tokens: nothing is cut off or held back."""
    return self.text == self._plain.text

  def add(self, token: int) -> str:
    """Adds a token and returns the new text, which may be empty."""
    self.has_ended = token in self._end_tokens
    if not self.has_ended:
      self.tokens.append(token)
      self._plain.add(token)
    self.is_done = self.has_ended or len(self.tokens) >= self._max_tokens
    text = self._plain.text
    if not text.startswith(self.text):
      # A complete character and the first bytes of the next one decode as if all were incomplete.
      text = self.text + REPLACEMENT
    if not self.is_done:  # an incomplete character waits for its other bytes
      text = text.rstrip(REPLACEMENT)
    stopped_texts = [text[: text.index(stop)] for stop in self._stop if stop in text]
    if self._special_stop:
      self._shown.add(token)
      self._lengths.append((len(self._shown.text), len(self._plain.text)))
      stopped_texts += self._texts_before_special_stops()
    if stopped_texts:
      text = min(stopped_texts, key=len)
      self.has_ended = True
      self.is_done = True
    elif not self.is_done:
      text = text[: self._safe_length(text)]
    new_text = text[len(self.text) :]
    self.text = text
    return new_text

  def _texts_before_special_stops(self) -> list[str]:
    """Returns the text before each generated special token in the stop strings."""
    texts = []
    for stop in self._special_stop:
      start = self._shown.text.find(stop)
      if start >= 0:
        texts.append(self._text_before(start))
    return texts

  def _text_before(self, start: int) -> str:
    """Returns the text before a position of the text with special tokens."""
    # The text of the tokens before the position, and the part of the next one before it.
    shown_length, length = max(pair for pair in self._lengths if pair[0] <= start)
    return self._plain.text[:length] + self._shown.text[shown_length:start]

  def _safe_length(self, text: str) -> int:
    """Returns the length of the text that no stop string can remove."""
    length = len(text) - _prefix_length(text, self._stop)
    shown_prefix = _prefix_length(self._shown.text, self._special_stop)
    if shown_prefix:
      before = self._text_before(len(self._shown.text) - shown_prefix)
      length = min(length, len(before))
    return length


def _prefix_length(text: str, stops: tuple[str, ...]) -> int:
  """Returns the length of the longest suffix of a text that is a prefix of a stop string."""
  longest = max(map(len, stops), default=0)
  for length in range(min(longest, len(text)), 0, -1):
    if any(stop.startswith(text[-length:]) for stop in stops):
      return length
  return 0


def _spells_special(vocabulary: vocabularies.Vocabulary, text: str) -> bool:
  """Whether a text is equal to a special token."""
  return any(special in text for special in vocabulary.special_tokens)
