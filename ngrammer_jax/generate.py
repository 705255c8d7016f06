"""Continues prompts: python -m ngrammer_jax.generate --workdir=DIR --prompt='My fellow citizens'.

Standard output has only the text. With --prompts=FILE, which has one prompt a line, it has one JSON
object a line.
"""

import argparse
import dataclasses
import functools
import json
import logging
import pathlib
import sys
import time

from ngrammer_jax import errors, files, flags, progress


def main(argv: list[str]) -> int:
  """Generates text; a single prompt is printed token by token."""
  parser = argparse.ArgumentParser(
    prog='python -m ngrammer_jax.generate',
    description=__doc__,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='beginning of the text')
  source.add_argument('--prompts', type=pathlib.Path, metavar='FILE', help='one prompt a line')
  parser.add_argument('--output', type=pathlib.Path, help='file for the results of --prompts')
  parser.add_argument('--tokens', type=int, default=100, help='maximum number of new tokens')
  parser.add_argument('--temperature', type=float, default=1.0, help='0: greedy decoding')
  parser.add_argument('--top_k', type=int, help='sample from the k most likely tokens')
  parser.add_argument('--top_p', type=float, help='nucleus sampling: total probability')
  parser.add_argument(
    '--seed', type=int, default=0, help='seed of the first prompt; prompt i has seed + i'
  )
  parser.add_argument('--context', type=int, help='context length; default: as in evaluation')
  flags.add_cache(parser)
  options = parser.parse_args(argv)
  prompts = _prompts(options)

  from ngrammer_jax import runs
  from ngrammer_jax.decoding import sampling

  run = runs.load_run(options.workdir, flags.step(options.step))
  generate = functools.partial(
    run.completions,
    prompts,
    sampling.SamplingConfig(options.temperature, options.top_k, options.top_p),
    options.tokens,
    options.seed,
    options.context,
  )
  rate = Rate()
  if options.prompts is None:
    unprinted = [options.prompt]  # until the first token, when all errors have been raised

    def on_text(row, new_text):
      rate.count()
      print(''.join([*unprinted, new_text]), end='', flush=True)
      unprinted.clear()

    list(generate(on_text=on_text))
    print()
  else:
    with progress.Progress('generating', len(prompts) * options.tokens, 'tokens') as bar:

      def on_text(row, new_text):
        rate.count()
        bar.advance(1)

      # Each completion is written at once: an interrupted command keeps what is finished.
      output = sys.stdout if options.output is None else options.output.open('w', encoding='utf-8')
      for completion in generate(on_text=on_text):
        line = json.dumps(dataclasses.asdict(completion), ensure_ascii=False)
        print(line, file=output, flush=True)
  logging.info('%s', rate)
  return 0


def _prompts(options: argparse.Namespace) -> list[str]:
  """Returns the prompts. Raises BadInput if they cannot be read, or the output not be written."""
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
  """Measures tokens per second from the first token on: before it, the model is compiled."""

  def __init__(self):
    self._tokens, self._start_time = 0, time.monotonic()

  def count(self) -> None:
    """Counts a token."""
    if not self._tokens:
      self._start_time = time.monotonic()
    self._tokens += 1

  def __str__(self) -> str:
    seconds = max(time.monotonic() - self._start_time, 1e-9)
    return f'{self._tokens:,} tokens, {(self._tokens - 1) / seconds:,.0f} tokens/s'


if __name__ == '__main__':
  flags.run(main)
