"""Mean attention weights by distance, as in Figure 3b of Daniluk et al. 2017.

N heads, T segment length, K keys, D distances, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, progress, runs
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.layers import documents, local
from ngrammer_jax.models import language_model

MAX_TOKENS = 8192  # tokens of the split that are read
MAX_DISTANCE = 15  # for models without a limited attention window


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the mean attention weights of a run, as plain values for JSON.

  Only tokens that can attend to all distances, inside their document and the memory, are counted,
  so that all distances are averaged over the same tokens. The attention window of a recurrent model
  is carried across segments here, whatever `carry_memory` says; this affects which tokens count.

  Keys: `step`, `split`; `tokens`, number of tokens read; `counted`, number of tokens averaged over;
  `distances` in tokens, 0 for the token itself; `heads` [L][N][D] mean weights; `layers` [L][D]
  means over heads; `mean` [D] over heads and layers; and `rest`, the mean weight on all other keys
  and persistent vectors.

  Raises:
    BadInput: the model has no attention, or no token can attend to all distances.
  """
  config = run.config.evaluation_model()
  recurrent = config.recurrent
  if recurrent is not None and recurrent.readout in ('none', 'ngram'):
    raise errors.BadInput(
      f'--workdir={run.workdir} has no attention: model.recurrent.readout={recurrent.readout!r}'
    )
  distances = _select_distances(config, run.config.training.segment_length)
  sums_LxNxD, counted, tokens = _sum_weights(run, split, config, distances)
  if not counted:
    raise errors.BadInput(
      f'--split={split}: no token can attend to {distances[-1]} tokens before it in its document'
    )
  heads_LxNxD = sums_LxNxD / counted
  mean_D = heads_LxNxD.mean(axis=(0, 1))
  return {
    **{'step': int(run.state.step), 'split': split, 'tokens': tokens, 'counted': counted},
    'distances': distances,
    'heads': heads_LxNxD.tolist(),
    'layers': heads_LxNxD.mean(axis=1).tolist(),
    'mean': mean_D.tolist(),
    'rest': max(0.0, 1.0 - float(mean_D.sum())),
  }


def _select_distances(config, segment_length) -> list[int]:
  """Returns the distances to report, the nearest first."""
  recurrent = config.recurrent
  if recurrent is not None:
    # Attention reads previous outputs; a recurrent memory also reads the current word.
    first = int(recurrent.readout in recurrent_config.ATTENTION)
    return list(range(first, first + recurrent.window))
  farthest, nearest = segment_length - 1, 0
  if config.memory is not None:
    window, nearest = config.memory.window(), int(not config.memory.sees_itself())
    if window is None:
      farthest = max(config.memory.length, segment_length - 1)
    else:
      farthest = max(min(window - 1, config.memory.length), 0)
  return list(range(nearest, min(MAX_DISTANCE, farthest) + 1))


def _sum_weights(run, split, config, distances):
  """Returns weights [L, N, D] summed over counted tokens, the number of these, and of all."""
  if config.recurrent is None:
    # All weights are captured, so heads and layers are computed without scan, remat and kernels.
    config = dataclasses.replace(config, scan_layers=False, remat='none', kernel='xla')
  model = language_model.build(config, run.vocabulary.size)
  memory = language_model.empty_memory(config, 1, 1 if config.recurrent is not None else 0)
  text, segment_length = run.split(split), run.config.training.segment_length
  distances_D = jnp.asarray(distances)

  @jax.jit
  def sum_segment(params, codebook, tokens_1xT, starts_1xT, memory, is_counted_T):
    (_, memory, _), captured = model.apply(
      {'params': params, 'codebook': codebook},
      tokens_1xT,
      memory,
      starts_BxT=starts_1xT,
      mutable=['intermediates'],
    )
    weights = _weights_by_layer(config, captured['intermediates'], distances_D)
    sums = [jnp.einsum('ntd,t->nd', w.astype(jnp.float32), is_counted_T) for w in weights]
    return memory, jnp.stack(sums)

  state = run.state
  sums, counted, tokens, position = 0, 0, min(MAX_TOKENS, len(text.tokens)), np.int32(0)
  with progress.Progress('reading', tokens, 'tokens') as bar:
    for first in range(0, tokens, segment_length):
      inputs, _, starts = text.window(first, min(segment_length, tokens - first))
      position_T = np.asarray(documents.positions(starts[None], position[None]))[0]
      position = position_T[-1] + 1
      is_counted_T = _count_visible_tokens(config, position_T, first) >= distances[-1]
      memory, segment_sums = sum_segment(
        state.params,
        state.codebook,
        inputs[None],
        starts[None],
        memory,
        is_counted_T.astype(np.float32),
      )
      sums = sums + np.asarray(segment_sums, np.float64)
      counted += int(is_counted_T.sum())
      bar.advance(len(inputs))
  return sums, counted, tokens


def _count_visible_tokens(config, position_T, first):
  """Returns how many previous tokens of its document each token can attend to."""
  if config.recurrent is not None:
    return position_T
  memory_length = 0 if config.memory is None else min(config.memory.length, first)
  return np.minimum(position_T, memory_length + np.arange(len(position_T)))


def _weights_by_layer(config, intermediates, distances_D):
  """Returns for each layer the weights [N, T, D] by distance."""
  if config.recurrent is not None:  # the farthest slot is first
    return [intermediates['readout']['weights'][0][..., ::-1]]
  persistent = config.persistent
  vectors = persistent.vectors if persistent and persistent.kind == 'all_attention' else 0
  layers = [intermediates[f'layer_{i}']['attention'] for i in range(config.layers)]
  return [_weights_by_distance(layer, vectors, distances_D) for layer in layers]


def _weights_by_distance(intermediates, vectors, distances_D):
  """Returns the weights [N, T, D] of a layer; its queries may be computed in F blocks of b."""
  probs_FxNxbxK = intermediates['probs'][0]
  probs_FxNxbxK = probs_FxNxbxK[..., : probs_FxNxbxK.shape[-1] - vectors]
  F, N, b, K = probs_FxNxbxK.shape
  index_bxD = K - b + jnp.arange(b)[:, None] - distances_D
  shape = (F, N, *index_bxD.shape)
  weights_FxNxbxD = jnp.take_along_axis(
    probs_FxNxbxK, jnp.broadcast_to(jnp.maximum(index_bxD, 0), shape), axis=-1
  )
  weights_FxNxbxD = jnp.where(index_bxD >= 0, weights_FxNxbxD, 0)
  return local.joined(weights_FxNxbxD.swapaxes(1, 2), F)[0].swapaxes(0, 1)


def format_table(result: dict[str, Any]) -> str:
  """Formats the mean weights by distance as a table."""
  layers = range(len(result['layers']))
  header = f'{"distance":<10}{"mean":>8}'
  has_layer_columns = len(layers) > 1
  if has_layer_columns:
    header += ''.join(f'{f"layer {i}":>9}' for i in layers)
  lines = [
    f'step {result["step"]:,}, {result["counted"]:,} of {result["tokens"]:,} tokens of '
    f'{result["split"]}: those that can attend to all distances',
    header,
  ]
  for i, distance in enumerate(result['distances']):
    row = f'{-distance:<10}{result["mean"][i]:>8.1%}'
    if has_layer_columns:
      row += ''.join(f'{result["layers"][layer][i]:>9.1%}' for layer in layers)
    lines.append(row)
  lines.append(f'{"other keys":<10}{result["rest"]:>8.1%}')
  return '\n'.join(lines)


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the weights of each layer and their mean, the farthest distance on the left."""
  positions = [-distance for distance in result['distances']]
  if len(result['layers']) > 1:
    for i, weights in enumerate(result['layers']):
      axes.plot(positions, weights, linewidth=1, alpha=0.6, label=f'layer {i}')
  axes.plot(positions, result['mean'], color='black', marker='o', markersize=3, label='mean')
  axes.set(xlabel='relative position of the key', ylabel='mean attention weight')
  axes.set_title(f'step {result["step"]:,}, {result["split"]}', fontsize=9)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_ylim(bottom=0, top=1.05 * max(map(max, [*result['layers'], result['mean']])))
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
