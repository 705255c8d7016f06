"""Fixture for runs with random variables."""

import json

import pytest


@pytest.fixture
def untrained(tmp_path, cache, monkeypatch):
  """Returns a function that creates the run directory of a config with random variables at step 4.

  `modify` changes the parameters and the codebook in place.
  """
  import numpy as np

  from ngrammer_jax import config as experiment
  from ngrammer_jax import runs
  from ngrammer_jax.data import mixture
  from ngrammer_jax.models import language_model, model_variables
  from tests import checks

  def create_run(config, modify=lambda params, codebook: None):
    config.check()
    corpus, workdir = mixture.prepare(config.data), tmp_path / 'run'
    workdir.mkdir()
    corpus.vocabulary.save(workdir)
    (workdir / 'corpus.json').write_text(json.dumps({'content_hash': corpus.content_hash}))
    experiment.save(config, workdir / 'config.json')
    model = language_model.build(config.model, corpus.vocabulary.size)
    memory = language_model.empty_memory(config.model, 1)
    variables = checks.random_variables(model, np.zeros((1, 1), np.int32), memory)
    params, codebook = variables['params'], variables.get('codebook', {})
    modify(params, codebook)
    restored = model_variables.ModelVariables(4, params, codebook)
    monkeypatch.setattr(runs.Run, 'restored', restored)
    return workdir

  return create_run
