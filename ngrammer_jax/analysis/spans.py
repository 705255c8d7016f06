"""Attention spans by layer and head, and the attention on persistent vectors.

L layers, N heads, T tokens of text, C persistent vectors.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, progress, runs
from ngrammer_jax.models import language_model
from ngrammer_jax.training import windows

MAX_SEGMENTS = 8  # segments of the split that are read
MAX_RECORDED_TOKENS = 200  # tokens for which dynamic spans are recorded one by one
MAX_PLOTTED_TOKENS = 80  # of these, the tokens in the figure


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the spans of a run, as plain values for JSON.

  Keys: `step`, `split`; `tokens`, number of tokens read from the start of the split; and, None for
  models without them:

  `spans`: [L][N] in tokens, including the ramp, as in Figure 4 of the adaptive-span paper; for
    dynamic spans the mean over tokens.
  `limit`, `ramp`: options of the spans.
  `along`: for dynamic spans, the mean over all heads at each of the first tokens, and the texts of
    these tokens, as in Figure 5.
  `persistent`: [L][N], the share of attention on persistent vectors that share a softmax with the
    context.

  Raises:
    BadInput: the model has neither spans nor such persistent vectors.
  """
  config = run.config.model
  span, persistent = config.span, config.persistent
  has_persistent = bool(persistent is not None and persistent.vectors)
  has_persistent = has_persistent and persistent.kind == 'all_attention'
  if span is None and not has_persistent:
    raise errors.BadInput(
      f'--workdir={run.workdir} has no spans and no persistent vectors that share a softmax with '
      f'the context: it needs model.span or model.persistent'
    )
  result = {'step': int(run.state.step), 'split': split, 'tokens': 0}
  result |= dict.fromkeys(('spans', 'limit', 'ramp', 'along', 'persistent'))
  if span is not None:
    result |= {'limit': span.limit, 'ramp': span.ramp}
  if span is not None and span.kind == 'adaptive':
    result['spans'] = _add_ramp(windows.spans(config, run.state.params), span).tolist()
  if has_persistent or span.kind == 'dynamic':
    tokens_T = run.split(split).tokens[: MAX_SEGMENTS * run.config.training.segment_length]
    z_TxLxN, mass_LxN = _measure(run, np.asarray(tokens_T, np.int32), has_persistent)
    result['tokens'] = len(tokens_T)
    if has_persistent:
      result['persistent'] = mass_LxN.tolist()
    if z_TxLxN is not None:
      spans_TxLxN = _add_ramp(z_TxLxN, span)
      result['spans'] = spans_TxLxN.mean(axis=0).tolist()
      texts = [
        run.vocabulary.decode([token]).decode(errors='replace')
        for token in tokens_T[:MAX_RECORDED_TOKENS]
      ]
      mean_spans = spans_TxLxN[:MAX_RECORDED_TOKENS].mean(axis=(1, 2)).tolist()
      result['along'] = {'texts': texts, 'spans': mean_spans}
  return result


def _add_ramp(z, span) -> np.ndarray:
  return np.minimum(z + span.ramp, span.limit)


def _measure(run, tokens_T, has_persistent):
  """Returns dynamic spans [T, L, N] and the attention [L, N] on persistent vectors, or None."""
  # Intermediates are captured layer by layer, without scan and remat.
  config = dataclasses.replace(run.config.model, scan_layers=False, remat='none')
  model = language_model.build(config, run.vocabulary.size)
  C = config.persistent.vectors if has_persistent else 0

  @jax.jit
  def measure_segment(params, codebook, tokens_1xT, memory):
    variables = {'params': params, 'codebook': codebook}
    (_, memory, _), captured = model.apply(variables, tokens_1xT, memory, mutable=['intermediates'])
    layers = [captured['intermediates'][f'layer_{i}']['attention'] for i in range(config.layers)]
    spans = [layer['span']['spans'][0][0] for layer in layers if 'span' in layer]
    masses = [layer['probs'][0][0, ..., -C:].sum(-1).mean(-1) for layer in layers] if C else []
    return memory, spans, masses

  params, codebook = run.state.params, run.state.codebook
  memory, spans, masses = language_model.empty_memory(config, 1), [], []
  segment_length = run.config.training.segment_length
  with progress.Progress('reading', len(tokens_T), 'tokens') as bar:
    for first in range(0, len(tokens_T), segment_length):
      segment_1xT = tokens_T[None, first : first + segment_length]
      memory, layer_spans, layer_masses = measure_segment(params, codebook, segment_1xT, memory)
      spans.append(np.stack(layer_spans, axis=1) if layer_spans else None)
      masses.append(np.asarray(layer_masses) * segment_1xT.shape[1])
      bar.advance(segment_1xT.shape[1])
  spans_TxLxN = np.concatenate(spans) if spans[0] is not None else None
  return spans_TxLxN, sum(masses) / len(tokens_T) if C else None


def format_table(result: dict[str, Any]) -> str:
  """Formats the spans by layer and head as a table."""
  lines = [f'step {result["step"]:,}']
  if result['spans'] is not None:
    lines.append(
      f'spans in tokens, including the ramp of {result["ramp"]}; the limit is {result["limit"]:,}'
    )
  if result['along'] is not None:
    lines[-1] += '; mean over tokens'
  if result['spans'] is not None:
    lines += _format_rows(result['spans'], '{:8.0f}')
  if result['persistent'] is not None:
    lines.append('share of attention on persistent vectors')
    lines += _format_rows(result['persistent'], '{:8.1%}')
  return '\n'.join(lines)


def _format_rows(values_LxN, pattern):
  heads = range(len(values_LxN[0]))
  header = f'{"layer":<8}{"mean":>8}' + ''.join(f'{f"head {n}":>8}' for n in heads)
  rows = [
    f'{layer:<8}' + ''.join(pattern.format(value) for value in (np.mean(row), *row))
    for layer, row in enumerate(values_LxN)
  ]
  return [header, *rows]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots spans by layer and head, and dynamic spans by token or the persistent vectors' share."""
  left, right = axes
  _plot_by_layer(left, result['spans'], 'span (tokens)')
  if result['along'] is not None:
    along = result['along']
    right.plot(along['spans'][:MAX_PLOTTED_TOKENS], linewidth=1)
    right.set(xlabel='token', ylabel='mean span (tokens)')
    right.set_ylim(bottom=0)
    visible_characters = str.maketrans({' ': '_', '\n': '|', '\t': '|', '$': r'\$'})
    texts = [text.translate(visible_characters) for text in along['texts'][:MAX_PLOTTED_TOKENS]]
    right.set_xticks(range(len(texts)), texts, fontsize=5)
  else:
    _plot_by_layer(right, result['persistent'], 'share of attention on persistent vectors')


def _plot_by_layer(axes, values_LxN, label):
  axes.set(xlabel='layer', ylabel=label)
  if values_LxN is None:
    axes.text(0.5, 0.5, 'none', ha='center', transform=axes.transAxes)
    return
  for layer, row in enumerate(values_LxN):
    axes.scatter([layer] * len(row), row, s=16, color='tab:blue', alpha=0.7)
  axes.plot(np.mean(values_LxN, axis=1), color='tab:orange', label='mean over heads')
  axes.set_xticks(range(len(values_LxN)))
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
