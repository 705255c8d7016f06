"""Training on a corpus that is read as it is needed."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest

from ngrammer_jax import errors, mesh_config, runs
from ngrammer_jax.data import packing, token_cache
from ngrammer_jax.training import loop, manifest, material


@pytest.fixture
def config(tiny, tmp_path):
  """Three shards of train for eight rows, one of validation."""
  words = np.random.default_rng(0).choice(['the ', 'union ', 'of ', 'states\n'], (61, 40))
  texts = [json.dumps({'text': ''.join(row)}) + '\n' for row in words]
  (tmp_path / 'shards').mkdir()
  for shard in range(3):
    (tmp_path / 'shards' / f'train-{shard}.jsonl').write_text(''.join(texts[shard:60:3]))
  (tmp_path / 'shards' / 'valid.jsonl').write_text(texts[-1])
  data = token_cache.DataConfig('shards', str(tmp_path / 'shards'), 'bytes')
  return dataclasses.replace(tiny(training={'keep_checkpoints': 9}), data=data)


def train(config, workdir):
  return loop.train(config, workdir, functools.partial(material.Corpus, workdir=workdir))


@pytest.mark.slow
def test_a_resume_is_exact_on_other_devices_too(config, tmp_path, monkeypatch):
  monkeypatch.setattr(packing, 'EVERY', 3)
  whole = tmp_path / 'whole'
  assert train(config, whole)
  assert len(list((whole / 'places').glob('*/*.jsonl'))) == 8  # a row on each device

  def resumed(name, mesh=config.mesh, places=True):
    shutil.copytree(whole, tmp_path / name)
    shutil.rmtree(tmp_path / name / 'checkpoints' / '12')
    if not places:  # then all is read again
      shutil.rmtree(tmp_path / name / 'places')
    assert train(dataclasses.replace(config, mesh=mesh), tmp_path / name)
    return manifest.verify(tmp_path / name / 'checkpoints' / '12').leaves

  leaves = manifest.verify(whole / 'checkpoints' / '12').leaves
  assert resumed('alike') == resumed('without_places', places=False) == leaves
  resumed('elsewhere', mesh=mesh_config.MeshConfig(data=2, model=4))
  runs_of = (runs.load_run(path) for path in (whole, tmp_path / 'elsewhere'))
  nats = [run.evaluate('validation')['nll_nats_per_token'] for run in runs_of]
  assert nats[0] == pytest.approx(nats[1], abs=1e-5)


def test_splits_that_are_no_text_to_evaluate(config, tmp_path):
  assert train(config, tmp_path / 'run')
  for split in ('train', 'test'):
    message = f"--split={split}: data.corpus='shards' has no such split to evaluate, but validation"
    with pytest.raises(errors.BadInput, match=message):
      runs.load_run(tmp_path / 'run').evaluate(split)


def test_a_resume_on_other_shards(config, tmp_path):
  assert train(config, tmp_path / 'run')
  with (tmp_path / 'shards' / 'train-1.jsonl').open('a') as file:
    file.write(json.dumps({'text': 'more'}))
  with pytest.raises(errors.BadInput, match='was started on another text'):
    train(config, tmp_path / 'run')
