"""Runs every command in strange surroundings, and lists all differences.

  python -m tests.campaigns.surroundings --folder=/tmp/surroundings --count=400

from the top of a checkout. Each trial draws a command, one to four of: no /dev/shm, no HOME, one
that cannot be written to, umask 077, no TMPDIR, locales, `python -O`, the cache of another user,
nohup, closed standard input; and a run in a folder with an unusual name.

A command must give what it gives in plain surroundings. As root, /dev/shm is read-only by a mount.
Results are appended to <folder>/results.jsonl: the same command continues where it was stopped. The
exit status is 1 if anything differs.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from typing import Any

from tests import tiny_run
from tests.campaigns import damages
from tests.training.helpers import arrays, write_config

ROOT = pathlib.Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0 and shutil.which('unshare') is not None
NAMES = (
  *('run', 'a b', 'rate[1]', 'é ü', '-dash', "it's", 'x*?', '日本語', 'a=b', '$HOME', '%s', '~x'),
  *('#', '{a}', 'a;b', 'a.b.c', 'x' * 120),
)
PROMPTS = 'the union', '1 €', 'é\\n', '🙂 of'
# Environment variables (None: removed), and what a shell does before the command.
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
  'no HOME': {'HOME': None},
  'HOME that cannot be written to': {'HOME': '/proc'},
  'missing HOME': {'HOME': '/no/such/home'},
  'missing TMPDIR': {'TMPDIR': '/no/such/folder'},
  'locale C': {'LC_ALL': 'C'},
  'ASCII': {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'},
  'latin-1': {'PYTHONIOENCODING': 'latin-1'},
  'python -O': {'PYTHONOPTIMIZE': '1'},
  'no terminal': {'TERM': None, 'COLUMNS': '1'},
}
SHELLS = {
  'umask 077': 'umask 077; ',
  'no /dev/shm': 'mount -t tmpfs -o ro tmpfs /dev/shm && ' if IS_ROOT else '',
  'nohup': 'trap "" HUP; ',
  'closed standard input': 'exec <&-; ',
  'few open files': 'ulimit -n 256; ',
}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a process did."""

  status: int
  out: bytes
  err: str

  def shortcoming(self) -> str | None:
    """What is wrong whatever was asked for; None: it is done, or refused in one sentence."""
    last = (self.err.splitlines() or [''])[-1]
    if 'Traceback' in self.err or self.status not in (0, 2):
      return f'status {self.status}: {last[-300:]}'
    return None if self.status == 0 or 'error: ' in last else f'no sentence: {last[-300:]}'


@dataclasses.dataclass(frozen=True)
class Lab:
  """A folder with a text, a config and a trained run, which commands are tried on copies of."""

  folder: pathlib.Path

  @property
  def intact(self) -> pathlib.Path:
    return self.folder / 'intact'

  def prepare(self) -> None:
    """Trains the run, if it is not there."""
    self.folder.mkdir(parents=True, exist_ok=True)
    text = tiny_run.write_text(self.folder / 'text.txt')
    config = tiny_run.config(text, training={'steps': 4, 'evaluate_every': 4})
    write_config(self.folder / 'tiny.py', config)
    (self.folder / 'prompts.txt').write_text('\n'.join(PROMPTS), encoding='utf-8')
    if not (self.intact / 'checkpoints' / '4').exists():
      shutil.rmtree(self.intact, ignore_errors=True)
      outcome = self.run(['train', f'--config={self.folder}/tiny.py', f'--workdir={self.intact}'])
      assert outcome.status == 0, outcome

  def run(self, command: list[str], shell: str = '', **variables: str | None) -> Outcome:
    """Runs a command of the package, after some shell commands and with environment variables."""
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'NGRAMMER_JAX_CACHE': str(self.folder / 'cache'),
      'PYTHONPATH': str(ROOT),
      **variables,
    }
    prefix = ['unshare', '-m'] if IS_ROOT and 'mount' in shell else []
    subcommand, *arguments = command
    process = subprocess.run(
      [*prefix, 'bash', '-c', f'{shell}exec "$@"', '-', sys.executable]
      + ['-m', f'ngrammer_jax.{subcommand}', *arguments],
      env={name: value for name, value in environment.items() if value is not None},
      cwd=self.folder,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=600,
    )
    return Outcome(process.returncode, process.stdout, process.stderr.decode('utf-8', 'replace'))

  def copy(self, name: str) -> pathlib.Path:
    """Returns a copy of the run with this name; the one before is removed."""
    damages.remove(self.folder / 'lab')
    return pathlib.Path(shutil.copytree(self.intact, self.folder / 'lab' / name, symlinks=True))

  def commands(self, workdir: pathlib.Path) -> dict[str, list[str]]:
    """Returns the commands that are tried."""
    on, beside = f'--workdir={workdir}', workdir.parent
    config, new = f'--config={self.folder}/tiny.py', f'--workdir={beside}/new {workdir.name}'
    text = f'--text={self.folder}/text.txt', '--config.evaluation.max_tokens=99'
    return {
      'train': ['train', config, new],
      'evaluate': ['evaluate', on],
      'text': ['evaluate', on, *text],
      'generate': ['generate', on, '--prompt=1 €', '--tokens=3', '--temperature=0'],
      'prompts': ['generate', on, f'--prompts={self.folder}/prompts.txt', '--tokens=2'],
      'clusters': ['analyze', 'clusters', on],
      'checkpoint': ['analyze', 'checkpoint', on],
      'export': ['export', on, f'--output={beside}/exported'],
    }

  def result(self, name: str, workdir: pathlib.Path, outcome: Outcome) -> Any:
    """Returns what a command gave, in a form that does not depend on the surroundings."""
    read = lambda file: json.loads((workdir / file).read_bytes())
    if name == 'train':
      return arrays(workdir.with_name(f'new {workdir.name}'))
    if name in ('evaluate', 'text'):
      file = 'test' if name == 'evaluate' else 'text_text'
      return read(f'evaluation/{file}.json')
    if name == 'prompts':
      return [json.loads(line) for line in outcome.out.splitlines()]
    if name == 'clusters':
      return read('clusters.json')
    if name == 'export':
      return (workdir.parent / 'exported' / 'model.safetensors').read_bytes()
    return bool(outcome.out)  # its encoding differs

  @functools.cached_property
  def references(self) -> dict[str, Any]:
    """The results in plain surroundings."""
    results = {}
    for name in self.commands(self.intact):
      workdir = self.copy('run')
      outcome = self.run(self.commands(workdir)[name])
      assert outcome.status == 0, outcome
      results[name] = self.result(name, workdir, outcome)
    return results


def surroundings(lab: Lab, draw: random.Random) -> tuple[str, str | None]:
  """A command in strange surroundings, with the result of plain ones."""
  kinds = draw.sample([*ENVIRONMENTS, *SHELLS, 'cache of another user'], draw.randint(1, 4))
  workdir = lab.copy(draw.choice(NAMES))
  name = draw.choice(list(lab.commands(workdir)))
  return f'{name} in {workdir.name!r}: {", ".join(kinds)}', compare(lab, name, workdir, kinds)


def compare(lab: Lab, name: str, workdir: pathlib.Path, kinds: list[str]) -> str | None:
  """Runs a command in some surroundings; returns what differs, if anything."""
  variables: dict[str, str | None] = {}
  for kind in kinds:
    variables |= ENVIRONMENTS.get(kind, {})
  if 'cache of another user' in kinds:
    cache = lab.folder / 'lab' / 'cache'
    cache.mkdir(mode=0o755)
    if IS_ROOT:
      os.chown(cache, 12_345, 12_345)
    variables['NGRAMMER_JAX_CACHE'] = str(cache)
  outcome = lab.run(
    lab.commands(workdir)[name], ''.join(SHELLS.get(kind, '') for kind in kinds), **variables
  )
  if (reason := outcome.shortcoming()) or outcome.status:
    return reason or outcome.err[-500:]
  same = lab.result(name, workdir, outcome) == lab.references[name]
  return None if same else f'another result: {outcome.err[-300:]}'


def main() -> None:
  """Runs the trials."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='folder of the trials')
  parser.add_argument('--count', type=int, default=400, help='number of trials')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--minutes', type=float, default=600, help='time after which it stops')
  options = parser.parse_args()
  deadline = time.monotonic() + 60 * options.minutes
  lab = Lab(options.folder.resolve())
  lab.prepare()
  path = lab.folder / 'results.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  found = {record['number']: record for record in map(json.loads, lines)}
  for number in range(options.count):
    if number in found or time.monotonic() > deadline:
      continue
    draw = random.Random(f'{options.seed} {number}')
    case, reason = surroundings(lab, draw)
    found[number] = {'number': number, 'case': case, 'difference': reason}
    with path.open('a', encoding='utf-8') as file:
      file.write(json.dumps(found[number]) + '\n')
    if reason is not None:
      print(f'{number}: {case}\n  {reason}', flush=True)
  bad = [record for record in found.values() if record['difference'] is not None]
  print(f'{len(found)} trials, {len(bad)} differences')
  sys.exit(bool(bad))


if __name__ == '__main__':
  main()
