"""Applies each mutant in a copy and runs the quick tests on it: python -m tests.mutants [NAME ...].

The test that caught a mutant before (caught_by.json) runs first, then those that mirror the folder
of the changed file, and for the mutants that survived all others. Each stops at the first failure;
the test that failed has to pass without the mutant. Results are written after every mutant, and a
run that was stopped resumes from them.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from tests import mutants

# The tests need nothing else.
COPIED = 'ngrammer_jax configs launch benchmarks studies docs notebooks tests'.split()
FILES = sorted(path.name for path in mutants.ROOT.iterdir() if path.is_file())
CACHES = shutil.ignore_patterns('__pycache__', '*.pyc')
CAUGHT_BY = mutants.FOLDER / 'caught_by.json'  # the test that caught each mutant last


def mirror(file: str, root: pathlib.Path = mutants.ROOT) -> list[str]:
  """The test files that mirror the folder of a file of the package, its own first."""
  parts = pathlib.PurePath(file).parts[1:]
  folder = root / 'tests' / (parts[0] if len(parts) > 1 else '')
  found = sorted(folder.rglob('test_*.py') if len(parts) > 1 else folder.glob('test_*.py'))
  # `test_superglue_metrics` is of superglue/metrics.py.
  found.sort(key=lambda path: not path.stem.endswith(f'_{pathlib.PurePath(file).stem}'))
  return [str(path.relative_to(root)) for path in found]


def others(file: str, root: pathlib.Path = mutants.ROOT) -> list[str]:
  """All other test files."""
  every = sorted((root / 'tests').rglob('test_*.py'))
  first = set(mirror(file, root))
  return [name for path in every if (name := str(path.relative_to(root))) not in first]


STAGES = {'mirror': mirror, 'others': others}


def fingerprint() -> str:
  """Changes with any file that is copied, but for the mutants: then results no longer hold."""
  paths = [mutants.ROOT / name for name in FILES if (mutants.ROOT / name).exists()]
  for folder in COPIED:
    paths += [path for path in (mutants.ROOT / folder).rglob('*') if path.is_file()]
  digest = hashlib.sha256()
  for path in sorted(paths):
    if mutants.FOLDER not in path.parents and '__pycache__' not in path.parts:
      digest.update(f'{path.relative_to(mutants.ROOT)}\n'.encode() + path.read_bytes())
  return digest.hexdigest()[:16]


def run_tests(files: list[str], root: pathlib.Path, timeout: float) -> dict[str, Any]:
  """Runs quick tests in a copy up to the first failure: which test failed, and CPU seconds."""
  command = [sys.executable, '-m', 'pytest', '-o', 'addopts=', '-m', 'not slow and not full']
  command += ['-x', '-q', '-rfE', '--tb=no', '--no-header', '-p', 'no:cacheprovider', *files]
  env = os.environ | {'PYTHONPATH': str(root), 'PYTHONDONTWRITEBYTECODE': '1'}
  shared = mutants.ROOT.parent / 'shared'
  if shared.is_dir():
    env.setdefault('NGRAMMER_JAX_TEST_DATA', str(shared))
  with tempfile.TemporaryFile('w+') as output:
    process = subprocess.Popen(
      command, cwd=root, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    end, timed_out = time.monotonic() + timeout, False
    while True:
      pid, status, usage = os.wait4(process.pid, os.WNOHANG)
      if pid:
        break
      if time.monotonic() > end:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        break
      time.sleep(0.2)
    process.returncode = os.waitstatus_to_exitcode(status)
    output.seek(0)
    said = output.read()
  result = {'cpu_seconds': round(usage.ru_utime + usage.ru_stime, 1), 'caught_by': None}
  failed = re.search(r'^(?:FAILED|ERROR) (.+?)(?: - |$)', said, re.MULTILINE)
  if timed_out:
    result['caught_by'] = f'no answer in {timeout:.0f} s'
  elif process.returncode == -signal.SIGKILL:
    raise SystemExit('error: pytest was killed, perhaps for its memory: use fewer --jobs')
  elif failed:
    result['caught_by'] = failed[1]
  elif process.returncode not in (0, 5):  # 5: no tests there
    result['caught_by'] = f'pytest ended with {process.returncode}'
    result['output'] = said[-2000:]
  return result


def try_mutant(mutant: mutants.Mutant | None, stage: str, timeout: float) -> dict[str, Any]:
  """The result of one stage for one mutant; None: the package as it is."""
  with tempfile.TemporaryDirectory(prefix='mutant-') as folder:
    root = pathlib.Path(folder)
    for name in COPIED:
      shutil.copytree(mutants.ROOT / name, root / name, ignore=CACHES)
    for name in FILES:
      if (mutants.ROOT / name).exists():
        shutil.copy(mutants.ROOT / name, root)
    if mutant is None:
      return run_tests(['tests'], root, timeout)
    (root / mutant.file).write_text(mutant.mutated(), encoding='utf-8')
    result = {'caught_by': None, 'cpu_seconds': 0}
    before = _caught_by().get(mutant.name) if stage == 'mirror' else None
    if before and (root / before.partition('::')[0]).exists():
      result = run_tests([before], root, timeout)
    if '::' not in (result['caught_by'] or ''):  # it may have another name now
      result |= run_tests(STAGES[stage](mutant.file), root, timeout)
    result['stage'] = stage
    if '::' in (result['caught_by'] or ''):
      shutil.copy(mutants.ROOT / mutant.file, root / mutant.file)
      if run_tests([result['caught_by']], root, timeout)['caught_by']:
        raise SystemExit(f'error: {result["caught_by"]} fails without {mutant.name} too')
    return result


def _caught_by() -> dict[str, str]:
  return json.loads(CAUGHT_BY.read_text(encoding='utf-8')) if CAUGHT_BY.exists() else {}


class Results:
  """Results by mutant, in a JSON file; those of a mutant that has changed are dropped."""

  def __init__(self, path: pathlib.Path, known: dict[str, mutants.Mutant]):
    self.path, self.tree, self.known, self.found = path, fingerprint(), known, {}
    self._lock = threading.Lock()
    if path.exists():
      kept = json.loads(path.read_text(encoding='utf-8'))
      if kept['tree'] != self.tree:
        raise SystemExit(
          f'error: {path} holds results of another state of the package or the tests: '
          f'remove it, or give another --results'
        )
      same = lambda name, result: name in known and result.get('mutant') == known[name].digest()
      self.found = {name: r for name, r in kept['mutants'].items() if same(name, r)}

  def add(self, name: str, result: dict[str, Any]) -> None:
    with self._lock:
      before = self.found.get(name, {}).get('cpu_seconds', 0)
      result['cpu_seconds'] = round(result['cpu_seconds'] + before, 1)
      result['mutant'] = self.known[name].digest()
      self.found[name] = result
      self.path.parent.mkdir(parents=True, exist_ok=True)
      text = json.dumps({'tree': self.tree, 'mutants': self.found}, indent=1)
      temporary = self.path.with_suffix('.new')
      temporary.write_text(text + '\n', encoding='utf-8')
      temporary.replace(self.path)
      if '::' in (result['caught_by'] or ''):
        tests = {n: t for n, t in _caught_by().items() if n in self.known}
        text = json.dumps(tests | {name: result['caught_by']}, indent=0, sort_keys=True)
        CAUGHT_BY.write_text(text + '\n', encoding='utf-8')
    caught = result['caught_by'] or f'survived ({result["stage"]})'
    print(f'{name:44} {result["cpu_seconds"]:7.1f} s  {caught}', flush=True)

  def missing(self, name: str, stage: str) -> bool:
    """Whether a stage has to be run for a mutant."""
    found = self.found.get(name)
    if found is None:
      return stage == 'mirror'
    return found['caught_by'] is None and stage == 'others' and found['stage'] == 'mirror'


def main() -> None:
  """Runs the mutants that are named, or all that have no result yet."""
  parser = argparse.ArgumentParser(prog='python -m tests.mutants', description=__doc__)
  parser.add_argument('names', nargs='*', metavar='NAME', help='mutants to run again; none: all')
  parser.add_argument('--list', action='store_true', help='print a name a line')
  parser.add_argument(
    '--results',
    type=pathlib.Path,
    default=mutants.ROOT / 'runs' / 'mutants.json',
    metavar='FILE',
    help='JSON file of results (%(default)s)',
  )
  parser.add_argument('--jobs', type=int, default=2, help='mutants at a time (%(default)s)')
  parser.add_argument(
    '--stage', choices=STAGES, action='append', help='only this stage; default: both'
  )
  parser.add_argument(
    '--timeout', type=float, default=1800, metavar='SECONDS', help='for a stage (%(default)s)'
  )
  parser.add_argument('--original', action='store_true', help='run the tests without a mutant')
  options = parser.parse_args()
  known = mutants.load()
  unknown = [name for name in options.names if name not in known]
  if unknown:
    parser.error(f'no mutant {", ".join(unknown)}; --list prints all')
  for mutant in known.values():
    mutant.mutated()  # all of them apply, before hours are spent
  if options.list:
    print('\n'.join(options.names or known))
    return
  if options.original:
    print(json.dumps(try_mutant(None, '', options.timeout)))
    return
  results = Results(options.results, known)
  chosen, stages = options.names or list(known), options.stage or list(STAGES)
  for name in options.names if 'mirror' in stages else ():
    results.found.pop(name, None)
  for stage in stages:
    todo = [name for name in chosen if results.missing(name, stage)]
    run = lambda name, stage=stage: results.add(
      name, try_mutant(known[name], stage, options.timeout)
    )
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
      for future in [pool.submit(run, name) for name in todo]:
        future.result()
  survivors = [name for name in chosen if not results.found.get(name, {}).get('caught_by')]
  print(f'{len(chosen) - len(survivors)} of {len(chosen)} mutants caught')
  for name in survivors:
    print(f'  survived: {name}: {known[name].breaks}')


if __name__ == '__main__':
  main()
