"""A whole run: it trains, stops where it should, and goes on exactly where it was."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, evaluation_config, files, mesh_config, runs
from ngrammer_jax.models import config as model_config
from ngrammer_jax.training import loop, record


def records(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_a_run_with_a_kernel_equals_one_without(tiny, tmp_path):
  """Interpreted on a CPU; its evaluation, of other lengths, has the scores."""
  training = {'steps': 4, 'segment_length': 128, 'batch_size': 8, 'segments_per_call': 2}
  every = {'evaluate_every': 4, 'checkpoint_every': 4}
  for kernel in ('xla', 'splash'):
    config = tiny(model={'kernel': kernel}, training=training | every)
    assert loop.train(config, tmp_path / kernel)
  by_scores, in_kernel = records(tmp_path / 'xla'), records(tmp_path / 'splash')
  for a, b in zip(by_scores, in_kernel, strict=True):
    assert [a[k] for k in a if 'loss' in k] == pytest.approx([b[k] for k in b if 'loss' in k])
  wrong = tiny(model={'kernel': 'splash'}, training={'steps': 4})
  with pytest.raises(errors.BadInput, match="model.kernel='splash' is for segments that 128 div"):
    loop.train(wrong, tmp_path / 'wrong')


def final_state(workdir):
  return jax.device_get(runs.load_run(workdir).state)


def without_times(lines):
  return [
    {k: v for k, v in line.items() if k not in ('tokens_per_second', 'goodput')} for line in lines
  ]


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_learns_records_and_is_finished(tiny, tmp_path):
  config = tiny(training={'steps': 24}, optimizer={'learning_rate': 0.01})
  assert loop.train(config, tmp_path / 'run')
  lines = [line for line in records(tmp_path / 'run') if 'loss' in line]
  assert [line['step'] for line in lines] == list(range(2, 25, 2))
  assert lines[-1]['loss'] < 0.8 * lines[0]['loss']
  assert {
    'learning_rate',
    'tokens_per_second',
    'gradient_norm/dense',
    'gradient_norm/ngram_table',
    'codebook/perplexity',
  } < set(lines[0])
  validations = [line for line in records(tmp_path / 'run') if 'validation/perplexity' in line]
  assert [line['step'] for line in validations] == [6, 12, 18, 24]
  assert list((tmp_path / 'run' / 'tensorboard').iterdir())
  assert not loop.train(config, tmp_path / 'run')


NGRAM = model_config.NGramConfig(
  clusters=8, vocabulary_size=64, dim=3, orders=(2, 3), layer='middle', empty='revive'
)
SWITCHES = {'ngram': NGRAM, 'convolution': 3, 'norm': 'hybrid', 'activation': 'squared_relu'}


XL = {
  'position': 'relative',
  'memory': model_config.MemoryConfig(length=12),
  'ngram': model_config.NGramConfig(
    clusters=8, vocabulary_size=64, dim=3, layer='attention', pairing=('attended', 'previous')
  ),
}


@pytest.mark.parametrize(
  'model, stop_at',
  [
    ({'dropout': 0.1}, 4),
    ({'dropout': 0.1}, 10),
    pytest.param(SWITCHES, 6, marks=pytest.mark.slow),
    pytest.param(XL, 6, marks=pytest.mark.slow),
  ],
)
def test_an_interrupted_run_goes_on_bit_identically(tiny, tmp_path, monkeypatch, model, stop_at):
  config = tiny(model=model)
  loop.train(config, tmp_path / 'whole')

  add = record.Record.add

  def stop(self, done, metrics):
    add(self, done, metrics)
    if done == stop_at:
      raise KeyboardInterrupt

  monkeypatch.setattr(record.Record, 'add', stop)
  with pytest.raises(KeyboardInterrupt):
    loop.train(config, tmp_path / 'cut')
  monkeypatch.undo()
  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / 'cache'))
  loop.train(config, tmp_path / 'cut')

  assert_identical(final_state(tmp_path / 'cut'), final_state(tmp_path / 'whole'))
  whole, cut = (without_times(records(tmp_path / name)) for name in ('whole', 'cut'))
  assert cut == whole


def test_a_killed_process_goes_on_bit_identically(tiny, tmp_path):
  """SIGKILL once the first checkpoint is there, wherever the run is by then."""
  config_file = tmp_path / 'config.py'
  config = tiny(training={'steps': 40})
  fields = dataclasses.asdict(config)
  config_file.write_text(
    f'import ml_collections\ndef get_config(): return ml_collections.ConfigDict({fields!r})\n'
  )

  def start(workdir):
    command = [
      sys.executable,
      '-m',
      'ngrammer_jax.train',
      f'--config={config_file}',
      f'--workdir={workdir}',
    ]
    return subprocess.Popen(
      command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )

  process = start(tmp_path / 'killed')
  while not (tmp_path / 'killed' / 'checkpoints' / '4').exists():
    assert process.poll() is None and time.sleep(0.01) is None
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  assert start(tmp_path / 'killed').wait() == 0
  loop.train(config, tmp_path / 'whole')
  assert_identical(final_state(tmp_path / 'killed'), final_state(tmp_path / 'whole'))
  killed, whole = (without_times(records(tmp_path / name)) for name in ('killed', 'whole'))
  assert killed == whole


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoints(tiny, tmp_path):
  config = tiny(optimizer={'learning_rate': 1e15, 'clip_norm': None, 'warmup_steps': 0})
  with pytest.raises(errors.BadInput) as caught:
    loop.train(config, tmp_path / 'run')
  assert str(caught.value).startswith('training diverged at step 2, between steps 0 and 2: loss is')
  assert 'Last good checkpoint: none yet' in str(caught.value)
  assert not [p for p in (tmp_path / 'run' / 'checkpoints').iterdir() if p.name.isdigit()]


def test_segments_per_call_does_not_change_the_result(tiny, tmp_path):
  for calls in (2, 4):
    config = tiny(training={'segments_per_call': calls, 'log_every': 4, 'evaluate_every': 0})
    loop.train(config, tmp_path / str(calls))
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(compare, final_state(tmp_path / '2'), final_state(tmp_path / '4'))


def test_another_config_in_the_same_workdir_is_refused(tiny, tmp_path):
  loop.train(tiny(), tmp_path / 'run')
  with pytest.raises(errors.BadInput) as caught:
    loop.train(tiny(model={'width': 32}), tmp_path / 'run')
  assert str(caught.value) == (
    f'--workdir={tmp_path}/run was started with model.width=16, now it is 32: '
    'use the old value, or another workdir'
  )
  with pytest.raises(errors.BadInput, match=r"schedule 'cosine' depends on the number of steps"):
    loop.train(tiny(training={'steps': 16}), tmp_path / 'run')


def test_what_may_change_on_resume(tiny, tmp_path):
  loop.train(tiny(optimizer={'schedule': 'constant'}), tmp_path / 'run')
  more = {'steps': 16, 'log_every': 4, 'checkpoint_every': 8, 'evaluate_every': 0}
  config = tiny(
    optimizer={'schedule': 'constant'},
    training=more,
    mesh=mesh_config.MeshConfig(data=2, fsdp=2, model=2),
    evaluation=evaluation_config.EvaluationConfig(streams=2),
  )
  assert loop.train(config, tmp_path / 'run')
  assert final_state(tmp_path / 'run').step == 16


def test_another_text_at_the_same_path_is_refused(tiny, tmp_path):
  config = tiny()
  loop.train(config, tmp_path / 'run')
  (tmp_path / 'text.txt').write_text('something else entirely. ' * 1000)
  with pytest.raises(errors.BadInput, match='was started on another text'):
    loop.train(config, tmp_path / 'run')


def test_a_batch_that_the_mesh_does_not_divide_is_refused(tiny, tmp_path):
  with pytest.raises(errors.BadInput) as caught:
    loop.train(tiny(training={'batch_size': 6}), tmp_path / 'run')
  assert str(caught.value) == (
    'training.batch_size=6 is not divisible by the 8 devices of mesh.data=8 x mesh.fsdp=1: use 8'
  )


def test_changes_inside_a_block_are_named(tiny, tmp_path):
  loop.train(tiny(), tmp_path / 'run')
  ngram = dataclasses.replace(tiny().model.ngram, dim=2)
  with pytest.raises(errors.BadInput, match=r'was started with model\.ngram\.dim=4, now it is 2:'):
    loop.train(tiny(model={'ngram': ngram}), tmp_path / 'run')
  with pytest.raises(errors.BadInput, match=r'with model\.ngram=NGramConfig\(.*now it is None:'):
    loop.train(tiny(model={'ngram': None}), tmp_path / 'run')


@pytest.mark.parametrize('writes', [0, 1, 2])
def test_a_start_that_was_killed_can_be_repeated(tiny, tmp_path, monkeypatch, writes):
  """Before each of the files of a workdir; the last one, config.json, makes it a run."""
  config, done, write = tiny(training={'steps': 2, 'evaluate_every': 0}), [], files.write

  def dies(path, content):
    if path.parent == tmp_path / 'run' and len(done) == writes:
      raise KeyboardInterrupt
    done.extend([path] * (path.parent == tmp_path / 'run'))
    write(path, content)

  monkeypatch.setattr(files, 'write', dies)
  with pytest.raises(KeyboardInterrupt):
    loop.train(config, tmp_path / 'run')
  monkeypatch.setattr(files, 'write', write)
  assert loop.train(config, tmp_path / 'run')


@pytest.mark.slow
def test_double_precision_throughout(tiny, tmp_path, x64):
  loop.train(tiny(model={'dtype': 'float64'}, training={'steps': 2}), tmp_path / 'run')
  state = final_state(tmp_path / 'run')
  leaves = jax.tree.leaves((state.params, state.codebook, state.opt_state))
  floats = {leaf.dtype.name for leaf in leaves if leaf.dtype.kind == 'f'}
  assert floats == {'float64'}


def test_double_precision_without_its_mode_is_refused(tiny, tmp_path):
  with pytest.raises(errors.BadInput, match='needs the environment variable JAX_ENABLE_X64=1'):
    loop.train(tiny(model={'dtype': 'float64'}), tmp_path / 'run')


def test_an_object_store_is_not_taken_for_a_folder(tiny):
  with pytest.raises(errors.BadInput, match='expected a folder on this machine'):
    loop.train(tiny(), pathlib.Path('gs://bucket/run'))


def test_a_run_in_parts_learns_the_same_and_goes_on(tiny, tmp_path):
  accumulation = experiment.AccumulationConfig(parts=2)
  whole, parts = (tiny(training=extra) for extra in ({}, {'accumulation': accumulation}))
  for config, name in ((whole, 'whole'), (parts, 'parts')):
    assert loop.train(
      dataclasses.replace(config, mesh=mesh_config.MeshConfig(data=4, model=2)), tmp_path / name
    )
  losses = [
    [r['loss'] for r in records(tmp_path / name) if 'loss' in r] for name in ('whole', 'parts')
  ]
  assert losses[1] == pytest.approx(losses[0], rel=1e-3)
  wrong = dataclasses.replace(parts, mesh=mesh_config.MeshConfig(data=8))
  message = 'training.batch_size=8 is not divisible by the 8 devices of mesh.data=8 x mesh.fsdp=1'
  with pytest.raises(errors.BadInput, match=f'{message} x training.accumulation.parts=2: use 16'):
    loop.train(wrong, tmp_path / 'wrong')
