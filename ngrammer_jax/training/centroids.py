"""Initial centroids of added quantisers: inputs in the first batches.

K clusters of N heads, H head width, B batch, T segment length, R inputs of width D.
"""

from collections.abc import Callable, Collection
import logging
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.models import language_model
from ngrammer_jax.training import accumulation
from ngrammer_jax.training import state as train_state

# Batches are read until there are so many inputs for each cluster, or so many batches.
INPUTS_PER_CLUSTER = 8
MAX_BATCHES = 16

Path = tuple[str, ...]


# The inputs of each quantiser by the path of its memory, [B, T, ...], and the mask of valid ones.
BatchInputs = tuple[dict[Path, jax.Array], jax.Array]


def draw(
  model: language_model.LanguageModel,
  state: train_state.TrainState,
  paths: Collection[Path],
  read: Callable[[int], token_batch.Batch],
  seed: int,
  microbatches: int = 1,
) -> Any:
  """Returns the codebook of a state with new centroids, distinct quantiser inputs.

  Args:
    model: the model.
    state: parameters and codebook for the inputs, and the first memory.
    paths: codebook paths of the memories to draw centroids for.
    read: returns the batch of a step, on the devices.
    seed: of the draw.
    microbatches: sequential parts of the batch, as in training.
  """
  mesh = state.step.sharding.mesh
  accumulate = accumulation.GradientAccumulation(microbatches, mesh)

  def batch_inputs(state: train_state.TrainState, batch: token_batch.Batch) -> BatchInputs:
    return _batch_inputs(model, state, batch, paths, accumulate)

  arrays = traverse_util.flatten_dict(state.codebook, keep_empty_nodes=True)
  centroid_paths = {path: (*path, 'quantizer', 'centroids') for path in paths}
  clusters = max(arrays[path].shape[1] for path in centroid_paths.values())
  compute = jax.jit(batch_inputs, out_shardings=sharding.replicated(mesh))
  batches = []
  count = 0
  with sharding.use(mesh):
    while len(batches) < MAX_BATCHES and count < INPUTS_PER_CLUSTER * clusters:
      inputs, valid_BxT = jax.device_get(compute(state, read(len(batches))))
      batches.append((inputs, valid_BxT))
      count += valid_BxT.sum()
  for path, centroid_path in centroid_paths.items():
    N, K, H = arrays[centroid_path].shape
    inputs_RxD = np.concatenate(
      [inputs[path][valid_BxT > 0].reshape(-1, N * H) for inputs, valid_BxT in batches]
    )
    inputs_KxD = _draw_different(inputs_RxD, K, seed, '/'.join(path))
    centroids_NxKxH = inputs_KxD.reshape(K, N, H).swapaxes(0, 1)
    arrays[centroid_path] = jax.device_put(centroids_NxKxH, arrays[centroid_path].sharding)
  return traverse_util.unflatten_dict(arrays)


def _batch_inputs(
  model: language_model.LanguageModel,
  state: train_state.TrainState,
  batch: token_batch.Batch,
  paths: Collection[Path],
  accumulate: accumulation.GradientAccumulation,
) -> BatchInputs:
  """Returns the inputs of the quantisers of these memories in a batch, one microbatch at a time."""

  def microbatch_inputs(rows: tuple[token_batch.Batch, Any], _: jax.Array) -> tuple[Any, tuple]:
    segment, memory = rows
    _, updated = model.apply(
      state.variables, segment.tokens_BxT, memory, **segment.marks, mutable=[quantizer.INPUTS]
    )
    inputs = traverse_util.flatten_dict(updated[quantizer.INPUTS])
    return {path: inputs[*path, 'quantizer', 'x'][0] for path in paths}, ()

  inputs, _ = accumulate(microbatch_inputs, (batch, state.memory))
  return inputs, batch.valid_BxT


def _draw_different(inputs_RxD: np.ndarray, K: int, seed: int, name: str) -> np.ndarray:
  """Returns K random inputs, [K, D], all distinct if possible; repeats are logged."""
  inputs_RxD = np.unique(inputs_RxD, axis=0)  # a token has the same embedding wherever it stands
  if len(inputs_RxD) < K:
    message = '%s: the first batches have %d different inputs for %d clusters: some start equal'
    logging.warning(message, name, len(inputs_RxD), K)
  numbers_K = np.resize(np.random.default_rng(seed).permutation(len(inputs_RxD)), K)
  return inputs_RxD[numbers_K]
