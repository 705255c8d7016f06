"""Trains a language model: python -m ngrammer_jax.train --config=FILE --workdir=DIR."""

import shlex

from ngrammer_jax import command_line, flags
from ngrammer_jax import config as experiment
from ngrammer_jax.system import hosts


def main(argv: list[str]) -> int:
  """Trains, or reports that the run is already finished."""
  parser = flags.make_parser('train', __doc__)
  flags.add_training(parser)
  options, config = command_line.parse(parser, argv, flags.start_training)

  # After parsing: errors in flags do not wait for the import of Orbax.
  from ngrammer_jax import runs
  from ngrammer_jax.training import dry_run, init_from, loop, train_task

  split_names: list[str] = []

  def make_task(config: experiment.Config) -> train_task.CorpusTask:
    start = None
    if config.init_from:
      start = init_from.Start(config, options.workdir)
    task = train_task.CorpusTask(config, options.workdir, runs.open_corpus, start)
    if start is not None:
      start.check_vocabulary(task.vocabulary)
    split_names.extend(task.split_names())
    return task

  if options.dry_run:
    table = dry_run.dry_run(config, options.workdir, make_task)
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


if __name__ == '__main__':
  flags.run(main)
