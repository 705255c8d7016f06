"""The config on the command line: --config=FILE[:VARIANT] and --config.a.b=value.

It behaves like `ml_collections.config_flags`, with three differences. Keys are checked against the
dataclasses, so an unknown key gives an error message instead of a traceback. A key inside an unset
block (None) creates the block. No flag is global.
"""

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import fnmatch
import functools
import logging
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import catalog, conversion, fields, memory_blocks, overriding
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config_files import load as load_file
from ngrammer_jax.runs import pretrained
from ngrammer_jax.system import hosts


def parse(
  parser: argparse.ArgumentParser,
  argv: list[str],
  start: Callable[[argparse.Namespace], None] | None = None,
) -> tuple[argparse.Namespace, Config]:
  """Returns plain flags, by argparse, and the config with its overrides applied.

  With --print_config it prints the config and exits, without requiring other flags. Incompatible
  values are printed before the error.

  Args:
    parser, argv: the parser of the plain flags, and the arguments.
    start: prepares JAX. It is called once, before a model is built, because processes cannot be
      joined afterwards.

  Raises:
    BadInput: an unknown config file, variant or key, or a value of the wrong type.
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

  @functools.cache
  def start_once() -> None:
    """Prepares JAX on the first call."""
    if start is not None:
      start(flags)

  config = resolve(flags.config, overrides, getattr(flags, 'workdir', None), start_once)
  for key, value in fields.walk_values(config):
    if not key.is_used and value != key.default:
      logging.warning('%s is no longer used', key.path)
  start_once()
  return flags, config


def _add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--config',
    required=True,
    metavar='FILE[:VARIANT]',
    help='config file or name of a config of the package, with its variant; or '
    'pretrained:NAME; or the folder of a run or a published model',
  )
  add_list(parser)
  parser.add_argument(
    '--print_config',
    action='store_true',
    help='print every key of the resolved config with its meaning, and exit',
  )


def add_list(parser: argparse.ArgumentParser) -> None:
  """Adds --list, usable without other flags."""

  class PrintList(argparse.Action):
    """Prints the list as soon as the flag is read, like --help and --version."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
      print(f'{catalog.format_list()}\n\n{pretrained.format_list()}')
      parser.exit()

  parser.add_argument(
    '--list',
    action=PrintList,
    nargs=0,
    default=argparse.SUPPRESS,
    help='list all configs, their variants and the pretrained models, and exit',
  )


def resolve(
  spec: str,
  overrides: list[tuple[str, str]],
  workdir: pathlib.Path | None = None,
  start: Callable[[], None] | None = None,
  show: bool = False,
) -> Config:
  """Returns the config of FILE or FILE:VARIANT with overrides applied; see `parse`.

  Fills unset fields of added memories from the model of `init_from`, see `init_from.complete`. With
  `show`, it prints the config before it is checked.
  """
  values = load_file(spec)
  in_file = [path for path, _ in memory_blocks.blocks(values.get('model') or {})]
  overriding.apply_all(values, overrides)
  has_memories = any(memory_blocks.blocks(values.get('model') or {}))
  if values.get('init_from') is None or not has_memories:
    return conversion.resolve(values, show)
  from ngrammer_jax.training import init_from  # imports JAX

  if start is not None:
    start()
  with hosts.collective_errors():
    init_from.complete(values, {path for path, _ in overrides}, in_file, workdir)
    return conversion.resolve(values, show)


def split(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
  """Splits arguments into config overrides, (key, text) each, and all others."""
  overrides = []
  plain = []
  rest = iter(argv)
  for argument in rest:
    if argument.startswith(('--config.', '--noconfig.')):
      overrides.append(_override(argument, rest))
    else:
      plain.append(argument)
  return overrides, plain


def override(config: Config, overrides: list[tuple[str, str]], *allowed: str) -> Config:
  """Returns the config with overrides of keys that match `allowed`, such as `evaluation.*`.

  Raises BadInput for other keys.
  """
  values = dataclasses.asdict(config)
  for path, _ in overrides:
    if not any(fnmatch.fnmatch(path, pattern) for pattern in allowed):
      message = f'--config.{path}: only {", ".join(allowed)} can be changed here'
      if path.startswith('data.'):
        message += '; evaluate --text=FILE scores another text'
      raise errors.BadInput(message)
  overriding.apply_all(values, overrides)
  return conversion.resolve(values)


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
