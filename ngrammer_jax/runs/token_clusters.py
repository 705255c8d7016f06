"""The memories of a run with token clusters, and the cluster of each token."""

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import memories
from ngrammer_jax.runs.opened_run import OpenedRun


def find_memories(run: OpenedRun) -> dict[str, NGramMemory]:
  """Returns the memories with token clusters; see `Run.token_memories`."""
  model = run.config.model
  memories_by_path = {
    '/'.join(path): memory
    for path, memory in memories.ngram_modules(model, run.vocabulary_size)
    if memory.clusters_depend_on_token and model.adaptive_softmax is None
  }
  if not memories_by_path:
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no token clusters: it needs model.ngram, with '
      f'model.ngram.clusters and model.ngram.layer="input", or an n-gram memory with '
      f'key="embedding_clusters"'
    )
  return memories_by_path


def clusters_of(run: OpenedRun, memory: str) -> np.ndarray:
  """Returns the cluster of every token and head, int32 [V, N], in one of `find_memories`."""
  codebook = run.variables['codebook']
  for module in memory.split('/'):
    codebook = codebook[module]
  return np.asarray(codebook['quantizer']['token_ids'])
