"""Models of equal size: solves for a config key to match the parameters of another model.

Parameters are counted from shapes, without allocation.
"""

from collections.abc import Callable
import dataclasses
import logging
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import conversion, fields, overriding
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.system import hosts
from ngrammer_jax.training import model_size

TOLERANCE = 0.001  # largest difference, as a share of the parameters of the other model


def match(config: Config, key: str, other: ModelConfig, name: str, vocabulary_size: int) -> Config:
  """Returns the config with the value of a key that matches the parameters of another model.

  Logs the value and the numbers of parameters of both.

  Args:
    config: the experiment.
    key: an integer key that increases the number of parameters, such as `model.feed_forward_width`,
      `model.ngram.vocabulary_size` or `model.ngram_memories.0.rows`.
    other: the other model.
    name: its name, for messages.
    vocabulary_size: V, of both.

  Raises:
    BadInput: the key is no such number, or no value matches within TOLERANCE.
  """
  target = model_size.count(other, vocabulary_size).parameters
  start = _whole_number(config, key)

  def count(value: int) -> int:
    model = _with_value(config, key, value).model
    try:
      return model_size.count(model, vocabulary_size).parameters
    except ValueError as error:  # of tables that cannot exist
      raise errors.BadInput(f'{key}={value}: {error}') from error

  label = f'--match_parameters={name} --match_key={key}'
  with errors.named(label):
    value = _solve(count, start, target)
    matched = _with_value(config, key, value)
    if matched.data.matched_vocabulary_size is not None:
      data = dataclasses.replace(matched.data, matched_vocabulary_size=vocabulary_size)
      matched = dataclasses.replace(matched, data=data)
    matched.check()
  parameters = count(value)
  difference = (parameters - target) / target
  if abs(difference) > TOLERANCE:
    raise errors.BadInput(
      f'{label}: {parameters:,} parameters with {key}={value}, the nearest to the {target:,} of '
      f'{name}, differ by {difference:+.2%}, more than {TOLERANCE:.1%}: use a --match_key with '
      f'smaller steps, or other sizes'
    )
  if hosts.is_primary():
    logging.info(
      '%s=%s has %s parameters, and %s has %s (%s)',
      key,
      value,
      f'{parameters:,}',
      name,
      f'{target:,}',
      f'{difference:+.3%}',
    )
  return matched


def _whole_number(config: Config, key: str) -> int:
  """Returns the value of a key. Raises BadInput unless it is one whole number."""
  declared = conversion.find_key(key)
  value: Any = config
  for part in key.split('.'):
    if isinstance(value, tuple) and part.isdecimal() and int(part) < len(value):
      value = value[int(part)]
    else:
      value = getattr(value, part, None)
  if isinstance(value, tuple) and len(value) == 1:
    (value,) = value
  if int not in (*declared.types, declared.entry_type) or type(value) is not int:
    raise errors.BadInput(
      f'--match_key={key} is {fields.format_value(value)}, not one whole number: use for example '
      f'model.feed_forward_width or model.ngram_memories.0.rows'
    )
  return value


def _with_value(config: Config, key: str, value: int) -> Config:
  """Returns the config with another value of a key, unchecked."""
  values = dataclasses.asdict(config)
  overriding.apply_all(values, [(key, value)])
  return conversion.build(Config, conversion.to_dict(values))


def _solve(count: Callable[[int], int], start: int, target: int) -> int:
  """Returns the value with the count nearest to the target, for an increasing count.

  Raises BadInput if the count does not increase with the value, or cannot reach the target.
  """
  low, high = _bracket(count, start, target)
  low_count, high_count = count(low), count(high)
  number = 0
  while high - low > 1:
    number += 1
    if number % 3:  # most counts are linear in the value
      guess = low + (target - low_count) * (high - low) // (high_count - low_count)
    else:
      guess = (low + high) // 2
    guess = min(max(guess, low + 1), high - 1)
    guess_count = count(guess)
    if guess_count <= target:
      low, low_count = guess, guess_count
    else:
      high, high_count = guess, guess_count
  if target - low_count <= high_count - target:
    return low
  return high


def _bracket(count: Callable[[int], int], start: int, target: int) -> tuple[int, int]:
  """Returns a value with a count up to the target, and one with a count above.

  Args:
    count: see `_solve`.
    start: a value with a valid model.
    target: the target.
  """
  start_count = count(start)
  growth = max(start, 1)
  slope = (count(start + growth) - start_count) / growth
  if slope <= 0:
    raise errors.BadInput('the number of parameters does not grow with it')
  solution = start + (target - start_count) / slope  # if the count is linear
  low = max(int(0.99 * solution), 1)
  while count(low) > target:
    if low == 1:
      raise errors.BadInput(f'{count(1):,} parameters with the value 1 are more than {target:,}')
    low //= 2
  high = low + max(int(0.02 * solution), 1)
  while count(high) <= target:
    high *= 2
  return low, high
