"""Attention spans by layer and head, and the attention on persistent vectors.

L layers, N heads, T tokens of text, C persistent vectors.
"""

from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture, figures
from ngrammer_jax.analysis.elements import MAX_SHOWN_TOKENS, Element, foldable_table, shaded_text
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import span as span_config
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.models import spans as model_spans

MAX_SEGMENTS = 8  # segments of the split that are read
MAX_RECORDED_TOKENS = 200  # tokens for which dynamic spans are recorded one by one
MAX_PLOTTED_TOKENS = 80  # of these, the tokens in the figure
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the spans of a run, as plain values for JSON.

  Keys: `step`, `split`; `tokens`, number of tokens read from the start of the split; and, None for
  models without them:

  `spans`: [L][N] in tokens, including the ramp, as in Figure 4 of the adaptive-span paper; for
    dynamic spans the mean over tokens.
  `limit`, `ramp`: options of the spans.
  `along`: for dynamic spans, the mean over all heads at each of the first inputs, and the texts of
    these tokens, with an empty one for the start of a document, as in Figure 5.
  `persistent`: [L][N], the share of attention on persistent vectors that share a softmax with the
    context.

  Raises:
    BadInput: the model has no spans and no such persistent vectors.
  """
  check_applicable(run)
  config = run.config.evaluation_model()
  span = config.span
  has_persistent = capture.shared_vectors(config) > 0
  result = {
    'step': run.restored.step,
    'split': split,
    'tokens': 0,
    'spans': None,
    'limit': None,
    'ramp': None,
    'along': None,
    'persistent': None,
  }
  if span is not None:
    result['limit'] = span.limit
    result['ramp'] = span.ramp
  if span is not None and span.kind == 'adaptive':
    spans_LxN = model_spans.adaptive_spans(config, run.restored.params)
    result['spans'] = _add_ramp(spans_LxN, span).tolist()
  if has_persistent or span.kind == 'dynamic':
    text = run.split(split)
    max_tokens = MAX_SEGMENTS * run.config.training.segment_length
    z_TxLxN, share_LxN, result['tokens'] = _measure(run, text, max_tokens, config)
    if has_persistent:
      result['persistent'] = share_LxN.tolist()
    if z_TxLxN is not None:
      spans_TxLxN = _add_ramp(z_TxLxN, span)
      result['spans'] = spans_TxLxN.mean(axis=0).tolist()
      texts = capture.input_texts(run, text, min(result['tokens'], MAX_RECORDED_TOKENS))
      mean_spans = spans_TxLxN[:MAX_RECORDED_TOKENS].mean(axis=(1, 2)).tolist()
      result['along'] = {'texts': texts, 'spans': mean_spans}
  return result


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no spans and no persistent vectors in the softmax."""
  config = run.config.evaluation_model()
  if config.span is None and capture.shared_vectors(config) == 0:
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no spans and no persistent vectors that share a softmax with '
      f'the context: it needs model.span or model.persistent'
    )


def _add_ramp(z: np.ndarray, span: span_config.SpanConfig) -> np.ndarray:
  """Returns spans in tokens, including the ramp."""
  return np.minimum(z + span.ramp, span.limit)


def _measure(
  run: runs.Run,
  text: token_split.TokenSplit,
  max_tokens: int,
  config: model_config.ModelConfig,
) -> tuple[np.ndarray | None, np.ndarray, int]:
  """Returns dynamic spans [T, L, N] or None, the share [L, N] of persistent vectors, and T."""
  vectors = capture.shared_vectors(config)

  def measure(intermediates: dict[str, Any]) -> tuple[list[jax.Array], list[jax.Array]]:
    layers = capture.attention_layers(config, intermediates)
    spans = [layer['span']['spans'][0][0] for layer in layers if 'span' in layer]  # [T, N]
    return spans, [capture.persistent_share(layer, vectors) for layer in layers if vectors]

  segment_spans = []
  shares = 0
  tokens = 0
  segments = capture.captured_segments(run, text, max_tokens, measure)
  for starts_T, (layer_spans, layer_shares) in segments:
    if layer_spans:
      segment_spans.append(np.stack(layer_spans, axis=1))
    shares = shares + np.asarray(layer_shares) * len(starts_T)
    tokens += len(starts_T)
  spans_TxLxN = np.concatenate(segment_spans) if segment_spans else None
  return spans_TxLxN, shares / tokens, tokens


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the tables by layer and head, and the shaded text of dynamic spans."""
  result_elements = []
  if result['spans'] is not None:
    mean = '' if result['along'] is None else '; mean over tokens'
    title = (
      f'spans in tokens, including the ramp of {result["ramp"]}; the limit is '
      f'{result["limit"]:,}{mean}'
    )
    result_elements.append(foldable_table(title, table_rows(result['spans'], ',.0f')))
  if result['persistent'] is not None:
    title = 'share of attention on persistent vectors'
    result_elements.append(foldable_table(title, table_rows(result['persistent'], '.1%')))
  if result['along'] is not None:
    along = {key: values[:MAX_SHOWN_TOKENS] for key, values in result['along'].items()}
    title = 'mean span of each token'
    result_elements.append(shaded_text(title, along['texts'], along['spans'], '.0f'))
  return result_elements


def table_rows(values_LxN: list[list[float]], pattern: str) -> list[list[str]]:
  """Returns values by layer and head as rows of a table, the header first."""
  rows = [['layer', 'mean', *(f'head {n}' for n in range(len(values_LxN[0])))]]
  for layer, row in enumerate(values_LxN):
    rows.append([str(layer)] + [format(value, pattern) for value in (np.mean(row), *row)])
  return rows


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots spans by layer and head, and dynamic spans by token or the persistent vectors' share."""
  left, right = axes
  if result['spans'] is not None:
    _plot_by_layer(left, result['spans'], 'span (tokens)')
    shortest = max(1, np.min(result['spans']))
    left.axhline(result['limit'], color='tab:red', linestyle='--', linewidth=1, label='limit')
    left.set_yscale('log', base=2)
    left.set_ylim(shortest / 1.2, result['limit'] * 1.2)
    left.yaxis.set_major_formatter('{x:,.0f}')
  if result['along'] is not None:
    along = result['along']
    right.plot(along['spans'][:MAX_PLOTTED_TOKENS], linewidth=1)
    right.set(xlabel='token', ylabel='mean span (tokens)')
    right.set_ylim(bottom=0)
    labels = figures.token_labels(along['texts'][:MAX_PLOTTED_TOKENS])
    right.set_xticks(range(len(labels)), labels, fontsize=5)
  elif result['persistent'] is not None:
    _plot_by_layer(right, result['persistent'], 'share of attention on\npersistent vectors')
    right.set_ylim(0, 1.02)
  panel = max(axes, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
  handles, labels = panel.get_legend_handles_labels()
  columns = -(-len(labels) // 20)
  panel.figure.legend(handles, labels, loc='outside right upper', fontsize=7, ncols=columns)


def _plot_by_layer(axes: Any, values_LxN: list[list[float]], label: str) -> None:
  """Plots a dot for each head, the heads of a layer side by side, and their mean as a line."""
  layers = np.arange(len(values_LxN))
  N = len(values_LxN[0])
  for n, values_L in enumerate(np.transpose(values_LxN)):
    offset = 0.6 * ((n + 0.5) / N - 0.5)
    axes.scatter(layers + offset, values_L, s=14, color=figures.color(n), label=f'head {n}')
  means = np.mean(values_LxN, axis=1)
  axes.hlines(means, layers - 0.4, layers + 0.4, color='black', linewidth=1, label='mean')
  axes.set(xlabel='layer', ylabel=label, xlim=(-0.6, layers[-1] + 0.6))
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
