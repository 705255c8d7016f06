"""A run resumes from whatever a crash, a bad disk or another machine left of it."""

import dataclasses
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.checkpoints import checksums, manifest, reader, workdirs
from ngrammer_jax.config import mesh as mesh_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.training import loop, programs
from tests import tiny_run
from tests.checks import bad_input, mesh_of
from tests.training.helpers import arrays, damage, names, records, signal_at, write_config

ROOT = pathlib.Path(__file__).parents[2]


def shared_config(trained):
  """That of the shared run, with which it can be resumed."""
  return tiny_run.config(trained.parent / 'text.txt')


def test_training_never_starts_again_from_scratch_by_itself(trained, trained_copy, caplog):
  run = trained_copy
  before = (run / 'metrics.jsonl').read_bytes()
  (run / 'checkpoints' / '12' / 'manifest.json').unlink()
  name, _ = damage(run / 'checkpoints' / '8')
  (run / 'checkpoints' / '4' / '_METADATA').write_bytes(b'')
  size = manifest.read(run / 'checkpoints' / '4').files['_METADATA'][0]
  for _ in range(2):
    with bad_input(
      f'--workdir={run} has no intact checkpoint (step 12: manifest.json is missing; '
      f'step 8: {name} was changed: wrong checksum; '
      f'step 4: _METADATA has 0 bytes, expected {size:,}): '
      'copy its checkpoints from a backup, or start again with another --workdir'
    ):
      loop.train(shared_config(trained), run)
    *_, middle, last = [r.getMessage() for r in caplog.records if 'is corrupt' in r.getMessage()]
    assert middle.endswith('; falling back to the previous') and 'falling back' not in last
    assert names(run) == ['12', '4', '8']
    assert (run / 'metrics.jsonl').read_bytes() == before


@pytest.mark.full
def test_damage_again_and_again_costs_more_steps_and_no_bit(tiny, reference_run, tmp_path, caplog):
  run = shutil.copytree(reference_run, tmp_path / 'run')
  for steps in ((12,), (8, 12)):
    caplog.clear()
    for step in steps:
      name, content = damage(run / 'checkpoints' / str(step))
    assert loop.train(tiny(), run)
    assert arrays(run) == arrays(reference_run) and records(run) == records(reference_run)
    assert arrays(run, 8) == arrays(reference_run, 8)
    assert f'12 is corrupt: {name} was changed: wrong checksum; falling back' in caplog.text
  assert (run / 'checkpoints' / '12.damaged-2' / name).read_bytes() == content
  assert names(run) == ['12', '12.damaged', '12.damaged-2', '4', '8', '8.damaged']


@pytest.mark.full
def test_a_resume_with_other_segments_per_call_costs_no_bit(tiny, reference_run, tmp_path):
  for calls in (1, 3, 12):
    run = shutil.copytree(reference_run, tmp_path / str(calls))
    damage(run / 'checkpoints' / '12')
    assert loop.train(tiny(training={'segments_per_call': calls}), run)
    assert arrays(run) == arrays(reference_run)
    # The loss on record is the mean of the steps of a call.
    steps = lambda workdir: [record['step'] for record in records(workdir)]
    assert steps(run) == steps(reference_run)


# The memories of a model, with what differs from the preset. Together they have every preset whose
# tables are shared, in values or in the feed-forward, and each optimizer of rows.
MEMORIES = {
  'values': {
    'ngram_memories': (
      {'preset': 'value_embeddings', 'optimizer': 'row_adagrad'},
      {'preset': 'nanochat_values', 'optimizer': 'adagrad'},
      {'preset': 'ngram_values', 'layers': (0, 1), 'rows': (31,), 'width': 4},
    ),
    'copy_memory': {'window': 8},
  },
  'sums': {
    'ngram_memories': (
      {'preset': 'bigram_hash', 'rows': (31,), 'width': 16, 'signs': 7, 'optimizer': 'adagrad'},
      {'preset': 'ngram_hash', 'rows': (31,), 'width': 16, 'signs': 7, 'optimizer': 'row_adagrad'},
    ),
    'product_memory': {'preset': 'lample2019', 'optimizer': 'row_adagrad'},
    'token_shift': {},
  },
  'products': {
    'ngram_memories': (
      {'preset': 'gemma3n_ple', 'layers': (0, 1), 'width': 4, 'optimizer': 'row_adagrad'},
      {'preset': 'stem', 'layers': (1,), 'optimizer': 'adagrad'},
      {'preset': 'deep_embed', 'layers': (1,), 'optimizer': 'row_adagrad'},
    ),
    'product_memory': {'preset': 'memory_layers', 'optimizer': 'adagrad'},
  },
}
SMALL_KEYS = {'layers': (0,), 'sub_keys': 8, 'heads': 2, 'top': 3, 'key_width': 4}


@pytest.mark.full
@pytest.mark.parametrize('name', MEMORIES)
def test_memories_resume_bit_identically_with_muon(tiny, tmp_path, name):
  model = dict(MEMORIES[name])
  model['ngram_memories'] = [
    {'learning_rate_factor': None, **memory} for memory in model['ngram_memories']
  ]
  if 'product_memory' in model:
    model['product_memory'] = SMALL_KEYS | {'learning_rate_factor': None} | model['product_memory']
  model = {'ngram': None, **model}
  values = dataclasses.asdict(tiny(optimizer={'algorithm': 'muon'}, training={'evaluate_every': 0}))
  config = experiment.resolve(values | {'model': values['model'] | model})
  loop.train(config, tmp_path / 'run')
  resumed = shutil.copytree(tmp_path / 'run', tmp_path / 'resumed')
  for step in (8, 12):
    shutil.rmtree(resumed / 'checkpoints' / str(step))
  assert loop.train(config, resumed)
  assert arrays(resumed) == arrays(tmp_path / 'run')
  assert records(resumed) == records(tmp_path / 'run')


@pytest.mark.full
def test_one_trunk_serves_several_budgets(tiny, tmp_path):
  wsd = {'schedule': 'wsd', 'warmup_steps': 2, 'decay_steps': 4}

  def config(steps, decay_from):
    return tiny(optimizer=wsd | {'decay_from': decay_from}, training={'steps': steps})

  trunk = tmp_path / 'trunk'
  loop.train(config(8, 8), trunk)
  at_step_8 = arrays(trunk)
  branch = shutil.copytree(trunk, tmp_path / 'branch')
  shutil.rmtree(branch / 'checkpoints' / '8')
  assert loop.train(config(8, 4), branch)
  assert loop.train(config(12, 8), trunk)
  assert arrays(trunk, 8) == at_step_8 != arrays(branch)
  # A run that has its decay from the start, with the same steps before it.
  loop.train(config(12, 8), tmp_path / 'whole')
  assert arrays(tmp_path / 'whole') == arrays(trunk)
  assert arrays(tmp_path / 'whole', 8) == at_step_8
  rates = [record['learning_rate'] for record in records(trunk) if 'learning_rate' in record]
  assert rates == [r['learning_rate'] for r in records(tmp_path / 'whole') if 'learning_rate' in r]


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_identically(tiny, tmp_path, toy_model):
  """SIGKILL once the first checkpoint is there, wherever the run is by then."""
  config = tiny(
    training={'steps': 80, 'log_every': 10, 'checkpoint_every': 10, 'evaluate_every': 0}
  )
  code = (
    'from tests.training import toy; from ngrammer_jax import flags, train; '
    'toy.install(); flags.run(train.main)'
  )
  command = [sys.executable, '-c', code, f'--workdir={tmp_path}/killed']
  command += [f'--config={write_config(tmp_path / "config.py", config)}']
  with (tmp_path / 'log').open('w+') as log:
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    end = time.monotonic() + 120
    try:
      while not (tmp_path / 'killed' / 'checkpoints' / '10').exists():
        assert time.monotonic() < end, 'no checkpoint in two minutes'
        assert process.poll() is None, (tmp_path / 'log').read_text()
        time.sleep(0.005)
    finally:
      process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, 'the run was over before it was killed'
  assert loop.train(config, tmp_path / 'killed')
  loop.train(config, tmp_path / 'reference')
  assert arrays(tmp_path / 'killed') == arrays(tmp_path / 'reference')
  assert records(tmp_path / 'killed') == records(tmp_path / 'reference')


@pytest.mark.full
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(
  tiny, tmp_path, reference_run, monkeypatch
):
  write = manifest.write

  def fails(folder, content):
    if content.step == 8:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(folder, content)

  with (
    bad_input(
      f'--workdir={tmp_path}/run: the disk is full: no room for step 8, 7.5 MB left. '
      'Last checkpoint: step 4. Free some space, then rerun the same command to resume'
    ),
    monkeypatch.context() as patch,
  ):
    patch.setattr(manifest, 'write', fails)
    patch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=7.5e6))
    loop.train(tiny(), tmp_path / 'run')
  assert reader.steps(tmp_path / 'run') == [4]
  assert arrays(tmp_path / 'run', 4) == arrays(reference_run, 4)
  assert loop.train(tiny(), tmp_path / 'run')
  assert arrays(tmp_path / 'run') == arrays(reference_run) and records(tmp_path / 'run') == records(
    reference_run
  )


def test_a_disk_without_room_is_refused_before_training(tiny, tmp_path, toy_model, monkeypatch):
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=1e4))
  with pytest.raises(errors.BadInput, match=r'no room for a checkpoint of 1\.\d MB, 0\.0 MB left'):
    loop.train(tiny(), tmp_path / 'run')
  assert not names(tmp_path / 'run')


def test_what_one_mesh_saved_another_restores(trained):
  """All of it, bit by bit, which `restore` checks, on the devices of the other one."""
  config, vocabulary = shared_config(trained), vocabularies.load(trained)
  run = programs.Programs(config, vocabulary.size, mesh_of(2, 2, 2))
  state = reader.restore(trained, 12, run.abstract)
  assert checksums.checksums(state) == {k: sums for k, (*_, sums) in arrays(trained).items()}
  table = state.params['ngrammer']['table']
  assert table.addressable_shards[0].data.size == table.size // 4
  leaf_shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, run.abstract))
  assert leaf_shardings[0] == leaf_shardings[1]


def test_scanned_and_unrolled_states_have_the_same_arrays(tiny):
  states = [
    programs.Programs(tiny(model={'scan_layers': scan}), 11, sharding.make_mesh()).abstract
    for scan in (True, False)
  ]
  shapes = [
    {name: (leaf.shape, leaf.dtype) for name, leaf in checksums.named_leaves(state).items()}
    for state in states
  ]
  assert shapes[0] == shapes[1] and len(shapes[0]) > 30


def assert_close(run, reference_run):
  """Within rounding, and not without any."""
  states = [jax.device_get(runs.load_run(workdir).state) for workdir in (run, reference_run)]
  assert states[0].step == states[1].step == 12
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *states)
  assert arrays(run) != arrays(reference_run)


@pytest.mark.slow
@pytest.mark.parametrize('other', ['scanned', 'mesh'])
def test_another_program_goes_on_within_rounding(tiny, tmp_path, trained, monkeypatch, other):
  """Two steps with a config, four with another, the rest with the first again."""
  first, run = tiny(), tmp_path / 'run'
  mesh = mesh_config.MeshConfig(data=2, fsdp=2, model=2)
  second = tiny(mesh=mesh) if other == 'mesh' else tiny(model={'scan_layers': True})
  for config, stop in (first, 2), (second, 6):
    with monkeypatch.context() as patch, pytest.raises(errors.Interrupted):
      signal_at(patch, {stop: signal.SIGTERM})
      loop.train(config, run)
  assert reader.steps(run) == [2, 4, 6]
  if other == 'scanned':
    first = tiny(model={'scan_layers': False})
  assert loop.train(first, run)
  assert_close(run, trained)


@pytest.mark.slow
def test_a_run_with_scanned_layers_goes_on_with_them(tiny, tmp_path, monkeypatch):
  """Bit for bit, although the command has the default, which is layers in a row."""
  scanned = tiny(model={'scan_layers': True})
  assert loop.train(scanned, tmp_path / 'whole')
  run = tmp_path / 'run'
  with monkeypatch.context() as patch, pytest.raises(errors.Interrupted):
    signal_at(patch, {4: signal.SIGTERM})
    loop.train(scanned, run)
  assert loop.train(tiny(), run)
  assert arrays(run) == arrays(tmp_path / 'whole')
  assert workdirs.load_config(run).model.scan_layers is True
