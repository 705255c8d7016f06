"""Which parameters decay, `optimizer.weight_decay_on`.

The logical axis names of a parameter (see `layers.axis_names`) tell its kind:

  matrix      a linear map; also convolution taps and persistent vectors
  embedding   vectors of tokens or of positions, and the output matrix
  vector      a norm, bias, gate, scale or span
  table       an n-gram table

Tables do not decay, nor do spans, which have a penalty of their own.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ngrammer_jax import sharding
from ngrammer_jax.config.optimizer import DEFAULT_DECAYING, OptimizerConfig
from ngrammer_jax.layers import axis_names
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.models import spans
from ngrammer_jax.optimizers import muon

KINDS = {  # that decay, by `optimizer.weight_decay_on`
  'matrices': ('matrix',),
  'matrices_and_embeddings': ('matrix', 'embedding'),
  'all': ('matrix', 'embedding', 'vector'),
}
# Axes along which arrays of one kind are stacked: a stack of vectors is no matrix.
STACKS = ('layers', 'branches', 'buckets', 'gates')
EMBEDDED = ('vocab', 'vocab_clusters', 'position')  # axes whose entries have a vector each


def mask(config: OptimizerConfig, params: Any) -> Any:
  """Returns whether each parameter decays; none does without a weight decay.

  Args:
    config: the optimizer config.
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
  """
  kinds = KINDS[config.weight_decay_on or DEFAULT_DECAYING]

  def decays(path, leaf):
    if muon.is_matrix(path, leaf) and config.algorithm == 'muon':
      return of_matrices(config) > 0
    if not config.weight_decay or spans.is_span(path):
      return False
    return kind_of(axis_names.names_of(leaf)) in kinds

  return jax.tree_util.tree_map_with_path(decays, params, is_leaf=sharding.is_boxed)


def of_matrices(config: OptimizerConfig) -> float:
  """Returns the weight decay of the matrices that Muon trains."""
  if config.muon is None or config.muon.weight_decay is None:
    return config.weight_decay
  return config.muon.weight_decay


def kind_of(names: Sequence[str | None]) -> str:
  """Returns the kind of a parameter with these logical axis names, see the top of this file."""
  if table.AXES[0] in names:
    return 'table'
  axes = [name for name in names if name not in STACKS]
  if 'heads' in axes and 'kv' in axes:  # together they are the features of all heads
    axes.remove('kv')
  if 'norm' in axes or len(axes) < 2:
    return 'vector'
  if any(name in EMBEDDED for name in axes):
    return 'embedding'
  return 'matrix'
