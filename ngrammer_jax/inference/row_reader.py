"""Rows of tables in host memory for evaluation and generation.

B batch, T segment length, P tokens whose rows are read, I heads of all orders, V rows of a
table, E their width, L rows of a table that a segment looks up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.data.rows import batch_exchange, token_batch
from ngrammer_jax.layers.ngram import host_rows
from ngrammer_jax.models import host_tables, row_finder
from ngrammer_jax.system import hosts


class RowReader:
  """Gives a model the rows of tables in host memory for the segments of a batch of streams.

  Call it where no mesh is active, such as in a thread of its own. It returns the collection
  `host_rows.VALUES`, the values that each token reads. If several processes have the rows, it
  returns `host_rows.TERMS` and `host_rows.ROWS`: each process gives its rows of all streams, and
  the devices add and look them up.

  Args:
    model: the language model.
    mesh: device mesh.
    variables: `params`, with the tables in host memory, and `codebook`.
    rows: number of streams.
  """

  def __init__(self, model: Any, mesh: jax.sharding.Mesh, variables: Any, rows: int):
    self._model = model
    self._mesh = mesh
    self._rows = rows
    params = traverse_util.flatten_dict(variables['params'], sep='/')
    self._tables = {}
    for name in host_tables.names(model.config):
      leaf = params[name]
      if not isinstance(leaf, host_arrays.ProcessRows):
        leaf = np.asarray(leaf)  # it may be on a device
      self._tables[name] = leaf
    self._codebook = variables.get('codebook', {})
    self._on_devices = host_tables.without_tables(model.config, variables)
    self._finders: dict[int, row_finder.RowFinder] = {}  # by the first row
    self._mailbox = hosts.Mailbox('rows')
    self._segments = 0  # that were exchanged

  def __call__(self, segment: token_batch.Batch) -> Any:
    """Returns the variables of the model for the next segment.

    Args:
      segment: all rows of the segment, as NumPy arrays.
    """
    return self._read({0: segment})

  def read_local(self, parts: Mapping[int, token_batch.Batch]) -> Any:
    """Returns the variables of the model for the next segment.

    Args:
      parts: rows of the segment as NumPy arrays, by the number of the first row: all those that the
        devices of this process have.
    """
    if hosts.is_multiprocess():
      parts = {0: batch_exchange.gather(self._mailbox, self._segments, parts)}
      self._segments += 1
    return self._read(parts)

  def _read(self, parts: Mapping[int, token_batch.Batch]) -> Any:
    """Returns the variables of the model for parts of a segment, by the number of the first row."""
    rows = {}
    for first, part in parts.items():
      find = self._finder(first, part)
      rows[first] = find(part.tokens_BxT, part.starts_BxT, part.valid_BxT)
    if hosts.is_multiprocess():
      return self._on_devices | self._terms([rows[0]], is_stacked=False)
    return self._on_devices | {host_rows.VALUES: self._values(rows)}

  def peek(self, segments: Sequence[token_batch.Batch]) -> Any:
    """Returns the collections of segments that might come next, stacked [K, ...].

    Args:
      segments: K segments of all rows.
    """
    (find,) = self._finders.values()
    state = find.state
    rows_of_segments = []
    for segment in segments:
      rows_of_segments.append(find(segment.tokens_BxT, segment.starts_BxT, segment.valid_BxT))
      find.state = state
    if hosts.is_multiprocess():
      return self._terms(rows_of_segments, is_stacked=True)
    stacked = {}
    for name in rows_of_segments[0]:
      stacked[name] = np.stack([rows[name] for rows in rows_of_segments], axis=1)
    values = self._values({0: stacked})
    return {host_rows.VALUES: jax.tree.map(lambda values: jnp.swapaxes(values, 0, 1), values)}

  def close(self) -> None:
    """Ends an exchange that waits for other processes, in another thread."""
    self._mailbox.close()

  def _finder(self, first: int, part: token_batch.Batch) -> row_finder.RowFinder:
    """Returns the finder of the rows of a part of the batch."""
    if first not in self._finders:
      state = row_finder.empty_state(self._model.config, len(part.tokens_BxT))
      self._finders[first] = row_finder.RowFinder(self._model, self._codebook, state)
    return self._finders[first]

  def _values(self, rows: Mapping[int, Mapping[str, np.ndarray]]) -> Any:
    """Returns the values of rows, by the first stream of a part and by table, on the devices."""

    def load(streams: slice) -> dict[str, np.ndarray]:
      first = max(number for number in rows if number <= streams.start)
      part = slice(streams.start - first, streams.stop - first)
      values = {}
      for name, rows_BxPxI in rows[first].items():
        values[name] = host_arrays.take(self._tables[name], rows_BxPxI[part])
      return values

    values = sharding.global_rows(self._mesh, self._rows, load)
    return traverse_util.unflatten_dict(values, sep='/')

  def _terms(self, rows_of_segments: Sequence[Mapping[str, np.ndarray]], is_stacked: bool) -> Any:
    """Returns `host_rows.TERMS` and `host_rows.ROWS` of segments of all streams.

    Args:
      rows_of_segments: row numbers of K segments, [B, P, I] by the name of the table.
      is_stacked: whether the arrays are stacked, [K, ...]; otherwise K is 1.
    """
    terms = {}
    positions = {}
    axis = int(is_stacked)  # of the streams
    lookups = [row_finder.distinct(rows) for rows in rows_of_segments]
    for name, leaf in self._tables.items():
      L = min(rows_of_segments[0][name].size, leaf.shape[0])
      own = [host_arrays.take_here(leaf, rows[name], L) for rows, _ in lookups]
      places = [places[name] for _, places in lookups]
      if is_stacked:
        terms[name] = sharding.terms(self._mesh, np.stack(own), axis)
        positions[name] = np.stack(places)
      else:
        terms[name] = sharding.terms(self._mesh, own[0])
        positions[name] = places[0]

    def load(streams: slice) -> dict[str, np.ndarray]:
      index = (slice(None),) * axis + (streams,)
      return {name: array[index] for name, array in positions.items()}

    positions = sharding.global_rows(self._mesh, self._rows, load, axis)
    return {
      host_rows.TERMS: traverse_util.unflatten_dict(terms, sep='/'),
      host_rows.ROWS: traverse_util.unflatten_dict(positions, sep='/'),
    }


def abstract_values(
  model: Any, codebook: Any, shape: tuple[int, int], row_sharding: jax.sharding.Sharding
) -> Any:
  """Returns `host_rows.VALUES` of a segment, [B, T], without values."""
  state = jax.eval_shape(lambda: row_finder.empty_state(model.config, shape[0]))
  by_name = host_tables.modules(model.config, model.vocabulary_size)
  values = {}
  for name, rows in row_finder.abstract_rows(model, codebook, state, shape).items():
    width = by_name[name].table_shape()[1]
    values[name] = jax.ShapeDtypeStruct(
      (*rows.shape, width), by_name[name].table_dtype, sharding=row_sharding
    )
  return traverse_util.unflatten_dict(values, sep='/')
