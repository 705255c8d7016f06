"""The command `ngrammer_jax COMMAND`, and the flags of all commands."""

import importlib
import pathlib
import re

import pytest

import ngrammer_jax
from ngrammer_jax import __main__ as command

ROOT = pathlib.Path(__file__).resolve().parents[1]


def output_of(capsys, main, *argv):
  with pytest.raises(SystemExit) as caught:
    main(list(argv))
  assert not caught.value.code
  return capsys.readouterr().out


@pytest.mark.parametrize('subcommand', ['', *command.COMMANDS])
def test_every_subcommand_has_a_version_and_shows_its_defaults(capsys, subcommand):
  main = importlib.import_module(f'ngrammer_jax.{subcommand or "__main__"}').main
  assert output_of(capsys, main, '--version') == f'ngrammer_jax {ngrammer_jax.__version__}\n'
  shown = output_of(capsys, main, '--help')
  defaults = {'generate': '100', 'evaluate': 'newest', 'train': '10.0', 'finetune': '10.0'}
  if subcommand in defaults:
    assert f'(default: {defaults[subcommand]})' in ' '.join(shown.split())
  assert 'default: None' not in shown and 'default: False' not in shown


def test_a_subcommand_gets_the_arguments_after_its_name(monkeypatch, capsys):
  from ngrammer_jax import evaluate

  calls = []
  monkeypatch.setattr(evaluate, 'main', calls.append)
  command.main(['evaluate', '--workdir=x', '--help'])
  assert calls == [['--workdir=x', '--help']]
  with pytest.raises(SystemExit) as caught:
    command.main(['evaluat'])
  assert caught.value.code == 2 and "invalid choice: 'evaluat'" in capsys.readouterr().err


def test_without_a_subcommand_three_examples_are_shown(capsys):
  assert command.main([]) == 0
  shown = capsys.readouterr().out
  examples = re.findall(r'^  ngrammer_jax (\w+) --', shown.partition('examples:')[2], re.M)
  examples += re.findall(r'^  ngrammer_jax (analyze) clusters', shown, re.M)
  assert examples == ['train', 'generate', 'analyze']


@pytest.mark.parametrize('subcommand', ['', *command.COMMANDS])
def test_every_help_fits_one_screen(capsys, monkeypatch, subcommand):
  monkeypatch.setenv('COLUMNS', '140')  # a wide terminal, where lines still end early
  main = importlib.import_module(f'ngrammer_jax.{subcommand or "__main__"}').main
  lines = output_of(capsys, main, '--help').splitlines()
  assert len(lines) <= 40 and max(map(len, lines)) <= 100


def test_the_list_has_every_config_and_variant(capsys):
  listed = output_of(capsys, command.main, '--list')
  names = re.findall(r'^(\w+): \w', listed, re.M)
  assert names == sorted(p.stem for p in (ROOT / 'configs').glob('*.py') if p.stem != '__init__')
  for line in ('ngrammer, transformer, primer', 'rte, boolq, cb, copa, multirc, record, wic, wsc'):
    assert f'\n  {line}' in listed, line
  assert all(len(line) <= 120 for line in listed.splitlines())
