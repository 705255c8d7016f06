"""How far heads look, and what they find in persistent vectors.

L layers, N heads, T tokens of text, C persistent vectors.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, progress, runs
from ngrammer_jax.models import language_model
from ngrammer_jax.training import windows

SEGMENTS = 8  # of text that is looked at
SHOWN = 200  # tokens that dynamic spans are shown along
DRAWN = 80  # and of them in the figure


def analyse(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """All there is to know of the spans of a run, as plain values for JSON.

  Keys: `step`, `split`, `tokens`, the first of the split that were read; and, None where the
  model has no such thing:

  `spans`: [L][N] in tokens with the ramp, as in Figure 4 of the adaptive-span paper; of dynamic
    spans the mean over the tokens.
  `limit`, `ramp`: of the spans.
  `along`: of dynamic spans, the mean of all heads at each of some tokens, and their texts, as in
    Figure 5.
  `persistent`: [L][N], the share of attention that persistent vectors have, where they share a
    softmax with the context.

  Raises:
    BadInput: the model has neither.
  """
  c = run.config.model
  shared = c.persistent is not None and c.persistent.vectors
  shared = shared and c.persistent.kind == 'all_attention'
  if c.span is None and not shared:
    raise errors.BadInput(
      f'--workdir={run.workdir} has no spans, and no persistent vectors that share a softmax: it '
      f'needs model.span or model.persistent'
    )
  result = {'step': int(run.state.step), 'split': split, 'tokens': 0}
  result |= dict.fromkeys(('spans', 'limit', 'ramp', 'along', 'persistent'))
  if c.span is not None:
    result |= {'limit': c.span.limit, 'ramp': c.span.ramp}
  if c.span is not None and c.span.kind == 'adaptive':
    result['spans'] = _with_ramp(windows.spans(c, run.state.params), c.span).tolist()
  if shared or c.span.kind == 'dynamic':
    tokens_T = run.split(split).tokens[: SEGMENTS * run.config.training.segment_length]
    z_TxLxN, mass_LxN = _observed(run, np.asarray(tokens_T, np.int32), shared)
    result['tokens'] = len(tokens_T)
    if shared:
      result['persistent'] = mass_LxN.tolist()
    if z_TxLxN is not None:
      spans_TxLxN = _with_ramp(z_TxLxN, c.span)
      result['spans'] = spans_TxLxN.mean(axis=0).tolist()
      texts = [
        run.vocabulary.decode([token]).decode(errors='replace') for token in tokens_T[:SHOWN]
      ]
      along = spans_TxLxN[:SHOWN].mean(axis=(1, 2)).tolist()
      result['along'] = {'texts': texts, 'spans': along}
  return result


def _with_ramp(z, span) -> np.ndarray:
  return np.minimum(z + span.ramp, span.limit)


def _observed(run, tokens_T, shared):
  """The dynamic spans of every token, and the share of the persistent vectors."""
  # All heads together and one layer after the other: so they can be looked at.
  config = dataclasses.replace(run.config.model, scan_layers=False, remat='none')
  model = language_model.build(config, run.vocabulary.size)
  C = config.persistent.vectors if shared else 0

  @jax.jit
  def look(params, codebook, tokens_1xT, memory):
    given = {'params': params, 'codebook': codebook}
    (_, memory, _), seen = model.apply(given, tokens_1xT, memory, mutable=['intermediates'])
    seen = [seen['intermediates'][f'layer_{i}']['attention'] for i in range(config.layers)]
    spans = [layer['span']['spans'][0][0] for layer in seen if 'span' in layer]
    masses = [layer['probs'][0][0, ..., -C:].sum(-1).mean(-1) for layer in seen] if C else []
    return memory, spans, masses

  params, codebook = run.state.params, run.state.codebook
  memory, spans, masses = language_model.empty_memory(config, 1), [], []
  length = run.config.training.segment_length
  with progress.Progress('reading', len(tokens_T), 'tokens') as bar:
    for first in range(0, len(tokens_T), length):
      part = tokens_T[None, first : first + length]
      memory, spans_of_part, masses_of_part = look(params, codebook, part, memory)
      spans.append(np.stack(spans_of_part, axis=1) if spans_of_part else None)
      masses.append(np.asarray(masses_of_part) * part.shape[1])
      bar.advance(part.shape[1])
  dynamic = np.concatenate(spans) if spans[0] is not None else None
  return dynamic, sum(masses) / len(tokens_T) if C else None


def table(result: dict[str, Any]) -> str:
  """The spans by layer and head, to read."""
  lines = [f'step {result["step"]:,}']
  if result['spans'] is not None:
    lines.append(
      f'spans in tokens, with the ramp of {result["ramp"]}; the limit is {result["limit"]:,}'
    )
  if result['along'] is not None:
    lines[-1] += '; means of the tokens'
  if result['spans'] is not None:
    lines += _rows(result['spans'], '{:8.0f}')
  if result['persistent'] is not None:
    lines.append('share of attention on persistent vectors')
    lines += _rows(result['persistent'], '{:8.1%}')
  return '\n'.join(lines)


def _rows(values_LxN, pattern):
  heads = range(len(values_LxN[0]))
  header = f'{"layer":<8}{"mean":>8}' + ''.join(f'{f"head {n}":>8}' for n in heads)
  rows = [
    f'{layer:<8}' + ''.join(pattern.format(value) for value in (np.mean(row), *row))
    for layer, row in enumerate(values_LxN)
  ]
  return [header, *rows]


def draw(result: dict[str, Any], axes: Any) -> None:
  """Spans by layer and head; dynamic ones along the text, or the share of persistent vectors."""
  first, second = axes
  _by_layer(first, result['spans'], 'span (tokens)')
  if result['along'] is not None:
    along = result['along']
    second.plot(along['spans'][:DRAWN], linewidth=1)
    second.set(xlabel='token', ylabel='mean span (tokens)')
    second.set_ylim(bottom=0)
    seen = str.maketrans({' ': '_', '\n': '|', '\t': '|', '$': r'\$'})
    texts = [text.translate(seen) for text in along['texts'][:DRAWN]]
    second.set_xticks(range(len(texts)), texts, fontsize=5)
  else:
    _by_layer(second, result['persistent'], 'share on persistent vectors')


def _by_layer(axes, values_LxN, label):
  axes.set(xlabel='layer', ylabel=label)
  if values_LxN is None:
    axes.text(0.5, 0.5, 'none', ha='center', transform=axes.transAxes)
    return
  for layer, row in enumerate(values_LxN):
    axes.scatter([layer] * len(row), row, s=16, color='tab:blue', alpha=0.7)
  axes.plot(np.mean(values_LxN, axis=1), color='tab:orange', label='mean of the heads')
  axes.set_xticks(range(len(values_LxN)))
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
