"""The command line: --config=FILE[:ROW], --config.a.b=value and a few plain flags.

It looks and behaves as `ml_collections.config_flags` does, with three differences: keys
are checked against the dataclasses, so a wrong one ends in a sentence and not in a
traceback; a key inside a block that is None creates the block; and no flag is global.
"""

import argparse
import ast
from collections.abc import Callable
import contextlib
import dataclasses
import importlib.util
import inspect
import logging
import os
import pathlib
import signal
import sys
import traceback
import typing
from typing import Any, NoReturn

import jax
import ml_collections

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, files, hosts, mesh_config, progress
from ngrammer_jax.training import profile


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs a verb: logs to standard error, and makes BadInput exit status 2."""
  form = '%(process_prefix)s%(message)s'
  logging.basicConfig(level=logging.INFO, format=form, handlers=[progress.LogHandler()])
  for handler in logging.getLogger().handlers:
    handler.addFilter(hosts.ProcessPrefix())
  logging.getLogger('jax').setLevel(logging.WARNING)  # tells of every device it misses
  for name in ('absl', 'gcsfs', 'fsspec', 'google', 'asyncio'):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # these also raise what they tell of
  said = None
  try:
    status = main(sys.argv[1:])
  except errors.BadInput as error:
    said, status = f'error: {error}', 2
  except errors.Interrupted as stopped:
    said, status = str(stopped), 128 + stopped.signal
  except errors.PeerLostError as error:
    said, status = f'error: {error}', 1
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr, flush=True)
    os._exit(130)  # XLA may be compiling, and would crash while Python is taken down
  except BrokenPipeError:  # whoever read standard output has enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 128 + signal.SIGPIPE
  except Exception as error:
    if not hosts.is_multiprocess():
      raise
    _leave(error)
  if said is not None:
    agreed = said.startswith('error: process ')
    who = '' if hosts.is_primary() or agreed else f'process {hosts.process_index()}: '
    with contextlib.suppress(OSError):
      print(f'{who}{said}', file=sys.stderr)
  sys.exit(status or 0)


def _leave(error: Exception) -> NoReturn:
  """Ends one of several processes at once: the others would be waited for, and may be gone."""
  if not isinstance(error, jax.errors.JaxRuntimeError):
    traceback.print_exception(error)
  logging.error(
    '%s: %s\nerror: another process may be lost: see what each of them says; the same command, '
    'for all of them, goes on from the last checkpoint',
    type(error).__name__,
    error,
  )
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


def add_watchdog(parser: argparse.ArgumentParser) -> None:
  """The flag of those verbs that may hang for long."""

  def minutes(text):
    if not 0 <= float(text) < float('inf'):
      raise ValueError
    return float(text)

  parser.add_argument(
    '--watchdog',
    type=minutes,
    default=10.0,
    metavar='MINUTES',
    help='without progress after which the log gets the stacks of all threads; 0: never',
  )


def add_cache(parser: argparse.ArgumentParser) -> None:
  """The flag of those verbs that compile."""

  def keep(text):
    folder = files.path(text)
    try:
      files.check_reachable(folder)
      files.make_folder(folder)
      files.write(folder / 'writable', '')
    except OSError as error:
      raise argparse.ArgumentTypeError(f'{text} cannot be written: {error.strerror}') from error
    except errors.BadInput as error:
      raise argparse.ArgumentTypeError(str(error)) from error
    jax.config.update('jax_compilation_cache_dir', text)
    return folder

  parser.add_argument(
    '--compilation_cache',
    type=keep,
    metavar='DIR',
    help='where compiled programs are kept, for the next start',
  )


def add_trace(parser: argparse.ArgumentParser) -> None:
  """The flag of those verbs that train."""

  def steps(text):
    first, colon, last = text.partition(':')
    known = first.isdecimal() and last.isdecimal()
    if not colon or not known or int(first) >= int(last):
      raise argparse.ArgumentTypeError(
        f'{text} is not FIRST:LAST, as in 100:110, which are the steps from 100 to 109'
      )
    return profile.StepRange(int(first), int(last))

  parser.add_argument(
    '--trace',
    type=steps,
    metavar='FIRST:LAST',
    help='steps to take a trace of, for TensorBoard, whole calls of segments_per_call',
  )


def step(text: str) -> int | str:
  """The value of --step: a number, newest or best. Raises BadInput for anything else."""
  if not text.isdecimal() and text not in ('newest', 'best'):
    raise errors.BadInput(f'--step={text} is not a step, newest or best')
  return int(text) if text.isdecimal() else text


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, Any]:
  """Plain flags by argparse, and the config with its overrides applied.

  Raises:
    BadInput: no such config file or row, unknown key, value of the wrong type.
  """
  parser.add_argument('--config', required=True, metavar='FILE[:ROW]', help='what to run')
  parser.epilog = 'Any key of the config: --config.training.steps=2000'
  overrides, plain = split(argv)
  flags = parser.parse_args(plain)
  config = load_file(flags.config)
  for key, text in overrides:
    _apply(config, key, text)
  return flags, experiment.resolve(config)


def split(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
  """Keys of the config and their texts, and all other arguments."""
  overrides, plain = [], []
  rest = iter(argv)
  for argument in rest:
    if argument.startswith(('--config.', '--noconfig.')):
      overrides.append(_override(argument, rest))
    else:
      plain.append(argument)
  return overrides, plain


def override(
  config: experiment.Config, overrides: list[tuple[str, str]], section: str
) -> experiment.Config:
  """The config with some keys of one section changed. Raises BadInput for those of others."""
  fields = dataclasses.asdict(config)
  for key, text in overrides:
    if not key.startswith(f'{section}.'):
      raise errors.BadInput(
        f'--config.{key}: of a trained run only {section}.* can be changed here'
      )
    _apply(fields, key, text)
  return experiment.resolve(fields)


def load_file(spec: str) -> dict[str, Any]:
  """The config of FILE or FILE:ROW: what its get_config() or get_config(ROW) returns."""
  name, _, row = spec.partition(':') if not pathlib.Path(spec).exists() else (spec, '', '')
  path = pathlib.Path(name)
  if not path.is_file():
    beside = sorted(str(p) for p in path.parent.glob('*.py')) if path.parent.is_dir() else []
    found = f'; there are: {", ".join(beside)}' if beside else ''
    raise errors.BadInput(f'--config={spec}: no file {name}{found}')
  module_spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
    get_config = getattr(module, 'get_config', None)
    if get_config is None:
      raise errors.BadInput(f'{name} has no get_config()')
    if row and not inspect.signature(get_config).parameters:
      raise errors.BadInput(f'{name} has no rows; leave out ":{row}"')
    config = get_config(row) if row else get_config()
  except errors.BadInput as error:
    raise errors.BadInput(f'--config={spec}: {error}') from error
  except Exception as error:
    raise errors.BadInput(f'--config={spec} fails: {type(error).__name__}: {error}') from error
  config = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
  if not isinstance(config, dict):
    raise errors.BadInput(f'--config={spec}: get_config() returned {config!r}, not a ConfigDict')
  return config


def _override(argument: str, rest: typing.Iterator[str]) -> tuple[str, str]:
  """Key and text of --config.key=text, --config.key text, --config.flag or --noconfig.flag."""
  if argument.startswith('--noconfig.'):
    key = argument.removeprefix('--noconfig.')
    if _annotation(key) is not bool:
      raise errors.BadInput(f'{argument}: {key} is not a switch; use --config.{key}=VALUE')
    return key, 'False'
  key, equals, text = argument.removeprefix('--config.').partition('=')
  if equals:
    return key, text
  kind = _annotation(key)
  if kind is bool:
    return key, 'True'
  text = next(rest, '--')
  if text.startswith('--'):
    raise errors.BadInput(f'{argument} needs a value: {argument}=VALUE')
  return key, text


def _annotation(key: str) -> Any:
  """The declared type of a dotted key. Raises BadInput for one that does not exist."""
  kind: Any = experiment.Config
  parts = key.split('.')
  for i, part in enumerate(parts):
    block = experiment.block_class(kind)
    path = ''.join(f'{p}.' for p in parts[:i])
    if block is None:
      raise errors.BadInput(f'unknown config key {key}: {path[:-1]} is a value, not a section')
    hints = typing.get_type_hints(block)
    if part not in hints:
      raise errors.BadInput(experiment.unknown_key(path + part))
    kind = hints[part]
  return kind


def _apply(config: dict[str, Any], key: str, text: str) -> None:
  """Sets a dotted key, making the blocks on the way that are None."""
  value = _value(key, text, _annotation(key))
  *sections, last = key.split('.')
  for section in sections:
    if config.get(section) is None:
      config[section] = {}
    config = config[section]
    if not isinstance(config, dict):
      raise errors.BadInput(f'--config.{key}: {section} is not a section in the config file')
  config[last] = value


def _value(key: str, text: str, annotation: Any) -> Any:
  """The text as a value of the declared type."""
  options = experiment.options_of(annotation)
  if text in ('None', 'none') and type(None) in options:
    return None
  if annotation is mesh_config.MeshConfig:
    return dataclasses.asdict(annotation.named(text))
  if experiment.block_class(annotation) is not None:
    raise errors.BadInput(f'{key} is a section: set a key inside it, as in --config.{key}.KEY=...')
  if bool in options and text.lower() in ('true', 'false', '1', '0'):
    return text.lower() in ('true', '1')
  if str in options:
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text  # of the wrong type: resolve says which was expected
  # 1e4 steps are 10,000 steps.
  if int in options and isinstance(value, float) and value.is_integer():
    return int(value)
  return value
