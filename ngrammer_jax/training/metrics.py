"""Metrics of a training step: the use of the codebooks.

L layers, N heads, K clusters, H head width.
"""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from ngrammer_jax.layers.ngram import quantizer

Metrics = dict[str, jax.Array]


def codebook_metrics(before: Any, after: Any, is_full_batch: bool = True) -> Metrics:
  """Returns the means over all quantisers of a model; empty if it has none.

  `perplexity`: exp of the entropy of the cluster usage. `dead`: share of clusters that are almost
  unused. `drift`: distance that the centroids moved in this step, relative to their norm.
  `changed`: share of tokens whose cluster this changed.

  Args:
    before: codebook before the step.
    after: codebook after the step.
    is_full_batch: whether the batch was not split into parts, which `changed` needs.
  """
  pairs = zip(_quantizers(before), _quantizers(after), strict=True)
  values = [_quantizer_metrics(old, new, is_full_batch) for old, new in pairs]
  return jax.tree.map(lambda *scalars: sum(scalars) / len(scalars), *values) if values else {}


def _quantizers(codebook: Any) -> list[dict[str, jax.Array]]:
  """Returns the variables of every quantiser of a model."""
  parts = traverse_util.flatten_dict(codebook, is_leaf=lambda _, part: 'centroids' in part)
  return [part for part in parts.values() if isinstance(part, Mapping)]


def _quantizer_metrics(old, new, is_full_batch) -> Metrics:
  usage_NxK = new['usage']
  entropy_N = -jax.scipy.special.xlogy(usage_NxK, usage_NxK).sum(axis=-1)
  update_NxKxH = new['centroids'] - old['centroids']
  changed = {'codebook/changed': new['changed'].mean()} if is_full_batch else {}
  return {
    'codebook/perplexity': jnp.exp(entropy_N).mean(),
    'codebook/dead': (usage_NxK < quantizer.DEAD / usage_NxK.shape[1]).mean(),
    'codebook/drift': jnp.linalg.norm(update_NxKxH) / jnp.linalg.norm(old['centroids']),
    **changed,
  }
