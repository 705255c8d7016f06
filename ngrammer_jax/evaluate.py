"""Evaluates a run: python -m ngrammer_jax.evaluate --workdir=DIR --split=test.

Keys of the evaluation section can be overridden: --config.evaluation.memory.length=256

The Children's Book Test: --cloze=/path/to/CBTest [--cloze_protocol=prefix]
Synthetic questions from its raw books: --cloze=/path/to/CBTest --cloze_made=500
"""

import dataclasses
import logging
import pathlib
import signal

from ngrammer_jax import compilation_cache, errors, files, flags, hosts
from ngrammer_jax.config import command_line


def main(argv: list[str]) -> int:
  """Scores a split, writes evaluation/<split>.json and prints a table."""
  parser = flags.make_parser('evaluate', __doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  parser.add_argument('--split', default='test', help='train, validation or test')
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
  cloze = parser.add_argument_group("the Children's Book Test")
  cloze.add_argument(
    '--cloze', type=pathlib.Path, metavar='PATH', help='folder or file of questions'
  )
  cloze.add_argument(
    '--cloze_protocol', help='query (default): score the whole query; prefix: score up to the gap'
  )
  cloze.add_argument(
    '--cloze_made', type=int, metavar='N', help='number of synthetic questions of each class'
  )
  compilation_cache.add_flag(parser)
  hosts.add_flags(parser)
  overrides, plain = command_line.split(argv)
  options = parser.parse_args(plain)
  _check_cloze(options)
  hosts.join(options)
  compilation_cache.enable(options.compilation_cache)
  if hosts.is_multiprocess():  # JAX would catch SIGTERM, but there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import language_modeling

  with hosts.collective_errors():
    run = runs.load_run(options.workdir, flags.step(options.step))
  if options.cloze is not None:
    return _answer_cloze(run, overrides, options)
  path = options.workdir / 'evaluation' / f'{options.split}.json'
  if run.config.finetune is not None:
    return _evaluate_task(run, overrides, options.split, path)
  config = command_line.override(run.config, overrides, 'evaluation')
  run = dataclasses.replace(run, config=config)
  # The limit of validation during training does not apply, unless it is set on this command line.
  limit = config.evaluation.max_tokens
  if limit is not None and not any(key == 'evaluation.max_tokens' for key, _ in overrides):
    limit = None
    logging.info('the whole split is evaluated, also if validation in training was limited')
  result = run.evaluate(options.split, limit)
  language_modeling.save(result, path)
  if not hosts.is_primary():
    return 0
  print(language_modeling.format_table({options.split: result}))
  print(f'{language_modeling.format_protocol(result)}\nwrote {path}')
  return 0


def _check_cloze(options):
  """Raises BadInput for flags that need --cloze, or have an invalid value."""
  for flag in ('cloze_protocol', 'cloze_made'):
    value = getattr(options, flag)
    if value is not None and options.cloze is None:
      raise errors.BadInput(f'--{flag}={value} needs --cloze=PATH: add it, or omit --{flag}')
  if options.cloze_made is not None and options.cloze_made < 1:
    raise errors.BadInput(f'--cloze_made={options.cloze_made} must be at least 1')


def _answer_cloze(run, overrides, options):
  """Answers cloze questions, writes evaluation/cloze_<name>.json and .jsonl, prints a table."""
  from ngrammer_jax.inference import cloze

  run = dataclasses.replace(run, config=command_line.override(run.config, overrides, 'evaluation'))
  protocol = options.cloze_protocol or cloze.PROTOCOLS[0]
  result, answers = run.cloze(options.cloze, options.split, protocol, options.cloze_made)
  path = cloze.save(result, answers, options.workdir / 'evaluation')
  if hosts.is_primary():
    print(cloze.format_table(result))
    print(f'wrote {path} and all answers to {path.with_suffix(".jsonl")}')
  return 0


def _evaluate_task(run, overrides, split, path):
  """Evaluates a fine-tuned run on its task, or on a diagnostic set."""
  from ngrammer_jax.tasks.superglue import evaluation, finetuning

  data = [override for override in overrides if override[0] == 'data.superglue_dir']
  config = command_line.override(run.config, data, 'data')
  finetune = [override for override in overrides if override not in data]
  config = command_line.override(config, finetune, 'finetune')
  if not data:
    run.log_paths('superglue_dir')
  if config.finetune.task != run.config.finetune.task:  # a diagnostic set
    path = path.with_name(f'{config.finetune.task}_{split}.json')
  result, answers = finetuning.evaluate(dataclasses.replace(run, config=config), split)
  evaluation.save(result, answers, path)
  if not hosts.is_primary():
    return 0
  print(evaluation.format_table(result))
  print(f'step {result["step"]:,}\nwrote {path} and all answers to {evaluation.answers_path(path)}')
  return 0


if __name__ == '__main__':
  flags.run(main)
