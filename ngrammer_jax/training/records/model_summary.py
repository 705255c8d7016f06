"""The size of the model in one line of the log."""

import logging
from typing import Any

import jax

from ngrammer_jax.models import model_variables
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import state as train_state


def log(labels: Any, decay_mask: Any, state: train_state.TrainState) -> None:
  """Logs the numbers of parameters: all, decaying, frozen, of tables, and without gradient.

  Args:
    labels: optimizer label of every parameter.
    decay_mask: whether each parameter decays, if it is trained.
    state: the train state.
  """
  sizes = [f'{model_variables.count_elements(state.params):,} parameters']
  decaying = []
  trees = map(jax.tree.leaves, (labels, decay_mask, state.params))
  for label, decays, leaf in zip(*trees, strict=True):
    if decays and label != partition.FROZEN:
      decaying.append(leaf)
  if decaying:
    sizes.append(f'{model_variables.count_elements(decaying):,} of them decay')
  groups = partition.leaves_by_label(labels, state.params)
  frozen = groups.pop(partition.FROZEN, [])
  if frozen:
    dtypes = ', '.join(sorted({str(leaf.dtype) for leaf in frozen}))
    sizes.append(f'{model_variables.count_elements(frozen):,} of them frozen, in {dtypes}')
  tables = [leaves for label, leaves in groups.items() if label != 'dense']
  if tables:
    sizes.append(f'{model_variables.count_elements(tables):,} of them in tables')
  if state.codebook:
    count = model_variables.count_elements(state.codebook)
    sizes.append(f'{count:,} values without gradient (codebooks, token classes)')
  logging.info('model: %s', ', '.join(sizes))
