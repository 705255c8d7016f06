"""Settings of official implementations by name, and the check before they become a config."""

import argparse
from collections.abc import Collection, Mapping
import difflib
from typing import Any

from ngrammer_jax import errors

Settings = Mapping[str, Any] | argparse.Namespace


def read(
  settings: Settings, defaults: Mapping[str, Any], ignored: Collection[str], origin: str
) -> dict[str, Any]:
  """Returns the value of each setting of a model.

  Args:
    settings: a mapping, or the namespace of `argparse`; settings may be in groups, mappings too.
    defaults: the official default of each setting of the model.
    ignored: names of settings that do not change the model, such as those of training.
    origin: description of the official code, for the error message.

  Raises:
    BadInput: names a setting that the official code does not have.
  """
  values = dict(defaults)
  options = vars(settings) if isinstance(settings, argparse.Namespace) else settings
  flat: dict[str, Any] = {}
  for name, value in options.items():
    flat |= value if isinstance(value, Mapping) else {name: value}
  for name, value in flat.items():
    if name in defaults:
      values[name] = value
    elif name not in ignored:
      matches = difflib.get_close_matches(name, [*defaults, *ignored], n=1)
      remedy = f'did you mean {matches[0]}?' if matches else f'it has {", ".join(defaults)}'
      raise errors.BadInput(f'{origin} has no setting {name} (its value is {value!r}): {remedy}')
  return values


def check(values: Mapping[str, Any], supported: Mapping[str, Collection[Any]], origin: str) -> None:
  """Raises BadInput that names every setting with another value than the supported ones."""
  problems = [
    f'{name}={values[name]!r} must be {" or ".join(map(repr, choices))}: {origin} with another '
    f'value is a model that cannot be loaded'
    for name, choices in supported.items()
    if values[name] not in choices
  ]
  if problems:
    raise errors.BadInput('\n'.join(problems))
