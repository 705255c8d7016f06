"""A message names the cause, and what can be copied from it works in a shell."""

import os
import pathlib
import shlex

import pytest

from ngrammer_jax import errors, runs, train
from ngrammer_jax.data import mixture
from ngrammer_jax.system import hosts, process
from ngrammer_jax.training import loop
from tests.checks import bad_input
from tests.training.helpers import write_config


def test_a_stored_relative_path_names_the_key(trained_copy, tmp_path, monkeypatch):
  """Also a folder, a path with ~ inside, and one of a mixture."""
  monkeypatch.chdir(tmp_path)
  run = runs.load_run(trained_copy)
  for path in ('texts/a.txt', '../none', 'a~b'):
    object.__setattr__(run.config.data, 'path', path)
    run.__dict__.pop('mixture', None)
    with bad_input(
      f'data.path={path}: the corpus was not found in {tmp_path}; expected a text file, or a '
      f'folder of them; name another place with --config.data.path'
    ):
      run.split('test')


@pytest.mark.parametrize('name', ['file', 'file/below'])
def test_a_cache_that_cannot_be_written_names_the_variable(tiny, tmp_path, monkeypatch, name):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / name))
  with pytest.raises(errors.BadInput, match='name another folder with NGRAMMER_JAX_CACHE'):
    mixture.prepare(tiny().data)


@pytest.mark.parametrize('folder', ["a b's [1]", '-r', 'é;ls', '$HOME'])
def test_printed_commands_quote_their_folders(tiny, tmp_path, monkeypatch, capsys, folder):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # the command adds to it
  monkeypatch.setattr(loop, 'train', lambda *args: True)
  config = write_config(tmp_path / 'config.py', tiny())
  train.main([f'--config={config}', f'--workdir={folder}'])
  printed = capsys.readouterr().out.splitlines()[1:3]
  evaluate, tensorboard = (shlex.split(line) for line in printed)
  assert evaluate[3] == f'--workdir={folder}'
  assert pathlib.Path(tensorboard[2]) == pathlib.Path(folder) / 'tensorboard'


@pytest.mark.parametrize('index', [0, 1])
def test_an_error_of_all_processes_is_printed_by_the_first(monkeypatch, capsys, index):
  """That of one process is printed there."""
  monkeypatch.setattr(hosts, '_process', {'index': index, 'count': 2})
  monkeypatch.setattr(hosts, 'all_gather', lambda message: [None, 'no text'])
  monkeypatch.setattr(process, '_exit_alone', lambda status: None)

  def shared(argv):
    with hosts.collective_errors():
      pass

  def own(argv):
    raise errors.BadInput('a damaged shard')

  for main, expected in (
    (shared, '' if index else 'error: process 1: no text\n'),
    (own, f'{"process 1: " * index}error: a damaged shard\n'),
  ):
    with pytest.raises(SystemExit) as stopped:
      process.run(main)
    assert (stopped.value.code, capsys.readouterr().err) == (2, expected)
