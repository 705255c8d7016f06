"""Flags of all commands, and their start."""

import argparse
from collections.abc import Sequence
import dataclasses
import difflib
import logging
import os
import re
import shutil
import signal
import typing

import ngrammer_jax
from ngrammer_jax import errors
from ngrammer_jax.runs import model_source, pretrained
from ngrammer_jax.system import compilation_cache, hosts, storage
from ngrammer_jax.system.process import run as run  # the commands start with it

if typing.TYPE_CHECKING:
  from ngrammer_jax import runs


USAGE = '%(prog)s [flags]'
MAX_COLUMNS = 100  # of the help
ESCAPES = {r'\n': '\n', r'\t': '\t', r'\\': '\\'}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
  """Shows the default of every flag, if any, and keeps the lines of the description."""

  def __init__(self, prog: str):
    columns = shutil.get_terminal_size((MAX_COLUMNS, 0)).columns
    super().__init__(prog, max_help_position=30, width=min(columns, MAX_COLUMNS))

  def _get_help_string(self, action: argparse.Action) -> str | None:
    if action.default in (None, []) or isinstance(action.default, bool):
      return action.help
    return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
  """A parser that suggests a flag for an unknown one."""

  def parse_known_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None):
    if self._subparsers is None:  # else most flags belong to a subparser
      self._check_names([argument.partition('=')[0] for argument in args])
    return super().parse_known_args(args, namespace)

  def _check_names(self, names: list[str]) -> None:
    """Exits with an error for the first unknown flag that resembles a flag or a config key."""
    flags = [flag for action in self._actions for flag in action.option_strings]
    for name in names:
      if not name.startswith('--') or any(flag.startswith(name) for flag in flags):
        continue
      if '.' in name and not name.startswith('--config.'):  # --training.steps
        near = [f'--config.{name[2:]}']
      else:
        near = difflib.get_close_matches(name, flags, n=1)
      if near:
        self.error(f'no flag {name}: did you mean {near[0]}?')


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
  """Returns the parser of a command, with --version."""
  parser = Parser(
    prog=f'python -m ngrammer_jax.{command}',
    usage=USAGE,
    description=description,
    formatter_class=HelpFormatter,
  )
  add_version(parser)
  return parser


def add_version(parser: argparse.ArgumentParser) -> None:
  """Adds --version."""
  version = f'ngrammer_jax {ngrammer_jax.__version__}'
  parser.add_argument('--version', action='version', version=version, help='print it and exit')


def add_run(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a trained model: --workdir, --pretrained, --adapter and --step."""
  add_source(parser)
  text = 'LoRA adapter for the published model of --pretrained'
  parser.add_argument('--adapter', type=storage.path, metavar='FOLDER', help=text)
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")


def add_source(parser: argparse.ArgumentParser) -> None:
  """Adds --workdir and --pretrained; one of them is required."""
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--workdir', type=storage.path, metavar='DIR', help='run directory')
  names = ', '.join(pretrained.all_names()) or pretrained.NO_MODELS
  source.add_argument(
    '--pretrained',
    metavar='NAME',
    help=f'model of the package: {names}; or the folder of a published model',
  )


def load_run(options: argparse.Namespace) -> 'runs.Run':
  """Opens the run of the flags of `add_run`. Raises BadInput without one."""
  from ngrammer_jax import runs  # imports JAX

  number = model_source.read_step(options.step)
  if options.pretrained is not None:
    run = runs.load_pretrained(options.pretrained, adapter=options.adapter)
    return dataclasses.replace(run, step=number)
  if options.adapter is not None:
    raise errors.BadInput(
      f'--adapter={options.adapter} needs the published model that it was trained on: name it by '
      f'--pretrained instead of --workdir'
    )
  return runs.load_run(options.workdir, number)


def add_literal(parser: argparse.ArgumentParser) -> None:
  """Adds --literal, see `read_escapes`."""
  parser.add_argument(
    '--literal',
    action='store_true',
    help=r'do not read \n, \t and \\ in texts of flags as escapes',
  )


def read_escapes(options: argparse.Namespace, *names: str) -> None:
  r"""Replaces \n, \t and \\ in the texts of flags (shells do not), with a log line."""
  if options.literal:
    return
  for name in names:
    value = getattr(options, name)
    if value is None:
      continue
    if isinstance(value, list):
      changed = [_unescape(text) for text in value]
    else:
      changed = _unescape(value)
    if changed != value:
      logging.info(r'--%s=%r: \n, \t and \\ are read as escapes (--literal: not)', name, changed)
    setattr(options, name, changed)


def _unescape(text: str) -> str:
  r"""Replaces \n, \t and \\ in a text; other backslashes stay."""
  return re.sub(r'\\[nt\\]', lambda match: ESCAPES[match[0]], text)


def add_training(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of commands that train."""
  from ngrammer_jax.training.records import watchdog  # inference needs nothing of training

  parser.add_argument(
    '--workdir', type=storage.path, required=True, metavar='DIR', help='run directory'
  )
  parser.add_argument(
    '--dry_run',
    action='store_true',
    help='print parameters, memory and expected time of the training, and exit',
  )
  parser.add_argument(
    '--watchdog',
    type=minutes,
    default=watchdog.DEFAULT_MINUTES,
    metavar='MINUTES',
    help='minutes without progress before stack traces; 0: never',
  )
  parser.add_argument(
    '--trace',
    type=_parse_steps,
    metavar='FIRST:LAST',
    help='steps to trace for TensorBoard, in whole calls of segments_per_call',
  )
  compilation_cache.add_flag(parser)
  hosts.add_flags(parser)


def start_training(options: argparse.Namespace) -> None:
  """Prepares JAX for a training, with the flags of `add_training`.

  Training is bit-identical on GPUs too; JAX reads the XLA flag when it finds the devices.

  Raises:
    BadInput: the workdir is a published model.
  """
  if model_source.ModelSource.from_path(options.workdir).is_published:
    raise errors.BadInput(
      f'--workdir={options.workdir} is a published model, to which no training is added: use a new '
      f'folder, and --config=hf:{options.workdir} --config.init_from=hf:{options.workdir} to start '
      f'from the model'
    )
  deterministic = '--xla_gpu_deterministic_ops=true'
  os.environ['XLA_FLAGS'] = f'{deterministic} {os.environ.get("XLA_FLAGS", "")}'.strip()
  hosts.join(options)
  compilation_cache.enable(options.compilation_cache)


def start_evaluation(options: argparse.Namespace) -> None:
  """Prepares JAX for an evaluation by one or several processes."""
  hosts.join(options)
  compilation_cache.enable(options.compilation_cache)
  if hosts.is_multiprocess():  # JAX would catch SIGTERM, but there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def minutes(text: str) -> float:
  """Parses a number of minutes; argparse shows the name of this function in errors."""
  if not 0 <= float(text) < float('inf'):
    raise ValueError
  return float(text)


def _parse_steps(text: str) -> range:
  """Parses --trace: a range of steps, such as 100:110."""
  first, _, last = text.partition(':')
  if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
    raise argparse.ArgumentTypeError(
      f'{text} is not FIRST:LAST, such as 100:110 for the steps from 100 to 109'
    )
  return range(int(first), int(last))
