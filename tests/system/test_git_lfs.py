"""Pointers of Git LFS are refused by every reader of a large file."""

import io
import pathlib
import types

import pytest

from ngrammer_jax.data import prompts, vocabularies
from ngrammer_jax.data.files import file_formats, text_files
from ngrammer_jax.data.vocabularies import published
from ngrammer_jax.interop import safetensors
from ngrammer_jax.interop.huggingface import published_model
from ngrammer_jax.runs import published_run
from ngrammer_jax.system import json_files
from ngrammer_jax.tasks.superglue import reader
from tests import published_folders
from tests.checks import bad_input

POINTER = (
  b'version https://git-lfs.github.com/spec/v1\noid sha256:'
  + b'4d7a2146' * 8
  + b'\nsize 269060552\n'
)


def refused(path):
  return bad_input(
    f'{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository'
  )


READERS = {
  'a.txt': file_formats.identify,
  'a.jsonl': file_formats.identify,
  'a.jsonl.zst': file_formats.identify,
  'a.parquet': file_formats.identify,
  'a.arrow': file_formats.identify,
  'text8.zip': lambda path: next(text_files.read_bytes(path)),
  'prompts.txt': prompts.read,
  'a.gguf': published_model.open,
  'file': published_model.open,
  'b.gguf': lambda path: published.read(path, None),
  'exported.safetensors': safetensors.load,
  'manifest.json': json_files.read,
  'CB/train.jsonl': lambda path: reader.read(path.parents[1], 'cb', 'train'),
  'BoolQ.zip': lambda path: reader.read(path.parent, 'boolq', 'train'),
}


@pytest.mark.parametrize('content', [POINTER, POINTER.replace(b'\n', b'\r\n')])
@pytest.mark.parametrize('name', READERS)
def test_files(tmp_path, name, content):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)
  with refused(path):
    READERS[name](path)


@pytest.mark.parametrize('kind', ['sentencepiece', 'tokenizer'])
def test_a_vocabulary(tmp_path, kind):
  path = tmp_path / 'file'
  path.write_bytes(POINTER)
  with bad_input(
    f'data.vocabulary_path={path}: {path} is a Git LFS pointer, not the file itself: run '
    f'`git lfs pull` in its repository'
  ):
    vocabularies.read(kind, path)
  stored = tmp_path / vocabularies.KINDS[kind].file
  (tmp_path / 'vocabulary.json').write_text(f'{{"kind": "{kind}"}}')
  stored.write_bytes(POINTER)
  with refused(stored):
    vocabularies.load(tmp_path)


def test_standard_input(monkeypatch):
  monkeypatch.setattr('sys.stdin', types.SimpleNamespace(buffer=io.BytesIO(POINTER)))
  with refused('--prompts=-'):
    prompts.read(pathlib.Path('-'))


def test_a_published_folder(tmp_path):
  """Also one file of several; all are refused when the folder is opened."""
  published_folders.write(tmp_path)
  published_folders.write_settings(tmp_path)
  published_folders.split(tmp_path)
  names = [path.name for path in tmp_path.iterdir()] + ['tokenizer.model', 'merges.txt']
  assert 'model-00002-of-00002.safetensors' in names and 'model.safetensors.index.json' in names
  for name in names:
    path = tmp_path / name
    intact = path.read_bytes() if path.exists() else None
    path.write_bytes(POINTER)
    with refused(path):
      published_run.open_run(tmp_path).origin  # noqa: B018
    path.unlink()
    if intact is not None:
      path.write_bytes(intact)
