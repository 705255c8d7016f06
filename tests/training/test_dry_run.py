"""--dry_run says what a training needs, and leaves nothing behind."""

import dataclasses
import os
import pathlib
import re

import pytest

from ngrammer_jax import errors, host_arrays, train
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.training import dry_run, loop, model_size
from tests.checks import bad_input
from tests.training import toy
from tests.training.helpers import arrays, write_config


def files_in(folder):
  return sorted(path for path in folder.rglob('*') if 'cache' not in path.parts)


def run_subcommand(tmp_path, capsys, *arguments):
  status = train.main([f'--config={tmp_path}/config.py', '--dry_run', *arguments])
  assert status == 0
  return dict(re.split('  +', line) for line in capsys.readouterr().out.splitlines())


def test_a_dry_run_of_a_new_run_and_of_one_that_is_resumed(tiny, tmp_path, monkeypatch, capsys):
  toy.install(monkeypatch.setattr)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # the command adds to it
  loop.train(tiny(training={'steps': 10}, optimizer={'schedule': 'constant'}), tmp_path / 'run')
  config = tiny(training={'steps': 16}, optimizer={'schedule': 'constant'})
  write_config(tmp_path / 'config.py', config)
  before, state = files_in(tmp_path), arrays(tmp_path / 'run')
  clock = iter(range(0, 1000, 3))
  monkeypatch.setattr(dry_run.time, 'monotonic', lambda: next(clock))
  rows = run_subcommand(tmp_path, capsys, f'--workdir={tmp_path}/new')
  assert rows['compilation'] == '3s'
  size = model_size.count(config.model, 257)
  assert rows['parameters'] == f'{size.parameters:,}, 512 of them in tables'
  text = '1.0 MiB in a step on a device, 8.0 MiB on all 8 simulated devices, this machine has '
  assert rows['peak memory'].startswith(text)
  assert rows['train state'].startswith('0.0 MiB on a device (')
  assert re.fullmatch(
    r'(\d+(\.\d+)? [kM]?|[\d,]+ )FLOPs in the forward pass', rows['FLOPs of a token']
  )
  assert rows['step'] == '0.75 s, 171 tokens/s'  # 3 seconds for two calls of 2 steps
  assert rows['steps'] == '16 of 16 left, 128 tokens each'
  assert rows['expected time'] == '12s, without validation and saving'
  rows = run_subcommand(tmp_path, capsys, f'--workdir={tmp_path}/run')
  assert rows['steps'] == '6 of 16 left, 128 tokens each' and rows['expected time'][:3] == '4s,'
  assert files_in(tmp_path) == before and arrays(tmp_path / 'run') == state
  write_config(tmp_path / 'config.py', tiny(training={'steps': 16}))
  with bad_input(
    f"--workdir={tmp_path}/run was started with optimizer.schedule='constant', now it is 'cosine': "
    f'use the old value, or another workdir, with --config.init_from={tmp_path}/run to start from '
    f'the parameters of this run'
  ):
    run_subcommand(tmp_path, capsys, f'--workdir={tmp_path}/run')


def test_no_corpus_is_read_unless_it_decides_the_vocabulary(tiny, tmp_path, monkeypatch, capsys):
  toy.install(monkeypatch.setattr)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  write_config(tmp_path / 'config.py', tiny())
  (tmp_path / 'text.txt').unlink()
  arguments = [f'--workdir={tmp_path}/new']
  plain = run_subcommand(tmp_path, capsys, *arguments)
  for data in (
    ['corpus=c4/en', 'vocabulary=sentencepiece', 'vocabulary_size=32000', 'path=None'],
    ['vocabulary=words', 'vocabulary_size=300'],
    ['corpus=shards', 'path=gs://nowhere/text', 'vocabulary=sentencepiece'],
  ):
    rows = run_subcommand(tmp_path, capsys, *arguments, *(f'--config.data.{key}' for key in data))
    assert rows['parameters'] > plain['parameters']
  with pytest.raises(errors.BadInput, match='text.txt'):
    run_subcommand(tmp_path, capsys, *arguments, '--config.data.vocabulary=characters')


def test_a_step_with_tables_in_host_memory_finds_reads_and_writes_rows(
  tiny, one_device, tmp_path, monkeypatch
):
  """New rows in each step, as in training."""
  memory = NGramMemoryConfig(
    hash='polynomial', join='sum', orders=(1, 2), heads=1, rows=(509,), width=16
  )
  memory = dataclasses.replace(memory, table_memory='host')
  model = {'ngram': None, 'ngram_memories': (memory,), 'layers': 1}
  rows = {'read': [], 'written': []}
  take_here = host_arrays.take_here
  put_here = host_arrays.put_here

  def read(leaf, numbers, count):
    rows['read'].append(numbers.tolist())
    return take_here(leaf, numbers, count)

  def write(leaf, numbers, values):
    rows['written'].append(numbers.tolist())
    put_here(leaf, numbers, values)

  monkeypatch.setattr(host_arrays, 'take_here', read)
  monkeypatch.setattr(host_arrays, 'put_here', write)
  dry_run.dry_run(tiny(model, training={'segments_per_call': 1}), tmp_path / 'new')
  leaves = 2  # the table and its accumulator
  assert len(rows['read']) == leaves * (1 + dry_run.MAX_TIMED_STEPS)
  assert rows['written'] == rows['read']
  assert rows['read'][0] != rows['read'][leaves]


@pytest.mark.slow
def test_a_dry_run_of_a_real_model(tiny, one_device, tmp_path):
  table = dry_run.dry_run(tiny({'layers': 1, 'ngram': None}), pathlib.Path(tmp_path / 'new'))
  rows = dict(re.split('  +', line) for line in table.splitlines())
  assert (
    rows['parameters'] == f'{257 * 17 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 32:,}, 0 of them in tables'
    and float(rows['step'].split()[0]) > 0
  )
  assert not (tmp_path / 'new').exists()
