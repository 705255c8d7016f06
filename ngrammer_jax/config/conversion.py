"""Configs from dicts, ConfigDicts and JSON, and back."""

from collections.abc import Iterable, Mapping
import dataclasses
import difflib
import json
import os
import pathlib
import typing
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.system import files, json_files

if typing.TYPE_CHECKING:
  import ml_collections


def default() -> 'ml_collections.ConfigDict':
  """Returns the default experiment as a ConfigDict; optional blocks are None."""
  return _config_dict(dataclasses.asdict(Config()))


def block(key: str, /, **values: Any) -> 'ml_collections.ConfigDict':
  """Returns an optional block such as `model.memory`, or one of a tuple, for config files.

  Args:
    key: dotted key of the block, or of the tuple.
    **values: values of its fields; the others have the value of the preset, or their default.
  """
  block_type = find_key(key).block
  defaults = _preset_values(block_type, values, f'{key}.') or dataclasses.asdict(block_type())
  return _config_dict(_merge(defaults, values))


def _config_dict(values: dict[str, Any]) -> 'ml_collections.ConfigDict':
  import ml_collections  # only config files need it, and it is slow to import

  return ml_collections.ConfigDict(values, type_safe=False)


def resolve(values: Any, show: bool = False) -> Config:
  """Returns the checked config of a ConfigDict or a plain dict; missing keys get their defaults.

  Args:
    values: the config.
    show: whether to print it before it is checked.

  Raises:
    BadInput: an unknown key (the nearest valid one is named), a value of the wrong type,
      or an impossible combination.
  """
  config = build(Config, to_dict(values))
  if show:
    print(describe(config))
  config.check()
  return config


def to_dict(values: Any) -> Any:
  """Returns ConfigDicts (also in sequences) as plain dicts; other values unchanged."""
  if hasattr(values, 'to_dict'):
    values = values.to_dict()
  if isinstance(values, Mapping):
    return {name: to_dict(value) for name, value in values.items()}
  if isinstance(values, tuple | list):
    return tuple(map(to_dict, values))
  return values


def build(block_type: type, values: Any, path: str = '') -> Any:
  """Returns values as the dataclass of the section at `path`, unchecked.

  Args:
    block_type: the dataclass.
    values: a mapping from the names of its fields.
    path: dotted path of the section, with a dot at the end.
  """
  if not isinstance(values, Mapping):
    section = path[:-1] or 'the config'
    raise errors.BadInput(f'{section}={values!r} must be a section, not a value')
  keys = fields.keys(block_type, path)
  converted = {}
  for name, value in _merge(_preset_values(block_type, values, path), values).items():
    if name not in keys:
      raise errors.BadInput(unknown_key(f'{path}{name}', isinstance(value, Mapping)))
    converted[name] = _convert(keys[name], value)
  return block_type(**converted)


def _convert(key: fields.Key, value: Any) -> Any:
  """Returns the value of a key: a section, a block or None, a tuple of blocks or a plain value."""
  if key.is_tuple_of_blocks:
    return tuple(_convert(key.entry(index), block) for index, block in _entries(key, value))
  if key.block is None:
    return key.convert(value)
  if isinstance(value, str) and key.presets is not None:
    return key.presets(value)
  if value is not None:
    return build(key.block, value, f'{key.path}.')
  if key.is_optional:
    return None
  raise errors.BadInput(f'{key.path}=None: the section is required')


def _entries(key: fields.Key, value: Any) -> list[tuple[int, Any]]:
  """Returns number and value of each block of a tuple of blocks, see `blocks_by_number`."""
  blocks = {int(name): block for name, block in blocks_by_number(value).items()}
  for index in blocks:
    if index >= len(blocks):
      first_missing = next(i for i in range(index) if i not in blocks)
      raise errors.BadInput(
        f'{key.path}.{index}: the blocks before it are missing; the next one is '
        f'{key.path}.{first_missing}'
      )
  return sorted(blocks.items())


def blocks_by_number(value: Any) -> dict[str, Any]:
  """Returns the blocks of a tuple of blocks by their numbers, such as '0'.

  Args:
    value: the tuple, a dict from numbers to blocks (maybe empty), a single block or None.
  """
  if value is None:
    return {}
  if isinstance(value, tuple | list):
    return {str(index): block for index, block in enumerate(value)}
  if isinstance(value, Mapping) and all(is_index(str(name)) for name in value):
    return {str(name): block for name, block in value.items()}
  return {'0': value}


def _preset_values(block_type: type, values: Mapping[str, Any], path: str) -> dict[str, Any]:
  """Returns the initial values of a block: the values of its preset, or none."""
  key = fields.keys(block_type, path).get('preset')
  name = values.get('preset')
  if key is None or name is None:
    return {}
  key.check_value(name)
  return dataclasses.asdict(block_type.from_preset(name))


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns values with defaults for missing keys, also inside blocks."""
  merged = dict(defaults)
  for name, value in values.items():
    default = merged.get(name)
    if isinstance(default, Mapping) and isinstance(value, Mapping):
      value = _merge(default, value)
    merged[name] = value
  return merged


def is_index(name: str) -> bool:
  """Whether a part of a dotted key is the number of a block of a tuple."""
  return name.isdecimal() and name == str(int(name))


def find_key(path: str) -> fields.Key:
  """Returns the key at a dotted path. Raises BadInput for an unknown key."""
  key = None
  for name in path.split('.'):
    parent = '' if key is None else f'{key.path}.'
    inner = _keys_inside(key, name)
    if inner is None:
      raise errors.BadInput(f'unknown config key {path}: {key.path} is a value, not a section')
    if name not in inner:
      raise errors.BadInput(unknown_key(f'{parent}{name}', f'{parent}{name}' != path))
    key = inner[name]
  return key


def _keys_inside(key: fields.Key | None, name: str) -> dict[str, fields.Key] | None:
  """Returns the keys inside of a key, or of the config, by name; None if it is a value.

  For a tuple of blocks of any length, returns the key of the block number `name`.
  """
  if key is None:
    return fields.keys(Config)
  if key.is_tuple_of_blocks:
    return {name: key.entry(name)} if is_index(name) else {}
  if key.block is None:
    return None
  return fields.keys(key.block, f'{key.path}.')


def unknown_key(path: str, is_section: bool = False) -> str:
  """Returns the message for an unknown dotted key, with the nearest valid one."""
  paths = _paths_near(path)
  if is_section:
    paths = sorted({each.rpartition('.')[0] for each in paths} - {''})
  name = _last_name(path)
  same_name = [each for each in paths if _last_name(each) == name]
  longer = [each for each in paths if each.startswith(path)]
  abbreviated = []
  if len(name) > 1:
    abbreviated = [each for each in paths if _initials(_last_name(each)) == name]  # lr
  candidates = same_name or longer or abbreviated or paths
  near = difflib.get_close_matches(path, candidates, n=1, cutoff=0.0)
  return f'unknown config key {path}: did you mean {near[0]}?'


def _paths_near(path: str) -> list[str]:
  """Returns the dotted keys of the config; for tuples of blocks, only the tuple in `path`."""
  paths = []
  for key in fields.walk(Config):
    parent, in_tuple, name = key.path.partition('.0.')
    if not in_tuple:
      paths.append(parent)
    elif path.startswith(parent):  # a key in a block of the tuple, maybe without the block's number
      index = path.removeprefix(f'{parent}.').split('.')[0]
      paths.append(f'{parent}.{index if is_index(index) else 0}.{name}')
  return paths


def _last_name(path: str) -> str:
  return path.split('.')[-1]


def _initials(name: str) -> str:
  """Returns the first letters of the words of a name: lr of learning_rate."""
  return ''.join(word[:1] for word in name.split('_'))


def check_variant(variant: str, variants: Iterable[str]) -> None:
  """Raises BadInput with the nearest variant if a config file lacks this one."""
  names = list(variants)
  if variant in names:
    return
  longer = [name for name in names if name.endswith(f'_{variant}')]  # quickstart_engram
  near = longer or difflib.get_close_matches(variant, names, n=1)
  hint = '; available'
  if near:
    hint = f': did you mean {near[0]!r}? Available'
  raise errors.BadInput(f'no variant {variant!r}{hint}: {", ".join(names)}')


def save(config: Config, path: pathlib.Path) -> None:
  """Writes the resolved config as JSON."""
  files.write(path, json.dumps(dataclasses.asdict(config), indent=2) + '\n')


def load_stored(path: pathlib.Path) -> Config:
  """Loads a config written by `save`, also by an earlier version.

  A model without training has the sections `model` and `data` only.

  Raises:
    BadInput: see `resolve`.
    file_errors.DAMAGE_ERRORS: the file is not JSON, or a section is missing.
  """
  values = read(path)
  sections = {key.path for key in fields.keys(Config).values() if key.block and not key.is_optional}
  missing = sections - values.keys()
  if missing and values.keys() != {'model', 'data'}:
    raise ValueError(f'no section {", ".join(sorted(missing))}')
  data = values['data']
  own_vocabulary = stored_vocabulary(path.parent)
  if data.get('vocabulary_path') and own_vocabulary is not None:
    if not os.path.exists(os.path.expanduser(data['vocabulary_path'])):  # the run may have moved
      data['vocabulary_path'] = str(own_vocabulary)
  return resolve(values)


def read(path: pathlib.Path) -> dict[str, Any]:
  """Reads the values of a config written by `save`, with the defaults of its version."""
  values = json_files.read(path)
  values.get('training', {}).pop('span_check_every', None)  # no longer used
  values.get('optimizer', {}).setdefault('weight_decay_on', 'all')
  return values


def stored_vocabulary(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the vocabulary file in a workdir; None if the vocabulary has no file."""
  paths = (path for path in folder.glob('vocabulary.*') if path.name != 'vocabulary.json')
  return next(paths, None)


def describe(config: Config) -> str:
  """Formats every key of a config with its value and its meaning, one per line."""
  lines = []
  for key, value in fields.walk_values(config):
    comment = key.comment
    if key.choices:
      comment += f' ({", ".join(key.choices)})'
    for name, values in key.only_for.items():
      if fields.ANY in values:
        comment += f'; only with {name}'
      else:
        comment += f'; only for {name} {", ".join(map(str, values))}'
    assignment = f'{key.path}={value!r}'
    lines.append(f'{assignment:36}  # {comment}')
  return '\n'.join(lines)
