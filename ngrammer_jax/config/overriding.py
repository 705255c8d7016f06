"""Overrides of a config: dotted keys with their values, or with the texts of a command line."""

import ast
from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import os
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import conversion, fields, resume
from ngrammer_jax.config.experiment import Config


def apply_all(config: dict[str, Any], overrides: Iterable[tuple[str, Any]]) -> None:
  """Applies overrides to a config in their order, but presets before other keys.

  Args:
    config: the values of the config, changed in place.
    overrides: dotted keys and values; a text is parsed as on the command line.

  Raises:
    BadInput: unknown key, or a value for a section.
  """
  overrides = list(overrides)
  for number, (path, value) in enumerate(overrides):
    _apply(config, path, value)
    block, _, name = path.rpartition('.')
    if name == 'preset':  # it set the whole block
      for earlier, earlier_value in overrides[:number]:
        if earlier.startswith(f'{block}.') and earlier != path:
          _apply(config, earlier, earlier_value)


def of_opened_run(config: Config, overrides: Mapping[str, Any] | None) -> Config:
  """Returns the config of an opened run with other values of some keys.

  Args:
    config: the config of the run.
    overrides: values by dotted key; a text is parsed as on the command line. None: no overrides.

  Raises:
    BadInput: unknown key, invalid value, or a key that changes the parameters.
  """
  if not overrides:
    return config
  if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
    raise errors.BadInput(
      'overrides must be a dict from names of keys to values, such as '
      "{'evaluation.segment_length': 256}"
    )
  for path in overrides:
    if path.startswith('data.vocabulary'):
      raise errors.BadInput(f'overrides: {path} cannot differ: a run keeps its vocabulary')
  values = dataclasses.asdict(config)
  apply_all(values, overrides.items())
  changed = conversion.build(Config, conversion.to_dict(values))
  for key, old, new in resume.differences(
    config.model, changed.model, 'model.', resume.keeps_parameters
  ):
    raise errors.BadInput(
      f'overrides: the parameters depend on {key.path}={fields.format_value(old)}, not '
      f'{fields.format_value(new)}: leave it out'
    )
  changed.check()
  return changed


def _apply(config: dict[str, Any], path: str, value: Any) -> None:
  """Sets a dotted key, and creates missing blocks around it.

  A tuple of blocks becomes a dict from numbers to blocks. A preset resets its block.
  """
  key = conversion.find_key(path)
  if isinstance(value, os.PathLike):
    value = os.fspath(value)
  if isinstance(value, str):
    value = _parse(key, value)
  elif key.block is not None and value is not None:
    raise errors.BadInput(_section_message(key))
  names = path.split('.')
  for section, name in itertools.pairwise(names):
    if config.get(section) is None:
      config[section] = {}
    if conversion.is_index(name):
      config[section] = conversion.blocks_by_number(config[section])
    config = config[section]
    if not isinstance(config, dict):
      raise errors.BadInput(f'--config.{path}: {section} is not a section in the config file')
  if names[-1] == 'preset':
    config.clear()
  config[names[-1]] = value


def _parse(key: fields.Key, text: str) -> Any:
  """Returns the text as a value of the declared type."""
  if text in ('None', 'none') and key.is_optional:
    return None
  if text in ('None', 'none', '()') and key.is_tuple_of_blocks:
    return ()
  if key.presets is not None:
    return dataclasses.asdict(key.presets(text))
  if key.block is not None:
    raise errors.BadInput(_section_message(key))
  if bool in key.types and text.lower() in ('true', 'false', '1', '0'):
    return text.lower() in ('true', '1')
  if str in key.types:
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: deeply nested
    value = text  # of the wrong type: `conversion.resolve` reports the expected one
  # 1e4 steps are 10,000 steps.
  if int in key.types and isinstance(value, float) and value.is_integer():
    return int(value)
  return value


def _section_message(key: fields.Key) -> str:
  return f'{key.path} is a section: set a key in it, {key.path}.KEY'
