"""Runs every command in strange surroundings, and lists all differences.

  python -m tests.campaigns.surroundings --folder=/tmp/surroundings --count=400

from the top of a checkout. Each trial draws a command, and one of four kinds:

  surroundings  one to four of: no /dev/shm, no HOME, one that cannot be written to, umask 077, no
                TMPDIR, locales, `python -O`, the cache of another user, nohup, closed standard
                input; with unusual names of all files, below absolute or relative paths
  results       a place that is full, read-only or taken
  signals       one or several signals to a training, which is then started again
  numbers       values of flags and keys that are out of range together

A command must give what it gives in plain surroundings, or must be refused: status 2 and one
sentence. A traceback is a difference, and so is a result that is lost. As root, places are
read-only or full by mounts. Results are appended to <folder>/results.jsonl: the same command
continues where it was stopped. The exit status is 1 if anything differs.

Every command is drawn; those that need TensorFlow or the harness of EleutherAI are drawn rarely,
and only if it is installed. Not covered: several processes, accelerators, gs:// and s3://,
downloads, published models, other models and corpora than the ones of `Lab`. Full and taken places,
signals and numbers are tried with a few commands only: see the functions.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
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

from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.config.span import SpanConfig
from tests import tiny_run
from tests.campaigns import damages
from tests.data import test_cloze
from tests.tasks import superglue_examples
from tests.training.helpers import arrays, write_config

ROOT = pathlib.Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0 and shutil.which('unshare') is not None
NAMES = (
  *('run', 'a b', 'rate[1]', 'é ü', '-dash', "it's", 'x*?', '日本語', 'a=b', '$HOME', '%s', '~x'),
  *('#', '{a}', 'a;b', 'a.b.c', 'x' * 120),
)
PROMPTS = 'the union', '1 €', 'é\\n', '🙂 of'
# An idea for each analysis: clusters, gates, copies, product keys and spans.
MODEL = {
  'layers': 1,
  'ngram_memories': (
    NGramMemoryConfig(key='tokens', layers=(0,), orders=(2,), heads=1, rows=(31,), width=4),
  ),
  'copy_memory': CopyMemoryConfig(window=16),
  'product_memory': ProductMemoryConfig(layers=(0,), sub_keys=4, heads=2, top=2, key_width=4),
  'memory': MemoryConfig(length=16, same_length='memory_alone'),
  'span': SpanConfig(limit=16, ramp=4),
}
ANALYSES = {
  **dict.fromkeys(('clusters', 'ngrams', 'gates', 'retention', 'copies', 'product_keys'), ()),
  **dict.fromkeys(('spans', 'attention'), ()),
  'recl': ('--context_step=16', '--max_context=48'),
}
# Commands that take minutes, and the package that each needs.
SLOW = {'finetune': 'seqio', 'submit': 'seqio', 'lm_eval': 'lm_eval'}
FINETUNING = (
  *('training.steps=2', 'training.batch_size=4', 'training.segment_length=96'),
  *('training.checkpoint_every=2', 'training.evaluate_every=0', 'optimizer.warmup_steps=1'),
  'finetune.targets_length=20',
)
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
  """A folder with inputs, a trained and a fine-tuned run, which commands are tried on copies of."""

  folder: pathlib.Path
  drawn: tuple[str, ...] = ()  # the commands of `surroundings`, or all

  def prepare(self) -> None:
    """Writes the inputs and trains the runs, if they are not there."""
    inputs = self.folder / 'intact inputs'
    inputs.mkdir(parents=True, exist_ok=True)
    text = tiny_run.write_text(inputs / 'text.txt')
    config = tiny_run.config(text, MODEL, training={'steps': 4, 'evaluate_every': 4})
    write_config(inputs / 'tiny.py', config)
    (inputs / 'prompts.txt').write_text('\n'.join(PROMPTS), encoding='utf-8')
    test_cloze.write(inputs, test_cloze.format_questions([test_cloze.QUESTION]), 'cloze.txt')
    superglue_examples.write_folders(inputs / 'superglue')
    intact, commands = self.folder / 'intact', self.commands(self.folder / 'intact')
    runs = {'train': intact}
    if 'submit' in commands:
      runs['finetune'] = self.folder / 'intact tuned'
    for name, workdir in runs.items():
      if not (workdir / 'checkpoints').exists():
        command = [a.replace(':rte', ':mixture') for a in commands[name]]
        outcome = self.run([*command, f'--workdir={workdir}'])
        assert outcome.status == 0, outcome
    answer = {'kind': 'CN', 'file': 'file', 'line': 21, 'point': 1}
    (intact / 'evaluation').mkdir(exist_ok=True)
    (intact / 'evaluation' / 'answers.jsonl').write_text(json.dumps(answer))

  def run(self, command: list[str], shell: str = '', **variables: str | None) -> Outcome:
    """Runs a command of the package, after some shell commands and with environment variables."""
    process = self.start(command, shell, **variables)
    out, err = process.communicate(timeout=600)
    return Outcome(process.returncode, out, err.decode('utf-8', 'replace'))

  def start(self, command: list[str], shell: str = '', **variables: str | None):
    """Starts a command in the folder of the copies, to which relative paths are relative."""
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'NGRAMMER_JAX_CACHE': str(self.folder / 'cache'),
      'PYTHONPATH': str(ROOT),
      **variables,
    }
    prefix = ['unshare', '-m'] if IS_ROOT and 'mount' in shell else []
    subcommand, *arguments = command
    cwd = self.folder / 'lab'
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
      [*prefix, 'bash', '-c', f'{shell}exec "$@"', '-', sys.executable]
      + ['-m', f'ngrammer_jax.{subcommand}', *arguments],
      env={name: value for name, value in environment.items() if value is not None},
      cwd=cwd,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )

  def copy(self, name: str) -> pathlib.Path:
    """Returns a copy of the run, with others beside it; those before are removed."""
    damages.remove(self.folder / 'lab')
    for source in self.folder.glob('intact*'):
      copied = self.folder / 'lab' / source.name.replace('intact', name)
      shutil.copytree(source, copied, symlinks=True)
    return self.folder / 'lab' / name

  def commands(self, workdir: pathlib.Path) -> dict[str, list[str]]:
    """Returns the commands that are tried; their files are beside the workdir."""
    on, new, inputs = f'--workdir={workdir}', f'--workdir={workdir} new', f'{workdir} inputs'
    text = f'--text={inputs}/text.txt', '--config.evaluation.max_tokens=99'
    superglue = f'--config.data.superglue_dir={inputs}/superglue'
    commands = {
      'train': [
        'train',
        f'--config={inputs}/tiny.py',
        new,
        f'--config.data.path={inputs}/text.txt',
      ],
      'evaluate': ['evaluate', on],
      'text': ['evaluate', on, *text],
      'cloze': ['evaluate', on, f'--cloze={inputs}/cloze.txt'],
      'generate': ['generate', on, '--prompt=1 €', '--tokens=3', '--temperature=0'],
      'prompts': ['generate', on, f'--prompts={inputs}/prompts.txt', '--tokens=2'],
      'checkpoint': ['analyze', 'checkpoint', on],
      'report': ['analyze', 'report', on, f'--output={workdir} report.html', '--tokens=2'],
      'compare': ['analyze', 'compare', on, f'--baseline={workdir}', '--max_tokens=99'],
      'answers': ['analyze', 'cloze', on, on, '--results=answers'],
      'export': ['export', on, f'--output={workdir} exported'],
      'finetune': [
        *('finetune', f'--config={ROOT}/configs/superglue.py:rte', new, superglue),
        *(f'--config.init_from={workdir}', *(f'--config.{key}' for key in FINETUNING)),
      ],
      'submit': ['submit', f'--workdir={workdir} tuned', superglue, f'--output={workdir} answers'],
      'lm_eval': [
        *('tasks.lm_eval', f'--model_args=workdir={workdir}', '--tasks=ngrammer_rte'),
        *(f'--include_path={ROOT}/studies/lm_eval', f'--output_path={workdir} harness'),
        f'--metadata={json.dumps({"superglue_dir": f"{inputs}/superglue"})}',
      ],
    }
    commands['compare'] += [f'--output={workdir} compare.json']
    commands |= {name: ['analyze', name, on, *flags] for name, flags in ANALYSES.items()}
    is_missing = lambda name: name in SLOW and importlib.util.find_spec(SLOW[name]) is None
    return {name: command for name, command in commands.items() if not is_missing(name)}

  def result(self, name: str, workdir: pathlib.Path, outcome: Outcome) -> Any:
    """Returns what a command gave, in a form that does not depend on the surroundings."""
    beside = lambda suffix: workdir.with_name(f'{workdir.name} {suffix}')
    if name in ('train', 'finetune'):
      return arrays(beside('new'))
    if name == 'prompts':
      return [json.loads(line) for line in outcome.out.splitlines()]
    if name == 'export':
      return (beside('exported') / 'model.safetensors').read_bytes()
    if name == 'submit':
      return (beside('answers') / 'submission.zip').read_bytes()
    if name == 'report':
      return b'</html>' in beside('report.html').read_bytes()
    if name in ('generate', 'checkpoint', 'answers'):
      return bool(outcome.out)  # its encoding differs
    files = {
      **{'evaluate': workdir / 'evaluation/test.json', 'compare': beside('compare.json')},
      **{'text': workdir / 'evaluation/text_text.json'},
      **{'cloze': workdir / 'evaluation/cloze_cloze.json'},
      'lm_eval': next(beside('harness').rglob('results*.json'), None),
    }
    result = json.loads(files.get(name, workdir / f'{name}.json').read_bytes())
    if name == 'lm_eval':  # beside times and versions
      return result['results']
    return without_names(result)

  @functools.cached_property
  def _references(self) -> dict[str, Any]:
    return {}

  def reference(self, name: str) -> Any:
    """Returns the result of a command in plain surroundings; removes the copy of the run."""
    if name not in self._references:
      workdir = self.copy('run')
      outcome = self.run(self.commands(workdir)[name])
      assert outcome.status == 0, outcome
      self._references[name] = self.result(name, workdir, outcome)
    return self._references[name]


def without_names(value: Any) -> Any:
  """Returns a JSON value without the entries that hold paths and names of runs."""
  if isinstance(value, list):
    return [without_names(item) for item in value]
  names = 'name', 'run', 'baseline', 'text', 'path', 'files'
  if isinstance(value, dict):
    return {key: without_names(item) for key, item in value.items() if key not in names}
  return value


def surroundings(lab: Lab, draw: random.Random) -> tuple[str, str | None]:
  """A command in strange surroundings, with the result of plain ones."""
  kinds = draw.sample([*ENVIRONMENTS, *SHELLS, 'cache of another user'], draw.randint(1, 4))
  workdir, is_relative = lab.copy(draw.choice(NAMES)), draw.random() < 0.5
  is_relative &= not workdir.name.startswith('~')  # that would be the folder of a user
  names = lab.drawn or tuple(lab.commands(workdir))
  (name,) = draw.choices(names, [1 if name in SLOW else 5 for name in names])
  path = pathlib.Path(workdir.name) if is_relative else workdir
  difference = compare(lab, name, lab.commands(path)[name], workdir, kinds)
  return f'{name} in {str(path)!r}: {", ".join(kinds)}', difference


def compare(
  lab: Lab, name: str, command: list[str], workdir: pathlib.Path, kinds: list[str]
) -> str | None:
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
  outcome = lab.run(command, ''.join(SHELLS.get(kind, '') for kind in kinds), **variables)
  if (reason := outcome.shortcoming()) or outcome.status:
    return reason or outcome.err[-500:]
  same = lab.result(name, workdir, outcome) == lab.reference(name)
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
  saved = workdir.with_name(f'{workdir.name} new') / 'checkpoints'
  if delay is None and process.returncode and not any(saved.glob('[0-9]*')):
    return case, 'no checkpoint'
  outcome = lab.run(command)
  if reason := outcome.shortcoming():
    return case, reason
  same = lab.result('train', workdir, outcome) == lab.reference('train')
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
  text = 'only these commands, by the names in the results, in surroundings'
  parser.add_argument('--commands', nargs='+', default=(), help=text)
  options = parser.parse_args()
  deadline = time.monotonic() + 60 * options.minutes
  lab = Lab(options.folder.resolve(), tuple(options.commands))
  kinds = {surroundings: 1} if lab.drawn else KINDS
  lab.prepare()
  path = lab.folder / 'results.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  found = {record['number']: record for record in map(json.loads, lines)}
  for number in range(options.count):
    if number in found or time.monotonic() > deadline:
      continue
    draw = random.Random(f'{options.seed} {number}')
    (kind,) = draw.choices(list(kinds), kinds.values())
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
