"""Fine-tunes a trained model: python -m ngrammer_jax.finetune --config=FILE:TASK --workdir=DIR.

--config.init_from=DIR names the pre-trained run, --config.data.superglue_dir=DIR the tasks.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import pathlib
import shlex
from typing import Any

from ngrammer_jax import command_line, errors, flags
from ngrammer_jax import config as experiment
from ngrammer_jax.system import hosts

Results = dict[str, dict[str, Any]]  # by the name of the task


def main(argv: list[str]) -> int:
  """Fine-tunes on one task, or on all tasks one by one, and prints the table."""
  parser = flags.make_parser('finetune', __doc__)
  flags.add_training(parser)
  options, config = command_line.parse(parser, argv, flags.start_training)
  overrides, _ = command_line.split(argv)
  override_keys = [key for key, _ in overrides]

  from ngrammer_jax.tasks.superglue import evaluation, finetuning
  from ngrammer_jax.training import dry_run, loop

  if config.finetune is None:
    raise errors.BadInput('--config has no finetune section: use configs/superglue.py:TASK')
  task = config.finetune.task
  configs = _configs_by_task(config, options.config, overrides)
  workdirs = {}
  for name in configs:
    workdirs[name] = options.workdir
    if task == 'all':
      workdirs[name] = options.workdir / name
  for name, workdir in workdirs.items():  # all configs are checked before any task is trained
    with hosts.collective_errors():
      configs[name] = finetuning.resolve_config(configs[name], override_keys, workdir)
      finetuning.check_examples(configs[name])
  results: dict[str, Results] = {}  # by the checkpoint, best or newest
  for name, workdir in workdirs.items():
    make_task = functools.partial(finetuning.FinetuneTask, workdir=workdir)
    if options.dry_run:
      table = dry_run.dry_run(configs[name], workdir, make_task)
      if hosts.is_primary():
        print(f'{name}\n{table}')
      continue
    loop.train(configs[name], workdir, make_task, options.watchdog, options.trace)
    for checkpoint, result in _evaluate_checkpoints(workdir).items():
      results.setdefault(checkpoint, {}).update(evaluation.results_by_task(result))
  if options.dry_run or not hosts.is_primary():
    return 0
  for checkpoint, task_results in results.items():
    print(f'{checkpoint} checkpoint, validation')
    print(evaluation.format_table({'task': task, 'tasks': task_results}))
  if task == 'all':
    _save_combined(results, options.workdir / 'evaluation')
  print(f'finished, in {options.workdir}')
  for workdir in workdirs.values():
    print(f'  python -m ngrammer_jax.evaluate --workdir={shlex.quote(str(workdir))} --split=test')
  if task in ('all', 'mixture'):
    print(
      f'  python -m ngrammer_jax.submit --workdir={shlex.quote(str(options.workdir))} --output=DIR'
    )
  return 0


def _configs_by_task(
  config: experiment.Config, spec: str, overrides: list[tuple[str, str]]
) -> dict[str, experiment.Config]:
  """Returns the config of each trained task, several for `all`.

  The variant `all` of a config file means the variants of all its tasks.

  Args:
    config: config of the command.
    spec: the value of --config.
    overrides: keys of the config and their texts, see `command_line.split`.
  """
  from ngrammer_jax.tasks.superglue import formats

  if config.finetune.task != 'all':
    return {config.finetune.task: config}
  configs = {}
  for name in formats.SUPERGLUE_TASKS:
    if spec.endswith(':all'):
      configs[name] = command_line.resolve(spec.removesuffix('all') + name, overrides)
    else:
      finetune = dataclasses.replace(config.finetune, task=name)
      configs[name] = dataclasses.replace(config, finetune=finetune)
  return configs


def _evaluate_checkpoints(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Evaluates and saves the best and the newest checkpoint, once if they are the same.

  Returns their results, by `best` and `newest`.
  """
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


def _save_combined(results: Mapping[str, Results], folder: pathlib.Path) -> None:
  """Writes the combined results of all tasks, one file for each checkpoint, best or newest."""
  from ngrammer_jax.inference import language_modeling
  from ngrammer_jax.tasks.superglue import evaluation

  with contextlib.ExitStack() as stack:  # each is written, also if another cannot be
    for checkpoint, task_results in results.items():
      path = folder / f'{checkpoint}.json'
      stack.callback(language_modeling.save, evaluation.combine_results(task_results), path)


if __name__ == '__main__':
  flags.run(main)
