"""Runs a trained model on a split and captures intermediates of its layers.

No other analysis depends on the format of the intermediates of attention.

N heads, T segment length, K keys, D distances, C persistent vectors.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import runs
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.models import language_model
from ngrammer_jax.system import progress


def captured_segments(
  run: runs.Run,
  text: token_split.TokenSplit,
  max_tokens: int,
  measure: Callable[[dict[str, Any]], Any],
) -> Iterator[tuple[np.ndarray, Any]]:
  """Yields for each segment its document starts [T] and the result of `measure`.

  The model has the options of evaluation, and its memory is carried from segment to segment, for a
  recurrent model even if `carry_memory` is False.

  Args:
    run: the trained run.
    text: the split; it is read from its start.
    max_tokens: maximum number of tokens.
    measure: function from the intermediates of one segment to arrays. It is compiled.
  """
  # Intermediates are captured layer by layer: without scan, remat and fused kernels.
  config = run.config.evaluation_model()
  is_recurrent = config.recurrent is not None
  if not is_recurrent:
    config = dataclasses.replace(config, scan_layers=False, remat='none', kernel='xla')
  model = language_model.build(config, run.vocabulary.size)
  memory = language_model.empty_memory(config, 1, cache_slots=int(is_recurrent))

  @jax.jit
  def measure_segment(variables, tokens_1xT, starts_1xT, memory):
    (_, memory, _), captured = model.apply(
      variables, tokens_1xT, memory, starts_BxT=starts_1xT, mutable=['intermediates']
    )
    return memory, measure(captured['intermediates'])

  variables = run.restored.collections
  segment_length = run.config.training.segment_length
  tokens = min(max_tokens, len(text.tokens))
  with progress.Progress('reading', tokens, 'tokens') as bar:
    for first in range(0, tokens, segment_length):
      inputs, _, starts = text.window(first, min(segment_length, tokens - first))
      memory, measured = measure_segment(variables, inputs[None], starts[None], memory)
      yield starts, jax.device_get(measured)
      bar.advance(len(inputs))


def input_texts(run: runs.Run, text: token_split.TokenSplit, count: int) -> list[str]:
  """Returns the texts of the first inputs, with an empty one for the start of a document.

  The computations at an input depend on this token; its target is the next token.
  """
  inputs, _, _ = text.window(0, count)
  return [decode(run, [token]) for token in inputs]


def decode(run: runs.Run, ids: Sequence[int]) -> str:
  """Returns the text of tokens."""
  return run.vocabulary.decode(ids).decode(errors='replace')


def attention_layers(
  config: model_config.ModelConfig, intermediates: dict[str, Any]
) -> list[dict[str, Any]]:
  """Returns the intermediates of the attention of each layer of a Transformer."""
  return [intermediates[f'layer_{i}']['attention'] for i in range(config.layers)]


def shared_vectors(config: model_config.ModelConfig) -> int:
  """Returns C, the number of persistent vectors in the softmax of the context."""
  persistent = config.persistent
  if persistent is None or persistent.kind != 'all_attention':
    return 0
  return persistent.vectors


def weights_by_distance(layer: dict[str, Any], vectors: int, distances_D: np.ndarray) -> jax.Array:
  """Returns the attention weights [N, T, D] of a layer by distance, 0 beyond the first key.

  Args:
    layer: intermediates of its attention; the last keys are the persistent vectors.
    vectors: C.
    distances_D: distances between query and key, in tokens.
  """
  (probs_NxTxK,) = layer['probs'][0]
  T = probs_NxTxK.shape[1]
  K = probs_NxTxK.shape[2] - vectors
  query_Tx1 = np.arange(T)[:, None]
  index_TxD = K - T + query_Tx1 - distances_D
  return jnp.where(index_TxD >= 0, probs_NxTxK[:, query_Tx1, np.maximum(index_TxD, 0)], 0)


def persistent_share(layer: dict[str, Any], vectors: int) -> jax.Array:
  """Returns the attention [N] on the C persistent vectors, mean over the segment."""
  (probs_NxTxK,) = layer['probs'][0]
  return probs_NxTxK[..., -vectors:].sum(axis=-1).mean(axis=1)
