"""The line of the log about the size of the model."""

import logging
import types

import numpy as np

from ngrammer_jax.training.records import model_summary

PARAMS = {'embedding': np.ones((5, 2)), 'kernel': np.ones((2, 3)), 'table': np.ones((4, 2))}
LABELS = {'embedding': 'frozen', 'kernel': 'dense', 'table': 'ngram_table'}


def test_parameters_that_decay_are_counted(caplog):
  caplog.set_level(logging.INFO)
  state = types.SimpleNamespace(params=PARAMS, codebook={})
  mask = {'embedding': True, 'kernel': True, 'table': False}
  for decay_mask in (mask, dict.fromkeys(PARAMS, False)):
    model_summary.log(LABELS, decay_mask, state)
  with_decay, without = caplog.messages
  assert with_decay == (
    'model: 24 parameters, 6 of them decay, 10 of them frozen, in float64, 8 of them in tables'
  )
  assert with_decay.replace(' 6 of them decay,', '') == without
