"""Fine-tunes a trained model: python -m ngrammer_jax.finetune --config=FILE:TASK --workdir=DIR.

--config.init_from=DIR is the pre-trained run, --config.data.superglue_dir=DIR the folder of tasks.
"""

import dataclasses
import functools

from ngrammer_jax import files, flags, hosts
from ngrammer_jax.config import command_line


def main(argv: list[str]) -> int:
  """Fine-tunes on one task, or on all tasks one by one, and prints the table."""
  parser = flags.make_parser('finetune', __doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  flags.add_watchdog(parser)
  flags.add_trace(parser)
  flags.add_cache(parser)
  hosts.add_flags(parser)
  options, config = command_line.parse(parser, argv)
  override_keys = [key for key, _ in command_line.split(argv)[0]]

  flags.use_deterministic_ops()
  hosts.join(options)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import language_modeling
  from ngrammer_jax.tasks.superglue import evaluation, finetuning, formats
  from ngrammer_jax.training import loop

  task = config.finetune.task if config.finetune else None
  is_all = task == 'all'
  workdirs = {task: options.workdir}
  if is_all:
    workdirs = {name: options.workdir / name for name in formats.SUPERGLUE_TASKS}
  configs, results = {}, {}
  for name, workdir in workdirs.items():  # all configs are checked before any task is trained
    finetune = config.finetune and dataclasses.replace(config.finetune, task=name)
    task_config = dataclasses.replace(config, finetune=finetune)
    with hosts.collective_errors():
      configs[name] = finetuning.resolve_config(task_config, override_keys, workdir)
      finetuning.check_examples(configs[name])
  for name, workdir in workdirs.items():
    make_task = functools.partial(finetuning.FinetuneTask, workdir=workdir)
    loop.train(configs[name], workdir, make_task, options.watchdog, options.trace)
    for step in ('best', 'newest'):
      result = finetuning.evaluate(runs.load_run(workdir, step), 'validation')
      results.setdefault(step, {}).update(evaluation.results_by_task(result))
      file = 'validation.json' if step == 'newest' else 'validation_best.json'
      language_modeling.save(result, workdir / 'evaluation' / file)
  if not hosts.is_primary():
    return 0
  for step, task_results in results.items():
    if is_all:
      path = options.workdir / 'evaluation' / f'{step}.json'
      language_modeling.save(evaluation.combine_results(task_results), path)
    print(f'{step} checkpoint, validation')
    print(evaluation.format_table({'task': task, 'tasks': task_results}))
  print(f'finished, in {options.workdir}')
  for workdir in workdirs.values():
    print(f'  python -m ngrammer_jax.evaluate --workdir={workdir} --split=test')
  return 0


if __name__ == '__main__':
  flags.run(main)
