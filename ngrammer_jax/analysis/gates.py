"""Gates of the n-gram memories over a text, and the n-grams with the highest gates.

T tokens of text, S shown tokens, P gates, n order of an n-gram.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture, figures, lookups
from ngrammer_jax.analysis.elements import MAX_SHOWN_TOKENS, Element, shaded_text
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import encoding

MAX_TOKENS = 2**18  # tokens of the split that are read
MAX_TEXT_TOKENS = 1000  # tokens of the split that are shown one by one, without a text
MAX_PLOTTED_TOKENS = 60  # of these, the tokens in the figure
MAX_SHADED_GATES = 3  # gates whose tokens are drawn as shaded text; more are a heat map
MIN_COUNT = 10  # occurrences of the n-grams that are compared
MAX_NGRAMS = 50  # n-grams of each order in the result
MAX_LISTED = 6  # of these, the n-grams that are shown
BINS = 50  # of the histogram of gates, from 0 to 1
FIGURE_SIZE = (2, 13.0)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation', text: str | None = None) -> dict[str, Any]:
  """Computes the gates of a run, as plain values for JSON.

  The gate of a token is between 0 and 1; for several branches, it is their mean. Rows in values
  have a gate for each head, without the factor.

  Keys: `step`, `split`; `tokens`, number of tokens read from the start of the split; `texts` of the
  shown tokens [S], with an empty one for the start of a document; and `gates`, with for each memory
  and block, and each head:

  `name`: name of the parameters of the memory, and number of the head.
  `values`: gates of the shown tokens [S].
  `mean`, `deviation`, `histogram`: of all tokens of the split, in equal bins from 0 to 1.
  `ngrams`: for each order, the n-grams of tokens with the highest mean gate at their last token,
    with at least MIN_COUNT occurrences: `text`, `count` and `gate`.

  Args:
    run: the run.
    split: split of the n-grams, and of the shown tokens without a text.
    text: text to show, as a separate document.

  Raises:
    BadInput: the model has no gate, or the text has a character outside the vocabulary.
  """
  gates = _gates(run)
  shown = None if text is None else _encode(run, text)
  tokens = run.split(split)
  by_gate = _read(run, gates, tokens, MAX_TOKENS)
  T = len(by_gate[gates[0].name])
  if shown is None:
    shown = tokens
    S = min(T, MAX_TEXT_TOKENS)
    shown_by_gate = {name: values_T[:S] for name, values_T in by_gate.items()}
  else:
    S = len(shown.tokens)
    shown_by_gate = _read(run, gates, shown, S)
  result = {'step': run.restored.step, 'split': split, 'tokens': T}
  result['texts'] = capture.input_texts(run, shown, S)
  result['gates'] = []
  for gate in gates:
    orders = gate.memory.hash.orders
    statistics = _analyze_gate(run, tokens, by_gate[gate.name], orders)
    values = shown_by_gate[gate.name].tolist()
    result['gates'].append({'name': gate.name, 'values': values} | statistics)
  return result


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no gate."""
  _gates(run)


class Gate(NamedTuple):
  """A gate of rows.

  Attributes:
    memory: the memory, with its own table or a shared one.
    module: name of the module of the gate in the memory.
    head: the attention head of the gated values. None: no specific head.
  """

  memory: lookups.NGramTable
  module: str
  head: int | None = None

  @property
  def name(self) -> str:
    """The name of the memory, and of the head."""
    if self.head is None:
      return self.memory.name
    return f'{self.memory.name}/head_{self.head}'

  def measure(self, intermediates: dict[str, Any]) -> jax.Array:
    """Returns the gates of a segment, [B, T], the mean of all branches."""
    (values_BxTxG,) = self.memory.subtree(intermediates)[self.module]['gate']
    if self.head is None:
      return values_BxTxG.mean(axis=-1)
    return values_BxTxG[..., self.head]


def _gates(run: runs.Run) -> list[Gate]:
  """Returns all gates. Raises NotApplicable if there are none."""
  gates = []
  for memory in lookups.ngram_memories(run):
    o = memory.module.options
    if memory.module.is_table:
      continue
    if o.join == 'gate':
      gates.append(Gate(memory, 'gate'))
    elif o.value_gate is not None and o.value_gate.per_head and not o.one_head:
      gates += [Gate(memory, 'values', head) for head in range(memory.module.key_heads)]
    elif o.value_gate is not None:
      gates.append(Gate(memory, 'values'))
  if not gates:
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no gate: it needs model.ngram_memories with join="gate", or '
      f'with value_gate'
    )
  return gates


def _encode(run: runs.Run, text: str) -> token_split.TokenSplit:
  """Returns a text as a split. The document start at its end lets the model read all of it."""
  ids = encoding.encode(run.vocabulary, text, '--text', special=False).ids
  if not len(ids):
    raise errors.BadInput(f'--text={text!r} has no tokens: omit it for the tokens of --split')
  start = run.vocabulary.document_start
  return token_split.TokenSplit(np.append(ids, start), np.zeros(1, int), None, start)


def _read(
  run: runs.Run, gates: list[Gate], text: token_split.TokenSplit, max_tokens: int
) -> dict[str, np.ndarray]:
  """Returns the gates by name for the first inputs of a text, float64 [T]."""

  def measure(intermediates: dict[str, Any]) -> dict[str, jax.Array]:
    return {gate.name: gate.measure(intermediates) for gate in gates}

  def join(*segments_1xT: np.ndarray) -> np.ndarray:
    return np.concatenate(segments_1xT, axis=1, dtype=np.float64)[0]

  segments = [values for _, values in capture.captured_segments(run, text, max_tokens, measure)]
  return jax.tree.map(join, *segments)


def _analyze_gate(
  run: runs.Run, text: token_split.TokenSplit, values_T: np.ndarray, orders: tuple[int, ...]
) -> dict[str, Any]:
  """Returns the statistics of a gate over a text."""
  histogram, _ = np.histogram(values_T, BINS, (0, 1))
  return {
    'mean': float(values_T.mean()),
    'deviation': float(values_T.std()),
    'histogram': histogram.tolist(),
    'ngrams': {order: _highest(run, text, values_T, order) for order in orders},
  }


def _highest(
  run: runs.Run, text: token_split.TokenSplit, values_T: np.ndarray, order: int
) -> list[dict[str, Any]]:
  """Returns the n-grams with the highest mean gate."""
  ngrams_NxT = lookups.token_ngrams(text, len(values_T), order)
  number_T = lookups.number_ngrams(ngrams_NxT)
  count_U = np.bincount(number_T)
  mean_U = np.bincount(number_T, values_T) / count_U
  _, example_U = np.unique(number_T, return_index=True)
  is_whole_U = (ngrams_NxT[:, example_U] != lookups.NO_TOKEN).all(axis=0)
  frequent = np.flatnonzero(is_whole_U & (count_U >= MIN_COUNT))
  highest = frequent[np.argsort(-mean_U[frequent], kind='stable')][:MAX_NGRAMS]
  return [
    {
      'text': capture.decode(run, ngrams_NxT[::-1, example_U[u]]),
      'count': int(count_U[u]),
      'gate': float(mean_U[u]),
    }
    for u in highest
  ]


def elements(result: dict[str, Any], shown: int = MAX_SHOWN_TOKENS) -> list[Element]:
  """Returns mean and deviation of all gates, then the n-grams and the shaded text of each.

  All but the first gate are folded.

  Args:
    result: result of `analyze`.
    shown: number of tokens of the shaded text.
  """
  means = [('memory', 'mean gate', 'standard deviation')]
  for gate in result['gates']:
    means.append((gate['name'], f'{gate["mean"]:.3f}', f'{gate["deviation"]:.3f}'))
  result_elements = [Element(f'{result["tokens"]:,} tokens of {result["split"]}', means)]
  for number, gate in enumerate(result['gates']):
    rows = [['n-gram', 'mean gate', 'count']]
    for listed in gate['ngrams'].values():
      for ngram in listed[:MAX_LISTED]:
        rows.append([repr(ngram['text']), f'{ngram["gate"]:.3f}', f'{ngram["count"]:,}'])
    title = f'{gate["name"]}: n-grams with the highest mean gate, of at least {MIN_COUNT} each'
    result_elements.append(Element(title, rows, is_folded=number > 0))
    shaded = shaded_text(
      gate['name'],
      result['texts'][:shown],
      gate['values'][:shown],
      '.3f',
      is_folded=number > 0,
    )
    result_elements.append(shaded)
  return result_elements


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the gates of the first tokens, if their texts are available, and histograms of all."""
  tokens_axes, histogram_axes = axes
  if result['texts']:
    _plot_tokens(result, tokens_axes)
  edges = np.linspace(0, 1, BINS + 1)
  for gate in result['gates']:
    shares = 100 * np.array(gate['histogram']) / result['tokens']
    histogram_axes.stairs(shares, edges, label=gate['name'])
  histogram_axes.set(xlabel='gate', ylabel=f'tokens of {result["split"]} (%)', xlim=(0, 1))
  histogram_axes.legend(fontsize='x-small')


def _plot_tokens(result: dict[str, Any], axes: Any) -> None:
  """Plots the gates of the first tokens: as shaded text, or as a heat map of many gates."""
  texts = result['texts'][:MAX_PLOTTED_TOKENS]
  values_PxS = np.array([gate['values'][:MAX_PLOTTED_TOKENS] for gate in result['gates']])
  names = [gate['name'] for gate in result['gates']]
  if len(names) <= MAX_SHADED_GATES:
    image = figures.draw_shaded_texts(axes, names, texts, values_PxS)
  else:
    image = _plot_heat_map(axes, names, texts, values_PxS)
  axes.figure.colorbar(image, ax=axes, label='gate', location='top', aspect=40)


def _plot_heat_map(axes: Any, names: list[str], texts: list[str], values_PxS: np.ndarray) -> Any:
  """Plots a row of cells for each gate; returns the image."""
  P, S = values_PxS.shape
  # Cells are up to four times as high as wide; few memories or tokens do not fill the panel.
  aspect = min(4, 0.12 * S, 0.5 * S / P)
  image = axes.imshow(
    values_PxS, aspect=aspect, cmap=figures.SHADES, vmin=0, vmax=1, interpolation='nearest'
  )
  if P <= 6:  # enough room for several lines
    names = [name.replace('/', '/\n') for name in names]
  axes.set_yticks(range(P), names, fontsize=7)
  axes.set_xticks(range(S), figures.token_labels(texts), fontsize=6, rotation=90)
  return image
