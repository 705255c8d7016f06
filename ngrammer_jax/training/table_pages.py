"""Training with tables in host memory: a step gets the rows that it looks up, and returns them new.

On the devices, the table of a step has the different rows that its segment looks up, and so has the
state of the optimizer: the step is that of any table, but a small one. The rows of the next step
are read while this one is computed. Those that this step changes are not read: the next step takes
them from the table of this one, which stays on the devices. So each step sees all updates before
it, and no step waits for the memory of the host.

step t - 1 | step t                                        | step t + 1
           | write rows of t - 1, read rows of t + 1       | write rows of t, read rows of t + 2

B batch, T segment length, P tokens whose rows are read, I heads of all orders, L rows of the table
of a step, E width.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import dataclasses
import logging
import math
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.data.rows import batch_exchange, token_batch
from ngrammer_jax.models import host_tables, row_finder
from ngrammer_jax.system import hosts
from ngrammer_jax.training import metrics as step_metrics
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

Arrays = dict[str, Any]  # by the name of a leaf of the train state, such as `params/.../table`


class Page(NamedTuple):
  """What a step gets of tables in host memory, on the devices.

  Attributes:
    values: rows of the tables and of their optimizer state, [L, ...] by the name of the leaf; of
      several processes the terms of their sum, [devices, L, ...], see `sharding.terms`.
    previous: for each of them its index in the table of the previous step, which is newer; -1: it
      is not there. int32 [L] by the name of the table.
    positions: the collection `host_rows.ROWS`: which row of [L, E] every token reads, [B, P, I].
  """

  values: Arrays
  previous: Arrays
  positions: Any


class Lookups(NamedTuple):
  """The look-ups of a segment.

  Attributes:
    rows: the different rows that are looked up, ascending, int32 [at most L] by name of the table.
    positions: see `Page`.
    page: future of the `Page`, once it is being read.
  """

  rows: dict[str, np.ndarray]
  positions: Any
  page: list[futures.Future]


class PagedSegments(NamedTuple):
  """The segments of one step, [1, B, T], with their look-ups."""

  batch: token_batch.Batch
  lookups: Lookups


# What a call of the training step reads.
Segments = token_batch.Batch | PagedSegments


def with_single_steps(config: experiment.Config) -> experiment.Config:
  """Returns a config whose calls are of one step if a table is in host memory, and says so."""
  training = config.training
  if not host_tables.exist(config.model) or training.segments_per_call == 1:
    return config
  logging.info(
    'training.segments_per_call=%d: 1 with tables in host memory, whose rows travel step by step',
    training.segments_per_call,
  )
  return dataclasses.replace(config, training=dataclasses.replace(training, segments_per_call=1))


class LookupReader:
  """Finds the different rows that each segment of a training looks up.

  Args:
    model: the language model.
    state: the train state before the first segment.
    batch_size: B.
  """

  def __init__(self, model: Any, state: train_state.TrainState, batch_size: int):
    segments_before = hosts.gather_arrays(row_finder.state_of(model.config, state.memory))
    self._find = row_finder.RowFinder(model, state.codebook, segments_before)
    self._mailbox = hosts.Mailbox(f'lookups_from_{int(state.step)}')
    self._mesh = state.step.sharding.mesh
    self._batch_size = batch_size

  def __call__(self, step: int, parts: Mapping[int, token_batch.Batch]) -> Lookups:
    """Returns the look-ups of the segment of a step.

    Args:
      step: the step.
      parts: the rows of the batch of this process, as NumPy arrays, by the number of the first row.
    """
    segment = batch_exchange.gather(self._mailbox, step, parts)
    rows = self._find(segment.tokens_BxT, segment.starts_BxT, segment.valid_BxT)
    distinct_rows, positions = row_finder.distinct(rows)

    def rows_of(rows: slice) -> Arrays:
      return {name: array[rows] for name, array in positions.items()}

    placed = sharding.global_rows(self._mesh, self._batch_size, rows_of)
    return Lookups(distinct_rows, traverse_util.unflatten_dict(placed, sep='/'), [])

  def close(self) -> None:
    """Ends a look-up that waits for other processes, in another thread."""
    self._mailbox.close()


def previous_indices(rows: np.ndarray, previous_rows: np.ndarray, length: int) -> np.ndarray:
  """Returns the index of each row in the rows of the previous step, or -1; int32 [length].

  Args:
    rows: the different rows of a step, ascending.
    previous_rows: those of the previous step.
    length: L, at least the number of rows.
  """
  index_L = np.full(length, -1, np.int32)
  if previous_rows.size:
    index = np.minimum(np.searchsorted(previous_rows, rows), previous_rows.size - 1)
    is_equal = previous_rows[index] == rows
    index_L[: rows.size] = np.where(is_equal, index, -1)
  return index_L


class TablePages:
  """Moves rows between tables in host memory and the steps of a training.

  Args:
    model: the language model.
    abstract: the abstract train state.
    batch_size, segment_length: B and T.
  """

  def __init__(
    self, model: Any, abstract: train_state.TrainState, batch_size: int, segment_length: int
  ):
    mesh = abstract.step.sharding.mesh
    self._mesh = mesh
    self._replicated = sharding.replicated(mesh)
    self._by_row = sharding.rows_sharding(mesh)
    self._shapes = host_arrays.by_name(abstract)
    self._abstract, _ = host_arrays.split(abstract, self._shapes)
    shape = batch_size, segment_length
    state = row_finder.state_of(model.config, abstract.memory)
    rows = row_finder.abstract_rows(model, abstract.codebook, state, shape)
    self._positions = {name: leaf.shape for name, leaf in rows.items()}
    self._leaves = {}  # names of the leaves of each table: of its rows and their optimizer state
    self._lengths = {}  # L of each table
    for name, shape in self._positions.items():
      self._leaves[name] = [leaf for leaf in self._shapes if f'/{leaf}'.endswith(f'/{name}')]
      self._lengths[name] = min(math.prod(shape), self._shapes[f'params/{name}'].shape[0])
    self._thread = futures.ThreadPoolExecutor(1, 'table_pages')
    self._tables: Mapping[str, Any] = {}  # the leaves in host memory
    self._before: dict[str, np.ndarray] = {}  # rows of the table of the step before
    self._on_devices: Arrays | None = None  # its values
    self._writes: futures.Future | None = None

  # The compiled step.

  def _abstract_inputs(self) -> tuple[Arrays, Page]:
    """Returns shapes of the tables of the step before, and of the page of a step."""
    tables = {}
    values = {}
    previous = {}
    for name, leaves in self._leaves.items():
      L = self._lengths[name]
      previous[name] = jax.ShapeDtypeStruct((L,), jnp.int32, sharding=self._replicated)
      for leaf in leaves:
        shape = (L, *self._shapes[leaf].shape[1:])
        dtype = self._shapes[leaf].dtype
        tables[leaf] = jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)
        values[leaf] = tables[leaf]
        if hosts.is_multiprocess():
          values[leaf] = jax.ShapeDtypeStruct(
            (self._mesh.size, *shape), dtype, sharding=sharding.terms_sharding(self._mesh)
          )
    positions = {
      name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._by_row)
      for name, shape in self._positions.items()
    }
    return tables, Page(values, previous, traverse_util.unflatten_dict(positions, sep='/'))

  def trace(
    self,
    step: train_step.TrainStep,
    state: train_state.TrainState,
    segments: Segments,
    compiler_options: Mapping[str, Any] | None = None,
  ) -> jax.stages.Traced:
    """Traces the step. State and segments may be abstract."""
    if isinstance(segments, PagedSegments):
      segments = segments.batch
    on_devices, _ = host_arrays.split(state, self._shapes)
    return self._make_call(step, compiler_options).trace(
      on_devices, *self._abstract_inputs(), segments
    )

  def _make_call(
    self, step: train_step.TrainStep, compiler_options: Mapping[str, Any] | None
  ) -> Callable[..., Any]:
    """Returns the jitted step, a function of the state on the devices, which is donated.

    The others are the tables of the step before, the page, and the segments [1, B, T]. It returns
    the state, the tables and the metrics.
    """
    leaves_of = self._leaves

    def call(state, before, page, segments):
      tables = {}
      for name, leaves in leaves_of.items():
        index_L = page.previous[name]
        for leaf in leaves:
          previous_LxE = before[leaf].at[index_L].get(mode='clip')
          read_LxE = page.values[leaf]
          if hosts.is_multiprocess():
            read_LxE = read_LxE.sum(axis=0)  # all terms but one are 0
          tables[leaf] = jnp.where(index_L[:, None] >= 0, previous_LxE, read_LxE)
      segment = token_batch.map_batches(lambda array: array[0], segments)
      state, metrics = step(host_arrays.join(state, tables), segment, page.positions)
      state, tables = host_arrays.split(state, tables)
      return state, tables, jax.tree.map(lambda value: value[None], metrics)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
    outputs = shardings, self._replicated, self._replicated
    return jax.jit(
      call,
      donate_argnums=0,
      out_shardings=outputs,
      compiler_options=dict(compiler_options or {}),
    )

  # The rows of the steps.

  def read_ahead(self, calls: Iterator[Any], state: train_state.TrainState) -> Iterator[Any]:
    """Yields the data of each call once the rows of the call after it are being read.

    Args:
      calls: the data of the calls, with `PagedSegments`.
      state: the train state before the first call.
    """
    tables = host_arrays.by_name(state)
    waiting = None
    for call in calls:
      self._start_reading(call.segments.lookups, tables)
      if waiting is not None:
        yield waiting
      waiting = call
    if waiting is not None:
      yield waiting

  def call(
    self, compiled: jax.stages.Compiled, state: train_state.TrainState, segments: PagedSegments
  ) -> tuple[train_state.TrainState, step_metrics.Metrics]:
    """Trains on a segment. Of the state, what is on the devices is donated."""
    on_devices, tables = host_arrays.split(state, self._shapes)
    if not segments.lookups.page:
      self._start_reading(segments.lookups, tables)
    (page,) = segments.lookups.page
    if self._on_devices is None:
      shapes, _ = self._abstract_inputs()
      zeros = {leaf: np.zeros(each.shape, each.dtype) for leaf, each in shapes.items()}
      self._on_devices = self._replicate(zeros)
    on_devices, self._on_devices, metrics = compiled(
      on_devices, self._on_devices, page.result(), segments.batch
    )
    self.wait()  # for the writes of the step before, so that an error is raised
    self._writes = self._thread.submit(self._write, segments.lookups.rows, self._on_devices, tables)
    return host_arrays.join(on_devices, tables), metrics

  def wait(self) -> None:
    """Waits until the tables in host memory have the updates of all steps."""
    if self._writes is not None:
      self._writes.result()
      self._writes = None

  def _start_reading(self, lookups: Lookups, tables: Mapping[str, Any]) -> None:
    """Starts to read the rows of a step."""
    if any(tables[leaf] is not self._tables.get(leaf) for leaf in self._shapes):
      self._tables = tables  # another training: there is no step before
      self._before = {}
    before = self._before
    self._before = lookups.rows
    lookups.page.append(self._thread.submit(self._read, lookups, before, tables))

  def _read(
    self,
    lookups: Lookups,
    before: Mapping[str, np.ndarray],
    tables: Mapping[str, Any],
  ) -> Page:
    """Returns the page of a step.

    Args:
      lookups: its look-ups.
      before: the rows of the step before, which may be computed now.
      tables: all leaves of the state in host memory, with the updates of the steps before that.
    """
    values = {}
    previous = {}
    for name, rows in lookups.rows.items():
      L = self._lengths[name]
      previous[name] = previous_indices(rows, before.get(name, np.zeros(0, np.int32)), L)
      for leaf in self._leaves[name]:
        values[leaf] = host_arrays.take_here(tables[leaf], rows, L)
    if hosts.is_multiprocess():
      placed = {leaf: sharding.terms(self._mesh, array) for leaf, array in values.items()}
    else:
      placed = self._replicate(values)
    return Page(placed, self._replicate(previous), lookups.positions)

  def _write(
    self, rows: Mapping[str, np.ndarray], values: Arrays, tables: Mapping[str, Any]
  ) -> None:
    """Writes the new rows of a step into the tables."""
    for name, leaves in self._leaves.items():
      for leaf in leaves:
        new_LxE = np.asarray(values[leaf].addressable_data(0))
        host_arrays.put_here(tables[leaf], rows[name], new_LxE)

  def _replicate(self, arrays: dict[str, np.ndarray]) -> Arrays:
    """Returns arrays, which are the same in all processes, on all devices."""

    def place(array):
      return jax.make_array_from_callback(array.shape, self._replicated, lambda _: array)

    return jax.tree.map(place, arrays)
