"""Generated tokens as text that grows."""

from collections.abc import Iterable

from ngrammer_jax.data import vocabulary as vocabularies

INCOMPLETE = '\N{REPLACEMENT CHARACTER}'  # also what the first bytes of a character look like


class Continuation:
  """What follows a prompt: takes tokens, gives text, and never takes back a character.

  Attributes:
    text: so far.
    tokens: so far.
    ended: whether the document is over.
    done: whether it is, or the limit is reached.
  """

  def __init__(self, vocabulary: vocabularies.Vocabulary, prompt: Iterable[int], limit: int):
    self._vocabulary, self._prompt, self._limit = vocabulary, [int(i) for i in prompt], limit
    self._skip = len(self._decoded([]))
    self.text, self.tokens, self.ended, self.done = '', [], False, False

  def add(self, token: int) -> str:
    """Takes a token in; returns what the text has grown by."""
    self.ended = token == self._vocabulary.document_end
    if not self.ended:
      self.tokens.append(token)
    self.done = self.ended or len(self.tokens) >= self._limit
    text = self._decoded(self.tokens)[self._skip :]
    # The first bytes of a character wait for the others, unless none will come.
    text = text if self.done else text.rstrip(INCOMPLETE)
    grown, self.text = text[len(self.text) :], text
    return grown

  def _decoded(self, tokens: list[int]) -> str:
    return self._vocabulary.decode([*self._prompt, *tokens]).decode('utf-8', 'replace')
