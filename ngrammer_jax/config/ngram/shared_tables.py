"""Rules for n-gram memories with a shared table."""

from collections.abc import Sequence
import re

from ngrammer_jax import errors
from ngrammer_jax.config.formatting import format_value
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig

# What memories that share a table must agree on: all that says what is looked up, and how it is
# trained. How rows are joined with the hidden states is up to each of them.
TABLE_FIELDS = (
  'key',
  'hash',
  'orders',
  'heads',
  'rows',
  'row_rule',
  'row_multiple',
  'width',
  'deviation',
  'table_initial',
  'untrained_row',
  'seed',
  'boundary',
  'eos_id',
  'fill_id',
  'distinct_start',
  'displacement',
  'signs',
  'sign_hash',
  'optimizer',
  'learning_rate_factor',
  'exchange',
  'table_memory',
  'table_dtype',
)


def check(memories: Sequence[NGramMemoryConfig]) -> None:
  """Raises BadInput for memories that cannot share their table."""
  first_numbers: dict[str, int] = {}
  for number, memory in enumerate(memories):
    if memory.table is None:
      continue
    _check_name(number, memory.table)
    first = first_numbers.setdefault(memory.table, number)
    if first != number:
      _check_pair(memories, first, number)


def _check_name(number: int, table: str) -> None:
  """Raises BadInput for a table name that is invalid in parameter names."""
  if re.fullmatch('[a-z0-9_]+', table) is None:
    raise errors.BadInput(
      f'model.ngram_memories.{number}.table={table!r} must consist of small letters, digits and '
      f"underscores, such as 'bigrams'"
    )


def _check_pair(memories: Sequence[NGramMemoryConfig], first: int, other: int) -> None:
  """Raises BadInput for two memories of one table with different options."""
  table = memories[first].table
  first_path = f'model.ngram_memories.{first}'
  path = f'model.ngram_memories.{other}'
  if memories[first].sliced or memories[other].sliced:
    raise errors.BadInput(
      f'{path}.table={table!r} is also the table of {first_path}, but sliced rows are only for the '
      f'layers of one memory: use sliced=False, or another name'
    )
  for name in TABLE_FIELDS:
    expected = getattr(memories[first], name)
    value = getattr(memories[other], name)
    if value != expected:
      raise errors.BadInput(
        f'{path}.{name}={format_value(value)} must equal {first_path}.{name}='
        f'{format_value(expected)}: both read the table {table!r}; use '
        f'{format_value(expected)}, or another name of the table'
      )
  if memories[first].starts_with_equal_rows != memories[other].starts_with_equal_rows:
    raise errors.BadInput(
      f'{path}.start={format_value(memories[other].start)} does not fit {first_path}.start='
      f'{format_value(memories[first].start)}: the rows of the table {table!r} would start at 0 '
      f'for one of them only; use the same start and point, or another table name'
    )
