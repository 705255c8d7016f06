"""Checks of named arguments of official training scripts, before conversion to a config."""

import argparse
from collections.abc import Collection, Mapping
import difflib
from typing import Any

from ngrammer_jax import errors

OfficialArgs = Mapping[str, Any] | argparse.Namespace


def with_defaults(
  args: OfficialArgs, defaults: Mapping[str, Any], ignored: Collection[str], origin: str
) -> dict[str, Any]:
  """Returns the value of each argument of the model.

  Args:
    args: a mapping, or the namespace of `argparse`; arguments may be in groups, mappings too.
    defaults: the official default of each argument of the model.
    ignored: names of arguments without effect on the model, such as training options.
    origin: description of the official code, for the error message.

  Raises:
    BadInput: an argument unknown to the official code.
  """
  values = dict(defaults)
  for name, value in _without_groups(args).items():
    if name in defaults:
      values[name] = value
    elif name not in ignored:
      matches = difflib.get_close_matches(name, [*defaults, *ignored], n=1)
      remedy = f'it has {", ".join(defaults)}'
      if matches:
        remedy = f'did you mean {matches[0]}?'
      raise errors.BadInput(f'{origin} has no setting {name} (its value is {value!r}): {remedy}')
  return values


def _without_groups(args: OfficialArgs) -> dict[str, Any]:
  """Returns all arguments by name."""
  grouped = vars(args) if isinstance(args, argparse.Namespace) else args
  flat: dict[str, Any] = {}
  for name, value in grouped.items():
    if isinstance(value, Mapping):
      flat.update(value)
    else:
      flat[name] = value
  return flat


def check_supported(
  values: Mapping[str, Any], supported: Mapping[str, Collection[Any]], origin: str
) -> None:
  """Raises BadInput with every argument of an unsupported value."""
  problems = []
  for name, choices in supported.items():
    if values[name] not in choices:
      expected = ' or '.join(repr(choice) for choice in choices)
      problems.append(
        f'{name}={values[name]!r} must be {expected}: {origin} with another value is a model that '
        f'cannot be loaded'
      )
  if problems:
    raise errors.BadInput('\n'.join(problems))
