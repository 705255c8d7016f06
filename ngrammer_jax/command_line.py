"""The config on the command line: --config=FILE[:VARIANT] and --config.a.b=value.

It looks and behaves as `ml_collections.config_flags` does, with three differences: keys
are checked against the dataclasses, so an unknown one gives an error message instead of
a traceback; a key inside a block that is None creates the block; and no flag is global.
"""

import argparse
import ast
from collections.abc import Callable, Iterator
import dataclasses
import difflib
import fnmatch
import functools
import inspect
import itertools
import logging
import pathlib
import runpy
from typing import Any

from ngrammer_jax import errors, pretrained_models
from ngrammer_jax.config import catalog, conversion, fields, memory_blocks
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.system import hosts, json_files, storage


def parse(
  parser: argparse.ArgumentParser,
  argv: list[str],
  start: Callable[[argparse.Namespace], None] = lambda flags: None,
) -> tuple[argparse.Namespace, Config]:
  """Returns plain flags, by argparse, and the config with its overrides applied.

  With --print_config it prints the config and exits; no other flag is needed then. Values that do
  not go together are printed before the error.

  Args:
    parser, argv: the parser of the plain flags, and the arguments.
    start: prepares JAX. It is called once, before a model is built: processes cannot be joined
      afterwards.

  Raises:
    BadInput: no such config file or variant, unknown key, value of the wrong type.
  """
  _add_flags(parser)
  parser.epilog = 'Any key of the config: --config.training.steps=2000'
  overrides, plain = split(argv)
  printer = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  _add_flags(printer)
  if '--print_config' in plain and '--help' not in plain:
    flags, _ = printer.parse_known_args(plain)
    resolve(flags.config, overrides, show=True)
    parser.exit()
  flags = parser.parse_args(plain)
  start_once = functools.cache(lambda: start(flags))
  config = resolve(flags.config, overrides, getattr(flags, 'workdir', None), start_once)
  for key, value in fields.walk_values(config):
    if not key.is_used and value != key.default:
      logging.warning('%s is no longer used', key.path)
  start_once()
  return flags, config


def _add_flags(parser: argparse.ArgumentParser) -> None:
  text = (
    'config file, or the name of a config of the package, and its variant; or '
    'pretrained:NAME, or the folder of a run or a published model'
  )
  parser.add_argument('--config', required=True, metavar='FILE[:VARIANT]', help=text)
  add_list(parser)
  text = 'print every key of the resolved config with its meaning, and exit'
  parser.add_argument('--print_config', action='store_true', help=text)


def add_list(parser: argparse.ArgumentParser) -> None:
  """Adds --list, which needs no other flag."""

  class PrintList(argparse.Action):
    """Prints the list as soon as the flag is read, as --help and --version do."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
      print(f'{catalog.format_list()}\n\n{pretrained_models.format_list()}')
      parser.exit()

  text = 'list the configs of the package and their variants and its pretrained models, and exit'
  parser.add_argument('--list', action=PrintList, nargs=0, default=argparse.SUPPRESS, help=text)


def resolve(
  spec: str,
  overrides: list[tuple[str, str]],
  workdir: pathlib.Path | None = None,
  start: Callable[[], None] | None = None,
  show: bool = False,
) -> Config:
  """Returns the config of FILE or FILE:VARIANT with overrides applied; see `parse`.

  What is open in memories that the model of `init_from` does not have, that model decides; see
  `init_from.complete`. With `show`, it prints the config before it is checked.
  """
  values = load_file(spec)
  present = [path for path, _ in memory_blocks.blocks(values.get('model') or {})]
  _apply_all(values, overrides)
  if values.get('init_from') is not None and any(memory_blocks.blocks(values.get('model') or {})):
    from ngrammer_jax.runs import init_from  # imports JAX

    if start is not None:
      start()
    with hosts.collective_errors():
      init_from.complete(values, {path for path, _ in overrides}, present, workdir)
      return conversion.resolve(values, show)
  return conversion.resolve(values, show)


def split(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
  """Splits arguments into config overrides, (key, text) each, and all others."""
  overrides, plain = [], []
  rest = iter(argv)
  for argument in rest:
    if argument.startswith(('--config.', '--noconfig.')):
      overrides.append(_override(argument, rest))
    else:
      plain.append(argument)
  return overrides, plain


def override(config: Config, overrides: list[tuple[str, str]], *allowed: str) -> Config:
  """Returns the config with some keys changed: those that match `allowed`, such as `evaluation.*`.

  Raises BadInput for other keys.
  """
  values = dataclasses.asdict(config)
  for path, _ in overrides:
    if not any(fnmatch.fnmatch(path, pattern) for pattern in allowed):
      hint = '; evaluate --text=FILE scores another text' if path.startswith('data.') else ''
      raise errors.BadInput(f'--config.{path}: only {", ".join(allowed)} can be changed here{hint}')
  _apply_all(values, overrides)
  return conversion.resolve(values)


def load_file(spec: str) -> dict[str, Any]:
  """Returns the config of FILE or FILE:VARIANT, from its get_config() or get_config(VARIANT).

  A FILE that does not exist may be the name of a config of the package, such as `quickstart`, and
  `pretrained:NAME` is the config of a pretrained model, with its vocabulary. The folder of a run or
  of a published model, with or without `hf:` before it, is its config.
  """
  is_file = storage.user_path('--config', spec).exists()
  name, _, variant = (spec, '', '') if is_file else spec.partition(':')
  path = storage.user_path('--config', name)
  with errors.named(f'--config={spec}'):
    if spec.startswith(pretrained_models.PREFIX) and not path.exists():
      return _load_pretrained(variant)
    if spec.startswith(pretrained_models.PUBLISHED) and not path.exists():
      return _load_model(pathlib.Path(spec.removeprefix(pretrained_models.PUBLISHED)))
    folder = path.parent if path.name == 'config.json' else path
    if (folder / 'config.json').is_file() or path.suffix == '.gguf':
      return _load_model(folder)
    return _run_file(path if path.is_file() else _find_packaged(spec, name), name, variant)


def _run_file(path: pathlib.Path, name: str, variant: str) -> dict[str, Any]:
  """Returns the config of a file. Raises BadInput if it is none, or fails."""
  if path.suffix != '.py':
    raise errors.BadInput(f'{name} is not a Python file, FILE.py')
  try:
    get_config = runpy.run_path(str(path.absolute())).get('get_config')
    if get_config is None:
      raise errors.BadInput(f'{name} has no get_config()')
    if variant and not inspect.signature(get_config).parameters:
      raise errors.BadInput(f'{name} has no variants; omit ":{variant}"')
    config = get_config(variant) if variant else get_config()
  except errors.BadInput:
    raise
  except (Exception, SystemExit) as error:
    reason = f'{type(error).__name__}: {error}'
    raise errors.BadInput(f'it fails: {reason}; correct the file') from error
  config = conversion.to_dict(config)
  if not isinstance(config, dict):
    raise errors.BadInput(f'get_config() returned {config!r}, not a ConfigDict')
  return config


def _load_pretrained(name: str) -> dict[str, Any]:
  """Returns the config of a pretrained model. Raises BadInput if there is none."""
  folder = pretrained_models.find(name)
  if folder.is_file():
    return _load_model(folder)
  config = json_files.read(folder / 'config.json')
  if path := conversion.stored_vocabulary(folder):
    config['data'] |= {'vocabulary_path': str(path), 'vocabulary_size': None}
  return config


def _load_model(path: pathlib.Path) -> dict[str, Any]:
  """Returns the config of a run or a published model. Raises BadInput if there is none."""
  from ngrammer_jax import open_weights  # not needed for other configs
  from ngrammer_jax.checkpoints import workdirs

  if (path / workdirs.CORPUS).exists():
    return dataclasses.asdict(workdirs.load_config(path))
  return open_weights.open(path).config_values()


def _find_packaged(spec: str, name: str) -> pathlib.Path:
  """Returns the config of the package with a name. Raises BadInput if there is none."""
  packaged = catalog.files()
  if name in packaged:
    return packaged[name]
  is_path = name != pathlib.Path(name).stem
  others = sorted(map(str, pathlib.Path(name).parent.glob('[!_]*.py'))) if is_path else packaged
  available = f'; available: {", ".join(others)}' if others else ''
  if not is_path and (near := difflib.get_close_matches(name, packaged, n=1)):
    available = f': did you mean {near[0]}? Available: {", ".join(packaged)}'
  if not others and (packaged_name := pathlib.Path(name).stem) in packaged:  # of a checkout
    available = f': use the config of the package, --config={packaged_name}{spec[len(name) :]}'
  missing = f'no file {name}' if is_path else f'no file and no config of the package {name}'
  raise errors.BadInput(f'{missing}{available}')


def _override(argument: str, rest: Iterator[str]) -> tuple[str, str]:
  """Parses --config.key=text, --config.key text, --config.flag or --noconfig.flag."""
  if argument.startswith('--noconfig.'):
    path = argument.removeprefix('--noconfig.')
    if bool not in conversion.find_key(path).types:
      raise errors.BadInput(f'{argument}: {path} is not a boolean; use --config.{path}=VALUE')
    return path, 'False'
  path, equals, text = argument.removeprefix('--config.').partition('=')
  if equals:
    return path, text
  if bool in conversion.find_key(path).types:
    return path, 'True'
  text = next(rest, '--')
  if text.startswith('--'):
    raise errors.BadInput(f'{argument} needs a value: {argument}=VALUE')
  return path, text


def _apply_all(config: dict[str, Any], overrides: list[tuple[str, str]]) -> None:
  """Applies overrides to a config in their order, but presets before other keys."""
  for number, (path, text) in enumerate(overrides):
    _apply(config, path, text)
    block, _, name = path.rpartition('.')
    if name == 'preset':  # it set the whole block
      for earlier, earlier_text in overrides[:number]:
        if earlier.startswith(f'{block}.') and earlier != path:
          _apply(config, earlier, earlier_text)


def _apply(config: dict[str, Any], path: str, text: str) -> None:
  """Sets a dotted key, and creates the blocks around it that are None or not yet in a tuple.

  A tuple of blocks becomes a dict from their numbers. A preset starts its block anew.
  """
  value = _value(conversion.find_key(path), text)
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


def _value(key: fields.Key, text: str) -> Any:
  """Returns the text as a value of the declared type."""
  if text in ('None', 'none') and key.is_optional:
    return None
  if text in ('None', 'none', '()') and key.is_tuple_of_blocks:
    return ()
  if key.presets is not None:
    return dataclasses.asdict(key.presets(text))
  if key.block is not None:
    raise errors.BadInput(f'{key.path} is a section: set a key in it, --config.{key.path}.KEY=...')
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
