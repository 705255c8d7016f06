"""How much attention goes how far back: mean weights, as in Figure 3b of Daniluk et al. 2017.

N heads, T segment length, K keys, D distances, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, progress, runs
from ngrammer_jax.layers import documents, local
from ngrammer_jax.models import language_model, recurrent_config

TOKENS = 8192  # of the text that are read
FARTHEST = 15  # tokens back, in models that look as far as there is text


def analyse(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """The weights of a run, as plain values for JSON.

  Only tokens count that find all distances in their document and within reach, so that the weights
  of two distances are means over the same tokens. What a recurrent model looks back at is carried
  from segment to segment here, whatever `carry_memory` says: that changes which tokens find all.

  Keys: `step`, `split`; `tokens` that were read, and `counted` among them; `distances` in tokens,
  0 for the token itself; `heads` [L][N][D] mean weights, `layers` [L][D] the means of their heads,
  `mean` [D] of all; and `rest`, what is left for other keys and persistent vectors.

  Raises:
    BadInput: the model has no attention, or no token counts.
  """
  c = run.config.evaluation_model()
  r = c.recurrent
  if r is not None and r.readout in ('none', 'ngram'):
    raise errors.BadInput(
      f'--workdir={run.workdir} has no attention: model.recurrent.readout={r.readout!r}'
    )
  distances = _distances(c, run.config.training.segment_length)
  sums_LxNxD, counted, tokens = _observed(run, split, c, distances)
  if not counted:
    raise errors.BadInput(
      f'--split={split}: no token finds {distances[-1]} others before it in its document'
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


def _distances(config, length) -> list[int]:
  """Those that the weights are shown for, the nearest first."""
  r = config.recurrent
  if r is not None:
    first = int(r.readout in recurrent_config.ATTENTION)  # the current word is read, not the output
    return list(range(first, first + r.window))
  reach, nearest = length - 1, 0
  if config.memory is not None:
    window, nearest = config.memory.window(), int(not config.memory.sees_itself())
    reach = config.memory.length if window is None else min(window - 1, config.memory.length)
    reach = max(reach, length - 1 if window is None else 0)
  return list(range(nearest, min(FARTHEST, reach) + 1))


def _observed(run, split, config, distances):
  """Sums of the weights [L, N, D] over the tokens that count, how many these are, and all."""
  if config.recurrent is None:
    # All heads together, one layer after the other, all weights there: so they can be looked at.
    config = dataclasses.replace(config, scan_layers=False, remat='none', kernel='xla')
  model = language_model.build(config, run.vocabulary.size)
  memory = language_model.empty_memory(config, 1, 1 if config.recurrent is not None else 0)
  text, length = run.split(split), run.config.training.segment_length
  far = jnp.asarray(distances)

  @jax.jit
  def look(params, codebook, tokens_1xT, starts_1xT, memory, counts_T):
    given = {'params': params, 'codebook': codebook}
    (_, memory, _), seen = model.apply(
      given, tokens_1xT, memory, starts_BxT=starts_1xT, mutable=['intermediates']
    )
    weights = [of.astype(jnp.float32) for of in _weights(config, seen['intermediates'], far)]
    return memory, jnp.stack([jnp.einsum('ntd,t->nd', of, counts_T) for of in weights])

  sums, counted, tokens, before = 0, 0, min(TOKENS, len(text.tokens)), np.int32(0)
  with progress.Progress('reading', tokens, 'tokens') as bar:
    for first in range(0, tokens, length):
      inputs, _, starts = text.window(first, min(length, tokens - first))
      position_T = np.asarray(documents.positions(starts[None], before[None]))[0]
      before = position_T[-1] + 1
      counts_T = _within_reach(config, position_T, first) >= distances[-1]
      given = inputs[None], starts[None], memory, counts_T.astype(np.float32)
      memory, of_part = look(run.state.params, run.state.codebook, *given)
      sums, counted = sums + np.asarray(of_part, np.float64), counted + int(counts_T.sum())
      bar.advance(len(inputs))
  return sums, counted, tokens


def _within_reach(config, position_T, first):
  """How many tokens of its document each could attend to, itself not counted."""
  if config.recurrent is not None:
    return position_T
  kept = 0 if config.memory is None else min(config.memory.length, first)
  return np.minimum(position_T, kept + np.arange(len(position_T)))


def _weights(config, seen, far_D):
  """For each layer the weights [N, T, D] of the distances."""
  r = config.recurrent
  if r is not None:  # the farthest is first
    return [seen['readout']['weights'][0][..., ::-1]]
  persistent = config.persistent
  extra = persistent.vectors if persistent and persistent.kind == 'all_attention' else 0
  return [_by_distance(seen[f'layer_{i}']['attention'], extra, far_D) for i in range(config.layers)]


def _by_distance(seen, extra, far_D):
  """The weights [N, T, D] of a layer, whose queries may have been computed in blocks."""
  probs_FxNxbxK = seen['probs'][0]
  probs_FxNxbxK = probs_FxNxbxK[..., : probs_FxNxbxK.shape[-1] - extra]
  F, N, b, K = probs_FxNxbxK.shape
  index_bxD = K - b + jnp.arange(b)[:, None] - far_D
  shape = (F, N, *index_bxD.shape)
  found_FxNxbxD = jnp.take_along_axis(
    probs_FxNxbxK, jnp.broadcast_to(jnp.maximum(index_bxD, 0), shape), axis=-1
  )
  found_FxNxbxD = jnp.where(index_bxD >= 0, found_FxNxbxD, 0)
  return local.joined(found_FxNxbxD.swapaxes(1, 2), F)[0].swapaxes(0, 1)


def table(result: dict[str, Any]) -> str:
  """The mean weights by distance, to read."""
  layers = range(len(result['layers']))
  header = f'{"distance":<10}{"mean":>8}'
  several = len(layers) > 1
  if several:
    header += ''.join(f'{f"layer {i}":>9}' for i in layers)
  lines = [
    f'step {result["step"]:,}, {result["counted"]:,} of {result["tokens"]:,} tokens of '
    f'{result["split"]}, those that find all distances',
    header,
  ]
  for place, distance in enumerate(result['distances']):
    row = f'{-distance:<10}{result["mean"][place]:>8.1%}'
    if several:
      row += ''.join(f'{result["layers"][i][place]:>9.1%}' for i in layers)
    lines.append(row)
  lines.append(f'{"elsewhere":<10}{result["rest"]:>8.1%}')
  return '\n'.join(lines)


def draw(result: dict[str, Any], axes: Any) -> None:
  """The weights of all layers, the farthest to the left, and their mean."""
  places = [-distance for distance in result['distances']]
  if len(result['layers']) > 1:
    for number, weights in enumerate(result['layers']):
      axes.plot(places, weights, linewidth=1, alpha=0.6, label=f'layer {number}')
  axes.plot(places, result['mean'], color='black', marker='o', markersize=3, label='mean')
  axes.set(xlabel='position of what is attended to', ylabel='mean attention weight')
  axes.set_title(f'step {result["step"]:,}, {result["split"]}', fontsize=9)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_ylim(bottom=0, top=1.05 * max(map(max, [*result['layers'], result['mean']])))
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
