"""N-grams of a text in the tables of a model: visits of rows, and hash collisions.

T tokens of text.
"""

from typing import Any

import numpy as np

from ngrammer_jax import runs
from ngrammer_jax.analysis import lookups
from ngrammer_jax.analysis.elements import Element, foldable_table

MAX_TOKENS = 1_000_000  # tokens of the split that are read
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches

COLUMNS = (
  'table',
  'order',
  'head',
  'rows',
  'never visited',
  'distinct n-grams',
  'sharing a row (random)',
  'lost (random)',
  'share of text',
)


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes visits and collisions of a split's n-grams in each table, as plain values for JSON.

  An n-gram consists of the hashed ids: of tokens, their classes, bytes or clusters.

  Keys: `step`, `split`; `tokens`, number of tokens read from the start of the split; and `tables`,
  with for each table its `name` (of its parameters), `hash`, and `heads`, each with:

  `order`, `head`, `table_rows`: length of the n-grams, number of the head in its order, its rows.
  `never`: number of rows without an n-gram of the text.
  `visits`: numbers of rows visited once, 2 to 3 times, 4 to 7 times, and so on.
  and the collisions of `lookups.collisions`.

  Raises:
    BadInput: the model has no n-gram memory.
  """
  all_tables = lookups.ngram_tables(run)
  by_table = lookups.read(run, run.split(split), MAX_TOKENS)
  result = {'step': run.restored.step, 'split': split}
  result['tokens'] = len(by_table[all_tables[0].name].rows_TxI)
  result['tables'] = []
  for table in all_tables:
    by_head = by_table[table.name].by_head(table)
    heads = [_analyze_head(head, number_T, row_T) for head, number_T, row_T in by_head]
    result['tables'].append({'name': table.name, 'hash': table.hash.kind, 'heads': heads})
  return result


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no n-gram memory."""
  lookups.ngram_tables(run)


def _analyze_head(head: lookups.Head, number_T: np.ndarray, row_T: np.ndarray) -> dict[str, Any]:
  """Returns the visits and the collisions of a head."""
  _, visits = np.unique(row_T, return_counts=True)
  return {
    'order': head.order,
    'head': head.index,
    'table_rows': head.rows,
    'never': head.rows - len(visits),
    'visits': np.bincount(np.frexp(visits)[1] - 1).tolist(),  # by the integer part of log2
    **lookups.collisions(number_T, row_T, head.rows),
  }


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the table of the heads."""
  rows = [COLUMNS]
  for each in result['tables']:
    for head in each['heads']:
      lost = 1 - head['rows'] / head['distinct']
      random_lost = 1 - head['random_rows'] / head['distinct']
      rows.append(
        (
          each['name'],
          str(head['order']),
          str(head['head']),
          f'{head["table_rows"]:,}',
          f'{head["never"] / head["table_rows"]:.1%}',
          f'{head["distinct"]:,}',
          f'{head["shared_ngrams"]:.1%} ({head["random_shared_ngrams"]:.1%})',
          f'{lost:.1%} ({abs(random_lost):.1%})',
          f'{head["shared"]:.1%}',
        )
      )
  return [
    foldable_table(f'{result["tokens"]:,} tokens; in parentheses: of a random function', rows)
  ]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots visits of rows, and shares of colliding n-grams and tokens, by table and order."""
  visits_axes, shares_axes = axes
  groups: dict[str, list[dict[str, Any]]] = {}  # heads by table and order
  for each in result['tables']:
    for head in each['heads']:
      groups.setdefault(f'{each["name"]}, order {head["order"]}', []).append(head)
  _plot_visits(visits_axes, groups)
  names = [name.replace(', ', '\n') for name in groups]
  for key, label, offset in (
    ('shared_ngrams', 'distinct n-grams', -0.2),
    ('shared', 'tokens', 0.2),
  ):
    shares = [[100 * head[key] for head in heads] for heads in groups.values()]
    positions = np.arange(len(groups)) + offset
    shares_axes.barh(positions, [np.mean(each) for each in shares], 0.4, label=label)
    for position, each in zip(positions, shares, strict=True):
      shares_axes.plot(each, [position] * len(each), 'k.', markersize=2)
  random = []
  for heads in groups.values():
    random.append(np.mean([100 * head['random_shared_ngrams'] for head in heads]))
  shares_axes.plot(
    random, np.arange(len(groups)) - 0.2, 'k|', markersize=10, label='n-grams, random hash'
  )
  shares_axes.set_yticks(range(len(groups)), names, fontsize=8)
  shares_axes.set_ylim(max(len(groups), 2) - 0.5, -0.5)
  shares_axes.set(xlabel='sharing a row (%; dots: heads)', xlim=(0, 105))
  _add_legend(shares_axes, 3)


def _plot_visits(axes: Any, groups: dict[str, list[dict[str, Any]]]) -> None:
  """Plots the percentage of rows by number of visits, for each group of heads."""
  longest = max(len(head['visits']) for heads in groups.values() for head in heads)
  for name, heads in groups.items():
    counts = np.zeros(1 + longest)
    for head in heads:
      counts[: 1 + len(head['visits'])] += [head['never'], *head['visits']]
    axes.plot(100 * counts / counts.sum(), 'o-', linewidth=1, markersize=3, label=name)
  ranges = ['0', '1', *(f'{2**i}–{2 ** (i + 1) - 1}' for i in range(1, longest))]
  axes.set_xticks(range(len(ranges)), ranges, rotation=90, fontsize=8)
  axes.set(xlabel='visits of a row', ylabel='rows (%)', ylim=(0, None))
  _add_legend(axes, 2)


def _add_legend(axes: Any, columns: int) -> None:
  """Adds a legend above the axes."""
  axes.legend(
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=columns,
    fontsize='x-small',
    handlelength=1.2,
    columnspacing=1,
    frameon=False,
  )
