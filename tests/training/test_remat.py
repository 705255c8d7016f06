"""`model.remat=auto`: as little as the memory of a device needs."""

import logging
import shutil
import types

import jax
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, memory_limits
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.training import capacity, loop, programs
from tests.checks import mesh_of
from tests.training.helpers import arrays

DATA = {'corpus': 'text', 'path': 'x', 'vocabulary': 'bytes'}
SMALL = {'layers': 1, 'width': 16, 'heads': 2, 'feed_forward_width': 16}


def set_memory(monkeypatch, size):
  """Of a device that is not the processor."""
  limit = memory_limits.MemoryLimit('a device (GPU)', size, 1)
  monkeypatch.setattr(memory_limits, 'device_memory', lambda mesh: limit)


@pytest.fixture
def compile_with(monkeypatch):
  """Compiles nothing; peaks, or the text of an error, are given by value of `model.remat`."""

  def compile_with(peaks, config):
    tried = []
    run = programs.Programs(experiment.resolve(config | {'data': DATA}), 257, mesh_of(1))

    def lower_or_fail():
      remat = run._step.model.config.remat
      tried.append(remat)
      if isinstance(peaks[remat], str):
        raise jax.errors.JaxRuntimeError(peaks[remat])
      return peaks[remat]

    lowered = types.SimpleNamespace(compile=lower_or_fail)
    monkeypatch.setattr(run, 'trace', lambda *_: types.SimpleNamespace(lower=lambda: lowered))
    monkeypatch.setattr(capacity, 'peak_bytes', lambda peak: peak)
    monkeypatch.setattr(capacity, 'warn_of_temporaries', lambda *_: None)
    run.compile(None, None)
    return run.remat, tried

  return compile_with


def test_the_first_that_leaves_memory_is_chosen(monkeypatch, compile_with):
  """3 % of it; and the last one if none does. A compiler may say itself that one does not fit."""
  set_memory(monkeypatch, 1000)
  everything = ['none', 'minimal', 'full']
  for peaks, tried in (
    ((970, 500, 300), ['none']),
    ((971, 970, 300), ['none', 'minimal']),
    ((2000, 971, 300), everything),
    ((2000, 1500, 1200), everything),
    (('RESOURCE_EXHAUSTED: Ran out of memory', 500, 300), ['none', 'minimal']),
  ):
    by_remat = dict(zip(everything, peaks, strict=True))
    assert compile_with(by_remat, {'model': SMALL}) == (tried[-1], tried)


def test_another_error_of_the_compiler_is_raised(monkeypatch, compile_with):
  set_memory(monkeypatch, 1000)
  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
    compile_with({'none': 'INTERNAL: no'}, {'model': SMALL})


def test_nothing_is_chosen_where_no_memory_is_told(monkeypatch, compile_with):
  """On a processor, and on a device that does not say; nor for what a config sets."""
  peaks = dict.fromkeys(('auto', 'none', 'minimal', 'full'), 10**9)
  assert compile_with(peaks, {'model': SMALL}) == ('none', ['none'])
  set_memory(monkeypatch, None)
  assert compile_with(peaks, {'model': SMALL}) == ('none', ['none'])
  set_memory(monkeypatch, 1000)
  assert compile_with(peaks, {'model': SMALL | {'remat': 'minimal'}}) == ('minimal', ['minimal'])
  lstm = {'width': 16, 'tie_embeddings': False, 'recurrent': {}}
  assert compile_with(peaks, {'model': lstm}) == ('auto', ['auto'])


def test_recurrent_configs_of_earlier_versions_are_read():
  """Their default was `none`; other values are only for Transformers."""
  lstm = {'width': 16, 'tie_embeddings': False, 'recurrent': {}}
  config = experiment.resolve({'model': lstm | {'remat': 'none'}, 'data': DATA})
  assert programs.Programs(config, 257, mesh_of(1)).remat == 'none'
  with pytest.raises(errors.BadInput, match='^model.remat: only for Transformers'):
    experiment.resolve({'model': lstm | {'remat': 'minimal'}, 'data': DATA})


def test_the_choice_is_stored_with_the_run(tiny, one_device, tmp_path, monkeypatch):
  set_memory(monkeypatch, 10**9)
  monkeypatch.setattr(capacity, 'fits', lambda compiled, memory: False)
  loop.train(tiny({'ngram': None}, training={'steps': 4}), tmp_path / 'run')
  assert workdirs.load_config(tmp_path / 'run').model.remat == 'full'


@pytest.mark.full
def test_a_resumed_run_keeps_what_was_chosen(tiny, one_device, tmp_path, monkeypatch, caplog):
  """Its bits are those of a run that was given this value, also where there is more memory."""
  caplog.set_level(logging.INFO)
  config = tiny({'ngram': None}, training={'steps': 8})
  set_memory(monkeypatch, 10**9)
  monkeypatch.setattr(capacity, 'fits', lambda compiled, memory: False)
  loop.train(config, tmp_path / 'run')
  assert 'model.remat=minimal would need' in caplog.text
  monkeypatch.undo()
  caplog.clear()
  shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '8')
  loop.train(config, tmp_path / 'run')
  assert 'model.remat=full, as the run was started' in caplog.text
  assert workdirs.load_config(tmp_path / 'run').model.remat == 'full'
  given = tiny({'ngram': None, 'remat': 'full'}, training={'steps': 8})
  loop.train(given, tmp_path / 'given')
  assert arrays(tmp_path / 'run') == arrays(tmp_path / 'given')
