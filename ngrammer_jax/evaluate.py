"""Evaluates a run: python -m ngrammer_jax.evaluate --workdir=DIR --split=test.

Any key of evaluation can be changed: --config.evaluation.memory.length=256
"""

import argparse
import dataclasses
import signal

from ngrammer_jax import files, flags, hosts


def main(argv: list[str]) -> int:
  """Scores a split, writes evaluation/<split>.json and prints a table."""
  parser = argparse.ArgumentParser(prog='python -m ngrammer_jax.evaluate', description=__doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='of the run')
  parser.add_argument('--split', default='test', help='train, validation or test')
  parser.add_argument('--step', default='newest', help='a checkpoint: a step, newest or best')
  flags.add_cache(parser)
  hosts.add_flags(parser)
  overrides, plain = flags.split(argv)
  options = parser.parse_args(plain)
  hosts.join(options)
  if hosts.several():  # where JAX waits for SIGTERM; but there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  from ngrammer_jax import runs
  from ngrammer_jax.evaluation import language_modeling

  with hosts.together():
    run = runs.load_run(options.workdir, flags.step(options.step))
  path = options.workdir / 'evaluation' / f'{options.split}.json'
  if run.config.finetune is not None:
    return _task(run, overrides, options.split, path)
  config = flags.override(run.config, overrides, 'evaluation')
  run = dataclasses.replace(run, config=config)
  # The limit of validation in training is none of the verb, unless it is said here.
  limited = any(key == 'evaluation.max_tokens' for key, _ in overrides)
  result = run.evaluate(options.split, config.evaluation.max_tokens if limited else None)
  language_modeling.save(result, path)
  if not hosts.first():
    return 0
  print(language_modeling.table({options.split: result}))
  protocol = ', '.join(f'{key} {value}' for key, value in result['protocol'].items())
  print(f'step {result["step"]:,}, protocol: {protocol}\nwritten to {path}')
  return 0


def _task(run, overrides, split, path):
  """The same for a run that was fine-tuned."""
  from ngrammer_jax.evaluation import language_modeling
  from ngrammer_jax.tasks.superglue import finetuning

  moved = [override for override in overrides if override[0] == 'data.superglue_dir']
  config = flags.override(run.config, moved, 'data')
  others = [override for override in overrides if override not in moved]
  config = flags.override(config, others, 'finetune')
  if config.finetune.task != run.config.finetune.task:  # a diagnostic set
    path = path.with_name(f'{config.finetune.task}_{split}.json')
  result = finetuning.evaluate(dataclasses.replace(run, config=config), split)
  language_modeling.save(result, path)
  if not hosts.first():
    return 0
  print(finetuning.table(result))
  print(f'step {result["step"]:,}\nwritten to {path}')
  return 0


if __name__ == '__main__':
  flags.run(main)
