"""Trains a language model: python -m ngrammer_jax.train --config=FILE --workdir=DIR."""

import argparse
from collections.abc import Callable
import shlex
from typing import Any

from ngrammer_jax import command_line, config_files, errors, flags
from ngrammer_jax import config as experiment
from ngrammer_jax.config import conversion
from ngrammer_jax.system import hosts, storage


def main(argv: list[str]) -> int:
  """Trains, or reports that the run is already finished."""
  parser = flags.make_parser('train', __doc__)
  flags.add_training(parser)
  _add_matching(parser)
  names = {argument.partition('=')[0] for argument in argv}
  if {'--print_config', '--match_parameters'} <= names:
    raise errors.BadInput(
      '--print_config prints the config before --match_parameters changes it: use --dry_run, which '
      'logs the value of --match_key, or leave out one of them'
    )
  options, config = command_line.parse(parser, argv, flags.start_training)

  # After parsing: errors in flags do not wait for the import of Orbax.
  from ngrammer_jax import runs
  from ngrammer_jax.training import dry_run, init_from, loop, train_task

  split_names: list[str] = []

  def open_start(config: experiment.Config) -> init_from.Start | None:
    if config.init_from is None:
      return None
    return init_from.Start(config, options.workdir)

  def make_task(config: experiment.Config) -> train_task.CorpusTask:
    start = open_start(config)
    task = train_task.CorpusTask(config, options.workdir, runs.open_corpus, start)
    if start is not None:
      start.check_vocabulary(task.vocabulary)
    split_names.extend(task.split_names())
    return task

  def make_dry_task(config: experiment.Config) -> train_task.TrainTask:
    size = dry_run.vocabulary_size(config, options.workdir)
    if size is None:
      return make_task(config)
    return dry_run.UnreadTask(config, options.workdir, size, open_start(config))

  if options.match_parameters is not None:
    config = _match_parameters(config, options, make_task)
  if options.dry_run:
    table = dry_run.dry_run(config, options.workdir, make_dry_task)
    if hosts.is_primary():
      print(table)
    return 0
  has_trained = loop.train(config, options.workdir, make_task, options.watchdog, options.trace)
  if not hosts.is_primary():
    return 0
  status = 'finished' if has_trained else 'already finished'
  print(f'{status}: {config.training.steps:,} steps, in {options.workdir}')
  workdir = shlex.quote(f'{options.workdir}')
  records = shlex.quote(f'{options.workdir}/tensorboard')
  split = 'test' if 'test' in split_names else 'validation'
  print(f'  python -m ngrammer_jax.evaluate --workdir={workdir} --split={split}')
  print(f'  tensorboard --logdir {records}')
  if not has_trained:
    print('  to train longer, use another --workdir and --config.training.steps=...')
  return 0


def _add_matching(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a model that is as large as another."""
  parser.add_argument(
    '--match_parameters',
    metavar='CONFIG',
    help='config or run directory with the wanted number of parameters',
  )
  parser.add_argument(
    '--match_key',
    metavar='KEY',
    default='model.feed_forward_width',
    help='key to solve for, such as model.ngram_memories.0.rows',
  )


def _match_parameters(
  config: experiment.Config,
  options: argparse.Namespace,
  make_task: Callable[[experiment.Config], Any],
) -> experiment.Config:
  """Returns the config with as many parameters as the model of --match_parameters.

  Both are counted with the vocabulary of this training.

  Raises:
    BadInput: the other model is a run with another vocabulary; or see `matching.match`.
  """
  from ngrammer_jax.data import vocabularies
  from ngrammer_jax.training import dry_run, matching

  name = options.match_parameters
  with hosts.collective_errors():
    other = conversion.resolve(config_files.load(name, '--match_parameters'))
    size = dry_run.vocabulary_size(config, options.workdir)
    if size is None:
      size = make_task(config).vocabulary.size
    folder = storage.user_path('--match_parameters', name)
    if (folder / 'vocabulary.json').exists():
      other_size = vocabularies.load(folder).size
      if other_size != size:
        raise errors.BadInput(
          f'--match_parameters={name} has a vocabulary of {other_size:,} token ids, but this '
          f'training has one of {size:,}: use the same vocabulary'
        )
    return matching.match(config, options.match_key, other.model, name, size)


if __name__ == '__main__':
  flags.run(main)
