"""Presets: values of a block by name."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, TypeVar

from ngrammer_jax import errors
from ngrammer_jax.config import fields

_Block = TypeVar('_Block', bound=type)


def applied_by_constructor(
  presets: Mapping[str, dict[str, Any]], path: str
) -> Callable[[_Block], _Block]:
  """Returns a decorator for a config dataclass with a field `preset`.

  Like a config file, the constructor then starts from the values of the preset, and other arguments
  replace them. It also converts values to the types of their fields, such as a number to a tuple.
  `dataclasses.replace` passes all values, so it keeps the other ones, also with another preset.

  Args:
    presets: values by name.
    path: dotted path of the block.
  """

  def decorate(block: _Block) -> _Block:
    set_fields = block.__init__

    @functools.wraps(set_fields)
    def construct(self: Any, **values: Any) -> None:
      name = values.get('preset')
      if name is not None:
        values = find(presets, name, path) | values
      keys = fields.keys(block)
      for field, value in values.items():
        if field in keys:  # `set_fields` reports others
          values[field] = keys[field].convert(value)
      set_fields(self, **values)

    block.__init__ = construct
    return block

  return decorate


def find(presets: Mapping[str, dict[str, Any]], name: str, path: str) -> dict[str, Any]:
  """Returns the values of a preset, and its name.

  Args:
    presets: values by name.
    name: the name.
    path: dotted path of the block.

  Raises:
    BadInput: an unknown preset.
  """
  if name not in presets:
    raise errors.BadInput(f'{path} has no preset {name!r}; available: {", ".join(presets)}')
  return {'preset': name, **presets[name]}
