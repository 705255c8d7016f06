"""Time of the operations of a training step, summed over threads: python -m benchmarks.operations

  adaptive   the step of `benchmarks.span_step` with learned spans of at most 8,192
  xl_train, xl_evaluate   the passes of `benchmarks.transformer_xl_step`

An operation has its name in XLA; `ynn_fusion` is a matrix product with its neighbours.
"""

import argparse
import collections
from collections.abc import Callable
import pathlib
import tempfile

import jax

from benchmarks import span_step, transformer_xl_step

CONTAINERS = ('while', 'cond', 'conditional', 'call')  # of operations that are counted themselves
CASES = ('adaptive', 'xl_train', 'xl_evaluate')


def make(case: str) -> Callable[[], None]:
  """Returns one pass."""
  if case == 'adaptive':
    return span_step.make_jax()['adaptive_8192']
  return transformer_xl_step.make_jax()[case.removeprefix('xl_')]


def profile(run: Callable[[], None]) -> dict[str, float]:
  """Returns the seconds of each operation of a pass, the longest first."""
  run()
  seconds: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (file,) = pathlib.Path(folder).rglob('*.xplane.pb')
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
      for event in (event for line in plane.lines for event in line.events):
        name = event.name.split('.')[0]
        if 'hlo_op' in dict(event.stats) and name not in CONTAINERS:
          seconds[name] += event.duration_ns / 1e9
  return dict(seconds.most_common())


def main() -> None:
  """Prints the ten longest operations of each case."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--cases', nargs='+', choices=CASES, default=CASES)
  for case in parser.parse_args().cases:
    seconds = profile(make(case))
    total = sum(seconds.values())
    print(f'{case}: {total:.2f} s of all threads')
    for name in list(seconds)[:10]:
      print(f'{seconds[name] / total:8.1%}  {name}')


if __name__ == '__main__':
  main()
