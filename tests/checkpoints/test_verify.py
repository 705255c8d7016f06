"""All of a checkpoint is read without its model, and what is found is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.checkpoints import checksums, manifest, reader
from ngrammer_jax.checkpoints import writer as checkpoint_writer
from tests.checkpoints.test_checkpoints import abstract, same, save, state, workdir

__all__ = ['workdir']  # a fixture


def test_a_good_checkpoint_of_any_precision(tmp_path):
  with jax.enable_x64(True):
    doubles = {'a': jnp.asarray(np.random.default_rng(0).normal(size=9)), 'b': jnp.int8(3)}
    with checkpoint_writer.CheckpointWriter(tmp_path) as writer:
      writer.save(4, doubles)
    expected = checksums.checksums(doubles)
  saved = reader.verify(tmp_path, 4)
  assert {name: leaf[2] for name, leaf in saved.leaves.items()} == expected


def test_an_array_that_reads_otherwise_than_it_was_in_memory(workdir):
  """Every file as it was written, but the manifest is of other arrays."""
  folder = workdir / 'checkpoints' / '8'
  saved = manifest.read(folder)
  dtype, shape, _ = saved.leaves['params/kernel']
  saved.leaves['params/kernel'] = [dtype, shape, '0' * 16]
  manifest.write(folder, saved)
  with pytest.raises(manifest.CorruptError, match=r'\Aparams/kernel was changed: wrong checksum\Z'):
    reader.verify(workdir, 8)


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path):
  with checkpoint_writer.CheckpointWriter(tmp_path, keep=1) as saved:
    for step, loss in ((1, float('nan')), (2, 2.0), (3, 1.0), (4, 1.5)):
      saved.save(step, state(step), loss)
  assert reader.best_step(tmp_path) == 3
  assert reader.steps(tmp_path) == [3, 4]


def test_who_reads_while_a_run_prunes_takes_the_newer_one(tmp_path, monkeypatch):
  save(tmp_path, 4)
  verify = manifest.verify

  def prune(folder):
    if folder.name == '4' and folder.exists():
      save(tmp_path, 8, keep=1)
    return verify(folder)

  monkeypatch.setattr(manifest, 'verify', prune)
  step, restored = reader.restore_newest(tmp_path, abstract())
  assert step == 8 and same(restored, state(8))
