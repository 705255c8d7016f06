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
  """Returns the means over all quantisers of a model; empty without quantisers.

  `perplexity`: exp of the entropy of the cluster usage. `dead`: share of almost unused clusters.
  `drift`: distance moved by the centroids in this step, relative to their norm. `changed`: share of
  tokens with a changed cluster.

  Args:
    before: codebook before the step.
    after: codebook after the step.
    is_full_batch: whether the batch is not split into microbatches, as required by `changed`.
  """
  pairs = zip(_quantizers(before), _quantizers(after), strict=True)
  values = [_quantizer_metrics(old, new, is_full_batch) for old, new in pairs]
  if not values:
    return {}
  return jax.tree.map(_mean, *values)


def _mean(*scalars: jax.Array) -> jax.Array:
  return sum(scalars) / len(scalars)


def _quantizers(codebook: Any) -> list[dict[str, jax.Array]]:
  """Returns the variables of every quantiser of a model."""

  def is_quantizer(_: Any, variables: Mapping[str, Any]) -> bool:
    return 'centroids' in variables

  by_path = traverse_util.flatten_dict(codebook, is_leaf=is_quantizer)
  return [variables for variables in by_path.values() if isinstance(variables, Mapping)]


def _quantizer_metrics(
  old: Mapping[str, jax.Array], new: Mapping[str, jax.Array], is_full_batch: bool
) -> Metrics:
  usage_NxK = new['usage']
  entropy_N = -jax.scipy.special.xlogy(usage_NxK, usage_NxK).sum(axis=-1)
  update_NxKxH = new['centroids'] - old['centroids']
  metrics = {}
  if is_full_batch:
    metrics['codebook/changed'] = new['changed'].mean()
  metrics['codebook/perplexity'] = jnp.exp(entropy_N).mean()
  metrics['codebook/dead'] = (usage_NxK < quantizer.DEAD / usage_NxK.shape[1]).mean()
  metrics['codebook/drift'] = jnp.linalg.norm(update_NxKxH) / jnp.linalg.norm(old['centroids'])
  return metrics
