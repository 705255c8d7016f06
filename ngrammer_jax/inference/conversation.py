"""Conversations with a model that has a chat template."""

from collections.abc import Callable, Sequence
import dataclasses

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import chat_template
from ngrammer_jax.inference import encoding, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference.detokenizer import IncrementalDetokenizer


def encode_prompt(
  vocabulary: vocabularies.Vocabulary, prompt: str, name: str, config: text.CompletionConfig
) -> encoding.EncodedText:
  """Encodes a prompt as the first message of a conversation; see `text.encode_prompt`."""
  chat_template.check_exists(vocabulary)
  encoding.to_bytes(prompt, name)
  ids = chat_template.encode(
    vocabulary, chat_template.render(vocabulary, [{'role': 'user', 'content': prompt}])
  )
  config.check_length(name, len(ids))
  return encoding.EncodedText(prompt, ids)


def end_at_turn(
  config: text.CompletionConfig, vocabulary: vocabularies.TokenizerVocabulary
) -> text.CompletionConfig:
  """Returns options of answers, which also end with the turn of the model."""
  return dataclasses.replace(config, end_tokens=chat_template.end_of_turn(vocabulary))


class Conversation:
  """A conversation, whose tokens are read once: the KV cache keeps them between its messages.

  A template may show earlier messages differently than before. Then all of them are read again.

  Args:
    engine, variables: the engine and its variables.
    vocabulary: the vocabulary of the model, with a chat template.
    config: options of the answers.
  """

  def __init__(
    self,
    engine: inference.Engine,
    variables: inference.Variables,
    vocabulary: vocabularies.TokenizerVocabulary,
    config: text.CompletionConfig,
  ):
    self._vocabulary = vocabulary
    self._config = end_at_turn(config, vocabulary)
    self._start = lambda: engine.start_incremental_decoding(
      variables, config.seed, config.sampling, config.context, vocabulary.document_start
    )
    self._messages: list[chat_template.Message] = []
    self._forget()

  def _forget(self) -> None:
    """Lets the next message be read with all earlier ones."""
    self._read: Callable[[Sequence[int]], int] | None = None
    self._shown = ''  # the rendered conversation so far
    self._ids: list[int] = []  # its tokens
    self._num_read = 0  # how many of them the KV cache has

  def say(self, message: str, on_text: Callable[[int, str], None] | None = None) -> text.Completion:
    """Returns the answer of the model to a message.

    Args:
      message: what the user says.
      on_text: called with 0 and the new text, for each token.

    Raises:
      BadInput: the conversation does not fit the context, or the template does not accept it. The
        message is then no part of it.
    """
    encoding.to_bytes(message, 'the message')
    messages = [*self._messages, {'role': 'user', 'content': message}]
    rendered = chat_template.render(self._vocabulary, messages)
    if not rendered.startswith(self._shown):
      self._forget()
    ids = [
      *self._ids,
      *chat_template.encode(self._vocabulary, rendered[len(self._shown) :]).tolist(),
    ]
    new_ids = ids[self._num_read :]
    config = self._config
    config.check_length('the conversation', len(ids))
    read = self._read or self._start()
    self._forget()  # until the answer is complete
    answer = IncrementalDetokenizer(
      self._vocabulary, ids, config.tokens, config.stop, config.end_tokens
    )
    while not answer.is_done:
      token = read(new_ids)
      new_ids = [token]
      new_text = answer.add(token)
      if on_text is not None:
        on_text(0, new_text)
    self._messages = [*messages, {'role': 'assistant', 'content': answer.text}]
    # The tokens of a stop string were read, but are no part of the answer.
    is_whole = answer.tokens[-1:] != new_ids or not answer.has_ended
    if is_whole:
      self._read = read
      self._shown = rendered + answer.text
      self._ids = [*ids, *answer.tokens]
      self._num_read = len(self._ids) - (not answer.has_ended)  # else the last token is not read
    return text.Completion(message, answer.text, answer.tokens, answer.has_ended, config.seed)
