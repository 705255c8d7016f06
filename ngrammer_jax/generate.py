"""Generates text: python -m ngrammer_jax.generate --workdir=DIR --prompt='My fellow citizens'.

Standard output has the text and nothing else. With --prompts=FILE, which has one prompt per line,
it has one JSON object per line.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import sys
import time
from typing import TextIO

from ngrammer_jax import errors, files, flags, progress


def main(argv: list[str]) -> int:
  """Generates continuations; prints a single one while it is generated."""
  parser = argparse.ArgumentParser(
    prog='python -m ngrammer_jax.generate',
    description=__doc__,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='text to continue')
  source.add_argument('--prompts', type=pathlib.Path, metavar='FILE', help='one prompt per line')
  parser.add_argument('--output', type=pathlib.Path, help='file for the results of --prompts')
  parser.add_argument('--tokens', type=int, default=100, help='maximum number of new tokens')
  parser.add_argument('--temperature', type=float, default=1.0, help='0: greedy decoding')
  parser.add_argument('--top_k', type=int, help='sample from the k most likely tokens')
  parser.add_argument('--top_p', type=float, help='nucleus sampling: probability mass')
  parser.add_argument(
    '--seed', type=int, default=0, help='seed of the first prompt; prompt i has seed + i'
  )
  parser.add_argument('--context', type=int, help='context length; default: as in evaluation')
  flags.add_cache(parser)
  options = parser.parse_args(argv)
  prompts = _read_prompts(options)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import sampling

  run = runs.load_run(options.workdir, flags.step(options.step))
  config = sampling.SamplingConfig(options.temperature, options.top_k, options.top_p)
  complete = functools.partial(
    run.completions, prompts, config, options.tokens, options.seed, options.context
  )
  rate = Rate()
  if options.prompts is None:
    _print_text(complete, options.prompt, rate)
  else:
    total = len(prompts) * options.tokens
    with (
      progress.Progress('generating', total, 'tokens') as bar,
      _open_output(options.output) as output,
    ):
      _print_json(complete, output, rate, bar)
  logging.info('%s', rate)
  return 0


def _print_text(complete, prompt, rate) -> None:
  """Prints a prompt and its continuation while it is generated."""
  unprinted = [prompt]  # until the first token, before which any error is raised

  def print_new_text(_, new_text):
    rate.count()
    print(''.join([*unprinted, new_text]), end='', flush=True)
    unprinted.clear()

  list(complete(on_text=print_new_text))
  print()


def _print_json(complete, output, rate, bar) -> None:
  """Prints each completion as soon as it is done: an interrupted run keeps those before."""

  def count_token(row, new_text):
    rate.count()
    bar.advance(1)

  for one in complete(on_text=count_token):
    print(json.dumps(dataclasses.asdict(one), ensure_ascii=False), file=output, flush=True)


def _open_output(path: pathlib.Path | None) -> contextlib.AbstractContextManager[TextIO]:
  """Opens the file of the results. None: standard output, which stays open."""
  return contextlib.nullcontext(sys.stdout) if path is None else path.open('w', encoding='utf-8')


def _read_prompts(options: argparse.Namespace) -> list[str]:
  """Returns the prompts. Raises BadInput if a file cannot be read, or the output not written."""
  if options.prompts is None and options.output is not None:
    raise errors.BadInput('--output is for --prompts=FILE; a single text goes to standard output')
  if options.output is not None:
    try:
      options.output.open('a').close()
    except OSError as error:
      raise errors.BadInput(
        f'--output={options.output} cannot be written: {error.strerror}'
      ) from error
  if options.prompts is None:
    return [options.prompt]
  try:
    text = options.prompts.read_text(encoding='utf-8-sig')  # translates newlines of Windows
  except (OSError, UnicodeDecodeError) as error:
    raise errors.BadInput(f'--prompts={options.prompts} cannot be read: {error}') from error
  if not text:
    raise errors.BadInput(f'--prompts={options.prompts} is empty; expected one prompt a line')
  return text.removesuffix('\n').split('\n')


class Rate:
  """Tokens per second after the first token, which waits for loading and compiling."""

  def __init__(self):
    self._tokens, self._start = 0, time.monotonic()

  def count(self) -> None:
    """Counts a token."""
    if not self._tokens:
      self._start = time.monotonic()
    self._tokens += 1

  def __str__(self) -> str:
    seconds = max(time.monotonic() - self._start, 1e-9)
    return f'{self._tokens:,} tokens, {(self._tokens - 1) / seconds:,.0f} tokens/s'


if __name__ == '__main__':
  flags.run(main)
