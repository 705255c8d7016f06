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

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import io
import logging
import math
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import host_tables
from ngrammer_jax.system import hosts
from ngrammer_jax.training import metrics as step_metrics
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

Arrays = dict[str, Any]  # by the name of a leaf of the train state, such as `params/.../table`


class Page(NamedTuple):
  """What a step gets of tables in host memory, on the devices.

  Attributes:
    values: rows of the tables and of their optimizer state, [L, ...] by the name of the leaf.
    kept: for each of them its index in the table of the step before, which is newer; -1: it is not
      there. int32 [L] by the name of the table.
    positions: the collection `table.ROWS`: which row of [L, E] every token reads, [B, P, I].
  """

  values: Arrays
  kept: Arrays
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
    known = hosts.gather_arrays(host_tables.state_of(model.config, state.memory))
    self._finder = host_tables.RowFinder(model, state.codebook, known)
    self._mailbox = hosts.Mailbox(f'lookups_from_{int(state.step)}')
    self._mesh = state.step.sharding.mesh
    self._batch_size = batch_size

  def __call__(self, step: int, parts: Mapping[int, token_batch.Batch]) -> Lookups:
    """Returns the look-ups of the segment of a step.

    Args:
      step: the step.
      parts: the rows of the batch of this process, as NumPy arrays, by the number of the first row.
    """
    segment = self._whole(step, parts)
    different = {}
    positions = {}
    for name, rows_BxPxI in self._finder(segment).items():
      different[name], inverse = np.unique(rows_BxPxI, return_inverse=True)
      positions[name] = inverse.reshape(rows_BxPxI.shape).astype(np.int32)

    def rows_of(rows: slice) -> Arrays:
      return {name: array[rows] for name, array in positions.items()}

    placed = sharding.global_rows(self._mesh, self._batch_size, rows_of)
    return Lookups(different, traverse_util.unflatten_dict(placed, sep='/'), [])

  def _whole(self, step: int, parts: Mapping[int, token_batch.Batch]) -> token_batch.Batch:
    """Returns the segment of all rows of the batch, of which each process has read a part."""
    rows_by_first = dict(parts)
    if hosts.is_multiprocess():
      own = {first: (b.tokens_BxT, b.starts_BxT, b.valid_BxT) for first, b in parts.items()}
      for content in self._mailbox.exchange(step, _to_bytes(own)):
        for first, arrays in _from_bytes(content).items():
          tokens, starts, valid = arrays
          rows_by_first[first] = token_batch.Batch(tokens, None, starts, valid)
    in_order = [rows_by_first[first] for first in sorted(rows_by_first)]
    columns = [(b.tokens_BxT, b.starts_BxT, b.valid_BxT) for b in in_order]
    tokens, starts, valid = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
    return token_batch.Batch(tokens, None, starts, valid)


def _to_bytes(parts: Mapping[int, Sequence[np.ndarray]]) -> bytes:
  """Returns arrays by number as bytes."""
  file = io.BytesIO()
  arrays = {f'{number}_{i}': each for number, part in parts.items() for i, each in enumerate(part)}
  np.savez(file, **arrays)
  return file.getvalue()


def _from_bytes(content: bytes) -> dict[int, list[np.ndarray]]:
  """The inverse of `_to_bytes`."""
  parts: dict[int, list[np.ndarray]] = {}
  with np.load(io.BytesIO(content)) as arrays:
    for name in arrays.files:
      parts.setdefault(int(name.partition('_')[0]), []).append(arrays[name])
  return parts


def kept_indices(rows: np.ndarray, before: np.ndarray, length: int) -> np.ndarray:
  """Returns the index of each row in the rows of the step before, or -1; int32 [length].

  Args:
    rows: the different rows of a step, ascending.
    before: those of the step before.
    length: L, at least the number of rows.
  """
  kept_L = np.full(length, -1, np.int32)
  if before.size:
    index = np.minimum(np.searchsorted(before, rows), before.size - 1)
    is_kept = before[index] == rows
    kept_L[: rows.size] = np.where(is_kept, index, -1)
  return kept_L


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
    self._replicated = sharding.replicated(mesh)
    self._by_row = sharding.rows_sharding(mesh)
    self._shapes = host_tables.on_host(abstract)
    self._abstract, _ = host_tables.split(abstract, self._shapes)
    shape = batch_size, segment_length
    state = host_tables.state_of(model.config, abstract.memory)
    rows = host_tables.abstract_rows(model, abstract.codebook, state, shape)
    self._positions = {name: leaf.shape for name, leaf in rows.items()}
    self._leaves = {}  # names of the leaves of each table: of its rows and their optimizer state
    self._lengths = {}  # L of each table
    for name, shape in self._positions.items():
      self._leaves[name] = [leaf for leaf in self._shapes if f'/{leaf}'.endswith(f'/{name}')]
      self._lengths[name] = min(math.prod(shape), self._shapes[f'params/{name}'].shape[0])
    self._thread = futures.ThreadPoolExecutor(1, 'table_pages')
    self._tables: Mapping[str, np.ndarray] = {}  # the leaves in host memory
    self._before: dict[str, np.ndarray] = {}  # rows of the table of the step before
    self._on_devices: Arrays | None = None  # its values
    self._writes: futures.Future | None = None

  # The compiled step.

  def _abstract_inputs(self) -> tuple[Arrays, Page]:
    """Returns shapes of the tables of the step before, and of the page of a step."""
    values = {}
    kept = {}
    for name, leaves in self._leaves.items():
      L = self._lengths[name]
      kept[name] = jax.ShapeDtypeStruct((L,), jnp.int32, sharding=self._replicated)
      for leaf in leaves:
        shape = (L, *self._shapes[leaf].shape[1:])
        values[leaf] = jax.ShapeDtypeStruct(
          shape, self._shapes[leaf].dtype, sharding=self._replicated
        )
    positions = {
      name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._by_row)
      for name, shape in self._positions.items()
    }
    return values, Page(values, kept, traverse_util.unflatten_dict(positions, sep='/'))

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
    on_devices, _ = host_tables.split(state, self._shapes)
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
        kept_L = page.kept[name]
        for leaf in leaves:
          kept_LxE = before[leaf].at[kept_L].get(mode='clip')
          tables[leaf] = jnp.where(kept_L[:, None] >= 0, kept_LxE, page.values[leaf])
      segment = token_batch.map_batches(lambda array: array[0], segments)
      state, metrics = step(host_tables.join(state, tables), segment, page.positions)
      state, tables = host_tables.split(state, tables)
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
    tables = host_tables.on_host(state)
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
    on_devices, tables = host_tables.split(state, self._shapes)
    if not segments.lookups.page:
      self._start_reading(segments.lookups, tables)
    (page,) = segments.lookups.page
    if self._on_devices is None:
      values, _ = self._abstract_inputs()
      zeros = {leaf: np.zeros(each.shape, each.dtype) for leaf, each in values.items()}
      self._on_devices = self._replicate(zeros)
    on_devices, self._on_devices, metrics = compiled(
      on_devices, self._on_devices, page.result(), segments.batch
    )
    self.wait()  # for the writes of the step before, so that an error is raised
    self._writes = self._thread.submit(self._write, segments.lookups.rows, self._on_devices, tables)
    return host_tables.join(on_devices, tables), metrics

  def wait(self) -> None:
    """Waits until the tables in host memory have the updates of all steps."""
    if self._writes is not None:
      self._writes.result()
      self._writes = None

  def _start_reading(self, lookups: Lookups, tables: Mapping[str, np.ndarray]) -> None:
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
    tables: Mapping[str, np.ndarray],
  ) -> Page:
    """Returns the page of a step.

    Args:
      lookups: its look-ups.
      before: the rows of the step before, which may be computed now.
      tables: all leaves of the state in host memory, with the updates of the steps before that.
    """
    values = {}
    kept = {}
    for name, rows in lookups.rows.items():
      L = self._lengths[name]
      kept[name] = kept_indices(rows, before.get(name, np.zeros(0, np.int32)), L)
      for leaf in self._leaves[name]:
        values[leaf] = host_tables.take(tables[leaf], rows, L)
    return Page(self._replicate(values), self._replicate(kept), lookups.positions)

  def _write(
    self, rows: Mapping[str, np.ndarray], values: Arrays, tables: Mapping[str, np.ndarray]
  ) -> None:
    """Writes the new rows of a step into the tables."""
    for name, leaves in self._leaves.items():
      for leaf in leaves:
        new_LxE = np.asarray(values[leaf].addressable_data(0))
        host_tables.put(tables[leaf], rows[name], new_LxE[: rows[name].size])

  def _replicate(self, arrays: dict[str, np.ndarray]) -> Arrays:
    """Returns arrays, which are the same in all processes, on all devices."""

    def place(array):
      return jax.make_array_from_callback(array.shape, self._replicated, lambda _: array)

    return jax.tree.map(place, arrays)
