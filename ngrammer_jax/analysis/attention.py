"""Mean attention weights by distance, as in Figure 3b of Daniluk et al. 2017.

N heads, T segment length, K keys, D distances, L layers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture
from ngrammer_jax.analysis.elements import Element
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.layers import document_masks

MAX_TOKENS = 8192  # tokens of the split that are read
MAX_DISTANCE = 15  # for models without a limited attention window
FIGURE_SIZE = (1, 6.4)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the mean attention weights of a run, as plain values for JSON.

  Only tokens that can attend to all distances, inside their document and the memory, are counted.
  All distances are therefore averaged over the same tokens. The attention window of a recurrent
  model is carried across segments here, even if `carry_memory` is False; this affects which tokens
  count.

  Keys: `step`, `split`; `tokens`, number of tokens read; `counted`, number of tokens averaged over;
  `distances` in tokens, 0 for the token itself; `heads` [L][N][D] mean weights; `layers` [L][D]
  means over heads; `mean` [D] over heads and layers; and `rest`, the mean weight on all other keys
  and persistent vectors.

  Raises:
    BadInput: the model has no attention, or no token can attend to all distances.
  """
  check_applicable(run)
  config = run.config.evaluation_model()
  distances = _select_distances(config, run.config.training.segment_length)
  sums_LxNxD, counted, tokens = _sum_weights(run, split, config, distances)
  if not counted:
    raise errors.NotApplicable(
      f'--split={split}: no token can attend to {distances[-1]} tokens before it in its document'
    )
  heads_LxNxD = sums_LxNxD / counted
  mean_D = heads_LxNxD.mean(axis=(0, 1))
  return {
    'step': run.restored.step,
    'split': split,
    'tokens': tokens,
    'counted': counted,
    'distances': distances,
    'heads': heads_LxNxD.tolist(),
    'layers': heads_LxNxD.mean(axis=1).tolist(),
    'mean': mean_D.tolist(),
    'rest': max(0.0, 1.0 - float(mean_D.sum())),
  }


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no attention."""
  recurrent = run.config.model.recurrent
  if recurrent is not None and recurrent.readout in ('none', 'ngram'):
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no attention: model.recurrent.readout={recurrent.readout!r}'
    )


def _select_distances(config: model_config.ModelConfig, segment_length: int) -> list[int]:
  """Returns the distances to report, the nearest first."""
  recurrent = config.recurrent
  if recurrent is not None:
    # Attention reads previous outputs; a recurrent memory also reads the current word.
    first = int(recurrent.readout in recurrent_config.ATTENTION)
    return list(range(first, first + recurrent.window))
  nearest = 0
  farthest = segment_length - 1
  if config.memory is not None:
    nearest = int(not config.memory.sees_itself())
    window = config.memory.window()
    if window is None:
      farthest = max(config.memory.length, segment_length - 1)
    else:
      farthest = max(min(window - 1, config.memory.length), 0)
  return list(range(nearest, min(MAX_DISTANCE, farthest) + 1))


def _sum_weights(
  run: runs.Run, split: str, config: model_config.ModelConfig, distances: list[int]
) -> tuple[np.ndarray, int, int]:
  """Returns summed weights [L, N, D] of counted tokens, and the numbers of counted and all ones."""
  distances_D = np.asarray(distances)
  vectors = capture.shared_vectors(config)

  def weights_by_layer(intermediates: dict[str, Any]) -> jnp.ndarray:
    if config.recurrent is not None:  # the farthest slot is first
      return jnp.stack([intermediates['readout']['weights'][0][..., ::-1]])
    layers = capture.attention_layers(config, intermediates)
    return jnp.stack([capture.weights_by_distance(layer, vectors, distances_D) for layer in layers])

  sums = 0
  counted = 0
  tokens = 0
  position = np.int32(0)
  segments = capture.captured_segments(run, run.split(split), MAX_TOKENS, weights_by_layer)
  for starts_T, weights_LxNxTxD in segments:
    position_T = np.asarray(document_masks.positions(starts_T[None], position[None]))[0]
    position = position_T[-1] + 1
    is_counted_T = _count_visible_tokens(config, position_T, tokens) >= distances[-1]
    sums = sums + weights_LxNxTxD[:, :, is_counted_T].sum(axis=2, dtype=np.float64)
    counted += int(is_counted_T.sum())
    tokens += len(starts_T)
  return sums, counted, tokens


def _count_visible_tokens(
  config: model_config.ModelConfig, position_T: np.ndarray, first: int
) -> np.ndarray:
  """Returns the number of visible previous tokens in the document of each token."""
  if config.recurrent is not None:
    return position_T
  memory_length = 0 if config.memory is None else min(config.memory.length, first)
  return np.minimum(position_T, memory_length + np.arange(len(position_T)))


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the table of the mean weights by distance."""
  layers = result['layers'] if len(result['layers']) > 1 else []
  rows = [['distance', 'mean'] + [f'layer {i}' for i in range(len(layers))]]
  for distance, *weights in zip(result['distances'], result['mean'], *layers, strict=True):
    rows.append([str(-distance)] + [f'{weight:.1%}' for weight in weights])
  rows.append(['other keys', f'{result["rest"]:.1%}'] + [''] * len(layers))
  title = (
    f'mean attention of the {result["counted"]:,} of {result["tokens"]:,} tokens that can attend '
    f'to all distances'
  )
  return [Element(title, rows, is_folded=True)]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the weights of each layer and their mean, the farthest distance on the left."""
  positions = [-distance for distance in result['distances']]
  if len(result['layers']) > 1:
    for i, weights in enumerate(result['layers']):
      axes.plot(positions, weights, linewidth=1, alpha=0.6, label=f'layer {i}')
  axes.plot(positions, result['mean'], color='black', marker='o', markersize=3, label='mean')
  axes.set(xlabel='relative position of the key (tokens)', ylabel='mean attention weight')
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_ylim(bottom=0, top=1.05 * max(map(max, [*result['layers'], result['mean']])))
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
