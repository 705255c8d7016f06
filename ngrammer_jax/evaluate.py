"""Evaluates a run: python -m ngrammer_jax.evaluate --workdir=DIR --split=test.

Any key of evaluation can be changed: --config.evaluation.memory.length=256

The Children's Book Test: --cloze=/path/to/CBTest [--cloze_protocol=prefix]. Synthetic questions,
generated from its raw books: --cloze=/path/to/CBTest --cloze_made=500
"""

import argparse
import dataclasses
import pathlib
import signal

from ngrammer_jax import errors, files, flags, hosts


def main(argv: list[str]) -> int:
  """Scores a split, writes evaluation/<split>.json and prints a table."""
  parser = argparse.ArgumentParser(prog='python -m ngrammer_jax.evaluate', description=__doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  parser.add_argument('--split', default='test', help='train, validation or test')
  parser.add_argument('--step', default='newest', help='checkpoint: step number, newest or best')
  cloze = parser.add_argument_group("the Children's Book Test")
  cloze.add_argument(
    '--cloze', type=pathlib.Path, metavar='PATH', help='folder or file of the questions'
  )
  cloze.add_argument(
    '--cloze_protocol', help='query (default): score the whole query; prefix: up to the gap'
  )
  cloze.add_argument(
    '--cloze_made', type=int, metavar='N', help='generate N questions of each class from raw books'
  )
  flags.add_cache(parser)
  hosts.add_flags(parser)
  overrides, plain = flags.split(argv)
  options = parser.parse_args(plain)
  _check_cloze(options)
  hosts.join(options)
  if hosts.several():  # JAX then handles SIGTERM, but there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import language_modeling

  with hosts.together():
    run = runs.load_run(options.workdir, flags.step(options.step))
  if options.cloze is not None:
    return _cloze(run, overrides, options)
  path = options.workdir / 'evaluation' / f'{options.split}.json'
  if run.config.finetune is not None:
    return _task(run, overrides, options.split, path)
  config = flags.override(run.config, overrides, 'evaluation')
  run = dataclasses.replace(run, config=config)
  # The limit of validation during training applies here only if the command sets it.
  is_limited = any(key == 'evaluation.max_tokens' for key, _ in overrides)
  result = run.evaluate(options.split, config.evaluation.max_tokens if is_limited else None)
  language_modeling.save(result, path)
  if not hosts.first():
    return 0
  print(language_modeling.format_table({options.split: result}))
  protocol = ', '.join(f'{key} {value}' for key, value in result['protocol'].items())
  print(f'step {result["step"]:,}, protocol: {protocol}\nwritten to {path}')
  return 0


def _check_cloze(options):
  """Raises BadInput for cloze flags without --cloze, or out of range."""
  for flag in ('cloze_protocol', 'cloze_made'):
    value = getattr(options, flag)
    if value is not None and options.cloze is None:
      raise errors.BadInput(f'--{flag}={value} is for --cloze=PATH: add it, or leave this out')
  if options.cloze_made is not None and options.cloze_made < 1:
    raise errors.BadInput(f'--cloze_made={options.cloze_made} must be at least 1')


def _cloze(run, overrides, options):
  """Answers questions, writes evaluation/cloze_<name>.json and .jsonl, and prints a table."""
  from ngrammer_jax.inference import cloze

  run = dataclasses.replace(run, config=flags.override(run.config, overrides, 'evaluation'))
  protocol = options.cloze_protocol or cloze.PROTOCOLS[0]
  result, answers = run.cloze(options.cloze, options.split, protocol, options.cloze_made)
  path = cloze.save(result, answers, options.workdir / 'evaluation')
  if hosts.first():
    print(cloze.format_table(result))
    print(f'written to {path}, every answer to {path.with_suffix(".jsonl")}')
  return 0


def _task(run, overrides, split, path):
  """Evaluates a fine-tuned run in the same way."""
  from ngrammer_jax.inference import language_modeling
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
  print(finetuning.format_table(result))
  print(f'step {result["step"]:,}\nwritten to {path}')
  return 0


if __name__ == '__main__':
  flags.run(main)
