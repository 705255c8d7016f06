"""Loss of a run without its n-gram memories, and with wrong rows of their tables.

Nothing is trained again. T tokens of text.
"""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import runs
from ngrammer_jax.analysis import lookups, token_losses
from ngrammer_jax.analysis.parts import Part
from ngrammer_jax.config.ngram import memory as ngram_memory

MAX_TOKENS = 2**16  # tokens of the split that are scored
MAX_TRAIN_TOKENS = 10_000_000  # tokens of the training split in which n-grams are counted
COUNTS = (0, 1, 4, 16, 64, 256, 1024)  # smallest count of an n-gram in each group
MIN_INCREASE = 5e-5  # nats per token: of a smaller one, which is rounding, there are no shares
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes what the tables contribute to the loss of a run, as plain values for JSON.

  Each memory is changed alone, in all its blocks: it is removed, which gives back the model that it
  was added to, if that is frozen; all rows are set to zero; those of one order are; or every row
  that the text looks up is replaced by that of a random token, of the same head: rows that the
  model can use, but of wrong n-grams. Zero rows leave the biases of a memory in place.

  The loss is in nats per token. Groups are by the count of an n-gram of tokens in the first
  MAX_TRAIN_TOKENS tokens of the training split: the n-gram that ends at the input token, of the
  order that is set to zero, or else of the longest order.

  Keys: `step`, `split`; `tokens` and `train_tokens`, numbers of tokens scored and counted in;
  `loss`, that of the unchanged model; and `changes`, with for each:

  `memory`: name of the memory.
  `change`: `removed`, `zero`, `order N zero` or `exchanged`.
  `order`: order of the n-grams in the groups.
  `loss`: the loss.
  `groups`: for each smallest count of COUNTS, `count`; the number of `tokens`; and, None without
    tokens, the unchanged `loss`, the `increase` of the loss, and the `share` of the group in the
    increase summed over all tokens, None if that is rounding.

  Raises:
    BadInput: the model has no n-gram memory, or there is no training split.
  """
  all_tables = lookups.tables(run)
  text, train = run.split(split), run.split('train')
  tokens, train_tokens = min(len(text.tokens), MAX_TOKENS), min(len(train.tokens), MAX_TRAIN_TOKENS)
  orders = {order for table in all_tables for order in table.hash.orders}
  ngrams_NxT = lookups.token_ngrams(text, tokens, max(orders))
  train_ngrams_NxT = lookups.token_ngrams(train, train_tokens, max(orders))
  counts = {n: lookups.count_ngrams(ngrams_NxT[:n], train_ngrams_NxT[:n]) for n in orders}
  loss_T, changes = token_losses.token_losses(run, text, tokens), []
  for memory, change, order, changed, variables in _changes(run, all_tables, text, tokens):
    name = f'{memory}, {change}'
    changed_T = token_losses.token_losses(changed, text, tokens, variables, name)
    result = {'memory': memory, 'change': change, 'order': order, 'loss': float(changed_T.mean())}
    changes.append(result | {'groups': _group(counts[order], loss_T, changed_T - loss_T)})
  result = {'step': run.restored.step, 'split': split, 'tokens': tokens}
  return result | {'train_tokens': train_tokens, 'loss': float(loss_T.mean()), 'changes': changes}


def _changes(run, all_tables, text, tokens):
  """Yields the name of a memory, its change, the order of the groups, a run and its variables."""
  by_table = lookups.read(run, text, tokens)
  for memory in dict.fromkeys(table.path[-1] for table in all_tables):
    tables = [table for table in all_tables if table.path[-1] == memory]
    orders = tables[0].hash.orders
    yield memory, 'removed', max(orders), *_remove(run, memory)
    for zeroed in dict.fromkeys((orders, *((order,) for order in orders))):
      change = 'zero' if zeroed == orders else f'order {zeroed[0]} zero'
      zeros = {table: _zeros(run, table, zeroed) for table in tables}
      yield memory, change, max(zeroed), run, _change_tables(run, zeros)
    exchanged = {table: _exchange(run, table, by_table[table.name]) for table in tables}
    yield memory, 'exchanged', max(orders), run, _change_tables(run, exchanged)


def _remove(run, memory):
  """Returns a run without a memory, and its variables."""
  memories = run.config.model.ngram_memories
  remaining = [i for i in range(len(memories)) if ngram_memory.name(i) != memory]
  changes = {'ngram_memories': tuple(memories[i] for i in remaining)}
  changes |= {'ngram': None} if len(remaining) == len(memories) else {}
  model = dataclasses.replace(run.config.model, **changes)
  without = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
  # Memories are numbered.
  renamed = {ngram_memory.name(old): ngram_memory.name(new) for new, old in enumerate(remaining)}

  def keep(tree):
    return {
      renamed.get(name, name): keep(part) if isinstance(part, Mapping) else part
      for name, part in tree.items()
      if name != memory
    }

  variables = {'params': keep(run.restored.params), 'codebook': keep(run.restored.codebook)}
  return without, without.engine.prepare(variables)


def _zeros(run, table, orders):
  """Returns the table with zeros in the rows of some orders."""
  rows = np.array(table.part_of(run.restored.params)['table'])
  for head in table.heads():
    if head.order in orders:
      rows[head.first : head.first + head.rows] = 0
  return rows


def _exchange(run, table, text_lookups):
  """Returns the table in which each row of a text is replaced by that of a random other token."""
  rows, rng = np.array(table.part_of(run.restored.params)['table']), np.random.default_rng(0)
  for head, row_T in zip(table.heads(), text_lookups.rows_TxI.T, strict=True):
    visited = np.unique(row_T)
    drawn = rng.choice(row_T, len(visited))
    drawn = np.where(drawn == visited, np.roll(visited, 1), drawn)
    rows[head.first + visited] = rows[head.first + drawn]
  return rows


def _change_tables(run, changed):
  """Returns the variables of a run with arrays instead of some tables."""
  params = flax.traverse_util.flatten_dict(run.restored.params)
  for table, rows in changed.items():
    key = (*table.path, 'table')
    params[key] = jax.device_put(rows, jnp.asarray(params[key]).sharding)
  return run.variables | {'params': flax.traverse_util.unflatten_dict(params)}


def _group(counts_T, loss_T, increase_T):
  """Returns the losses of tokens by the count of their n-gram."""
  group_T, total, groups = np.digitize(counts_T, COUNTS) - 1, increase_T.sum(), []
  has_shares = abs(total) >= MIN_INCREASE * len(increase_T)
  for number, count in enumerate(COUNTS):
    is_in_T = group_T == number
    group = {'count': count, 'tokens': int(is_in_T.sum())}
    group |= dict.fromkeys(('loss', 'increase', 'share'))
    if group['tokens']:
      increase = increase_T[is_in_T]
      group |= {'loss': float(loss_T[is_in_T].mean()), 'increase': float(increase.mean())}
      group['share'] = float(increase.sum() / total) if has_shares else None
    groups.append(group)
  return groups


def _ranges():
  """Returns the counts of each group as text."""
  ends = [f'–{end - 1}' if end > start + 1 else '' for start, end in itertools.pairwise(COUNTS)]
  return [f'{start}{end}' for start, end in zip(COUNTS, [*ends, ' or more'], strict=True)]


def parts(result: dict[str, Any]) -> list[Part]:
  """Returns the losses of all changes, then the groups of each."""
  rows = [('change', 'nats/token', 'increase')]
  title = f'unchanged: {result["loss"]:.4f} nats/token, {result["tokens"]:,} tokens'
  result_parts = [Part(title, rows)]
  for each in result['changes']:
    name, increase = f'{each["memory"]}, {each["change"]}', each['loss'] - result['loss']
    rows.append((name, f'{each["loss"]:.4f}', f'{increase:+.4f}'))
    title = (
      f'{name}: by count of the {each["order"]}-gram in {result["train_tokens"]:,} training tokens'
    )
    groups = [('count', 'tokens', 'nats/token', 'increase', 'share of the increase')]
    for text, group in zip(_ranges(), each['groups'], strict=True):
      if group['tokens']:
        share = '' if group['share'] is None else f'{group["share"]:.1%}'
        losses = f'{group["loss"]:.4f}', f'{group["increase"]:+.4f}'
        groups.append((text, f'{group["tokens"]:,}', *losses, share))
    result_parts.append(Part(title, groups))
  return result_parts


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the increase of the loss by count of the n-gram: mean of each group, and part of all."""
  labels = _ranges()
  for each in result['changes']:
    name, groups = f'{each["memory"]}, {each["change"]}', each['groups']
    increases = np.array([np.nan if g['increase'] is None else g['increase'] for g in groups])
    tokens = np.array([group['tokens'] for group in groups])
    for one, values in zip(axes, (increases, increases * tokens / result['tokens']), strict=True):
      one.plot(values, 'o-', linewidth=1, markersize=4, label=name)
  for one, label in zip(axes, ('increase in the group', 'part of the total increase'), strict=True):
    one.set_xticks(range(len(labels)), labels, rotation=30, fontsize=8)
    one.set(xlabel='count of the n-gram in the training text', ylabel=f'{label} (nats/token)')
    one.axhline(0, color='black', linewidth=0.5)
    one.set_yscale('symlog', linthresh=0.01)  # few n-grams may have most of the increase
    one.grid(alpha=0.3)
  axes[0].legend(fontsize='x-small')
