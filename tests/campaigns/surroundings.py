"""Runs every command in strange surroundings, and lists all differences.

  python -m tests.campaigns.surroundings --folder=/tmp/surroundings --count=400

from the top of a checkout. Each trial draws a command, and one of four kinds:

  surroundings  one to four of: no /dev/shm, no HOME, one that cannot be written to, umask 077, no
                TMPDIR, locales, `python -O`, the cache of another user, nohup, closed standard
                input; and a run in a folder with an unusual name
  results       a place that is full, read-only or taken
  signals       one or several signals to a training, which is then started again
  numbers       values of flags and keys that are out of range together

A command must give what it gives in plain surroundings, or must be refused: status 2 and one
sentence. A traceback is a difference, and so is a result that is lost. As root, places are
read-only or full by mounts. Results are appended to <folder>/results.jsonl: the same command
continues where it was stopped. The exit status is 1 if anything differs.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
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
KEYS = {  # some are wrong alone, some together, most are right
  'optimizer.warmup_steps': (0, 4, 5, 1_000, -1),
  'optimizer.learning_rate': (0, 1e-30, 1e-3, 'nan'),
  'training.segment_length': (1, 16, 3_000, 10**9),
  'training.batch_size': (8, 2_000, 7, 0),
  'training.steps': (1, 4, 0),
  'training.evaluate_every': (0, 3, 10**6),
  'training.checkpoint_every': (1, 10**6, 0),
  'training.log_every': (1, 10**6),
  'evaluation.streams': (1, 100, 10**6),
  'evaluation.segment_length': (1, 16, 2_000),
  'evaluation.max_tokens': (1, 100, 10**9),
}
FLAGS = {
  '--tokens': (0, 1, 3, 'many'),
  '--stop': ('\\n', '', 'e', '\\\\n', '€'),
  '--temperature': (0, 1e-30, 1e30, 'inf'),
  '--top_k': (1, 10**9, 0),
  '--top_p': (1, 1e-9, 0),
  '--context': (1, 16, 10**6),
  '--seed': (0, 2**32 - 1, 2**32, -1),
  '--repetition_penalty': (1, 1e9, 0),
}
SIGNALS = 'TERM', 'INT', 'HUP', 'USR1', 'USR2'


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
    process = self.start(command, shell, **variables)
    out, err = process.communicate(timeout=600)
    return Outcome(process.returncode, out, err.decode('utf-8', 'replace'))

  def start(self, command: list[str], shell: str = '', **variables: str | None):
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'NGRAMMER_JAX_CACHE': str(self.folder / 'cache'),
      'PYTHONPATH': str(ROOT),
      **variables,
    }
    prefix = ['unshare', '-m'] if IS_ROOT and 'mount' in shell else []
    subcommand, *arguments = command
    return subprocess.Popen(
      [*prefix, 'bash', '-c', f'{shell}exec "$@"', '-', sys.executable]
      + ['-m', f'ngrammer_jax.{subcommand}', *arguments],
      env={name: value for name, value in environment.items() if value is not None},
      cwd=self.folder,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )

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


def results(lab: Lab, draw: random.Random) -> tuple[str, str | None]:
  """A command whose results have no place, or one that is taken."""
  workdir, kind = lab.copy(draw.choice(NAMES)), draw.choice(('full', 'read-only', 'taken', 'label'))
  place = lab.folder / 'lab' / 'results'
  place.mkdir()
  commands = lab.commands(workdir)
  name = draw.choice(('evaluate', 'text', 'prompts', 'clusters'))
  flag = {'prompts': f'--output={place}/a', 'clusters': f'--figure={place}/a.png'}
  command = [*commands[name], flag.get(name, f'--output={place}')]
  case = f'{kind}: {name} in {workdir.name!r}'
  if kind == 'label':
    label = draw.choice(('a/b', '../x', 'é', '$x$', '', 'x' * 300))
    outcome = lab.run([*commands['clusters'], f'--label={label}'])
    return f'{case} {label!r}', outcome.shortcoming() or (outcome.err if outcome.status else None)
  if kind == 'taken':
    first, second = lab.folder / 'lab' / 'a' / 'text.txt', lab.folder / 'lab' / 'b' / 'text.txt'
    for path, text in ((first, 'the union\n' * 20), (second, 'strong states\n' * 20)):
      path.parent.mkdir()
      path.write_text(text)
    evaluate = lambda path: lab.run([*commands['evaluate'], f'--text={path}'])
    shortcomings = [evaluate(path).shortcoming() for path in (first, second)]
    files = list((workdir / 'evaluation').glob('text_*.json'))
    texts = {json.loads(path.read_bytes())['text'] for path in files}
    lost = {str(first), str(second)} - texts
    return case, next(filter(None, shortcomings), f'lost {lost}' if lost else None)
  if not IS_ROOT:
    return case, None
  place_text = str(place).replace("'", "'\\''")
  options = 'size=8k' if kind == 'full' else 'ro'
  shell = f"mount -t tmpfs -o {options} tmpfs '{place_text}' && "
  if kind == 'full':
    shell += f"{{ head -c 8192 /dev/zero >'{place_text}/filler' 2>/dev/null; true; }} && "
  outcome = lab.run(command, shell)
  if reason := outcome.shortcoming():
    return case, reason
  if outcome.status == 0:
    return case, 'the result is nowhere'
  # Refused before anything was computed, or printed.
  is_refused = any(text in outcome.err for text in ('cannot be written to;', 'is a file, expected'))
  count = outcome.out.count(b'"prompt"')
  is_printed = {'prompts': count == len(PROMPTS), 'clusters': b'coherence' in outcome.out}
  is_printed = is_printed.get(name, b'nll_nats_per_token' in outcome.out)
  return case, None if is_refused or is_printed else f'the result is lost: {outcome.err[-300:]}'


def signals(lab: Lab, draw: random.Random) -> tuple[str, str | None]:
  """A training that gets signals, and is started again."""
  workdir = lab.copy(draw.choice(NAMES))
  numbers = [draw.choice(SIGNALS)] + draw.choices(SIGNALS, k=draw.choice((0, 0, 1, 2)))
  numbers = numbers if numbers.count('INT') < 3 else ['INT', 'INT']  # the third one ends it
  command = lab.commands(workdir)['train']
  command += ['--config.training.log_every=1', '--config.training.checkpoint_every=4']
  process = lab.start(command)
  delay = draw.uniform(0, 6) if draw.random() < 0.3 else None
  if delay is None:
    for line in process.stderr:
      if line.startswith(b'step '):
        break
  else:
    time.sleep(delay)
  for number in numbers:
    process.send_signal(signal.Signals[f'SIG{number}'])
    time.sleep(draw.choice((0, 0.01)))
  _, err = process.communicate(timeout=300)
  case = f'{" ".join(numbers)} {"at a step" if delay is None else f"after {delay:.1f} s"}'
  ended = {128 + signal.Signals[f'SIG{number}'] for number in numbers} | {0}
  is_early = b'data.path=' not in err  # Python may not have loaded the program
  if not is_early and (b'Traceback' in err or process.returncode not in ended):
    return case, f'status {process.returncode}: {err[-300:]!r}'
  saved = workdir.with_name(f'new {workdir.name}') / 'checkpoints'
  if delay is None and process.returncode and not any(saved.glob('[0-9]*')):
    return case, 'no checkpoint'
  outcome = lab.run(command)
  if reason := outcome.shortcoming():
    return case, reason
  same = lab.result('train', workdir, outcome) == lab.references['train']
  return case, None if same else 'another result after it was started again'


def numbers(lab: Lab, draw: random.Random) -> tuple[str, str | None]:
  """Flags or keys whose values may not fit together."""
  workdir = lab.copy('run')
  commands = lab.commands(workdir)
  if draw.random() < 0.4:
    chosen = draw.sample(list(FLAGS), draw.randint(1, 3))
    flags = [f'{flag}={draw.choice(FLAGS[flag])}' for flag in chosen]
    command = [*commands['generate'][:3], '--tokens=2', *flags]
    outcome = lab.run(command)
    return ' '.join(flags), outcome.shortcoming()
  chosen = draw.sample(list(KEYS), draw.randint(1, 4))
  keys = {key: draw.choice(KEYS[key]) for key in chosen}
  command = [*commands['train'], *(f'--config.{key}={value}' for key, value in keys.items())]
  outcome = lab.run(command)
  case, reason = ' '.join(map('{}={}'.format, keys, keys.values())), outcome.shortcoming()
  steps, warmup = keys.get('training.steps', 4), keys.get('optimizer.warmup_steps', 2)
  if not reason and outcome.status == 0 and warmup >= steps and 'warmup_steps' not in outcome.err:
    reason = 'nothing is said about the warm-up'
  return case, reason


KINDS = {surroundings: 5, results: 2, signals: 2, numbers: 3}


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
    (kind,) = draw.choices(list(KINDS), KINDS.values())
    case, reason = kind(lab, draw)
    found[number] = {'number': number, 'kind': kind.__name__, 'case': case, 'difference': reason}
    with path.open('a', encoding='utf-8') as file:
      file.write(json.dumps(found[number]) + '\n')
    if reason is not None:
      print(f'{number}: {kind.__name__}: {case}\n  {reason}', flush=True)
  counts = collections.Counter(record['kind'] for record in found.values())
  bad = [record for record in found.values() if record['difference'] is not None]
  print(f'{len(found)} trials ({dict(counts)}), {len(bad)} differences')
  sys.exit(bool(bad))


if __name__ == '__main__':
  main()
