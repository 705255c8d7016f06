"""Continues prompts: python -m ngrammer_jax.generate --workdir=DIR --prompt='My fellow citizens'.

The text goes to standard output, and nothing else does; with --prompts=FILE, one prompt a
line, it is one JSON object a line.
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
  """Generates, as it goes for a single prompt."""
  parser = argparse.ArgumentParser(
    prog='python -m ngrammer_jax.generate',
    description=__doc__,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  parser.add_argument('--workdir', type=files.path, required=True, help='of the run')
  parser.add_argument('--step', default='newest', help='a checkpoint: a step, newest or best')
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='how the text begins')
  source.add_argument('--prompts', type=pathlib.Path, metavar='FILE', help='one prompt a line')
  parser.add_argument('--output', type=pathlib.Path, help='a file for the results of --prompts')
  parser.add_argument('--tokens', type=int, default=100, help='to add, at most')
  parser.add_argument('--temperature', type=float, default=1.0, help='0: the most likely token')
  parser.add_argument('--top_k', type=int, help='draw from the k most likely tokens')
  parser.add_argument('--top_p', type=float, help='draw from the most likely, up to this share')
  parser.add_argument('--seed', type=int, default=0, help='of the first prompt; then one more each')
  parser.add_argument('--context', type=int, help='tokens looked back at; default: as evaluated')
  flags.add_cache(parser)
  options = parser.parse_args(argv)
  prompts = _prompts(options)

  from ngrammer_jax import runs
  from ngrammer_jax.inference import sampling

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
    waiting = [options.prompt]  # for the first token: whatever is wrong is known by then

    def tell(row, grown):
      rate.count()
      print(''.join([*waiting, grown]), end='', flush=True)
      waiting.clear()

    list(generate(on_text=tell))
    print()
  else:
    with progress.Progress('generating', len(prompts) * options.tokens, 'tokens') as bar:

      def tell(row, grown):
        rate.count()
        bar.advance(1)

      # Written as they are done: whoever stops the work keeps what there is.
      output = sys.stdout if options.output is None else options.output.open('w', encoding='utf-8')
      for one in generate(on_text=tell):
        print(json.dumps(dataclasses.asdict(one), ensure_ascii=False), file=output, flush=True)
  logging.info('%s', rate)
  return 0


def _prompts(options: argparse.Namespace) -> list[str]:
  """The prompts. Raises BadInput where they cannot be read, or the output not be written."""
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
    text = options.prompts.read_text(encoding='utf-8-sig')  # any newline of Unix or Windows
  except (OSError, UnicodeDecodeError) as error:
    raise errors.BadInput(f'--prompts={options.prompts} cannot be read: {error}') from error
  if not text:
    raise errors.BadInput(f'--prompts={options.prompts} is empty; expected one prompt a line')
  return text.removesuffix('\n').split('\n')


class Rate:
  """Tokens per second, from the first one on: what comes before is reading and compiling."""

  def __init__(self):
    self._tokens, self._began = 0, time.monotonic()

  def count(self) -> None:
    """Counts a token."""
    if not self._tokens:
      self._began = time.monotonic()
    self._tokens += 1

  def __str__(self) -> str:
    seconds = max(time.monotonic() - self._began, 1e-9)
    return f'{self._tokens:,} tokens, {(self._tokens - 1) / seconds:,.0f} tokens/s'


if __name__ == '__main__':
  flags.run(main)
