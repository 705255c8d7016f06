"""What the text of a key or flag stands for: runs, published and pretrained models."""

import pathlib

import pytest

import ngrammer_jax
from ngrammer_jax import errors
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data import vocabularies
from ngrammer_jax.runs import model_source
from ngrammer_jax.runs.published_run import PublishedRun
from ngrammer_jax.training import init_from
from tests import published_folders
from tests.checks import bad_input
from tests.loops import each


@pytest.fixture
def published(tmp_path):
  folder = tmp_path / 'published'
  published_folders.write(folder)
  return folder


@pytest.fixture
def run(tiny, tmp_path):
  """A run without a checkpoint."""
  folder = tmp_path / 'run'
  folder.mkdir()
  workdirs.write(folder, tiny(), vocabularies.ByteVocabulary(), 'hash')
  return folder


@each('prefix', ['', 'hf:', 'pretrained:'])
def test_a_published_model_is_found_with_any_prefix(published, prefix):
  source = model_source.resolve(f'{prefix}{published}', 'init_from')
  assert source.is_published and source.path == published
  assert isinstance(source.open(), PublishedRun)
  assert source.config_values()['model']['width'] == 16


def test_a_training_starts_from_a_published_model_at_a_path(tiny, published, tmp_path):
  spec = f'pretrained:{published}'
  with pytest.raises(errors.BadInput, match=f'^init_from={spec} was trained with model'):
    init_from.Start(tiny(init_from=spec), tmp_path / 'new')


@each('prefix', ['', 'hf:'])
def test_a_run_is_found_with_its_step(run, prefix):
  opened = model_source.resolve(f'{prefix}{run}', '--baseline').open(7)
  assert (opened.workdir, opened.step, opened.is_exported) == (run, 7, False)


def test_a_run_is_no_pretrained_model(run):
  message = (
    f'{run} is a run directory, not a pretrained model: use --workdir={run} to open it, or '
    f'init_from={run} to start from it'
  )
  with bad_input(message):
    ngrammer_jax.load_pretrained(run)
  with bad_input(f'init_from=pretrained:{run}: {message}'):
    model_source.resolve(f'pretrained:{run}', 'init_from')


def test_a_path_has_no_prefix():
  """A folder may be called so."""
  assert model_source.ModelSource.from_path('hf:x').path == pathlib.Path('hf:x')
  with bad_input('--workdir=hf:x does not exist; expected the folder of a training'):
    ngrammer_jax.load_run('hf:x')


def test_an_empty_folder_is_no_pretrained_model(tmp_path):
  with bad_input(f'{tmp_path} has no config.json: expected the folder of a published model'):
    ngrammer_jax.load_pretrained(tmp_path)


def test_messages_name_the_key(tiny, run, tmp_path):
  missing = tmp_path / 'none'
  with bad_input(f'--baseline={missing}: no such folder; expected the workdir of a run'):
    model_source.resolve(str(missing), '--baseline')
  assert not model_source.ModelSource.from_path(missing).is_published  # a new workdir
  too_long = 'a' * 300
  with bad_input(
    f'init_from={too_long}: {too_long} cannot be used: File name too long; use another path'
  ):
    model_source.resolve(too_long, 'init_from')
  with bad_input(
    'init_from=s3://b/run: s3://b/run is neither a local path nor gs://BUCKET/FOLDER: mount the '
    'bucket and pass the folder'
  ):
    model_source.resolve('s3://b/run', 'init_from')
  source = model_source.resolve(str(run), 'init_from')
  assert source.open().config == tiny()
  (run / 'config.json').unlink()
  with bad_input(
    f'init_from={run}: it holds no config.json; expected a run directory or a published model'
  ):
    source.open()
