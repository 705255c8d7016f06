"""N-gram tables of a model, and their lookups along a text.

T tokens, N places of the longest n-gram, n places in an order, K heads of an order, I = orders x K,
U distinct n-grams.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import capture
from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.ngram import hashing
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.ngram.windows import Windows
from ngrammer_jax.models import memories

NO_TOKEN = -1  # in place of a token before a document


class Head(NamedTuple):
  """A hash head.

  Attributes:
    order: n.
    index: index in its order, from 0.
    first: its first row in the table.
    rows: number of its rows.
  """

  order: int
  index: int
  first: int
  rows: int


class NGramTable(NamedTuple):
  """An n-gram table of one memory at one place.

  Attributes:
    path: path of its module in parameters and intermediates.
    module: its module, without variables.
  """

  path: tuple[str, ...]
  module: NGramMemory

  @property
  def name(self) -> str:
    """The path as text, such as layer_1/ngram_memory_0."""
    return '/'.join(self.path)

  @property
  def hash(self) -> hashing.NGramHash:
    """Its hash."""
    return self.module.ngram_hash()

  def heads(self) -> list[Head]:
    """Returns its heads, in the order of the table."""
    heads = []
    first_rows = iter(ngram_sizes.first_rows(self.module.options.row_rule, self.hash.sizes))
    for order, sizes_K in zip(self.hash.orders, self.hash.sizes, strict=True):
      for index, rows in enumerate(sizes_K):
        heads.append(Head(order, index, next(first_rows), rows))
    return heads

  @property
  def has_shared_rows(self) -> bool:
    """Whether all heads look up the same rows."""
    heads = self.heads()
    return len(heads) > 1 and heads[0].first == heads[-1].first

  def subtree(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the subtree of its module in parameters or intermediates."""
    for name in self.path:
      tree = tree[name]
    return tree


class Lookups(NamedTuple):
  """The lookups in a table along a text.

  Attributes:
    ids: ids of the n-grams, the token itself first: N arrays [T, K], or [T, 1] if equal for all
      heads.
    rows_TxI: rows within the head.
  """

  ids: tuple[np.ndarray, ...]
  rows_TxI: np.ndarray

  def by_head(self, table: NGramTable) -> Iterator[tuple[Head, np.ndarray, np.ndarray]]:
    """Yields each head with the numbers [T] of its n-grams (see `number_ngrams`) and rows [T]."""
    numbers = {}
    for i, head in enumerate(table.heads()):
      column = head.index if self.ids[0].shape[1] > 1 else 0
      key = head.order, column
      if key not in numbers:
        numbers[key] = number_ngrams([ids[:, column] for ids in self.ids[: head.order]])
      yield head, numbers[key], self.rows_TxI[:, i]


def ngram_memories(run: runs.Run) -> list[NGramTable]:
  """Returns all n-gram tables of a run; a shared table once for each place.

  Raises:
    NotApplicable: the model has no n-gram tables.
  """
  model = run.config.evaluation_model()
  modules = memories.ngram_modules(model, run.vocabulary.size)
  tables = [NGramTable(path, module) for path, module in modules]
  if not tables:
    raise errors.NotApplicable(
      f'--workdir={run.workdir} has no n-gram memory: it needs model.ngram_memories or model.ngram'
    )
  return tables


def ngram_tables(run: runs.Run) -> list[NGramTable]:
  """Returns all n-gram tables of a run, each once. Raises NotApplicable without any."""
  return [memory for memory in ngram_memories(run) if memory.module.has_table]


def read(run: runs.Run, text: token_split.TokenSplit, max_tokens: int) -> dict[str, Lookups]:
  """Returns the lookups in each table, by name, for the first tokens of a text."""
  tables = ngram_tables(run)

  def measure(intermediates: Mapping[str, Any]) -> dict[str, Any]:
    return {table.name: table.subtree(intermediates)['lookup'][0] for table in tables}

  segments = [lookups for _, lookups in capture.captured_segments(run, text, max_tokens, measure)]
  joined = jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1)[0], *segments)
  return {name: Lookups(tuple(sown['ids']), sown['rows']) for name, sown in joined.items()}


def number_ngrams(ids: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the number of each n-gram among the distinct ones, int64 [T], from 0 to U - 1.

  Args:
    ids: ids at each place, n arrays [T].
  """
  number_T = np.zeros(len(ids[0]), np.int64)
  for id_T in ids:
    distinct, id_T = np.unique(id_T, return_inverse=True)
    _, number_T = np.unique(number_T * len(distinct) + id_T, return_inverse=True)
  return number_T


def count_ngrams(ngrams_NxT: np.ndarray, others_NxS: np.ndarray) -> np.ndarray:
  """Returns the count of each n-gram of a text [N, T] in another text [N, S], int64 [T]."""
  T = ngrams_NxT.shape[1]
  number = number_ngrams(np.concatenate([ngrams_NxT, others_NxS], axis=1))
  return np.bincount(number[T:], minlength=number.max() + 1)[number[:T]]


def collisions(number_T: np.ndarray, row_T: np.ndarray, table_rows: int) -> dict[str, float]:
  """Computes the hash collisions of the n-grams of a text in one head.

  `distinct`: number of distinct n-grams in the text; `rows`: number of their table rows;
  `random_rows`: expected number of rows for a perfectly random hash; `shared`: collision rate, the
  share of tokens with an n-gram that shares its row with another n-gram; `shared_ngrams`: the same
  share of distinct n-grams; `random_shared_ngrams`: its expectation for a perfectly random hash.

  Args:
    number_T: number of the n-gram of each token, see `number_ngrams`.
    row_T: its row.
    table_rows: rows of the head.
  """
  U = int(number_T.max()) + 1
  row_U = np.zeros(U, np.int64)
  row_U[number_T] = row_T
  rows, ngrams_per_row = np.unique(row_U, return_counts=True)
  is_shared_U = ngrams_per_row[np.searchsorted(rows, row_U)] > 1
  return {
    'distinct': U,
    'rows': len(rows),
    'random_rows': float(table_rows * (1 - (1 - 1 / table_rows) ** U)),
    'shared': float(is_shared_U[number_T].mean()),
    'shared_ngrams': float(is_shared_U.mean()),
    'random_shared_ngrams': float(1 - (1 - 1 / table_rows) ** (U - 1)),
  }


def token_ngrams(text: token_split.TokenSplit, tokens: int, order: int) -> np.ndarray:
  """Returns the token ids of the n-grams that end at the first inputs of a text, int32 [n, T].

  The newest token is first. `NO_TOKEN` marks tokens before a document.
  """
  inputs_T, _, starts_T = text.window(0, tokens)
  ids_1xTx1 = jnp.asarray(inputs_T)[None, :, None]
  documents_1xT = document_masks.numbers(starts_T[None])
  window, _ = Windows(order, fill_id=NO_TOKEN)(ids_1xTx1, documents_1xT, None)
  return np.concatenate(window, axis=-1)[0].T
