"""Use of the values of product keys: share of used values, and evenness of use.

T tokens of text, H heads, K values of each, V values.
"""

from typing import Any

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture
from ngrammer_jax.analysis.elements import Element, foldable_table
from ngrammer_jax.config import product_memory

MAX_TOKENS = 1_000_000  # tokens of the split that are read
POINTS = 101  # of the curve of each layer
FIGURE_SIZE = (1, 6.4)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the use of the values over a text, as plain values for JSON.

  Keys: `step`, `split`; `tokens`, number of tokens read from the start of the split; `values`, V;
  `all`, the use by all layers together; and `layers`, with for each layer its `name` (of its
  parameters), its use, and `heads`, the use by each head. A use has

  `used`: share of the values read by at least one token.
  `kl`: in nats, the Kullback-Leibler divergence of the weights of the values, summed over tokens,
    from a uniform distribution: 0 for uniform use, log V for a single value (Lample et al.).

  and for a layer also `curve`: the share of the weights on the most used 0, 1, ..., 100 % of
  values.

  Raises:
    BadInput: the model has no product keys.
  """
  check_applicable(run)
  memory = run.config.model.product_memory
  names = [f'layer_{block}' for block in memory.layers]

  def measure(intermediates: dict[str, Any]) -> list[dict[str, Any]]:
    return [intermediates[name][product_memory.NAME]['lookup'][0] for name in names]

  shape = len(names), memory.heads, memory.rows
  weights_LxHxV = np.zeros(shape)
  counts_LxHxV = np.zeros(shape, np.int64)
  tokens = 0
  segments = capture.captured_segments(run, run.split(split), MAX_TOKENS, measure)
  for starts_T, lookups in segments:
    tokens += len(starts_T)
    for layer, lookup in enumerate(lookups):
      for head in range(memory.heads):
        row = lookup['rows'][0, :, head].ravel()
        weight = lookup['weights'][0, :, head].ravel()
        counts_LxHxV[layer, head] += np.bincount(row, minlength=memory.rows)
        weights_LxHxV[layer, head] += np.bincount(row, weight, minlength=memory.rows)
  result = {'step': run.restored.step, 'split': split, 'tokens': tokens, 'values': memory.rows}
  result['all'] = _use(counts_LxHxV.sum(axis=(0, 1)), weights_LxHxV.sum(axis=(0, 1)))
  result['layers'] = []
  for name, counts_HxV, weights_HxV in zip(names, counts_LxHxV, weights_LxHxV, strict=True):
    use = _use(counts_HxV.sum(axis=0), weights_HxV.sum(axis=0))
    heads = [_use(*head) for head in zip(counts_HxV, weights_HxV, strict=True)]
    curve = _curve(weights_HxV.sum(axis=0))
    layer = {'name': f'{name}/{product_memory.NAME}', 'heads': heads, 'curve': curve}
    result['layers'].append(layer | use)
  return result


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no product keys."""
  if run.config.model.product_memory is None:
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no product keys: it needs model.product_memory'
    )


def _use(counts_V: np.ndarray, weights_V: np.ndarray) -> dict[str, float]:
  """Returns the share of used values, and the divergence of their weights."""
  share_V = weights_V / weights_V.sum()
  share_U = share_V[share_V > 0]
  kl = np.log(len(share_V)) + (share_U * np.log(share_U)).sum()
  return {'used': float((counts_V > 0).mean()), 'kl': float(kl)}


def _curve(weights_V: np.ndarray) -> list[float]:
  """Returns the share of the weights on the most used values, by share of values."""
  total_V = np.cumsum(np.sort(weights_V)[::-1]) / weights_V.sum()
  shares = np.linspace(0, 1, POINTS)
  return np.interp(shares * len(weights_V), np.arange(len(weights_V) + 1), [0, *total_V]).tolist()


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the table of the layers and heads."""
  rows = [('layer', 'values used', 'KL from uniform (nats)')]

  def add(name: str, use: dict[str, Any]) -> None:
    rows.append((name, f'{use["used"]:.1%}', f'{use["kl"]:.3f}'))

  if len(result['layers']) > 1:
    add('all layers', result['all'])
  for layer in result['layers']:
    add(layer['name'], layer)
    for number, head in enumerate(layer['heads']):
      add(f'{layer["name"]}, head {number}', head)
  title = f'{result["tokens"]:,} tokens, {result["values"]:,} values'
  return [foldable_table(title, rows)]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the share of the weights on the most used values of each layer."""
  for layer in result['layers']:
    axes.plot(100 * np.array(layer['curve']), label=layer['name'])
  axes.set(xlabel='most used values (%)', ylabel='weights (%)', xlim=(0, 100), ylim=(0, 102))
  axes.legend(fontsize='x-small')
