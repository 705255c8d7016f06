"""Generated answers of lm_eval: options, ends and texts, as in its `hf`."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from lm_eval.models import utils

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import Vocabulary
from ngrammer_jax.inference import sampling

SAMPLING_OPTIONS = ('top_k', 'top_p', 'min_p', 'repetition_penalty')
OTHER_OPTIONS = ('until', 'max_gen_toks', 'do_sample', 'temperature')
# Options with the only value that means the same here.
FIXED_OPTIONS = {'num_beams': 1, 'use_cache': True}


@dataclasses.dataclass(frozen=True)
class AnswerConfig:
  """Options of an answer.

  Attributes:
    stops: stop strings, also texts of special tokens; an answer ends before them.
    tokens: maximum number of tokens.
    sampling: options of sampling.
  """

  stops: tuple[str, ...]
  tokens: int
  sampling: sampling.SamplingConfig

  @classmethod
  def from_options(cls, options: Mapping[str, Any], end: str) -> 'AnswerConfig':
    """Returns the options of a request.

    Args:
      options: `generation_kwargs` of a task, or `--gen_kwargs`.
      end: text of the end token, a stop; empty: no end token.

    Raises:
      BadInput: an unsupported option, or a value out of range.
    """
    options = utils.normalize_gen_kwargs(dict(options))
    for name, value in options.items():
      is_known = name in SAMPLING_OPTIONS + OTHER_OPTIONS
      if not is_known and (name not in FIXED_OPTIONS or value != FIXED_OPTIONS[name]):
        raise errors.BadInput(
          f'the task generates with {name}={value!r}, which is not supported: change it with '
          f'--gen_kwargs; supported: {", ".join(OTHER_OPTIONS + SAMPLING_OPTIONS)}'
        )
    stops = [stop for stop in options['until'] if stop is not None]
    if end and end not in stops:
      stops.append(end)
    temperature = 0.0
    if options['do_sample']:
      temperature = options.get('temperature', 1.0)
    sampling_args = {
      name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None
    }
    config = sampling.SamplingConfig(temperature, **sampling_args)
    config.check_values()
    return cls(tuple(stops), options['max_gen_toks'], config)


class Answer:
  """The tokens of an answer. They are decoded without their context.

  An answer ends at an end token, or at a stop in the text with special tokens. Its text ends before
  the first stop and excludes special tokens.

  Attributes:
    is_done: whether it has ended, or has its maximum number of tokens.
  """

  def __init__(self, vocabulary: Vocabulary, end_tokens: tuple[int, ...], config: AnswerConfig):
    self._vocabulary = vocabulary
    self._end_tokens = end_tokens
    self._config = config
    # A model may spell a stop with other tokens: two more are looked at.
    self._stop_lengths = {
      stop: len(vocabulary.encode(stop.encode(), special=True)) + 2 for stop in config.stops
    }
    self._tokens: list[int] = []
    self.is_done = config.tokens < 1

  def add(self, token: int) -> None:
    """Adds a token; tokens after the end are ignored."""
    if self.is_done:
      return
    self._tokens.append(token)
    has_ended = token in self._end_tokens or self._ends_with_stop()
    self.is_done = has_ended or len(self._tokens) >= self._config.tokens

  def _ends_with_stop(self) -> bool:
    return any(
      stop in self._decode(self._tokens[-length:], special=True)
      for stop, length in self._stop_lengths.items()
    )

  @property
  def text(self) -> str:
    """The text before the first stop."""
    text = self._decode(self._tokens, special=False)
    for stop in self._config.stops:
      if stop:
        text = text.split(stop)[0]
    return text

  def _decode(self, tokens: list[int], special: bool) -> str:
    return self._vocabulary.decode(tokens, special).decode(errors='replace')
