"""Compiled programs are cached, and never in a folder that another user can write to."""

import argparse
import os
import stat
import time

import jax
import pytest

from ngrammer_jax.system import compilation_cache
from tests.checks import bad_input

SETTINGS = (
  'jax_compilation_cache_dir',
  'jax_enable_compilation_cache',
  'jax_persistent_cache_min_compile_time_secs',
)


@pytest.fixture
def setting(cache):
  """Returns JAX's cache folder, which nothing has set yet; the user's cache is `cache`."""
  original = {name: getattr(jax.config, name) for name in SETTINGS}
  jax.config.update('jax_compilation_cache_dir', None)
  yield lambda: jax.config.jax_compilation_cache_dir
  for name, value in original.items():
    jax.config.update(name, value)


def parse(*argv):
  parser = argparse.ArgumentParser()
  compilation_cache.add_flag(parser)
  return parser.parse_args(argv).compilation_cache


def programs(cache):
  """The default folder."""
  return cache / 'programs' / compilation_cache._processor()


def test_the_default_is_a_private_folder_of_the_user(cache, setting, caplog):
  with caplog.at_level('DEBUG'):
    compilation_cache.enable(parse())
  assert setting() == str(programs(cache))
  assert f'compilation cache: {programs(cache)} (--compilation_cache=None: none)' in caplog.text
  for folder in (cache, cache / 'programs', programs(cache)):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_settings_of_jax_win(tmp_path, cache, setting):
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'own'))
  compilation_cache.enable(parse())
  assert setting() == str(tmp_path / 'own') and not cache.exists()
  compilation_cache.enable(parse(f'--compilation_cache={tmp_path}/named'))
  assert setting() == str(tmp_path / 'named')


def test_none_disables_it(cache, setting):
  compilation_cache.enable(parse('--compilation_cache=None'))
  assert setting() is None and not cache.exists()


def test_disabled_in_jax_it_stays_disabled(cache, setting):
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.enable(parse())
  assert setting() is None and not cache.exists()


@pytest.mark.parametrize('depth', range(3))
@pytest.mark.parametrize('mode', [0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(cache, setting, caplog, depth, mode):
  compilation_cache._make_default()
  folder = [cache, cache / 'programs', programs(cache)][depth]
  folder.chmod(mode)
  compilation_cache.enable(parse())
  assert setting() is None
  assert f'no compilation cache: {folder} belongs to another user, or others can' in caplog.text


def test_a_folder_of_another_user_is_not_used(cache, setting, monkeypatch, caplog):
  monkeypatch.setattr(os, 'getuid', lambda: cache.parent.stat().st_uid + 1)
  compilation_cache.enable(parse())
  assert setting() is None and 'belongs to another user' in caplog.text


def test_a_folder_that_cannot_be_created_is_not_needed(cache, setting, caplog):
  cache.touch()
  compilation_cache.enable(parse())
  assert setting() is None and 'no compilation cache: [Errno 17] File exists' in caplog.text


def test_old_programs_are_deleted(cache, setting):
  compilation_cache._make_default()
  old, new = (programs(cache) / f'jit_{name}-cache' for name in ('old', 'new'))
  for file, days in ((old, 31), (new, 29)):
    file.touch()
    os.utime(file, (time.time() - days * 86_400,) * 2)
  compilation_cache.enable(parse())
  assert new.exists() and not old.exists()


def test_a_file_is_no_folder(tmp_path, setting):
  (tmp_path / 'file').touch()
  folder = tmp_path / 'file' / 'programs'
  with bad_input(f'--compilation_cache={folder}: {tmp_path}/file is a file, expected a folder'):
    compilation_cache.enable(parse(f'--compilation_cache={folder}'))
  assert setting() is None
