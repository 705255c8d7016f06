"""Files that are whole or not there."""

import os
import pathlib

import pytest

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, files, json_files, storage


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / 'config.json'
  files.write(path, 'old, and longer')
  files.write(path, 'new')
  assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]

  def full(descriptor):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch, pytest.raises(OSError, match='No space left'):
    patch.setattr(os, 'fsync', full)
    files.write(path, 'half')
  assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]
  with monkeypatch.context() as patch:  # two processes at the same time
    inner = iter([lambda: files.write(path, 'other'), lambda: None])
    patch.setattr(os, 'fsync', lambda descriptor: next(inner)())
    files.write(path, 'new')
  assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]
  files.write(path, b'again')
  assert path.read_bytes() == b'again' and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
  'content, reason',
  [
    (None, 'No such file or directory'),
    (b'', 'Expecting value: line 1 column 1 (char 0)'),
    (b'{"step": 1', "Expecting ',' delimiter: line 1 column 11 (char 10)"),
    (
      b'{"step": "\xff"}',
      "'utf-8' codec can't decode byte 0xff in position 10: invalid start byte",
    ),
    (
      b'[' * 100_000,
      'maximum recursion depth exceeded while decoding a JSON array from a unicode st',
    ),
    (b'[]', 'expected an object {...}'),
    (b'{}', "no 'step'"),
  ],
)
def test_any_damage_is_one_sentence_with_the_name(tmp_path, content, reason):
  path = tmp_path / 'record.json'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(errors.BadInput) as caught, file_errors.translate_damage(path, 'delete it'):
    _ = json_files.read(path)['step']
  message = str(caught.value)
  assert message.startswith(f'{path} is damaged: {reason}') and message.endswith('; delete it')


@pytest.mark.parametrize(
  'error', [errors.BadInput('of the user'), OSError(24, 'Too many open files')]
)
def test_what_says_nothing_about_a_file_is_no_damage(error):
  with (
    pytest.raises(type(error)) as caught,
    file_errors.translate_damage('record.json', 'delete it'),
  ):
    raise error
  assert caught.value is error


def test_the_home_folder_is_expanded_as_a_shell_does_it():
  assert storage.path('~/runs/a') == pathlib.Path.home() / 'runs' / 'a'
  assert storage.path('runs/~a') == pathlib.Path('runs/~a')


def test_orbax_finds_only_what_is_in_the_folder(tmp_path):
  for name in ('a*', 'ab'):
    (tmp_path / name / 'part_0').mkdir(parents=True)
  folder = storage.orbax_path(tmp_path) / 'a*'
  assert [str(path / 'x') for path in folder.glob('part_*')] == [f'{tmp_path}/a*/part_0/x']
