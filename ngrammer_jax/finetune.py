"""Fine-tunes a trained model: python -m ngrammer_jax.finetune --config=FILE:TASK --workdir=DIR.

--config.init_from=RUN is what it begins with, --config.data.superglue_dir=DIR what it learns.
"""

import argparse
import dataclasses
import functools
import os

from ngrammer_jax import files, flags, hosts


def main(argv: list[str]) -> int:
  """Fine-tunes on a task, or on one after the other, and prints the table."""
  parser = argparse.ArgumentParser(prog='python -m ngrammer_jax.finetune', description=__doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='where the run is kept')
  flags.add_watchdog(parser)
  flags.add_trace(parser)
  flags.add_cache(parser)
  hosts.add_flags(parser)
  options, config = flags.parse(parser, argv)
  said = [key for key, _ in flags.split(argv)[0]]

  # As `train` does it, and before the first device is touched.
  deterministic = '--xla_gpu_deterministic_ops=true'
  os.environ['XLA_FLAGS'] = f'{deterministic} {os.environ.get("XLA_FLAGS", "")}'.strip()
  hosts.join(options)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import language_modeling
  from ngrammer_jax.tasks.superglue import finetuning, formats
  from ngrammer_jax.training import loop

  task = config.finetune.task if config.finetune else None
  one_by_one = task == 'all'
  workdirs = (
    {name: options.workdir / name for name in formats.SUPERGLUE_TASKS} if one_by_one else {}
  )
  workdirs = workdirs or {task: options.workdir}
  configs = {}
  for name, workdir in workdirs.items():  # all of them are looked at before any is trained
    given = config
    if one_by_one:
      given = dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, task=name))
    with hosts.together():
      configs[name] = finetuning.resolve_config(given, said, workdir)
      finetuning.check_examples(configs[name])
  results = {}
  for name, workdir in workdirs.items():
    make = functools.partial(finetuning.FinetuneTask, workdir=workdir)
    loop.train(configs[name], workdir, make, options.watchdog, options.trace)
    for step in ('best', 'newest'):
      result = finetuning.evaluate(runs.load_run(workdir, step), 'validation')
      results.setdefault(step, {}).update(result.get('tasks', {result['task']: result}))
      file = 'validation.json' if step == 'newest' else 'validation_best.json'
      language_modeling.save(result, workdir / 'evaluation' / file)
  for step, of_tasks in results.items() if hosts.first() else ():
    if one_by_one:
      path = options.workdir / 'evaluation' / f'{step}.json'
      language_modeling.save(finetuning.combine_results(of_tasks), path)
    print(f'{step} checkpoint, validation')
    print(finetuning.format_table({'task': task, 'tasks': of_tasks}))
  if not hosts.first():
    return 0
  print(f'finished, in {options.workdir}')
  for workdir in workdirs.values():
    print(f'  python -m ngrammer_jax.evaluate --workdir={workdir} --split=test')
  return 0


if __name__ == '__main__':
  flags.run(main)
