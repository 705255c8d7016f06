"""Attention in blocks equals attention over whole scores, with every option of a model."""

import copy

import numpy as np
import pytest

from ngrammer_jax.layers import blocked_attention, span
from tests.goldens import models

CASES = {
  name: case
  for name, case in models.cases().items()
  if name.startswith('transformer') and not case['prefix']
}
QUICK = [name for name, case in CASES.items() if 'quick' in case and case['quick']]


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_blocks_equal_whole_scores(x64, tmp_path, monkeypatch, name):
  """Hidden states, memory, codebook, loss and the gradient of every parameter."""
  monkeypatch.setattr(blocked_attention, 'BLOCK', 4)
  monkeypatch.setattr(span, 'EPSILON', 0.0)  # blocks do not add it for keys out of reach
  found = {}
  for kernel in ('blocks', 'xla'):
    case = copy.deepcopy(CASES[name])
    case['model']['kernel'] = kernel
    found[kernel] = models.compute(case, tmp_path)
  wrong = {}
  for key, values in found['xla'].items():
    difference = np.abs(found['blocks'][key] - values).max()
    if not difference <= 1e-10 * np.abs(values).max() + 1e-12:
      wrong[key] = difference
  assert not wrong, f'{name} {models.options(CASES[name])} differs in {wrong}'
