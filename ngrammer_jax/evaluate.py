"""Evaluates a run: python -m ngrammer_jax.evaluate --workdir=DIR --split=test.

any text                     --pretrained=NAME --text=FILE
evaluation keys              --config.evaluation.memory.length=256
a model larger than a device --config.mesh.fsdp=8
speed and memory             --config.model.scan_layers=False --config.model.vocabulary_chunk=N
a moved corpus               --config.data.path=/path/to/corpus
the Children's Book Test     --cloze=/path/to/CBTest [--cloze_protocol=prefix]
"""

import argparse
import dataclasses
import hashlib
import logging
import os
import pathlib
import typing

from ngrammer_jax import command_line, errors, flags
from ngrammer_jax.system import compilation_cache, file_errors, files, hosts, json_files, storage

if typing.TYPE_CHECKING:
  from ngrammer_jax import runs

# How the model is computed, which does not change its numbers.
COMPUTATION_KEYS = ('model.scan_layers', 'model.kernel', 'model.remat', 'model.vocabulary_chunk')

DEFAULT_SPLIT = 'test'
Overrides = list[tuple[str, str]]  # keys of the config and their texts, see `command_line.split`


def main(argv: list[str]) -> int:
  """Scores a split or a text, writes evaluation/<name>.json and prints a table."""
  overrides, plain = command_line.split(argv)
  options = _make_parser().parse_args(plain)
  _check_cloze(options)
  flags.start_evaluation(options)

  with hosts.collective_errors():
    run = flags.load_run(options)
  folder = options.output
  if folder is None and options.workdir is not None and run.results_folder is not None:
    folder = run.results_folder / 'evaluation'
  if folder is not None:
    hosts.on_primary(files.check_writable, f'--output={folder}', folder)
  if options.cloze is not None:
    return _answer_cloze(run, overrides, options, folder)
  names_task = any(key.startswith('finetune.') for key, _ in overrides)
  is_task = run.config.finetune is not None or names_task
  if is_task and options.text is None:
    return _evaluate_task(run, overrides, options.split or DEFAULT_SPLIT, folder)
  return _evaluate_language_model(run, overrides, options, folder)


def _make_parser() -> argparse.ArgumentParser:
  parser = flags.make_parser('evaluate', __doc__)
  flags.add_run(parser)
  source = parser.add_mutually_exclusive_group()
  text = 'train, validation or test; default: test, else validation'
  source.add_argument('--split', help=text)
  source.add_argument('--text', metavar='FILE', help='a text file instead of a split')
  parser.add_argument(
    '--output',
    type=storage.path,
    metavar='DIR',
    help='folder of the results; default: WORKDIR/evaluation',
  )
  cloze = parser.add_argument_group("the Children's Book Test")
  cloze.add_argument('--cloze', type=pathlib.Path, metavar='PATH', help='its folder or file')
  cloze.add_argument(
    '--cloze_protocol',
    metavar='NAME',
    help='query (default): score the whole query; prefix: score up to the gap',
  )
  compilation_cache.add_flag(parser)
  hosts.add_flags(parser)
  return parser


def _evaluate_language_model(
  run: 'runs.Run',
  overrides: Overrides,
  options: argparse.Namespace,
  folder: pathlib.Path | None,
) -> int:
  """Scores a split or a text, writes its metrics to a folder if there is one, prints a table."""
  from ngrammer_jax.inference import language_modeling

  allowed = ('evaluation.*', 'mesh.*', 'data.cache_dir', *COMPUTATION_KEYS)
  if run.config.data.corpus != 'sotu':  # the corpus may be elsewhere on this machine
    allowed += ('data.path', 'data.mixture.*.path')
  if options.text is not None:  # it may hold its text in other fields
    allowed += ('data.text_field', 'data.document_separator', 'data.chat', 'data.loss_on')
  config = run.config
  if options.text is not None:  # is no part of the corpus of the training
    data = dataclasses.replace(config.data, corpus='text', mixture=())
    config = dataclasses.replace(config, data=data)
  config = command_line.override(config, overrides, *allowed)
  run = dataclasses.replace(run, config=config)
  # The limit of validation during training does not apply, unless it is set on this command line.
  limit = config.evaluation.max_tokens
  if limit is not None and not any(key == 'evaluation.max_tokens' for key, _ in overrides):
    limit = None
    logging.info('the whole split is evaluated, also if validation in training was limited')
  if options.text is None:
    name = options.split or _existing_split(run)
    result = run.evaluate(name, limit)
  else:
    name = _text_name(options.text, folder)
    result = run.evaluate_file(options.text, limit)
  results = {name: result}
  for part, part_result in result.get('parts', {}).items():
    results[f'{name}/{part}'] = part_result
  paths = []
  if folder is not None:
    for key, value in results.items():
      path = folder / f'{key.replace("/", "_")}.json'
      language_modeling.save(value, path)
      paths.append(path)
  if hosts.is_primary():
    print(language_modeling.format_table(results))
    print(language_modeling.format_protocol(result))
    for path in paths:
      print(f'wrote {path}')
  return 0


def _existing_split(run: 'runs.Run') -> str:
  """Returns the test split, or with a log line the validation split of a corpus without one."""
  run.find_checkpoint()  # before the corpus is tokenised
  if DEFAULT_SPLIT in run.mixture.split_names():
    return DEFAULT_SPLIT
  if hosts.is_primary():
    logging.warning('the corpus has no test split: the validation split is evaluated')
  return 'validation'


def _text_name(text: str, folder: pathlib.Path | None) -> str:
  """Returns the name of the result of a text, distinct from splits and other texts."""
  name = f'text_{pathlib.Path(text).stem}'
  path = os.path.abspath(text)
  if folder is None:
    return name
  try:
    other = json_files.read(folder / f'{name}.json')['text']
  except file_errors.DAMAGE_ERRORS:  # there is none
    return name
  if os.path.abspath(other) == path:
    return name
  digest = hashlib.sha256(os.fsencode(path)).hexdigest()
  return f'{name}_{digest[:8]}'


def _check_cloze(options: argparse.Namespace) -> None:
  """Raises BadInput for flags that need --cloze, or exclude it."""
  if options.cloze_protocol is not None and options.cloze is None:
    raise errors.BadInput('--cloze_protocol needs --cloze=PATH')
  if options.cloze is not None and options.text is not None:
    raise errors.BadInput('--text cannot be combined with --cloze: omit one of them')


def _answer_cloze(
  run: 'runs.Run',
  overrides: Overrides,
  options: argparse.Namespace,
  folder: pathlib.Path | None,
) -> int:
  """Answers cloze questions, writes cloze_<name>.json and .jsonl to a folder, prints a table."""
  from ngrammer_jax.inference import cloze

  config = command_line.override(run.config, overrides, 'evaluation.*', *COMPUTATION_KEYS)
  run = dataclasses.replace(run, config=config)
  protocol = options.cloze_protocol or cloze.PROTOCOLS[0]
  result, answers = run.cloze(options.cloze, options.split or DEFAULT_SPLIT, protocol)
  path = None
  if folder is not None:
    path = cloze.save(result, answers, folder)
  if hosts.is_primary():
    print(cloze.format_table(result))
    if path is not None:
      print(f'wrote {path} and all answers to {path.with_suffix(".jsonl")}')
  return 0


def _evaluate_task(
  run: 'runs.Run', overrides: Overrides, split: str, folder: pathlib.Path | None
) -> int:
  """Evaluates a fine-tuned run on its task or a diagnostic set, or a model without fine-tuning."""
  from ngrammer_jax.tasks.superglue import evaluation, finetuning

  config = command_line.override(
    run.config, overrides, 'finetune.*', 'data.superglue_dir', 'evaluation.max_examples'
  )
  if config.data.superglue_dir == run.config.data.superglue_dir:
    run.log_paths('superglue_dir')
  is_other = run.config.finetune is None or config.finetune.task != run.config.finetune.task
  name = split
  if is_other:
    name = f'{config.finetune.task}_{split}'
  path = None
  if folder is not None:
    path = folder / f'{name}.json'
  elif split == 'test':
    raise errors.BadInput(
      '--split=test has no labels, and its answers are files: name a folder with --output=DIR, or '
      'use --split=validation'
    )
  # The limit of validation during training does not apply.
  limit = None
  if any(key == 'evaluation.max_examples' for key, _ in overrides):
    limit = config.evaluation.max_examples
  run = dataclasses.replace(run, config=config)
  result, answers, submissions = finetuning.evaluate(run, split, limit)
  if path is not None:
    evaluation.save(result, answers, submissions, path)
  if hosts.is_primary():
    print(f'{evaluation.format_table(result)}\nstep {result["step"]:,}')
    if path is not None:
      print(f'wrote {path} and all answers to {evaluation.answers_path(path)}')
    for name in submissions:
      print(f'wrote the submission file {path.with_name(name)}')
  return 0


if __name__ == '__main__':
  flags.run(main)
