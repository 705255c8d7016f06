"""Configs from dicts, ConfigDicts and JSON, and back."""

from collections.abc import Mapping
import dataclasses
import difflib
import json
import pathlib
from typing import Any

import ml_collections

from ngrammer_jax import errors, files
from ngrammer_jax.config import fields
from ngrammer_jax.config.experiment import Config


def default() -> ml_collections.ConfigDict:
  """Returns the default experiment as a ConfigDict; optional blocks are None."""
  return ml_collections.ConfigDict(dataclasses.asdict(Config()), type_safe=False)


def block(key: str, **values: Any) -> ml_collections.ConfigDict:
  """Returns an optional block such as `model.memory`, for config files.

  Args:
    key: dotted key of the block.
    **values: values of its fields; the others get their defaults.
  """
  defaults = dataclasses.asdict(find_key(key).block())
  return ml_collections.ConfigDict(defaults | values, type_safe=False)


def resolve(values: Any) -> Config:
  """Returns the checked config of a ConfigDict or a plain dict; missing keys get their defaults.

  Raises:
    BadInput: an unknown key (the nearest valid one is named), a value of the wrong type,
      or an impossible combination.
  """
  config = _build(Config, values)
  config.check()
  return config


def _build(kind: type, values: Any, path: str = '') -> Any:
  """Returns the dataclass `kind`, the section at `path` (which ends with a dot) of a config."""
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  if not isinstance(values, Mapping):
    section = path[:-1] or 'the config'
    raise errors.BadInput(f'{section}={values!r} must be a section, not a value')
  keys, converted = fields.keys(kind, path), {}
  for name, value in values.items():
    if name not in keys:
      raise errors.BadInput(unknown_key(f'{path}{name}'))
    key = keys[name]
    if key.block is None:
      converted[name] = key.convert(value)
    elif isinstance(value, str) and key.presets is not None:
      converted[name] = key.presets(value)
    elif value is not None:
      converted[name] = _build(key.block, value, f'{key.path}.')
    elif key.is_optional:
      converted[name] = None
    else:
      raise errors.BadInput(f'{key.path}=None: the section is required')
  return kind(**converted)


def find_key(path: str) -> fields.Key:
  """Returns the key at a dotted path. Raises BadInput for one that does not exist."""
  kind, parent = Config, ''
  for name in path.split('.'):
    if kind is None:
      raise errors.BadInput(f'unknown config key {path}: {parent[:-1]} is a value, not a section')
    keys = fields.keys(kind, parent)
    if name not in keys:
      raise errors.BadInput(unknown_key(f'{parent}{name}'))
    key = keys[name]
    kind, parent = key.block, f'{key.path}.'
  return key


def unknown_key(path: str) -> str:
  """Returns the message for a dotted key that does not exist, with the nearest one that does."""
  paths = [key.path for key in fields.walk(Config)]
  name = path.split('.')[-1]
  same_name = [p for p in paths if p.split('.')[-1] == name]
  longer = [p for p in paths if p.startswith(path)]
  near = difflib.get_close_matches(path, same_name or longer or paths, n=1, cutoff=0.0)
  return f'unknown config key {path}: did you mean {near[0]}?'


def save(config: Config, path: pathlib.Path) -> None:
  """Writes the resolved config as JSON."""
  files.write(path, json.dumps(dataclasses.asdict(config), indent=2) + '\n')


def load(path: pathlib.Path) -> Config:
  """Loads a config that `save` wrote, also that of an earlier version."""
  values = json.loads(path.read_text(encoding='utf-8'))
  values.get('training', {}).pop('span_check_every', None)  # no longer used
  return resolve(values)


def describe(config: Config) -> str:
  """Formats every key of a config with its value and its meaning, one per line."""
  lines = []
  for key, value in fields.walk_values(config):
    choices, only_for = key.rules.choices, key.rules.only_for
    comment = f'{key.comment} ({", ".join(choices)})' if choices else key.comment
    if only_for is not None:
      comment += f'; only for {only_for[0]} {", ".join(only_for[1])}'
    lines.append(f'{f"{key.path}={value!r}":36}  # {comment}')
  return '\n'.join(lines)
