"""Generates text: python -m ngrammer_jax.generate --workdir=DIR --prompt='My fellow citizens'.

Standard output has only the text; with --prompts=FILE, one JSON object per line. The file has one
prompt per line, or is JSON lines or Parquet with a field "prompt". --interactive continues each
line of standard input. With --chat, prompts are messages; JSON may have "messages" with roles.
A short KV cache: --config.evaluation.memory.length=1024 --config.evaluation.memory.sinks=4
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import json
import logging
import pathlib
import sys
import time
import typing
from typing import Any

from ngrammer_jax import command_line, errors, flags, interactive
from ngrammer_jax.system import compilation_cache, files, progress, result_files

if typing.TYPE_CHECKING:
  from ngrammer_jax.data.prompts import Prompt
  from ngrammer_jax.inference.sampling import SamplingConfig
  from ngrammer_jax.inference.text import Completion
  from ngrammer_jax.runs import Run

# The context, and how the model is computed.
OVERRIDABLE_KEYS = (
  'evaluation.memory.*',
  'evaluation.segment_length',
  'model.dtype',
  'model.positional.scaling.is_long',
)

OnText = Callable[[int, str], None]  # is given the index of a prompt, and its new text


def main(argv: list[str]) -> int:
  """Generates continuations; prints a single one while it is generated."""
  overrides, plain = command_line.split(argv)
  options = _make_parser().parse_args(plain)
  flags.read_escapes(options, 'prompt', 'stop', 'system')
  from ngrammer_jax.runs import generation  # imports JAX

  generation.PromptConfig(options.chat, options.special, options.system).check_values()
  if options.prompts is None and options.output is not None:
    raise errors.BadInput('--output is for --prompts=FILE; other texts go to standard output')
  prompts: list[Prompt] = []
  if not options.interactive:
    prompts = _read_prompts(options)

  compilation_cache.enable(options.compilation_cache)
  run = flags.load_run(options)
  if overrides:
    changed = command_line.override(run.config, overrides, *OVERRIDABLE_KEYS)
    run = dataclasses.replace(run, config=changed)
  config = run.sampling_config(
    options.temperature,
    options.top_k,
    options.top_p,
    options.repetition_penalty,
    options.min_p,
  )
  if options.interactive:
    _generate_interactively(run, config, options)
  else:
    _generate(run, config, options, prompts)
  return 0


def _generate(
  run: 'Run', config: 'SamplingConfig', options: argparse.Namespace, prompts: 'list[Prompt]'
) -> None:
  """Prints the completion of --prompt, or JSON lines for --prompts; logs the speed."""
  complete = functools.partial(_complete, run, config, options, prompts, options.seed)
  times: list[float] = []  # of each token, in seconds
  if options.prompts is not None:
    total = len(prompts) * options.tokens
    with progress.Progress('generating', total, 'tokens') as bar:
      _print_json(complete, options.output, times, bar)
  elif options.chat:
    _print_text(complete, '', times)
  else:
    _print_text(complete, options.prompt, times)
  logging.info('%s', _format_speed(times))


def _generate_interactively(
  run: 'Run', config: 'SamplingConfig', options: argparse.Namespace
) -> None:
  """Continues each line of standard input, or answers it in a conversation."""
  if options.chat:
    chat = run.converse(
      config, options.tokens, options.seed, options.context, options.stop, options.system
    )
    interactive.chat_in_lines(chat)
    return

  def continue_line(i: int, line: str) -> bool:
    complete = functools.partial(_complete, run, config, options, [line], options.seed + i)
    _print_text(complete, line, [])
    return True

  interactive.answer_lines(continue_line, interactive.PROMPT_HINT)


def _complete(
  run: 'Run',
  config: 'SamplingConfig',
  options: argparse.Namespace,
  prompts: 'list[Prompt]',
  seed: int,
  on_text: OnText,
) -> Iterator['Completion']:
  """Yields the completion of each prompt, see `Run.completions`."""
  return run.completions(
    prompts,
    config,
    options.tokens,
    seed,
    options.context,
    on_text,
    options.stop,
    options.chat,
    options.special,
    options.system,
  )


def _make_parser() -> argparse.ArgumentParser:
  parser = flags.make_parser('generate', __doc__)
  flags.add_run(parser)
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', metavar='TEXT', help='text to continue')
  text = 'prompts, one per line or in JSON lines; -: standard input'
  source.add_argument('--prompts', type=pathlib.Path, metavar='FILE', help=text)
  source.add_argument('--interactive', action='store_true', help='read prompts from standard input')
  parser.add_argument('--chat', action='store_true', help='answer prompts, by the chat template')
  text = 'system message of --chat; default: from the chat template'
  parser.add_argument('--system', metavar='TEXT', help=text)
  text = 'read special tokens in prompts as such; default: as ordinary text'
  parser.add_argument('--special', action='store_true', help=text)
  parser.add_argument(
    '--output', type=pathlib.Path, metavar='FILE', help='file for the results of --prompts'
  )
  parser.add_argument(
    '--tokens', type=int, default=100, metavar='N', help='maximum number of new tokens'
  )
  text = 'text before which a continuation ends; may be repeated'
  parser.add_argument('--stop', action='append', default=[], metavar='TEXT', help=text)
  _add_sampling(parser)
  parser.add_argument(
    '--seed', type=int, default=0, metavar='N', help='seed of prompt 0; prompt i has seed + i'
  )
  parser.add_argument(
    '--context', type=int, metavar='N', help='context length; default: as in evaluation'
  )
  flags.add_literal(parser)
  compilation_cache.add_flag(parser)
  return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
  """Adds the options of sampling. None: see `Run.sampling_config`."""
  group = parser.add_argument_group('sampling (defaults: generation_config.json, or as below)')
  group.add_argument(
    '--temperature', type=float, metavar='X', help='0: greedy decoding; default: 1'
  )
  text = 'sample from the k most likely tokens; 0, the default: from all'
  group.add_argument('--top_k', type=int, metavar='N', help=text)
  text = 'nucleus sampling with this probability mass; 1, the default: all tokens'
  group.add_argument('--top_p', type=float, metavar='X', help=text)
  text = 'minimum share of the highest probability; 0, the default: none'
  group.add_argument('--min_p', type=float, metavar='X', help=text)
  text = 'lower the logits of earlier tokens; 1, the default: no'
  group.add_argument('--repetition_penalty', type=float, metavar='X', help=text)


def _print_text(complete: Callable[..., Iterable[Any]], prompt: str, times: list[float]) -> None:
  """Prints a prompt and its continuation while it is generated; adds the time of each token."""
  unprinted = [prompt]  # until the first token, before which any error is raised

  def print_new_text(_: int, new_text: str) -> None:
    times.append(time.monotonic())
    print(*unprinted, new_text, sep='', end='', flush=True)
    unprinted.clear()

  list(complete(on_text=print_new_text))
  print()


def _print_json(
  complete: Callable[..., Iterable[Any]],
  path: pathlib.Path | None,
  times: list[float],
  bar: progress.Progress,
) -> None:
  """Prints each completion as soon as it is done, so an interrupted run keeps it.

  It goes to the file, or to standard output without a file or after a write error.
  """
  is_utf8 = str(sys.stdout.encoding).lower().startswith('utf')
  failure: OSError | None = None

  def count_token(row: int, new_text: str) -> None:
    times.append(time.monotonic())
    bar.advance(1)

  mode = 'w'  # what the file holds is replaced by the first result, not by an error before it
  for completion in complete(on_text=count_token):
    fields = dataclasses.asdict(completion)
    if path is not None and failure is None:
      try:
        with path.open(mode, encoding='utf-8') as file:
          print(json.dumps(fields, ensure_ascii=False), file=file)
        mode = 'a'
        continue
      except OSError as error:
        failure = error
    print(json.dumps(fields, ensure_ascii=not is_utf8), flush=True)
  if failure is not None:
    raise errors.BadInput(
      f'--output={path} cannot be written: {failure.strerror}; the results that it lacks are on '
      f'standard output'
    )


def _format_speed(times: list[float]) -> str:
  """Formats the number of tokens and, from two on, tokens per second."""
  count = f'{len(times):,} tokens'
  if len(times) == 1:
    count = '1 token'
  if len(times) < 2:
    return count
  # The first token waits for loading and compiling.
  rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
  return f'{count}, {rate:,.0f} tokens/s'


def _read_prompts(options: argparse.Namespace) -> 'list[Prompt]':
  """Returns the prompts. Raises BadInput for an unreadable file or an unwritable output."""
  if options.output is not None:
    result_files.check_output_file('--output', options.output, 'completions.jsonl')
    files.make_folder(options.output.parent)
  if options.prompts is None:
    return [options.prompt]
  from ngrammer_jax.data import prompts  # imports NumPy

  return prompts.read(options.prompts, options.chat)


if __name__ == '__main__':
  flags.run(main)
