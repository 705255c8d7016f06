"""Rules for a value of the config and another key: the number divides it, is below it, equals it.

`fields.field(..., relations=(divides('heads'),))` declares such a rule. `fields.check_values`
raises its error, with both keys, both values and the remedy.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import operator
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config.formatting import format_entry, format_value

ANY = 'any value'  # in `Relation.where` and the rules of `fields.Key`: all values but None and ()

Blocks = Sequence[tuple[str, Any]]  # path and dataclass of a block and of each enclosing block


class Comparison(NamedTuple):
  """A comparison of a number with another one.

  Attributes:
    words: the comparison in an error message.
    holds: whether the comparison is true for a value and the other number.
    nearest: the valid value nearest to a value; None: no nearest one.
    change: alternative change of the other key.
  """

  words: str
  holds: Callable[[Any, Any], bool]
  nearest: Callable[[Any, Any], Any]
  change: str


def _divides(value: int, other: int) -> bool:
  return other % value == 0


def _is_multiple(value: int, other: int) -> bool:
  return value % other == 0


def _nearest_divisor(value: int, other: int) -> int:
  """Returns the largest divisor of a number up to a value."""
  for divisor in range(min(value, other), 1, -1):
    if other % divisor == 0:
      return divisor
  return 1


def _nearest_multiple(value: int, other: int) -> int:
  return max(1, round(value / other)) * other


def _largest_below(value: Any, other: Any) -> int | None:
  """Returns the largest size below another one, which is at least 0. There is no largest float."""
  if isinstance(value, int):
    return max(other - 1, 0)
  return None


def _other_itself(value: Any, other: Any) -> Any:
  del value
  return other


DIVIDES = Comparison('divide', _divides, _nearest_divisor, 'another')
DIVISIBLE = Comparison('be divisible by', _is_multiple, _nearest_multiple, 'another')
LESS_THAN = Comparison('be less than', operator.lt, _largest_below, 'a larger')
AT_MOST = Comparison('be at most', operator.le, _other_itself, 'a larger')
AT_LEAST = Comparison('be at least', operator.ge, _other_itself, 'a smaller')
EQUALS = Comparison('equal', operator.eq, _other_itself, 'another')


@dataclasses.dataclass(frozen=True)
class Relation:
  """A rule for a value of the config, or each entry of a tuple, and another key.

  The rule does not apply to None, or if the other key is None or missing (a model without the rest
  of its config).

  Attributes:
    comparison: the comparison.
    other: the other key, of the same block or an enclosing one, or with its whole path such as
      `model.width`; or a value.
    where: further keys, each with the values for which the rule applies (for a tuple, values of any
      entry).
    times: a factor of the other number.
    minus: subtracted from the other number.
    unless: values that are always valid.
    remedy: suggested change, in place of the nearest valid value or the other key.
    reason: explanation at the end of the error message.
  """

  comparison: Comparison
  other: str | int | None
  where: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict, hash=False)
  times: int = 1
  minus: int = 0
  unless: tuple[Any, ...] = ()
  remedy: str = ''
  reason: str = ''

  def check(self, path: str, value: Any, blocks: Blocks) -> None:
    """Raises BadInput for a value that breaks the rule.

    Args:
      path: its dotted path.
      value: the value.
      blocks: the block of the key and each enclosing one.
    """
    if not self._applies(blocks):
      return
    name = ''
    other = self.other
    if isinstance(other, str):
      other_key = find_other_key(other, blocks)
      if other_key is None or other_key.value is None:
        return
      name = other_key.path
      other = other_key.value
    number = other
    if number is not None:
      number = self.times * other - self.minus
    entries = value if isinstance(value, tuple) else (value,)
    for entry in entries:
      if entry is None or entry in self.unless:
        continue
      if not self.comparison.holds(entry, number):
        raise errors.BadInput(
          f'{path}={format_entry(value, entry)} must {self.comparison.words} '
          f'{self._describe_other(name, other, number)}{self._describe_where(blocks)}: '
          f'{self._describe_remedy(entry, name, number)}'
        )

  def _applies(self, blocks: Blocks) -> bool:
    """Whether the rule applies by the keys of `where`."""
    for name, values in self.where.items():
      key = find_other_key(name, blocks)
      if key is None or not matches(key.value, values):
        return False
    return True

  def _describe_other(self, name: str, other: Any, number: Any) -> str:
    """Formats the other key with its value, and the number computed from it."""
    if not name:
      return format_value(other)
    text = f'{name}={format_value(other)}'
    if self.times != 1:
      text = f'{self.times} x {text}'
    if self.minus:
      text = f'{format_value(number)}, which is {text} minus {self.minus}'
    return text

  def _describe_where(self, blocks: Blocks) -> str:
    """Formats the conditions of `where`."""
    conditions = [find_other_key(name, blocks) for name in self.where]
    texts = [f'{path}={format_value(value)}' for path, value in conditions if value is not None]
    if not texts:
      return ''
    return f' for {" and ".join(texts)}'

  def _describe_remedy(self, value: Any, name: str, number: Any) -> str:
    """Returns the suggested change of the value or the other key, and the reason."""
    nearest = self.comparison.nearest(value, number)
    if self.remedy:
      text = self.remedy
    elif nearest is None and number is not None:
      text = 'use another value'
    else:
      text = f'use {format_value(nearest)}'
    if name and not self.remedy:
      text += f', or {self.comparison.change} {name}'
    if self.reason:
      text += f'; {self.reason}'
    return text


class OtherKey(NamedTuple):
  """The dotted path of a key, and its value."""

  path: str
  value: Any


def find_other_key(name: str, blocks: Blocks) -> OtherKey | None:
  """Returns path and value of a rule's key; None if none of the blocks has it.

  Args:
    name: path of the key within its block, or its whole path. Inside a None block its value is
      None.
    blocks: the block of the rule, and each enclosing one.
  """
  for path, block in blocks:
    within = name.removeprefix(path)
    first, *others = within.split('.')
    if not hasattr(block, first):
      continue
    value = getattr(block, first)
    for part in others:
      value = getattr(value, part, None)
    return OtherKey(f'{path}{within}', value)
  return None


def matches(value: Any, values: tuple[Any, ...]) -> bool:
  """Whether a value, or a tuple entry, is among the values of a rule (or the rule has ANY)."""
  if value in values:
    return True
  if isinstance(value, tuple) and any(entry in values for entry in value):
    return True
  return ANY in values and value not in (None, ())


def divides(other: str | int, **options: Any) -> Relation:
  """The value divides another key; for the options see `Relation`."""
  return Relation(DIVIDES, other, **options)


def divisible_by(other: str | int, **options: Any) -> Relation:
  """The value is a multiple of another key; for the options see `Relation`."""
  return Relation(DIVISIBLE, other, **options)


def less_than(other: str | int, **options: Any) -> Relation:
  """The value is below another key; for the options see `Relation`."""
  return Relation(LESS_THAN, other, **options)


def at_most(other: str | int, **options: Any) -> Relation:
  """The value is another key or below it; for the options see `Relation`."""
  return Relation(AT_MOST, other, **options)


def at_least(other: str | int, **options: Any) -> Relation:
  """The value is another key or above it; for the options see `Relation`."""
  return Relation(AT_LEAST, other, **options)


def equals(other: str | int | None, **options: Any) -> Relation:
  """The value equals another key; for the options see `Relation`."""
  return Relation(EQUALS, other, **options)
