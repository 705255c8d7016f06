"""Fine-tunes a trained model: python -m ngrammer_jax.finetune --config=FILE:TASK --workdir=DIR.

--config.init_from=DIR is the pre-trained run, --config.data.superglue_dir=DIR the folder of tasks.
"""

import contextlib
import dataclasses
import functools
import shlex

from ngrammer_jax import command_line, errors, flags
from ngrammer_jax.system import hosts


def main(argv: list[str]) -> int:
  """Fine-tunes on one task, or on all tasks one by one, and prints the table."""
  parser = flags.make_parser('finetune', __doc__)
  flags.add_training(parser)
  options, config = command_line.parse(parser, argv, flags.start_training)
  overrides, _ = command_line.split(argv)
  override_keys = [key for key, _ in overrides]

  from ngrammer_jax.inference import language_modeling
  from ngrammer_jax.tasks.superglue import evaluation, finetuning
  from ngrammer_jax.training import dry_run, loop

  if config.finetune is None:
    raise errors.BadInput('--config has no finetune section: use configs/superglue.py:TASK')
  task = config.finetune.task
  tasks = _configs_by_task(config, options.config, overrides)
  workdirs = {name: options.workdir / name if task == 'all' else options.workdir for name in tasks}
  configs, results = {}, {}
  for name, workdir in workdirs.items():  # all configs are checked before any task is trained
    with hosts.collective_errors():
      configs[name] = finetuning.resolve_config(tasks[name], override_keys, workdir)
      finetuning.check_examples(configs[name])
  for name, workdir in workdirs.items():
    make_task = functools.partial(finetuning.FinetuneTask, workdir=workdir)
    if options.dry_run:
      table = dry_run.dry_run(configs[name], workdir, make_task)
      if hosts.is_primary():
        print(f'{name}\n{table}')
      continue
    loop.train(configs[name], workdir, make_task, options.watchdog, options.trace)
    for step, result in _evaluate_checkpoints(workdir).items():
      results.setdefault(step, {}).update(evaluation.results_by_task(result))
  if options.dry_run or not hosts.is_primary():
    return 0
  with contextlib.ExitStack() as stack:  # each is written, also if another cannot be
    for step, task_results in results.items():
      print(f'{step} checkpoint, validation')
      print(evaluation.format_table({'task': task, 'tasks': task_results}))
      if task == 'all':
        path = options.workdir / 'evaluation' / f'{step}.json'
        stack.callback(language_modeling.save, evaluation.combine_results(task_results), path)
  print(f'finished, in {options.workdir}')
  for workdir in workdirs.values():
    print(f'  python -m ngrammer_jax.evaluate --workdir={shlex.quote(str(workdir))} --split=test')
  if task in ('all', 'mixture'):
    print(
      f'  python -m ngrammer_jax.submit --workdir={shlex.quote(str(options.workdir))} --output=DIR'
    )
  return 0


def _configs_by_task(config, spec, overrides):
  """Returns the config of each task that is trained: several for `all`.

  The variant `all` of a config file stands for the variants of the tasks in the same file.
  """
  from ngrammer_jax.tasks.superglue import formats

  if config.finetune.task != 'all':
    return {config.finetune.task: config}
  if spec.endswith(':all'):
    spec = spec.removesuffix('all')
    resolve = lambda name: command_line.resolve(spec + name, overrides)
    return {name: resolve(name) for name in formats.SUPERGLUE_TASKS}
  return {
    name: dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, task=name))
    for name in formats.SUPERGLUE_TASKS
  }


def _evaluate_checkpoints(workdir):
  """Evaluates and saves the best and the newest checkpoint, once if they are the same."""
  from ngrammer_jax import runs
  from ngrammer_jax.checkpoints import reader
  from ngrammer_jax.tasks.superglue import evaluation, finetuning

  newest = finetuning.evaluate(runs.load_run(workdir, 'newest'), 'validation')
  best_step = hosts.broadcast(reader.best_step(workdir))
  best = newest
  if best_step != newest[0]['step']:
    best = finetuning.evaluate(runs.load_run(workdir, 'best'), 'validation')
  with contextlib.ExitStack() as stack:  # each is written, also if another cannot be
    stack.callback(evaluation.save, *newest, workdir / 'evaluation' / 'validation.json')
    stack.callback(evaluation.save, *best, workdir / 'evaluation' / 'validation_best.json')
  return {'best': best[0], 'newest': newest[0]}


if __name__ == '__main__':
  flags.run(main)
