"""Loss of a run without its memories, and with wrong rows of their n-gram tables.

There is no retraining. T tokens of text.
"""

from collections.abc import Collection, Iterator, Mapping
import dataclasses
import itertools
from typing import Any, NamedTuple

from flax import linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import lookups, token_losses
from ngrammer_jax.analysis.elements import Element
from ngrammer_jax.config import memory_blocks
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.models import language_model, model_variables, parameter_groups

MAX_TOKENS = 2**16  # tokens of the split that are scored
MAX_TRAIN_TOKENS = 10_000_000  # tokens of the training split in which n-grams are counted
COUNTS = (0, 1, 4, 16, 64, 256, 1024)  # smallest count of an n-gram in each group
DEFAULT_ORDER = 2  # of the n-grams in the groups, for a memory without n-grams
OF_NGRAMS = ('ngram', 'ngram_memories')
MIN_INCREASE = 5e-5  # nats per token: of a smaller one, which is rounding, there are no shares
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches


def analyze(run: runs.Run, split: str = 'validation') -> dict[str, Any]:
  """Computes the contribution of the memories to the loss of a run, as plain values for JSON.

  Each memory is changed alone, in all its blocks. `removed`: without the memory; for a frozen model
  this is the model before the addition. A memory in place of a part of the model, such as the
  feed-forward, is not removed. For n-gram tables, also `zero`: all rows, or the rows of one order,
  are set to zero (biases of the memory stay); and `exchanged`: every looked-up row is replaced by
  the row of a random token of the same head, a usable row of a wrong n-gram.

  The loss is in nats per token. Groups are by the count of an n-gram of tokens in the first
  MAX_TRAIN_TOKENS tokens of the training split: the n-gram ends at the input token and has the
  zeroed order, or else the longest order; DEFAULT_ORDER for memories without orders.

  Keys: `step`, `split`; `tokens` and `train_tokens`, numbers of tokens scored and counted in;
  `loss` of the unchanged model; and `changes`, with for each:

  `memory`: name of the memory.
  `change`: `removed`, `zero`, `order N zero` or `exchanged`.
  `order`: order of the n-grams in the groups.
  `loss`: the loss.
  `groups`: for each smallest count of COUNTS, `count`; the number of `tokens`; and, None without
    tokens, the unchanged `loss`, the `increase` of the loss, and the `share` of the group in the
    increase summed over all tokens, None if the sum is rounding error.

  Raises:
    BadInput: the model has no memory, or there is no training split.
  """
  check_applicable(run)
  all_tables = _tables(run)
  text = run.split(split)
  train = run.split('train')
  tokens = min(len(text.tokens), MAX_TOKENS)
  train_tokens = min(len(train.tokens), MAX_TRAIN_TOKENS)
  orders = {order for table in all_tables for order in table.hash.orders} | {DEFAULT_ORDER}
  ngrams_NxT = lookups.token_ngrams(text, tokens, max(orders))
  train_ngrams_NxT = lookups.token_ngrams(train, train_tokens, max(orders))
  counts = {n: lookups.count_ngrams(ngrams_NxT[:n], train_ngrams_NxT[:n]) for n in orders}
  loss_T = token_losses.token_losses(run, text, tokens)
  changes = []
  for change in _changes(run, all_tables, text, tokens):
    changed_T = token_losses.token_losses(
      change.run, text, tokens, change.variables, f'{change.memory}, {change.name}'
    )
    changes.append(
      {
        'memory': change.memory,
        'change': change.name,
        'order': change.order,
        'loss': float(changed_T.mean()),
        'groups': _group(counts[change.order], loss_T, changed_T - loss_T),
      }
    )
  return {
    'step': run.restored.step,
    'split': split,
    'tokens': tokens,
    'train_tokens': train_tokens,
    'loss': float(loss_T.mean()),
    'changes': changes,
  }


def check_applicable(run: runs.Run) -> None:
  """Raises NotApplicable if the model has no memory."""
  if not any(memory_blocks.blocks(dataclasses.asdict(run.config.model))):
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no memory: it needs one of '
      f'{", ".join(f"model.{name}" for name in memory_blocks.NAMES)}'
    )


def _tables(run: runs.Run) -> list[lookups.NGramTable]:
  """Returns all n-gram tables, possibly none."""
  model = run.config.model
  if not model.ngram_memories and model.ngram is None:
    return []
  return lookups.ngram_tables(run)


class Change(NamedTuple):
  """A change of a memory.

  Attributes:
    memory: name of the memory.
    name: name of the change.
    order: order of the n-grams in the groups.
    run: the run, or the one without the memory.
    variables: its variables.
  """

  memory: str
  name: str
  order: int
  run: runs.Run
  variables: inference.Variables


def _changes(
  run: runs.Run,
  all_tables: list[lookups.NGramTable],
  text: token_split.TokenSplit,
  tokens: int,
) -> Iterator[Change]:
  """Yields the changes of each memory."""
  by_table = {}
  if all_tables:
    by_table = lookups.read(run, text, tokens)
  for memory in dict.fromkeys(table.path[-1] for table in all_tables):
    tables = [table for table in all_tables if table.path[-1] == memory]
    orders = tables[0].hash.orders
    yield from _removal(run, memory, max(orders))
    zeros = {table: _zeros(run, table, orders) for table in tables}
    yield Change(memory, 'zero', max(orders), run, _change_tables(run, zeros))
    if len(orders) > 1 and not tables[0].has_shared_rows:
      for order in orders:
        zeros = {table: _zeros(run, table, (order,)) for table in tables}
        yield Change(memory, f'order {order} zero', order, run, _change_tables(run, zeros))
    exchanged = {table: _exchange(run, table, by_table[table.name]) for table in tables}
    yield Change(memory, 'exchanged', max(orders), run, _change_tables(run, exchanged))
  for name in memory_blocks.NAMES:
    if name not in OF_NGRAMS and getattr(run.config.model, name) is not None:
      yield from _removal(run, name, DEFAULT_ORDER)


def _removal(run: runs.Run, memory: str, order: int) -> Iterator[Change]:
  """Yields the removal of a memory, if possible; for `order` see `Change`."""
  without = remove(run, memory)
  if without is not None:
    yield Change(memory, 'removed', order, *without)


def remove(run: runs.Run, memory: str) -> tuple[runs.Run, inference.Variables] | None:
  """Returns a run without a memory, and its variables; None if the model needs the memory.

  The model needs a memory in place of one of its parts, such as the feed-forward. A shared table is
  removed with all its memories, and a segment memory with the attention spans.

  Args:
    run: the run.
    memory: its block in the model, or the module name of an n-gram memory.
  """
  group = memory
  if memory not in memory_blocks.NAMES:
    group = parameter_groups.group_of(memory)
  memories = run.config.model.ngram_memories
  remaining = [i for i, m in enumerate(memories) if ngram_memory.table_module(i, m) != group]
  removed = {group, *(ngram_memory.name(i) for i in range(len(memories)) if i not in remaining)}
  evaluation = run.config.evaluation
  if group == 'memory':
    removed.add('span')
    evaluation = dataclasses.replace(evaluation, memory=None)
  changes: dict[str, Any] = {'ngram_memories': tuple(memories[i] for i in remaining)}
  changes |= {name: None for name in removed if name in memory_blocks.NAMES}
  model = dataclasses.replace(run.config.model, **changes)
  config = dataclasses.replace(run.config, model=model, evaluation=evaluation)
  without = dataclasses.replace(run, config=config)
  # Memories are numbered.
  renamed = {ngram_memory.name(old): ngram_memory.name(new) for new, old in enumerate(remaining)}

  def without_memory(tree: Mapping[str, Any]) -> dict[str, Any]:
    leaves = {}
    for name, leaf in flax.traverse_util.flatten_dict(tree, sep='/').items():
      if parameter_groups.group_of(name) not in removed:
        new_name = '/'.join(renamed.get(module, module) for module in name.split('/'))
        leaves[new_name] = leaf
    return leaves

  params = without_memory(run.restored.params)
  expected = model_variables.abstract(language_model.build(model, run.vocabulary_size))['params']
  if params.keys() != flax.traverse_util.flatten_dict(nn.unbox(expected), sep='/').keys():
    return None
  collections = {'params': params, 'codebook': without_memory(run.restored.codebook)}
  variables = {
    name: flax.traverse_util.unflatten_dict(leaves, sep='/') for name, leaves in collections.items()
  }
  return without, without.engine.prepare(variables)


def _zeros(run: runs.Run, table: lookups.NGramTable, orders: Collection[int]) -> np.ndarray:
  """Returns the table with zeros in the rows of some orders."""
  rows = np.array(table.subtree(run.restored.params)['table'])
  for head in table.heads():
    if head.order in orders:
      rows[head.first : head.first + head.rows] = 0
  return rows


def _exchange(
  run: runs.Run, table: lookups.NGramTable, text_lookups: lookups.Lookups
) -> np.ndarray:
  """Returns the table with each row of a text replaced by the row of a random other token."""
  before = np.asarray(table.subtree(run.restored.params)['table'])
  rows = before.copy()
  rng = np.random.default_rng(0)
  for head, row_T in zip(table.heads(), text_lookups.rows_TxI.T, strict=True):
    visited = np.unique(row_T)
    drawn = rng.choice(row_T, len(visited))
    drawn = np.where(drawn == visited, np.roll(visited, 1), drawn)
    rows[head.first + visited] = before[head.first + drawn]
  return rows


def _change_tables(
  run: runs.Run, changed: Mapping[lookups.NGramTable, np.ndarray]
) -> inference.Variables:
  """Returns the variables of a run with arrays instead of some tables."""
  params = flax.traverse_util.flatten_dict(run.restored.params)
  for table, rows in changed.items():
    key = (*table.path, 'table')
    params[key] = jax.device_put(rows, jnp.asarray(params[key]).sharding)
  return run.variables | {'params': flax.traverse_util.unflatten_dict(params)}


def _group(
  counts_T: np.ndarray, loss_T: np.ndarray, increase_T: np.ndarray
) -> list[dict[str, Any]]:
  """Returns the losses of tokens by the count of their n-gram."""
  group_T = np.digitize(counts_T, COUNTS) - 1
  total = increase_T.sum()
  has_shares = abs(total) >= MIN_INCREASE * len(increase_T)
  groups = []
  for number, count in enumerate(COUNTS):
    is_in_T = group_T == number
    group = {
      'count': count,
      'tokens': int(is_in_T.sum()),
      'loss': None,
      'increase': None,
      'share': None,
    }
    if group['tokens']:
      increase = increase_T[is_in_T]
      group['loss'] = float(loss_T[is_in_T].mean())
      group['increase'] = float(increase.mean())
      if has_shares:
        group['share'] = float(increase.sum() / total)
    groups.append(group)
  return groups


def _format_counts() -> list[str]:
  """Returns the counts of each group as text."""
  texts = []
  for start, end in itertools.pairwise(COUNTS):
    text = f'{start}'
    if end > start + 1:
      text += f'–{end - 1}'
    texts.append(text)
  return [*texts, f'{COUNTS[-1]} or more']


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the losses of all changes, then the groups of each."""
  rows = [('change', 'nats/token', 'increase')]
  title = f'unchanged: {result["loss"]:.4f} nats/token, {result["tokens"]:,} tokens'
  result_elements = [Element(title, rows)]
  for each in result['changes']:
    name = f'{each["memory"]}, {each["change"]}'
    increase = each['loss'] - result['loss']
    rows.append((name, f'{each["loss"]:.4f}', f'{increase:+.4f}'))
    title = (
      f'{name}: by count of the {each["order"]}-gram in {result["train_tokens"]:,} training tokens'
    )
    groups = [('count', 'tokens', 'nats/token', 'increase', 'share of the increase')]
    for counts, group in zip(_format_counts(), each['groups'], strict=True):
      if not group['tokens']:
        continue
      cells = [counts, f'{group["tokens"]:,}', f'{group["loss"]:.4f}', f'{group["increase"]:+.4f}']
      share = ''
      if group['share'] is not None:
        share = f'{group["share"]:.1%}'
      groups.append([*cells, share])
    result_elements.append(Element(title, groups))
  return result_elements


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the increase of the loss by count of the n-gram: mean of each group, and part of all."""
  labels = _format_counts()
  for each in result['changes']:
    groups = each['groups']
    # None becomes nan, which is not drawn.
    increases = np.array([group['increase'] for group in groups], float)
    tokens = np.array([group['tokens'] for group in groups])
    for panel, values in zip(axes, (increases, increases * tokens / result['tokens']), strict=True):
      name = f'{each["memory"]}, {each["change"]}'
      panel.plot(values, 'o-', linewidth=1, markersize=4, label=name)
  titles = 'increase in the group', 'part of the total increase'
  for panel, title in zip(axes, titles, strict=True):
    panel.set_xticks(range(len(labels)), labels, rotation=30, fontsize=8)
    panel.set(xlabel='count of the n-gram in the training text', ylabel=f'{title} (nats/token)')
    panel.axhline(0, color='black', linewidth=0.5)
    panel.set_yscale('symlog', linthresh=0.01)  # few n-grams may have most of the increase
    panel.grid(alpha=0.3)
  axes[0].legend(fontsize='x-small')
