"""CPU seconds of starting: imports, --help, an error, the first training step, the first token.

  python benchmarks/starting.py --config=configs/quickstart.py --workdir=runs/quickstart

Every measurement is a process of its own, and the best of several rounds counts. The first step and
the first token are measured twice: with an empty compilation cache, and again with the filled
cache. `train` counts all before the first call of steps, with cached tokens; `generate` counts
everything after its imports until the first token of a trained run.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

# The commands are stopped where the measurement ends, as `measure` prints the CPU seconds.
TRAIN = """
from ngrammer_jax import train
from ngrammer_jax.training import programs
programs.Programs.call = lambda *_: measure()
train.main({arguments})
"""
GENERATE = """
from ngrammer_jax import generate, runs
from ngrammer_jax.inference import text
import orbax.checkpoint, sentencepiece
imported = time.process_time()
text.IncrementalDetokenizer.add = lambda *_: measure(imported)
generate.main({arguments})
"""
EXIT = """
from ngrammer_jax import train
try:
  train.main({arguments})
except BaseException:
  pass
"""
MEASURE = """
import os, time
def measure(start=0):
  print('CPU', time.process_time() - start, flush=True)
  os._exit(0)
"""


def cpu_seconds(code: str, **environment: str) -> float:
  """Returns what a process with some code measures, until its end or its call of `measure`."""
  done = subprocess.run(
    [sys.executable, '-c', f'{MEASURE}{code}\nmeasure()'],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=True,
  )
  (line,) = (line for line in done.stdout.splitlines() if line.startswith('CPU '))
  return float(line.split()[1])


def train(arguments: list[str], cache: str) -> float:
  """Returns the CPU seconds before the first step of a new run."""
  with tempfile.TemporaryDirectory() as workdir:
    code = TRAIN.format(arguments=[*arguments, f'--workdir={workdir}/run'])
    return cpu_seconds(code, JAX_COMPILATION_CACHE_DIR=cache)


def generate(arguments: list[str], cache: str) -> float:
  """Returns the CPU seconds between the imports and the first token."""
  return cpu_seconds(GENERATE.format(arguments=arguments), JAX_COMPILATION_CACHE_DIR=cache)


def cold_and_warm(run, arguments: list[str]) -> tuple[float, float]:
  """Returns the CPU seconds with an empty compilation cache, and with a filled one."""
  with tempfile.TemporaryDirectory() as cache:
    return run(arguments, cache), run(arguments, cache)


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--config', default='configs/quickstart.py', help='config file of `train`')
  parser.add_argument('--workdir', type=pathlib.Path, help='trained run for `generate`')
  parser.add_argument('--rounds', type=int, default=5)
  options = parser.parse_args()
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
  config = f'--config={options.config}'
  prompt = '--prompt=My fellow citizens'
  rows = {
    'import jax': lambda: (cpu_seconds('import jax'),),
    'import ngrammer_jax.training.loop': lambda: (
      cpu_seconds('import ngrammer_jax.training.loop'),
    ),
    'train --help': lambda: (cpu_seconds(EXIT.format(arguments=['--help'])),),
    'train, unknown key': lambda: (
      cpu_seconds(EXIT.format(arguments=[config, '--workdir=none', '--config.model.x=1'])),
    ),
    'train, first step': lambda: cold_and_warm(train, [config]),
  }
  if options.workdir is not None:
    arguments = [f'--workdir={options.workdir}', prompt]
    rows['generate, first token'] = lambda: cold_and_warm(generate, arguments)
  rounds = [{name: row() for name, row in rows.items()} for _ in range(options.rounds)]
  print(f'{"CPU seconds":36}{"best":>8}{"with a filled compilation cache":>34}')
  for name in rows:
    best = [min(column) for column in zip(*(row[name] for row in rounds), strict=True)]
    print(f'{name:36}{best[0]:>8.2f}' + ''.join(f'{seconds:>34.2f}' for seconds in best[1:]))


if __name__ == '__main__':
  main()
