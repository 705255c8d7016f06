"""Runs are opened with other values of some keys, and published models in another dtype."""

import logging

import jax
import numpy as np

import ngrammer_jax
from tests import published_folders
from tests.checks import bad_input

OVERRIDES = {'evaluation.segment_length': 4, 'model.dtype': 'bfloat16'}


def test_every_kind_of_run_takes_overrides(trained, tmp_path):
  published_folders.write(tmp_path / 'published')
  opened = {
    'run': ngrammer_jax.load_run(trained, 8, OVERRIDES),
    'model of the package': ngrammer_jax.load_pretrained('text8', overrides=OVERRIDES),
    'published model': ngrammer_jax.load_pretrained(tmp_path / 'published', overrides=OVERRIDES),
  }
  for name, run in opened.items():
    assert run.config.evaluation_length() == 4, name
    assert run.config.model.dtype == run.evaluated.config.dtype == 'bfloat16', name
  assert opened['run'].step == 8
  assert ngrammer_jax.load_run(trained).config.evaluation_length() == 16
  with bad_input('overrides: the parameters depend on model.width=16, not 8: leave it out'):
    ngrammer_jax.load_run(trained, overrides={'model.width': 8})


def test_a_published_model_in_other_dtypes(tmp_path, caplog):
  """Float64 of a file is float32 without 64-bit mode, and says so; asked for, it is refused."""
  caplog.set_level(logging.INFO)
  params = published_folders.write(tmp_path, dtype='float64')
  open_as = lambda dtype: ngrammer_jax.load_pretrained(tmp_path, dtype=dtype)
  for dtype, expected in ((None, 'float32'), (np.float16, 'float16')):
    run = open_as(dtype)
    assert {*run.parameter_dtypes.values()} == {np.dtype(expected)}
    embedding = run.restored.params['embedding']
    np.testing.assert_array_equal(embedding, params['embedding'].astype(expected))
  assert caplog.messages == [f'{tmp_path}: float64 is read as float32, without JAX_ENABLE_X64=1']
  for dtype in ('float64', np.float64):
    with bad_input('dtype="float64" needs the environment variable JAX_ENABLE_X64=1'):
      open_as(dtype)
  message = "dtype='int8' is no parameter dtype: use one of float32, bfloat16, float16, float64"
  with bad_input(message):
    open_as('int8')
  with bad_input(message):
    open_as(None).export(tmp_path / 'exported', 'int8')
  assert not (tmp_path / 'exported').exists()
  with jax.enable_x64(True):
    for dtype in (None, 'float64'):
      embedding = open_as(dtype).restored.params['embedding']
      np.testing.assert_array_equal(embedding, params['embedding'])
      assert embedding.dtype == np.float64


def test_a_dtype_without_effect_is_said(caplog):
  with caplog.at_level(logging.WARNING):
    ngrammer_jax.load_pretrained('text8', dtype='float32')
    assert not caplog.messages
    run = ngrammer_jax.load_pretrained('text8', dtype='bfloat16')
  assert caplog.messages == [
    f'dtype=bfloat16 has no effect: parameters of {run.workdir} are float32'
  ]


def test_a_trained_run_computes_in_float64(trained):
  """Its parameters and codebook keep the dtype of the checkpoint."""
  text = 'the union of states'
  expected = ngrammer_jax.load_run(trained).score(text)[0].nats
  with jax.enable_x64(True):
    run = ngrammer_jax.load_run(trained, overrides={'model.dtype': 'float64'})
    nats = run.score(text)[0].nats
  assert {leaf.dtype for leaf in jax.tree.leaves(run.restored.collections)} == {np.dtype('float32')}
  np.testing.assert_allclose(nats, expected, rtol=1e-4)
  assert (nats != expected).any()


def test_steps_in_python(trained):
  for step in (8, '8', np.int64(8)):
    assert ngrammer_jax.load_run(trained, step).find_checkpoint() == 8
  for wrong in (8.0, 'last', None, -1, True):
    with bad_input(f'step={wrong!r} is not a step: use a number from 0, "newest" or "best"'):
      ngrammer_jax.load_run(trained, wrong)
