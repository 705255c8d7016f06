"""A small part of the trial in `tests/campaigns/surroundings.py`."""

import json
import pathlib
import random

import pytest

from ngrammer_jax import __main__, analyze
from ngrammer_jax.checkpoints import reader
from tests import tiny_run
from tests.campaigns import surroundings
from tests.training.helpers import write_config

HARSH = ('no HOME', 'missing TMPDIR', 'ASCII', 'python -O', 'umask 077', 'no /dev/shm')


@pytest.mark.full
def test_training_and_evaluation_in_all_harsh_surroundings(tmp_path):
  """At once, in a relative folder with a leading dash, brackets and characters of no ASCII."""
  lab = surroundings.Lab(tmp_path)
  text = tiny_run.write_text(tmp_path / 'text.txt')
  training = {'steps': 3, 'evaluate_every': 3}
  config = tiny_run.config(text, {'layers': 1}, training=training)
  config = write_config(tmp_path / 'tiny.py', config)
  variables = {'JAX_NUM_CPU_DEVICES': '1'}
  for kind in HARSH:
    variables |= surroundings.ENVIRONMENTS.get(kind, {})
  shell = ''.join(surroundings.SHELLS.get(kind, '') for kind in (*HARSH, 'closed standard input'))
  workdir = pathlib.Path('-é [1] 日本')
  for command in (['train', f'--config={config}'], ['evaluate', '--split=validation']):
    outcome = lab.run([*command, f'--workdir={workdir}'], shell, **variables)
    assert outcome.status == 0 and outcome.shortcoming() is None, outcome
  workdir = tmp_path / 'lab' / workdir
  assert reader.steps(workdir) == [3]
  result = json.loads((workdir / 'evaluation' / 'validation.json').read_bytes())
  assert result['step'] == 3 and result['tokens'] > 500


def test_trials_are_drawn_again_alike():
  """Else a campaign could not be resumed."""
  draws = [random.Random('0 5').choices(list(surroundings.KINDS), k=3) for _ in range(2)]
  assert draws[0] == draws[1]


def test_every_command_and_analysis_is_drawn(tmp_path, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: True)  # all packages are installed
  commands = surroundings.Lab(tmp_path).commands(pathlib.Path('-dash')).values()
  assert {command[0] for command in commands} == {*__main__.COMMANDS, 'tasks.lm_eval'}
  assert {command[1] for command in commands if command[0] == 'analyze'} == set(analyze.HELP)
