"""Fields of a config: their comments, the rules for their values, and iteration over them."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import math
import types
import typing
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.formatting import format_entry
from ngrammer_jax.config.formatting import format_value as format_value
from ngrammer_jax.config.relations import ANY as ANY
from ngrammer_jax.config.relations import Blocks, OtherKey, Relation, find_other_key, matches

MAX_INT = 2**31 - 1  # upper bound of every int without another one: sizes and ids are int32


@dataclasses.dataclass(frozen=True)
class Key:
  """One key of the config: a section, an optional block or a value, with rules for the value.

  The rules of a tuple apply to each entry. A float must be finite, and an int without `at_most` is
  at most MAX_INT.

  Attributes:
    default: the default value.
    comment: meaning of the value in one line, shown by --print_config.
    path: dotted path from the root of the config.
    types: the types of its value, including NoneType if it may be None.
    free_on_resume: whether the value may change on resume; a section passes this to its keys.
    kept_on_resume: whether a resumed run keeps its stored value if the command has the default.
    none_means: the value meant by None; None: no other value.
    free_on_init: whether the value may differ from the run in `init_from`, because the parameters
      keep their meaning.
    is_used: False for a key without effect, accepted for old configs.
    choices: all valid values.
    at_least, above, at_most, below: bounds of a number.
    also: further valid values, outside the bounds.
    may_be_empty: whether a tuple or a text, also an entry of a tuple, may have the length 0.
    only_for: other keys, of the same or an enclosing block, each with the values for which the
      field has an effect (for a tuple, values of an entry). With other values the field must have
      its default.
    needs: for a value (or tuple entry) of the field, other keys with their required values, as in
      `only_for`.
    relations: comparisons with other keys, see `config.relations`.
    remedy: for `only_for` and `needs`: the change to suggest instead of the default value. It may
      refer to the value, as in '{value.limit}'.
    reason: explanation at the end of the error message, for `only_for` and `needs` if present.
  """

  default: Any
  comment: str
  path: str = ''
  types: tuple[Any, ...] = ()
  free_on_resume: bool = False
  kept_on_resume: bool = False
  none_means: Any = None
  free_on_init: bool = False
  is_used: bool = True
  choices: tuple[str, ...] | None = None
  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  also: tuple[Any, ...] = ()
  may_be_empty: bool = True
  only_for: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict, hash=False)
  needs: Mapping[Any, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
  relations: tuple[Relation, ...] = ()
  remedy: str = ''
  reason: str = ''

  @functools.cached_property
  def block(self) -> type | None:
    """The dataclass of a section, an optional block or a tuple of blocks; None for other values."""
    if self.is_tuple_of_blocks:
      return self.entry_type
    for each in self.types:
      if dataclasses.is_dataclass(each):
        return each
    return None

  @functools.cached_property
  def is_tuple_of_blocks(self) -> bool:
    """Whether the value is a tuple of blocks; their keys are `path.0`, `path.1`, ..."""
    return dataclasses.is_dataclass(self.entry_type)

  @functools.cached_property
  def entry_type(self) -> type | None:
    """The type of the entries of a tuple; None for another value."""
    for each in self.types:
      if typing.get_origin(each) is tuple:
        return typing.get_args(each)[0]
    return None

  def entry(self, index: int | str) -> 'Key':
    """Returns the key of one block of a tuple of blocks."""
    return dataclasses.replace(self, path=f'{self.path}.{index}', default=None, types=(self.block,))

  def entries(self, value: Any) -> list[tuple['Key', Any]]:
    """Returns the key and value of each block of a tuple of blocks, or this key with its value."""
    if not self.is_tuple_of_blocks:
      return [(self, value)]
    return [(self.entry(index), block) for index, block in enumerate(value)]

  @property
  def presets(self) -> Callable[[str], Any] | None:
    """Function from the name of a preset to the block; None if the block has no presets."""
    return getattr(self.block, 'from_preset', None)

  @property
  def is_optional(self) -> bool:
    """Whether the value may be None."""
    return types.NoneType in self.types

  def convert(self, value: Any) -> Any:
    """Converts a value to its declared type: an int to a float, a single item to a tuple.

    Raises:
      BadInput: the value is of another type.
    """
    if self.entry_type is not None and value is not None:
      item = dataclasses.replace(self, types=(self.entry_type,))
      if type(value) in (list, tuple):
        return tuple(map(item.convert, value))
      if type(value) in item.types:
        return (value,)
    if float in self.types and type(value) is int:
      return _to_float(value)
    if type(value) not in self.types:
      expected = ' or '.join(map(_type_name, self.types))
      raise errors.BadInput(f'{self.path}={format_value(value)} is not of type {expected}')
    return value

  def _is_allowed(self, value: Any) -> bool:
    """Whether choices or bounds allow a value, or an entry of a tuple."""
    if self.choices is not None:
      return value in self.choices
    if self.at_least is not None and not value >= self.at_least:
      return False
    if self.above is not None and not value > self.above:
      return False
    if self.at_most is not None and not value <= self.at_most:
      return False
    return self.below is None or value < self.below

  def _describe_allowed(self) -> str:
    """Formats choices or bounds as the predicate of an error message."""
    if self.choices is not None:
      return f'is not one of: {", ".join(self.choices)}'
    if self.at_least is not None and self.at_most is not None:
      return f'must be from {self.at_least} to {self.at_most}'
    bounds = {
      'at least': self.at_least,
      'above': self.above,
      'at most': self.at_most,
      'below': self.below,
    }
    texts = [f'{words} {bound}' for words, bound in bounds.items() if bound is not None]
    return f'must be {" and ".join(texts)}'

  def _find_problem(self, value: Any) -> str | None:
    """Returns the problem of a value or tuple entry as a predicate; None: no problem."""
    if value is None or value in self.also:
      return None
    if isinstance(value, float) and not math.isfinite(value):
      return 'must be finite'
    if isinstance(value, int) and value > MAX_INT and self.at_most is None:
      return f'must be at most {MAX_INT:,}'
    if self._is_allowed(value):
      return None
    problem = self._describe_allowed()
    for other in self.also:
      problem += f', or {other}'
    if self.is_optional:
      problem += ', or None'
    if self.reason and not (self.only_for or self.needs):
      problem += f': {self.reason}'
    return problem

  def check_value(self, value: Any) -> None:
    """Raises BadInput for a value outside its choices or bounds, or an empty one."""
    if not self.may_be_empty and _is_empty(value):
      raise errors.BadInput(
        f'{self.path}={format_value(value)} must not be empty: use {format_value(self.default)}'
      )
    for item in value if isinstance(value, tuple) else (value,):
      problem = self._find_problem(item)
      if problem is not None:
        raise errors.BadInput(f'{self.path}={format_entry(value, item)} {problem}')

  def check_with_others(self, value: Any, blocks: Blocks) -> None:
    """Raises BadInput for a value excluded by other keys: see `only_for`, `needs`, `relations`.

    Args:
      value: the value.
      blocks: path and dataclass of the block of the key and of each enclosing block.
    """
    needs = {} if value == self.default else dict(self.only_for)
    for item in (value, *value) if isinstance(value, tuple) else (value,):
      needs |= self.needs.get(item, {})
    for name, choices in needs.items():
      other = find_other_key(name, blocks)
      if other is not None and not matches(other.value, choices):
        raise errors.BadInput(self._excluded_message(value, other, choices))
    for relation in self.relations:
      relation.check(self.path, value, blocks)

  def _excluded_message(self, value: Any, other: OtherKey, choices: tuple[Any, ...]) -> str:
    """Returns the message for a value excluded by another key."""
    message = f'{self.path}={format_value(value)} '
    if ANY in choices:
      message += f'needs {other.path}, which is {format_value(other.value)}'
    else:
      message += f'is not for {other.path}={format_value(other.value)}, but for '
      message += ', '.join(map(str, choices))
    message += f': {self._describe_remedy(value, other, choices)}'
    if self.reason:
      message += f'; {self.reason}'
    return message

  def _describe_remedy(self, value: Any, other: OtherKey, choices: tuple[Any, ...]) -> str:
    """Returns the suggested change of the value or the other key."""
    if self.remedy:
      return self.remedy.format(value=value)
    changes = []
    if ANY in choices:
      changes.append(f'set {other.path}')
    if value != self.default:
      changes.append(f'use {format_value(self.default)}')
    return ', or '.join(changes) or f'use {other.path}={format_value(choices[0])}'


def _is_empty(value: Any) -> bool:
  """Whether a value is an empty tuple or text, or a tuple with an empty text."""
  if isinstance(value, tuple):
    return not value or any(map(_is_empty, value))
  return value == ''


def _to_float(value: int) -> float:
  """Returns an int as a float, infinite if it is too large."""
  try:
    return float(value)
  except OverflowError:
    return math.inf if value > 0 else -math.inf


def _type_name(value_type: Any) -> str:
  """Returns the name of a declared type, such as int, None or tuple[int, ...]."""
  if value_type is types.NoneType:
    return 'None'
  if typing.get_origin(value_type):
    return str(value_type)
  return value_type.__name__


def field(default: Any, comment: str, **rules: Any) -> Any:
  """Declares a field of a config dataclass; for the arguments see `Key`."""
  return dataclasses.field(default=default, metadata={'key': Key(default, comment, **rules)})


@functools.cache
def keys(block: type, path: str = '') -> dict[str, Key]:
  """Returns the keys of a config dataclass by name, without those inside its blocks."""
  own_keys = {}
  for field in dataclasses.fields(block):
    field_types = (field.type,)
    if isinstance(field.type, types.UnionType):
      field_types = typing.get_args(field.type)
    own_keys[field.name] = dataclasses.replace(
      field.metadata['key'], path=f'{path}{field.name}', types=field_types
    )
  return own_keys


def walk(block: type, path: str = '') -> Iterator[Key]:
  """Yields every key of a config dataclass: a section or block, then the keys inside it.

  A tuple of blocks yields the keys of its first block.
  """
  for key in keys(block, path).values():
    yield key
    if key.is_tuple_of_blocks:
      yield from walk(key.block, f'{key.path}.0.')
    elif key.block is not None:
      yield from walk(key.block, f'{key.path}.')


def walk_values(config: Any, path: str = '') -> Iterator[tuple[Key, Any]]:
  """Yields the key and value of every plain value, and of empty blocks (None or ())."""
  for name, key in keys(type(config), path).items():
    entries = key.entries(getattr(config, name))
    if not entries:
      yield key, ()
    for entry, value in entries:
      if dataclasses.is_dataclass(value):
        yield from walk_values(value, f'{entry.path}.')
      else:
        yield entry, value


def check_values(config: Any, path: str = '') -> None:
  """Raises BadInput if a value of a config or of its blocks breaks its rules.

  Args:
    config: the config, or a block.
    path: its dotted path, with a dot at the end.
  """
  check_each_value(config, path)
  _check_with_others(config, path, ())


def check_each_value(config: Any, path: str = '') -> None:
  """Raises BadInput if a value breaks the rules for it alone; see `check_values`."""
  for key, value in walk_values(config, path):
    key.check_value(value)


def _check_with_others(config: Any, path: str, enclosing: Blocks) -> None:
  """Raises BadInput if a value breaks its rules with other keys.

  Args:
    config, path: see `check_values`.
    enclosing: path and dataclass of the enclosing blocks, the innermost first.
  """
  blocks = ((path, config), *enclosing)
  for name, key in keys(type(config), path).items():
    for entry, value in key.entries(getattr(config, name)):
      if dataclasses.is_dataclass(value):
        _check_with_others(value, f'{entry.path}.', blocks)
      entry.check_with_others(value, blocks)
