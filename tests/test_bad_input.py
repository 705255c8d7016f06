"""Bad input ends with exit status 2 and an error message, before any device is used."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from ngrammer_jax import command_line, config, flags, train

TEXT = ''.join(f'line {i % 97} of some text\n' for i in range(500)).encode()

CONFIG = """
from ngrammer_jax import config

def get_config():
  c = config.default()
  c.data.corpus = 'text'
  c.data.vocabulary = 'bytes'
  return c
"""

# The arguments of `train` besides --config and --workdir={tmp}/new, and the error message: one case
# for each thing that is checked. Tests of the parts have what else is refused.
TRAIN = {
  'unknown key': (
    '--config.training.stpes=100',
    'unknown config key training.stpes: did you mean training.steps?',
  ),
  'config file that is none of Python': (
    '--config={tmp}/text',
    '--config={tmp}/text: {tmp}/text is not a Python file, FILE.py',
  ),
  'workdir of a published model': (
    '--workdir={tmp}/published',
    '--workdir={tmp}/published is a published model, to which no training is added: use a new '
    'folder, and --config=hf:{tmp}/published --config.init_from=hf:{tmp}/published to start from '
    'the model',
  ),
  'home of nobody': (
    '--config.data.path=~nosuchuser/text',
    'data.path=~nosuchuser/text: no user has this name, or the home directory is unknown; '
    'use another path',
  ),
  'cache of nobody': (
    '--config.data.path={tmp}/text --config.data.cache_dir=~nosuchuser',
    'data.cache_dir=~nosuchuser: no user has this name, or the home directory is unknown; '
    'use another path',
  ),
  'end of a sentence that is not in the vocabulary': (
    '--config.data.path={tmp}/text --config.model.ngram_memories.0.preset=ple '
    '--config.model.ngram_memories.0.rows=100 --config.model.ngram_memories.0.eos_id=257',
    'model.ngram_memories.0.eos_id=257 is not below the number of ids 257 of '
    "model.ngram_memories.0.key='tokens': use an id of the vocabulary of this run",
  ),
  'missing corpus': (
    '--config.data.path={tmp}/none',
    'data.path={tmp}/none: the corpus was not found; expected a text file, or a folder of them',
  ),
  'missing part of a mixture': (
    '--config.data.mixture.0.path={tmp}/text --config.data.mixture.1.path={tmp}/none',
    'data.mixture.1.path={tmp}/none: the corpus was not found; expected a text file, or a folder '
    'of them',
  ),
  'invalid UTF-8': (
    '--config.data.vocabulary=words --config.data.path={tmp}/latin',
    '{tmp}/latin is not valid UTF-8 at byte 5,003 (0xe9): convert it, or use data.vocabulary=bytes',
  ),
  'fewer tokens than rows': (
    '--config.data.path={tmp}/text --config.training.batch_size=1e6',
    'training.batch_size=1000000 is more than the 9400 training tokens',
  ),
  'workdir of something else': (
    '--config.data.path={tmp}/text --workdir={tmp}',
    '--workdir={tmp} is not empty and holds no config.json: it is not a run. Use another folder',
  ),
  'workdir in another object store': (
    '--workdir=s3://bucket/run',
    's3://bucket/run is neither a local path nor gs://BUCKET/FOLDER: '
    'mount the bucket and pass the folder',
  ),
  'workdir below a file': (
    '--config.data.path={tmp}/text --workdir={tmp}/text/run',
    '--workdir={tmp}/text/run: {tmp}/text is a file, expected a folder',
  ),
  'workdir of another config': (
    '--config.data.path={tmp}/text --workdir={tmp}/run --config.model.layers=3',
    '--workdir={tmp}/run was started with model.layers=4, now it is 3: '
    'use the old value, or another workdir',
  ),
}
EVALUATE = {
  'no run': (
    '--workdir={tmp}/none',
    '--workdir={tmp}/none does not exist; expected the folder of a training',
  ),
  'a text of a pretrained model': (
    '--pretrained=state_of_the_union --config.data.path={tmp}/text',
    '--config.data.path: only evaluation.*, mesh.*, data.cache_dir, model.scan_layers, '
    'model.kernel, model.remat, model.vocabulary_chunk can be changed here; evaluate --text=FILE '
    'scores another text',
  ),
  'no questions there': (
    '--workdir={tmp}/run --cloze={tmp}/empty_folder',
    '--cloze={tmp}/empty_folder is not a file of questions, and not a folder with '
    'cbtest_{{NE,CN,V,P}}_test_2500ex.txt for --split=test',
  ),
  'questions of an unknown split': (
    '--workdir={tmp}/run --cloze={tmp} --split=valid',
    '--split=valid is not one of: train, validation, test',
  ),
  'unknown protocol of questions': (
    '--workdir={tmp}/run --cloze={tmp} --cloze_protocol=suffix',
    '--cloze_protocol=suffix is not one of: query, prefix',
  ),
  'a protocol without questions': (
    '--workdir={tmp}/run --cloze_protocol=prefix',
    '--cloze_protocol needs --cloze=PATH',
  ),
}
CASES = [('train', name) for name in TRAIN] + [('evaluate', name) for name in EVALUATE]

# Runs all cases in one interpreter, as `python -m` does. Prints the status and the standard error
# of each, and the number of devices if JAX can be initialised; the last case exits the interpreter.
DRIVER = """
import contextlib, io, json, logging, runpy, sys, warnings

import jax

warnings.simplefilter('ignore')
cases = json.load(sys.stdin)
logging.disable()

def run(subcommand, arguments):
  sys.argv = [subcommand, *arguments]
  runpy.run_module(f'ngrammer_jax.{subcommand}', run_name='__main__')

outcomes = []
for case in cases[:-1]:
  with contextlib.redirect_stderr(io.StringIO()) as stderr:
    try:
      run(*case)
      status = None
    except SystemExit as stop:
      status = stop.code
    except Exception as error:
      status = repr(error)
  outcomes.append((status, stderr.getvalue()))
try:
  devices = jax.device_count()
except RuntimeError:
  devices = 0
print(json.dumps([outcomes, devices]), flush=True)
run(*cases[-1])
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A config, a run, and valid and invalid corpora."""
  folder = tmp_path_factory.mktemp('bad_input')
  (folder / 'config.py').write_text(CONFIG)
  (folder / 'text').write_bytes(TEXT)
  (folder / 'latin').write_bytes(TEXT[:5003] + 'é'.encode('latin-1') + TEXT[5003:])
  (folder / 'published').mkdir()
  (folder / 'published' / 'config.json').write_text('{"model_type": "llama"}')
  (folder / 'run').mkdir()
  (folder / 'empty_folder').mkdir()
  _, started = command_line.parse(argparse.ArgumentParser(), [f'--config={folder}/config.py'])
  config.save(started, folder / 'run' / 'config.json')
  (folder / 'run' / 'checkpoints' / '4').mkdir(parents=True)
  return folder


@pytest.fixture(scope='module')
def outcomes(folder):
  """Status and standard error of every case; initialising a device is an error."""
  commands = []
  for subcommand, name in CASES:
    text, _ = (TRAIN if subcommand == 'train' else EVALUATE)[name]
    common = f'--config={folder}/config.py --workdir={folder}/new' if subcommand == 'train' else ''
    commands.append((subcommand, f'{common} {text.format(tmp=folder)}'.split()))
  environment = {'JAX_PLATFORMS': 'nonexistent', 'NGRAMMER_JAX_CACHE': str(folder / 'cache')}
  process = subprocess.run(
    [sys.executable, '-c', DRIVER],
    env=os.environ | environment,
    input=json.dumps(commands),
    capture_output=True,
    text=True,
  )
  assert process.stdout, process.stderr
  outcomes, devices = json.loads(process.stdout)
  assert devices == 0, 'a case that touches a device would go unnoticed'
  return dict(zip(CASES, [*outcomes, [process.returncode, process.stderr]], strict=True))


def test_bad_input_is_refused_without_a_device(outcomes, folder):
  for (subcommand, name), outcome in outcomes.items():
    _, message = (TRAIN if subcommand == 'train' else EVALUATE)[name]
    assert outcome == [2, f'error: {message.format(tmp=folder)}\n'], (subcommand, name)


def test_refused_runs_leave_no_workdir(outcomes, folder):
  assert not (folder / 'new').exists()


@pytest.fixture
def refused(folder, cache, tmp_path, monkeypatch, capsys):
  """Runs a training with eight devices that ends with status 2; returns its standard error."""

  def run(*arguments):
    argv = [f'--config={folder}/config.py', f'--config.data.path={folder}/text', *arguments]
    monkeypatch.setattr(sys, 'argv', ['train', *argv])
    with pytest.raises(SystemExit) as caught:
      flags.run(train.main)
    assert caught.value.code == 2
    return capsys.readouterr().err

  return run


@pytest.mark.parametrize(
  'arguments, message',
  [
    (
      '--config.training.batch_size=12',
      'training.batch_size=12 is not divisible by the 8 devices of mesh.data=8 x mesh.fsdp=1: '
      'use 16',
    ),
    (
      '--config.training.batch_size=6 --config.mesh.model=2 --config.mesh.fsdp=2',
      'training.batch_size=6 is not divisible by the 4 devices of mesh.data=2 x mesh.fsdp=2: use 8',
    ),
    (
      '--config.mesh.data=3',
      'mesh.data=3 x mesh.fsdp=1 x mesh.model=1 does not match the 8 cpu devices: '
      'the product of all sizes must be 8; one of them may be -1, if the others divide 8',
    ),
  ],
)
def test_what_does_not_fit_the_devices_is_refused(refused, tmp_path, arguments, message):
  assert refused(f'--workdir={tmp_path}/new', *arguments.split()) == f'error: {message}\n'
  assert not (tmp_path / 'new').exists()
