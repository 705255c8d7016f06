"""All measurements on a GPU or a TPU, in one command; the same command resumes it.

  python -m benchmarks.accelerator --minutes=9 --json=accelerator.jsonl
  python -m benchmarks.accelerator --json=accelerator.jsonl --trace
  python -m benchmarks.accelerator --cases n-grammer --predicted n-grammer=report.json

The most informative cases come first. Each runs in a process of its own, without network, and
leaves one line of JSON. Cases with a line in the file are not run again. With --minutes, a case
without enough time left does not start; the same command runs it later.

  attention   calls of cuDNN beside full scores: their errors
  step        training steps on random tokens, in bfloat16, on all devices of the machine: the
              median of 20 after 5. The floor is the time of the FLOPs of the model at the peak of
              the vendor, and MFU the floor over the time; --predicted adds the bound and the cycles
              of a report of launch/compile.py; --trace adds the share of each part of a step
  torch       steps of the same Transformer in PyTorch: torch.compile, bfloat16, flash attention
  run         a training from its command, with its input pipeline: its reported speed. The text
              has words by Zipf's law, see `accelerator_measures.random_text`

Operations are deterministic, as in the trainer, unless the name of the case says otherwise.
--tiny runs everything in small sizes.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks.accelerator_cases import CASES, FREE
from benchmarks.accelerator_measures import MEASURES

FIRST_LIMIT = 4.0  # minutes of a case, before one has ended


def format_line(result: dict[str, Any], results: dict[str, Any], predicted: dict) -> str:
  """Formats a result, and how it compares with the case without its suffix, or the first."""
  case = result['case']
  if problem := result.get('failed'):
    return f'{case}: failed\n{problem}'
  if 'errors' in result:
    return f'{case}: {json.dumps(result["errors"])}'
  seconds = result['seconds']
  line = f'{case:32} {1e3 * seconds:9.2f} ms'
  if result.get('floor'):
    line += f'  floor {1e3 * result["floor"]:8.2f} ms  MFU {result["floor"] / seconds:6.1%}'
  line += f'  {result["tokens"] / seconds:11,.0f} tokens/s'
  if 'peak_bytes' in result:
    line += f'  {result["peak_bytes"] / 2**30:6.2f} GiB'
  other = case.rpartition(',')[0] if ',' in case else next(iter(CASES))
  if other not in results:
    other = next(iter(CASES))
  if other != case and 'seconds' in results.get(other, {}):
    line += f'  {seconds / results[other]["seconds"]:.3f} of {other}'
  if report := predicted.get(case):
    train = report['train']
    line += f'  predicted {1e3 * train["bound"]:.1f} ms, cycles {1e3 * train["cycles"]:.1f} ms'
  line += ''.join(f'  {count} {name}' for name, count in result.get('kernels', {}).items())
  parts = result.get('parts', {})
  total = sum(parts.values())
  return line + ''.join(f'\n{seconds / total:8.1%}  {part}' for part, seconds in parts.items())


def read_results(path: pathlib.Path | None) -> dict[str, Any]:
  """Returns the results of a file by case; without the file, none."""
  results = {}
  if path is not None and path.exists():
    for line in path.read_text(encoding='utf-8').splitlines():
      with contextlib.suppress(json.JSONDecodeError):  # of a process that ended while it wrote
        result = json.loads(line)
        results[result['case']] = result
  return results


def append_result(path: pathlib.Path, result: dict[str, Any]) -> None:
  """Appends a line to the file of the results."""
  is_cut = path.exists() and not path.read_bytes().endswith(b'\n')
  with path.open('a', encoding='utf-8') as file:
    file.write('\n' * is_cut + json.dumps(result) + '\n')


def run_case(case: str, options: argparse.Namespace, limit: float) -> dict[str, Any] | None:
  """Runs a case in a process. Returns its result; None: the limit, in seconds, was too short."""
  own_flags = f'--xla_gpu_deterministic_ops={FREE not in case} '
  environment = os.environ | {'XLA_FLAGS': own_flags + os.environ.get('XLA_FLAGS', '')}
  if CASES[case].kind == 'torch':
    environment['JAX_PLATFORMS'] = 'cpu'  # JAX would take most of the memory of the GPU
  command = [sys.executable, '-m', 'benchmarks.accelerator', '--child', '--cases', case]
  command += [f'--steps={options.steps}', f'--warmup={options.warmup}']
  command += ['--tiny'] * options.tiny + ['--trace'] * options.trace
  start = time.monotonic()
  try:
    child = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=limit or None
    )
  except subprocess.TimeoutExpired:
    return None
  if child.returncode:
    result = {'failed': child.stderr[-2000:]}
  else:
    result = json.loads(child.stdout.splitlines()[-1])
  return {'case': case, 'minutes': (time.monotonic() - start) / 60} | result


def main() -> int:
  """Prints and writes a line for each case. Returns the exit status: 0 if all have a result."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--cases', nargs='*', choices=CASES, default=[*CASES], metavar='CASE')
  parser.add_argument('--minutes', type=float, default=0.0, help='stop before; 0: no limit')
  parser.add_argument('--steps', type=int, default=20, help='timed steps')
  parser.add_argument('--warmup', type=int, default=5, help='steps before them')
  parser.add_argument('--trace', action='store_true', help='the share of each part of a step')
  parser.add_argument('--predicted', nargs='*', default=[], metavar='CASE=REPORT')
  parser.add_argument('--json', type=pathlib.Path, help='file of the results, a line each')
  parser.add_argument('--tiny', action='store_true', help='small sizes, to try the script')
  parser.add_argument('--child', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.child:
    (case,) = options.cases
    print(json.dumps(MEASURES[CASES[case].kind](case, options)))
    return 0
  predicted = {}
  for name, path in (item.split('=', 1) for item in options.predicted):
    predicted[name] = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  end = time.monotonic() + 60 * options.minutes
  results = read_results(options.json)
  has_run = False
  for case in options.cases:
    if case in results:
      continue
    remaining = 0.0
    if options.minutes:
      remaining = end - time.monotonic()
      took = [result['minutes'] for result in results.values() if 'failed' not in result]
      longest = max(took, default=FIRST_LIMIT)
      if has_run and remaining < 60 * longest:
        break
    result = run_case(case, options, remaining)
    if result is None and has_run:
      break
    has_run = True
    if result is None:  # it had all the minutes
      result = {'case': case, 'minutes': options.minutes, 'failed': 'takes longer than --minutes'}
    results[case] = result
    print(format_line(result, results, predicted), flush=True)
    if options.json:
      append_result(options.json, result)
  left = [case for case in options.cases if case not in results]
  if left:
    print(f'{len(left)} cases are left, from {left[0]!r} on: the same command goes on', flush=True)
  return int(bool(left) or any('failed' in results[case] for case in options.cases))


if __name__ == '__main__':
  sys.exit(main())
