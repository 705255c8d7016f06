"""One process to a workdir."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import types

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import mesh as mesh_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.system import files
from tests import tokenizer_files
from tests.checks import bad_input

HOLD = """
import fcntl, sys, time
with open(sys.argv[1], 'w') as file:
  fcntl.flock(file, fcntl.LOCK_EX)
  print('process of the test', file=file, flush=True)
  print('held', flush=True)
  time.sleep(600)
"""


@contextlib.contextmanager
def locked(workdir):
  with (workdir / 'lock').open('a+') as file:
    workdirs._lock(workdir, file)
    yield


@pytest.fixture
def given():
  """What a run is trained on, as far as a workdir knows it."""
  save = lambda workdir: (workdir / 'vocabulary.json').write_text('{}')
  return types.SimpleNamespace(content_hash='abc', vocabulary=types.SimpleNamespace(save=save))


def occupy(workdir, config, given):
  with workdirs.lock_workdir(workdir, config, given.vocabulary, given.content_hash):
    pass


def test_a_second_process_is_refused_until_the_first_is_gone(tiny, tmp_path, given):
  run = tmp_path / 'run'
  config = tiny()
  occupy(run, config, given)
  holder = subprocess.Popen([sys.executable, '-c', HOLD, run / 'lock'], stdout=subprocess.PIPE)
  try:
    assert holder.stdout.readline() == b'held\n'
    for _ in range(2):  # whoever is refused leaves the name of the holder
      with bad_input(
        f'--workdir={run} is in use by process of the test: '
        'wait for it, stop it, or use another workdir'
      ):
        occupy(run, config, given)
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
  with locked(run):
    assert (run / 'lock').read_text() == f'process {os.getpid()} on {socket.gethostname()}\n'
    with bad_input(
      f'--workdir={run} is in use by process {os.getpid()} on {socket.gethostname()}: '
      'wait for it, stop it, or use another workdir'
    ):
      occupy(run, config, given)
  occupy(run, config, given)


@pytest.mark.parametrize('writes', [0, 1])
def test_a_start_that_was_killed_can_be_repeated(tiny, tmp_path, monkeypatch, given, writes):
  """Before each of the files of a workdir; the last one, config.json, makes it a run."""
  config, done, write = tiny(), [], files.write

  def dies(path, content):
    if len(done) == writes:
      raise KeyboardInterrupt
    done.append(path)
    write(path, content)

  with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
    patch.setattr(files, 'write', dies)
    occupy(tmp_path / 'run', config, given)
  assert not (tmp_path / 'run' / 'config.json').exists()
  workdirs.check_workdir(tmp_path / 'run', tiny(model={'width': 32}))  # it is not begun
  occupy(tmp_path / 'run', config, given)
  assert workdirs.load_config(tmp_path / 'run') == config
  workdirs.check_text(tmp_path / 'run', config, 'abc')
  workdirs.check_text(tmp_path / 'run', config, 'abd')  # nothing was learned from the text
  workdirs.check_workdir(tmp_path / 'run', tiny(model={'width': 32}))
  (tmp_path / 'run' / 'checkpoints' / '4').mkdir(parents=True)
  workdirs.check_text(tmp_path / 'run', config, 'abc-def')  # `run` is of an earlier version
  (tmp_path / 'run' / 'corpus.json').write_text('{"content_hash": "abc-def"}')
  for other in ('abd', 'abc-deg'):
    with pytest.raises(errors.BadInput, match='was started on another text'):
      workdirs.check_text(tmp_path / 'run', config, other)


def test_another_tokenizer_is_named(tiny, tmp_path):
  config, run, path = tiny(), tmp_path / 'run', tmp_path / 'tokenizer.json'
  data = dataclasses.replace(config.data, vocabulary='tokenizer', vocabulary_path=str(path))
  config = dataclasses.replace(config, data=data)
  path.write_bytes(tokenizer_files.byte_level(size=270))
  vocabulary = vocabularies.read('tokenizer', path)
  occupy(run, config, types.SimpleNamespace(content_hash='abc', vocabulary=vocabulary))
  (run / 'checkpoints' / '4').mkdir(parents=True)
  with bad_input(
    f'--workdir={run} was started on another text: data.path={data.path} has the content hash abd, '
    f'expected abc; use that text, or another workdir'
  ):
    workdirs.check_text(run, config, 'abd')
  path.write_bytes(tokenizer_files.byte_level(size=280))
  with pytest.raises(
    errors.BadInput, match=f'data.vocabulary_path={path}: the tokenizer has 280 ids'
  ):
    workdirs.check_text(run, config, 'abd')


def with_checkpoint(workdir, config):
  """Makes a workdir of a run that has saved a step."""
  (workdir / 'checkpoints' / '4').mkdir(parents=True)
  experiment.save(config, workdir / 'config.json')


NGRAM = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4)
NGRAM_TEXT = '(clusters=8, vocabulary_size=64, dim=4)'  # without its defaults


@pytest.mark.parametrize(
  'before, now, message',
  [
    ({}, {'model': {'ngram': dataclasses.replace(NGRAM, dim=2)}}, 'model.ngram.dim=4, now it is 2'),
    ({}, {'model': {'ngram': None}}, f'model.ngram={NGRAM_TEXT}, now it is None'),
    ({'model': {'ngram': None}}, {}, f'model.ngram=None, now it is {NGRAM_TEXT}'),
    (
      {'model': {'ngram': None}},
      {'model': {'ngram': model_config.NGramConfig()}},
      'model.ngram=None, now it is (defaults)',
    ),
    ({}, {'optimizer': {'clip_norm': None}}, 'optimizer.clip_norm=1.0, now it is None'),
    ({'optimizer': {'clip_norm': None}}, {}, 'optimizer.clip_norm=None, now it is 1.0'),
    ({}, {'seed': 1}, 'seed=0, now it is 1'),
    (
      {},
      {'training': {'steps': 16}},
      "training.steps=12, now it is 16 (schedule 'cosine' depends on the number of steps)",
    ),
    (
      {},
      {'optimizer': {'drop': experiment.DropConfig(4, 0.5)}},
      'optimizer.drop=None, now it is (steps=4, fraction=0.5)',
    ),
    (
      {'optimizer': {'schedule': 'constant', 'drop': experiment.DropConfig(4, 0.5)}},
      {
        'optimizer': {'schedule': 'constant', 'drop': experiment.DropConfig(4, 0.5)},
        'training': {'steps': 16},
      },
      'training.steps=12, now it is 16 (optimizer.drop depends on the number of steps)',
    ),
    (
      {'optimizer': {'schedule': 'constant'}},
      {'optimizer': {'schedule': 'constant'}, 'training': {'steps': 8}},
      'training.steps=12, now it is 8',
    ),
  ],
)
def test_what_changes_a_run_is_refused_and_named(tiny, tmp_path, before, now, message):
  with_checkpoint(tmp_path, tiny(**before))
  remedy = 'use the old value, or another workdir'
  if message.startswith(('optimizer.', 'training.', 'seed')):
    remedy += f', with --config.init_from={tmp_path} to start from the parameters of this run'
  with bad_input(f'--workdir={tmp_path} was started with {message}: {remedy}'):
    workdirs.check_workdir(tmp_path, tiny(**now))


WSD = {'schedule': 'wsd', 'decay_steps': 6}  # of 12 steps: the decay begins at step 6


@pytest.mark.parametrize(
  'steps, now',
  [
    (16, WSD),
    (11, WSD | {'decay_from': 4, 'decay_steps': 7}),
    (12, WSD | {'decay_from': 12}),
    (12, WSD | {'decay_shape': '1-sqrt', 'final_fraction': 0.0}),
  ],
)
def test_a_decay_that_has_not_begun_may_change(tiny, tmp_path, steps, now):
  with_checkpoint(tmp_path, tiny(optimizer=WSD))
  config = tiny(optimizer=now, training={'steps': steps})
  workdirs.check_workdir(tmp_path, config)
  (tmp_path / 'checkpoints' / '8').mkdir()
  with pytest.raises(errors.BadInput, match='step 8, after its decay began at step 6'):
    workdirs.check_workdir(tmp_path, config)


def test_a_decay_of_trained_steps_may_not_change(tiny, tmp_path):
  with_checkpoint(tmp_path, tiny(optimizer=WSD))
  with bad_input(
    f'--workdir={tmp_path} has a checkpoint of step 4, and the decay would begin at step 3: use '
    'optimizer.decay_from=4 or later, or remove the checkpoints after that step'
  ):
    workdirs.check_workdir(tmp_path, tiny(optimizer=WSD | {'decay_from': 3}))
  (tmp_path / 'checkpoints' / '8').mkdir()
  with bad_input(
    f'--workdir={tmp_path} has a checkpoint of step 8, after its decay began at step 6, so '
    'training.steps and the decay cannot change: remove the checkpoints after that step, or use '
    f'another workdir with --config.init_from={tmp_path}'
  ):
    workdirs.check_workdir(tmp_path, tiny(optimizer=WSD, training={'steps': 16}))
  workdirs.check_workdir(tmp_path, tiny(optimizer=WSD))


def test_what_changes_no_number_may_differ(tiny, tmp_path):
  with_checkpoint(tmp_path, tiny(optimizer={'schedule': 'constant'}))
  config = tiny(
    model={'scan_layers': False, 'remat': True, 'vocabulary_chunk': 8, 'kernel': 'xla'},
    optimizer={'schedule': 'constant'},
    training={
      'steps': 16,
      'log_every': 4,
      'evaluate_every': 0,
      'keep_checkpoints': 1,
      'segments_per_call': 4,
    },
    mesh=mesh_config.MeshConfig(model=2),
    evaluation=evaluation_config.EvaluationConfig(streams=2),
  )
  data = dataclasses.replace(config.data, path='elsewhere', cache_dir='there')
  config = dataclasses.replace(config, data=data)
  workdirs.check_workdir(tmp_path, config)
  with pytest.raises(errors.BadInput, match='was started with seed=0, now it is 1'):
    workdirs.check_workdir(tmp_path, dataclasses.replace(config, seed=1))


def test_a_changed_key_is_logged_on_resume(tiny, tmp_path, caplog, given):
  caplog.set_level(logging.INFO)
  run = tmp_path / 'run'
  started = tiny(optimizer={'schedule': 'constant'})
  occupy(run, started, given)
  changed = tiny(
    optimizer={'schedule': 'constant'},
    training={'log_every': 4},
    mesh=mesh_config.MeshConfig(model=2),
  )
  occupy(run, changed, given)  # without a checkpoint, the run starts anew
  assert caplog.messages == []
  (run / 'checkpoints' / '4').mkdir(parents=True)
  occupy(run, started, given)
  log_every = started.training.log_every
  assert caplog.messages == [
    f'training.log_every was 4, now it is {log_every}',
    'mesh.model was 2, now it is 1',
  ]
  caplog.clear()
  occupy(run, started, given)
  assert caplog.messages == []
  longer = {'steps': 16}
  resumed = tiny(optimizer={'schedule': 'constant'}, training=longer)
  workdirs.check_workdir(run, resumed)  # before the text is prepared
  occupy(run, resumed, given)
  assert caplog.messages == ['training.steps was 12, now it is 16']
  caplog.clear()
  named_loss = longer | {'loss': 'next_token'}  # earlier versions stored no name
  occupy(run, tiny(optimizer={'schedule': 'constant'}, training=named_loss), given)
  assert caplog.messages == []


@pytest.mark.parametrize(
  'stored, now, expected',
  [
    (True, None, True),
    (False, None, False),
    (True, False, False),
    (None, 2, 2),
    (None, None, None),
  ],
)
def test_a_resumed_run_keeps_its_scan_of_layers(tiny, tmp_path, stored, now, expected):
  config = tiny(model={'scan_layers': now})
  assert workdirs.with_kept_values(tmp_path, config) == config  # a new run
  with_checkpoint(tmp_path, tiny(model={'scan_layers': stored}))
  resumed = workdirs.with_kept_values(tmp_path, config)
  assert resumed == tiny(model={'scan_layers': expected})
  assert resumed.model.scan_layers is expected


@pytest.mark.parametrize(
  'command, expected', [({}, 'full'), ({'remat': 'auto'}, 'full'), ({'remat': 'none'}, 'none')]
)
def test_auto_keeps_what_a_run_rematerialises(tiny, tmp_path, caplog, command, expected):
  """Also if the command names it: only another value replaces the choice of the run."""
  caplog.set_level(logging.INFO)
  with_checkpoint(tmp_path, tiny(model={'remat': 'full'}))
  resumed = workdirs.with_kept_values(tmp_path, tiny(model=command))
  assert resumed.model.remat == expected
  kept = 'model.remat=full, as the run was started; to change it, set another value than auto'
  assert caplog.messages == ([kept] if expected == 'full' else [])
  workdirs.check_workdir(tmp_path, resumed)


def earlier_run(workdir, config):
  """A run with a checkpoint, of a version without `weight_decay_on`."""
  with_checkpoint(workdir, config)
  path = workdir / 'config.json'
  values = json.loads(path.read_text())
  del values['optimizer']['weight_decay_on']
  path.write_text(json.dumps(values))


def test_the_weight_decay_of_an_earlier_version_is_on_all(tiny, tmp_path, caplog):
  caplog.set_level(logging.INFO)
  command = tiny(optimizer={'weight_decay': 0.1})
  assert command.optimizer.weight_decay_on is None
  earlier_run(tmp_path, command)
  assert workdirs.load_config(tmp_path).optimizer.weight_decay_on == 'all'
  resumed = workdirs.with_kept_values(tmp_path, command)
  assert resumed == tiny(optimizer={'weight_decay': 0.1, 'weight_decay_on': 'all'})
  assert caplog.messages == ['optimizer.weight_decay_on=all, as the run was started']
  workdirs.check_workdir(tmp_path, resumed)
  for on in ('matrices', 'matrices_and_embeddings'):
    other = tiny(optimizer={'weight_decay': 0.1, 'weight_decay_on': on})
    assert workdirs.with_kept_values(tmp_path, other) == other
    with pytest.raises(errors.BadInput, match=f"weight_decay_on='all', now it is '{on}'"):
      workdirs.check_workdir(tmp_path, other)


@pytest.mark.parametrize('stored', [None, 'matrices', 'matrices_and_embeddings', 'all'])
def test_a_resumed_run_decays_what_it_did(tiny, tmp_path, stored):
  with_checkpoint(tmp_path, tiny(optimizer={'weight_decay_on': stored}))
  for command in (tiny(), tiny(optimizer={'weight_decay_on': stored})):
    resumed = workdirs.with_kept_values(tmp_path, command)
    assert resumed.optimizer.weight_decay_on == stored
    workdirs.check_workdir(tmp_path, resumed)


def test_a_default_is_the_same_as_its_value(tiny, tmp_path):
  with_checkpoint(tmp_path, tiny())
  workdirs.check_workdir(tmp_path, tiny(optimizer={'weight_decay_on': 'matrices'}))
  with pytest.raises(errors.BadInput, match="weight_decay_on=None, now it is 'all'"):
    workdirs.check_workdir(tmp_path, tiny(optimizer={'weight_decay_on': 'all'}))


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
  def fails(file, operation):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(fcntl, 'flock', fails)
  with locked(tmp_path):
    pass
  assert caplog.messages == [
    f'{tmp_path} cannot be locked: No locks available; do not start a second process'
  ]


def test_a_run_of_another_version(tiny, tmp_path):
  path = tmp_path / 'config.json'
  experiment.save(tiny(), path)
  path.write_text(path.read_text().replace('"epsilon"', '"epsilom"', 1))
  message = 'has a config.json that this version of ngrammer_jax cannot read: unknown config key'
  with pytest.raises(errors.BadInput, match=message):
    workdirs.load_config(tmp_path)


def test_a_record_of_the_text_without_a_hash_is_damaged(tiny, tmp_path):
  (tmp_path / 'checkpoints' / '4').mkdir(parents=True)
  for content, problem in (
    ('{}', "no 'content_hash'"),
    ('{"content_hash": 5}', 'content_hash is 5, expected text or null'),
    ('{"content_hash": ["abc"]}', "content_hash is ['abc'], expected text or null"),
  ):
    (tmp_path / 'corpus.json').write_text(content)
    with bad_input(
      f'{tmp_path}/corpus.json is damaged: {problem}; restore it from a backup, or use another '
      f'workdir'
    ):
      workdirs.check_text(tmp_path, tiny(), 'abc')


def test_an_earlier_start_from_a_published_model_is_forgotten(tiny, tmp_path, given):
  workdir = tmp_path / 'run'
  occupy(workdir, tiny(), given)
  for kept in (False, True):
    workdirs.write_origin(workdir, {'positions': 8})
    if kept:
      (workdir / 'checkpoints' / '4').mkdir(parents=True)
    occupy(workdir, tiny(), given)
    assert workdirs.read_origin(workdir) == ({'positions': 8} if kept else {})
