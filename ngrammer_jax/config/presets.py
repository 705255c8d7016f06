"""Presets: values of a block by name."""

from collections.abc import Mapping
from typing import Any

from ngrammer_jax import errors


def find(presets: Mapping[str, dict[str, Any]], name: str, path: str) -> dict[str, Any]:
  """Returns the values of a preset, and its name.

  Args:
    presets: values by name.
    name: the name.
    path: dotted path of the block.

  Raises:
    BadInput: there is no such preset.
  """
  if name not in presets:
    raise errors.BadInput(f'{path} has no preset {name!r}; available: {", ".join(presets)}')
  return {'preset': name, **presets[name]}
