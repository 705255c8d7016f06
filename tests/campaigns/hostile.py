"""Tries wrong input on every command, kills and stops runs, and lists all failures.

  python -m tests.campaigns.hostile --folder=/tmp/hostile --inputs=1000 --kills=102 --sigterms=54

from the top of a checkout. Wrong values, flags, files, checkpoints and texts are drawn with
--seed and tried in this process. Each must be refused: status 2, one sentence that names the thing,
nothing new on disk, no device. A damaged checkpoint must give the state of the previous one, bit by
bit; a bit that turns a valid file into another valid one is harmless.

Then runs of six families, their evaluation, and with --superglue=DIR a fine-tuning, are ended by
SIGKILL or SIGTERM at random times and started again: the result must equal that of an undisturbed
run, bit by bit.

Results are appended to <folder>/results.jsonl: the same command continues where it was stopped. The
exit status is 1 if any test failed.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import random
import shutil
import signal
import sys
import time
import types
from typing import Any
from unittest import mock

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.config import fields
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.system import text_tables
from tests import gguf_files, published_folders, tiny_run
from tests.campaigns import damages, kill_campaign
from tests.training.helpers import write_config

MAX_TOKENS = '--config.evaluation.max_tokens=2048'
TINY = (
  *('--config=configs/quickstart.py', '--config.training.steps=40', '--config.model.layers=2'),
  *('--config.model.width=48', '--config.model.feed_forward_width=64', '--config.model.heads=4'),
  *('--config.training.batch_size=4', '--config.training.segment_length=32'),
  *('--config.training.checkpoint_every=10', '--config.training.evaluate_every=20'),
  *(MAX_TOKENS, '--config.model.dropout=0.1'),
)
FINETUNING = (
  *('--config=configs/superglue.py:copa', '--config.training.steps=20'),
  *('--config.training.batch_size=4', '--config.training.checkpoint_every=5'),
  *('--config.training.evaluate_every=10', '--config.evaluation.max_examples=8'),
)
SPAN = (
  *('--config.model.ngram=None', '--config.model.position=shaw'),
  *('--config.model.memory.length=64', '--config.model.memory.same_length=memory_alone'),
  *('--config.model.span.limit=64', '--config.model.span.ramp=8'),
)
UNUSED_BY_RECURRENT = 'layers=4', 'feed_forward_width=688', 'position=rope'  # the defaults
FAMILIES = {
  'N-Grammer': ('--config.model.ngram.clusters=32',),
  'Transformer-XL': (
    *('--config.model.ngram=None', '--config.model.position=relative'),
    '--config.model.memory.length=32',
  ),
  'adaptive spans': SPAN,
  'all-attention': (
    *('--config.model.ngram=None', '--config.model.persistent.vectors=16'),
    '--config.model.feed_forward_width=0',
  ),
  'key-value-predict': (
    *('--config.model.ngram=None', '--config.model.recurrent.readout=key_value_predict'),
    *('--config.model.tie_embeddings=False', '--config.model.recurrent.hidden=48'),
    *(f'--config.model.{key}' for key in UNUSED_BY_RECURRENT),
  ),
  'Engram': (
    *('--config.model.ngram=None', '--config.model.ngram_memories.0.preset=engram'),
    *('--config.model.ngram_memories.0.layers=1', '--config.model.ngram_memories.0.rows=500'),
  ),
}


ARRAYS_READ = 'nan or infinite values'  # a refusal for which arrays have to be read


class DevicesUsed(Exception):
  """A command reached for devices: its input was accepted."""


@dataclasses.dataclass(frozen=True)
class Case:
  """A wrong input.

  Attributes:
    subcommand, arguments: the command.
    names: texts of which the refusal must have one.
    damage: changes the copy of the run before.
    may_be_harmless: whether the input may be accepted too.
    reached: what a command calls, a class or module and a name, once it has accepted its input.
  """

  subcommand: str
  arguments: tuple[str, ...]
  names: tuple[str, ...]
  damage: Callable[[], None] = lambda: None
  may_be_harmless: bool = False
  reached: tuple[Any, str] = (sharding, 'make_mesh')


@dataclasses.dataclass(frozen=True)
class Lab:
  """The folders of the trial: an intact run, its copy that is damaged, its text and config file."""

  folder: pathlib.Path

  @property
  def intact(self) -> pathlib.Path:
    return self.folder / 'intact'

  @property
  def run(self) -> pathlib.Path:
    return self.folder / 'lab' / 'run'

  @property
  def published(self) -> pathlib.Path:
    return self.folder / 'published'

  @property
  def config(self) -> pathlib.Path:
    return self.folder / 'tiny.py'

  @functools.cached_property
  def states(self) -> dict[int, list[np.ndarray]]:
    """The arrays of every checkpoint of the intact run, by step."""
    return {step: _leaves(runs.load_run(self.intact, step)) for step in (4, 8, 12)}

  def prepare(self) -> None:
    """Trains the intact run, if it is not there."""
    self.folder.mkdir(parents=True, exist_ok=True)
    text = tiny_run.write_text(self.folder / 'tiny.txt')
    write_config(self.config, tiny_run.config(text))
    if not (self.intact / 'checkpoints' / '12').exists():
      outcome = damages.run('train', [f'--config={self.config}', f'--workdir={self.intact}'], ())
      if outcome.status not in (0, None):
        sys.exit(f'the run that is damaged cannot be trained:\n{outcome.error}')

    if not self.published.exists():
      self.published.mkdir()
      published_folders.write(self.published / 'whole')
      published_folders.write(self.published / 'shards', tie_embeddings=False)
      published_folders.split(self.published / 'shards')
      published_folders.divide_tokenizer(self.published / 'shards')
      for name in ('whole', 'shards'):
        published_folders.write_settings(self.published / name)
      metadata = gguf_files.metadata(**gguf_files.tokenizer())
      rows = gguf_files.plain(np.ones((280, gguf_files.D)))
      tensors = gguf_files.tensors() | {'token_embd.weight': rows}
      (self.published / 'model.gguf').write_bytes(gguf_files.content(metadata, tensors))

  def restore(self) -> None:
    """Makes the copies intact again."""
    damages.remove(self.run.parent)
    shutil.copytree(self.intact, self.run, symlinks=True)
    shutil.copytree(self.published, self.run.with_name('published'))


def wrong_values(lab: Lab, draw: random.Random) -> Case:
  """A value that no key of the config can have."""
  texts = {key: _invalid_texts(key) for key in fields.walk(experiment.Config) if key.is_used}
  key = draw.choice([key for key in texts if texts[key]])
  text = draw.choice(texts[key])
  names = key.path, key.path.rpartition('.')[0] or key.path
  arguments = f'--config={lab.config}', f'--config.{key.path}={text}'
  return Case('train', (*arguments, f'--workdir={lab.folder / "lab" / "new"}'), names)


def _invalid_texts(key: fields.Key) -> list[str]:
  """Returns texts that are invalid for a key, whatever the others are."""
  if key.block is not None:
    return ['5', 'text', '[1, 2]', 'nan', '{"a": 1}']
  kinds = {key.entry_type or kind for kind in key.types} - {types.NoneType}
  texts = ['{"a": 1}', '[[1], 2]'] + ([] if key.is_optional else ['None'])
  if key.choices is not None:
    return [*texts, 'nonsense', '5', '~']
  if kinds == {bool}:
    return [*texts, 'maybe', '2', 'nan']
  if kinds <= {int, float}:
    texts += ['many', 'nan', '1e999', str(-(10**30)), str(10**400), '"', '--']
    low = key.at_least if key.at_least is not None else key.above
    if low is not None and low - 2 not in key.also:
      texts.append(str(int(low) - 2))
    if kinds == {int}:
      texts += ['1.5', str(10**18), str(2**63), 'True']
    return texts
  return []  # any text is one


def misspelled_keys(lab: Lab, draw: random.Random) -> Case:
  """A key that does not exist."""
  key = draw.choice(list(fields.walk(experiment.Config))).path
  place = draw.randrange(len(key))
  wrong = key[:place] + draw.choice('xqz_') + key[place:]
  arguments = f'--config={lab.config}', f'--config.{wrong}=1'
  names = tuple(itertools.accumulate(wrong.split('.'), '{}.{}'.format))
  return Case('train', (*arguments, f'--workdir={lab.folder / "lab" / "new"}'), names[::-1])


NUMBERS = ('abc', '', 'nan', '-1e9', '1e99', '0x', '1,5')
FLAGS = {
  'generate': {
    '--tokens': (*NUMBERS, '-1', '0'),
    '--temperature': ('abc', '', 'nan', '-1', 'inf', '-inf'),
    '--top_k': (*NUMBERS, '0', '-1'),
    '--top_p': ('abc', '', 'nan', '0', '-1', '1.5', 'inf'),
    '--seed': ('abc', '', '1.5', str(2**70)),
    '--context': (*NUMBERS, '0', '-1', str(10**12)),
    '--prompts': ('/no/such/file', '/', '~nosuchuser/x'),
  },
  'evaluate': {
    '--split': ('', 'nonsense', '../test', 'TEST'),
    '--cloze': ('/no/such/folder', '/dev/null'),
    '--config.evaluation.streams': ('0', 'many', '-5', '1e30'),
    '--config.evaluation.max_tokens': ('0', 'many', '1.5'),
    '--config.training.steps': ('7',),
  },
  'analyze report': {'--output': ('/',)},
  'analyze clusters': {'--figure': ('/', 'x.txt'), '--split': ('', 'nonsense')},
  'analyze checkpoint': {},
  'train': {
    '--trace': ('abc', '5', '9-3', '100-200', '-1', '0-0'),
    '--watchdog': ('abc', '-1', 'nan', ''),
    '--config.init_from': ('/no/such/run', '/', '~nosuchuser'),
  },
}
STEPS = ('0', '-1', '999', 'abc', '', '1.5', '1e9', 'NEWEST', str(10**30), '../12')
FOLDERS = ('/no/such/run', '/dev/null', 'x' * 300, '/', '~nosuchuser/run', '')


def wrong_flags(lab: Lab, draw: random.Random) -> Case:
  """A flag with a value that it cannot have, or a run or a step that does not exist."""
  command = draw.choice(list(FLAGS))
  subcommand, *rest = command.split()
  arguments = [*rest, *_required(lab, subcommand)]
  choices = dict(FLAGS[command])
  if subcommand != 'train':
    choices['--workdir'] = FOLDERS
  if command in ('generate', 'evaluate', 'analyze clusters', 'analyze checkpoint'):
    choices['--step'] = STEPS
  flag = draw.choice(list(choices))
  text = draw.choice(choices[flag])
  if flag == '--prompts':
    arguments.remove('--prompt=the')
  if flag != '--workdir':
    arguments.append(f'--workdir={lab.run if subcommand != "train" else lab.run.with_name("new")}')
  name = flag.removeprefix('--').removeprefix('config.')
  return Case(
    subcommand,
    (*arguments, f'{flag}={text}'),
    (name, 'curve.png', *([repr(text)[1:-1]] if len(text) > 2 else [])),
  )


def _required(lab: Lab, subcommand: str) -> list[str]:
  """Returns the flags that a command needs besides the workdir."""
  return {'train': [f'--config={lab.config}'], 'generate': ['--prompt=the']}.get(subcommand, [])


CONFIG_FILES = {
  'missing.py': None,
  'text.txt': b'get_config = dict',
  'syntax.py': b'def get_config(:',
  'raises.py': b'raise ValueError("a\\nb")',
  'exits.py': b'import sys; sys.exit(0)',
  'binary.py': bytes(range(256)),
  'empty.py': b'',
  'number.py': b'def get_config(): return 5',
  'none.py': b'def get_config(): return None',
  'recursive.py': b'def get_config(): return get_config()',
  'list.py': b'def get_config(): return {"model": [1, 2]}',
  'unknown.py': b'def get_config(): return {"modle": {}}',
  'imports.py': b'import no_such_module',
  'asserts.py': b'assert False',
}


def wrong_config_files(lab: Lab, draw: random.Random) -> Case:
  """A config file that is none."""
  name = draw.choice(list(CONFIG_FILES))
  path, content = lab.folder / 'lab' / name, CONFIG_FILES[name]
  damage = (lambda: None) if content is None else lambda: path.write_bytes(content)
  suffix = draw.choice(('', ':variant', ':'))
  arguments = f'--config={path}{suffix}', f'--workdir={lab.folder / "lab" / "new"}'
  return Case('train', arguments, (name, 'model', 'modle'), damage)


def damaged_files(lab: Lab, draw: random.Random) -> Case:
  """Something else in place of a file of the run."""
  file = draw.choice(list(damages.DAMAGES))
  damage = draw.choice(list(damages.DAMAGES[file].values()))
  return _damage(lab, draw, file, lambda: damage.apply(lab.run / file), (file,))


def flipped_bits(lab: Lab, draw: random.Random) -> Case:
  """A file of the run with flipped bits, cut short, or with a part twice."""
  file = draw.choice(list(damages.DAMAGES))

  def damage():
    path = lab.run / file
    path.write_bytes(damages.change_bytes(path.read_bytes(), draw))

  names = file, 'model.', 'training.', 'data.', 'evaluation.', 'optimizer.', 'mesh.'
  return dataclasses.replace(_damage(lab, draw, file, damage, names), may_be_harmless=True)


def _damage(lab, draw, file, damage, names):
  command = draw.choice(damages.READERS[file])
  subcommand, *rest = command.split()
  arguments = (*rest, *_required(lab, subcommand), f'--workdir={lab.run}')
  return Case(subcommand, arguments, names, damage)


TEXTS = {
  'missing.txt': None,
  'empty.txt': b'',
  'blank.txt': b' \n\n ',
  'short.txt': b'ab',
  'broken.zip': b'PK\x03\x04' + bytes(100),
  'broken.gz': b'\x1f\x8b\x08' + bytes(100),
  'latin.txt': 'caf\xe9 '.encode('latin-1') * 3000,
}
VOCABULARIES = ('characters', 'words', 'sentencepiece')


def wrong_texts(lab: Lab, draw: random.Random) -> Case:
  """A text that cannot be trained on."""
  name, vocabulary = draw.choice(list(TEXTS)), draw.choice(VOCABULARIES)
  path, content = lab.folder / 'lab' / name, TEXTS[name]
  damage = (lambda: None) if content is None else lambda: path.write_bytes(content)
  arguments = (
    *(f'--config={lab.config}', f'--workdir={lab.folder / "lab" / "new"}'),
    *(f'--config.data.path={path}', f'--config.data.vocabulary={vocabulary}'),
    f'--config.data.cache_dir={lab.folder / "lab" / "cache"}',
  )
  return Case('train', arguments, (name, 'data.', 'characters'), damage)


# Bytes of the headers of small files: others are values, most of which are harmless.
HEADER = 2_000


def published_models(lab: Lab, draw: random.Random) -> Case:
  """A damaged file of a published model; all of the others are read too."""
  has_package = importlib.util.find_spec('gguf') is not None
  intact = lab.published / draw.choice(('whole', 'shards', *['model.gguf'] * has_package))
  file = intact if intact.is_file() else draw.choice(sorted(intact.iterdir()))
  model, path = (lab.run.parent / each.relative_to(lab.folder) for each in (intact, file))

  def damage():
    kind, content = draw.choice(('header', 'header', 'bytes', 'other')), file.read_bytes()
    if kind == 'other':
      draw.choice(list(damages.ANY.values())).apply(path)
    elif kind == 'bytes' or path.suffix in ('.gguf', '.txt'):
      end = HEADER if kind == 'header' else None
      path.write_bytes(damages.change_bytes(content, draw, end))
    elif path.suffix == '.safetensors':
      path.write_bytes(damages.change_safetensors(content, draw))
    else:
      path.write_bytes(damages.change_json(content, draw))

  arguments = '--prompt=a', '--tokens=2', f'--workdir={model}'
  reached = inference.Engine, 'prepare'  # the weights are read
  names = model.name, path.name
  return Case('generate', arguments, names, damage, may_be_harmless=True, reached=reached)


INPUTS = {
  'values of keys': wrong_values,
  'misspelled keys': misspelled_keys,
  'flags': wrong_flags,
  'config files': wrong_config_files,
  'files of a run': damaged_files,
  'bits of a run': flipped_bits,
  'texts': wrong_texts,
  'published models': published_models,
}
WEIGHTS = (30, 5, 20, 5, 15, 15, 5, 15)


def try_input(lab: Lab, case: Case) -> tuple[str, str]:
  """Runs a case; returns `refused`, `harmless` or what failed, and what was printed last."""
  lab.restore()
  case.damage()
  make_mesh = mock.patch.object(sharding, 'make_mesh', wraps=sharding.make_mesh)
  # The second may replace the first.
  with make_mesh as mesh, mock.patch.object(*case.reached, side_effect=DevicesUsed):
    outcome = damages.run(case.subcommand, list(case.arguments), (lab.run.parent,))
  last = (outcome.error.splitlines() or [''])[-1]
  if isinstance(outcome.status, DevicesUsed) or outcome.status in (0, None):
    return ('harmless' if case.may_be_harmless else 'accepted'), last
  if outcome.status != 2:
    return f'status {outcome.status!r}'[:200], last
  if 'error: ' not in last or 'Traceback' in outcome.error or not last.isprintable():
    return 'no sentence', last
  if not any(name in last for name in case.names):
    return f'does not name {case.names[0]}', last
  if mesh.called and ARRAYS_READ not in last:
    return 'refused after devices were used', last
  new = [path for path in outcome.changes if '/cache' not in path]
  return (f'changed {", ".join(new)}' if new else 'refused'), last


def try_checkpoint(lab: Lab, draw: random.Random) -> tuple[str, str]:
  """Damages the newest checkpoint; returns `previous`, `harmless` or what failed."""
  lab.restore()
  folder = lab.run / 'checkpoints' / '12'
  files = sorted(path for path in folder.rglob('*') if path.is_file())
  path, kind = draw.choice(files), draw.choice(('flip', 'cut', 'delete', 'folder'))
  if kind == 'flip' and path.stat().st_size:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
  elif kind == 'cut':
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])
  else:
    path.unlink()
    if kind == 'folder':
      path.mkdir()
  try:
    run = runs.load_run(lab.run)
    step, leaves = int(run.state.step), _leaves(run)
  except errors.BadInput as error:
    return 'refused, although the previous one is intact', str(error)
  except Exception as error:
    return f'{type(error).__name__}', str(error)
  same = all(map(np.array_equal, leaves, lab.states[step]))
  result = {12: 'harmless', 8: 'previous'}.get(step, f'step {step}')
  return (result if same else 'other arrays'), f'{kind} {path.relative_to(folder)}'


def _leaves(run: runs.Run) -> list[np.ndarray]:
  as_data = lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf
  return [np.asarray(as_data(leaf)) for leaf in jax.tree.leaves(run.state)]


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def end_runs(
  lab: Lab, family: str, number: signal.Signals, count: int
) -> Iterator[tuple[str, str]]:
  """Ends trainings of a family, and one evaluation; yields result and moment of each signal."""
  folder = lab.folder / f'{family} {number.name}'.replace(' ', '_')
  cache = f'--compilation_cache={lab.folder / "programs"}'  # processes start faster
  yield from _end(folder, [*TINY, *FAMILIES[family], cache], number, count - 1, 'train')
  yield _end_evaluation(folder / 'reference', number)


def end_finetuning(
  lab: Lab, superglue: str, number: signal.Signals, count: int
) -> Iterator[tuple[str, str]]:
  """Ends fine-tunings of a small N-Grammer; yields result and moment of each signal."""
  pretrained = lab.folder / 'pretrained'
  kill_campaign.wait(kill_campaign.start('train', pretrained, list(TINY)), pretrained)
  places = f'--config.init_from={pretrained}', f'--config.data.superglue_dir={superglue}'
  folder = lab.folder / f'finetune_{number.name}'
  yield from _end(folder, [*FINETUNING, *places], number, count, 'finetune')


def _end(folder, arguments, number, count, subcommand):
  for moments, names in kill_campaign.campaign(folder, arguments, count, number, subcommand):
    for moment in moments:
      yield ', '.join(names) or 'equal', moment


def _end_evaluation(workdir: pathlib.Path, number: signal.Signals) -> tuple[str, str]:
  """Ends an evaluation by a signal, and repeats it."""
  evaluate = lambda: kill_campaign.start('evaluate', workdir, ['--split=test', MAX_TOKENS])
  start_time = time.monotonic()
  kill_campaign.wait(evaluate(), workdir)
  seconds = random.uniform(0, time.monotonic() - start_time)
  path = workdir / 'evaluation' / 'test.json'
  expected = path.read_bytes()
  path.unlink()
  process = evaluate()
  time.sleep(seconds)
  process.send_signal(number)
  process.wait()
  kill_campaign.wait(evaluate(), workdir)
  return 'equal' if path.read_bytes() == expected else 'test.json', f'after {seconds:.1f} s'


GOOD = ('refused', 'harmless', 'previous', 'equal')


def main() -> None:
  """Runs the trial."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='folder of the trial')
  parser.add_argument('--inputs', type=int, default=1000, help='number of wrong inputs')
  parser.add_argument('--kind', choices=[*INPUTS, 'checkpoints'], help='of these, one kind only')
  parser.add_argument('--kills', type=int, default=102, help='number of SIGKILLs')
  parser.add_argument('--sigterms', type=int, default=54, help='number of SIGTERMs')
  parser.add_argument('--superglue', help='folder of SuperGLUE, for the fine-tuning')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--minutes', type=float, default=600, help='time after which it stops')
  options = parser.parse_args()
  deadline = time.monotonic() + 60 * options.minutes
  lab = Lab(options.folder.resolve())
  lab.prepare()
  random.seed(options.seed)  # of the moments of signals
  results = _read(lab.folder)
  done = {(result['kind'], result['number']) for result in results}

  def record(kind, number, result, detail):
    results.append({'kind': kind, 'number': number, 'result': result, 'detail': detail[:500]})
    with (lab.folder / 'results.jsonl').open('a', encoding='utf-8') as file:
      file.write(json.dumps(results[-1]) + '\n')
    if result not in GOOD:
      print(f'{kind} {number}: {result}\n  {detail[:500]}', flush=True)

  for number in range(options.inputs):
    draw = random.Random(f'{options.seed} {number}')
    if draw.random() < 0.1:
      kind, attempt = 'checkpoints', lambda draw=draw: try_checkpoint(lab, draw)
    else:
      (kind,) = draw.choices(list(INPUTS), WEIGHTS)
      attempt = lambda draw=draw, kind=kind: try_input(lab, INPUTS[kind](lab, draw))
    is_other = options.kind not in (None, kind)
    if is_other or (kind, number) in done or time.monotonic() > deadline:
      continue
    record(kind, number, *attempt())
  for name, count in (('SIGKILL', options.kills), ('SIGTERM', options.sigterms)):
    each, number = -(-count // len(FAMILIES)), signal.Signals[name]
    trials = {family: end_runs(lab, family, number, each) for family in FAMILIES}
    if options.superglue is not None:
      trials['fine-tuning'] = end_finetuning(lab, options.superglue, number, each)
    for what, signals in trials.items():
      kind = f'{name}, {what}'
      if count and time.monotonic() < deadline and kind not in {r['kind'] for r in results}:
        for i, (result, moment) in enumerate(list(signals)):
          record(kind, i, result, moment)
  print(format_table(results))
  sys.exit(any(result['result'] not in GOOD for result in results))


def _read(folder: pathlib.Path) -> list[dict[str, Any]]:
  with contextlib.suppress(FileNotFoundError):
    return [json.loads(line) for line in (folder / 'results.jsonl').read_text().splitlines()]
  return []


def format_table(results: list[dict[str, Any]]) -> str:
  """Formats the number of inputs of each kind, by result."""
  counts = collections.Counter((result['kind'], result['result']) for result in results)
  rows = [['input', 'count', *GOOD, 'failed']]
  for kind in dict.fromkeys(result['kind'] for result in results):
    tried = sum(count for (name, _), count in counts.items() if name == kind)
    good = [counts[kind, result] for result in GOOD]
    rows.append([kind, *map(str, (tried, *good, tried - sum(good)))])
  return '\n'.join(text_tables.align_columns(rows, '<>'))


if __name__ == '__main__':
  main()
