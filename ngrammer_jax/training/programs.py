"""The compiled programs of a run: the steps of a call, and the evaluation."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import logging
import math
import time
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import host_arrays, memory_limits, sharding
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.inference import programs as inference_programs
from ngrammer_jax.models import (
  embedding_and_head,
  host_tables,
  language_model,
  model_variables,
  parameter_groups,
  width_rule,
)
from ngrammer_jax.optimizers import muon, partition, weight_decay, zero
from ngrammer_jax.system import hosts, progress
from ngrammer_jax.training import (
  accumulation,
  capacity,
  compiler,
  flops,
  losses,
  metrics,
  table_pages,
  trained_parts,
)
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

NAMES = ('train', 'evaluate', 'decode')  # of `Programs.trace_program`
REMATS = ('none', 'minimal', 'full')  # what `model.remat=auto` tries, in this order


class Programs:
  """The programs of a run.

  Args:
    config: the experiment.
    vocabulary_size: V.
    mesh: device mesh.
    source_dtypes: dtype of every initial parameter from another run, by name; None: none.
    loss: the loss of each token in training.

  Attributes:
    mesh: device mesh.
    frozen: dtype of every frozen parameter, by name.
    labels: optimizer label of every parameter.
    decay_mask: whether each parameter decays, if it is trained.
    matrices: the matrices trained by Muon, see `muon.find_matrices`; None for other algorithms.
    create: returns the initial state.
    abstract: shapes, dtypes and shardings of the state, as in checkpoints.
    packed: the same in training, with packed tables (see `layers.ngram.table`).
    is_compiled: whether the call is compiled.
    compiled: the compiled call, once there is one.
    pages: moves the rows of tables in host memory; None: no such tables.
    remat: `model.remat` of the call; selected at compilation if `auto`.

  Raises:
    BadInput: tables are in host memory and JAX may not use the processor.
  """

  def __init__(
    self,
    config: experiment.Config,
    vocabulary_size: int,
    mesh: jax.sharding.Mesh,
    source_dtypes: Mapping[str, np.dtype] | None = None,
    loss: losses.Loss = losses.next_token,
  ):
    config = table_pages.with_single_steps(config)
    self._config = config
    self._vocabulary_size = vocabulary_size
    self.mesh = mesh
    self.is_compiled = False
    self.remat = config.model.remat
    model = language_model.build(config.model, vocabulary_size, jit_layers=True)
    variables = model_variables.abstract(model)
    memories = config.model.table_memories()
    host_tables.check_processor(config.model)
    source_dtypes = source_dtypes or {}
    self.frozen = trained_parts.frozen_parameters(
      config.optimizer, variables['params'], source_dtypes
    )
    self.labels = partition.labels(variables['params'], memories, self.frozen)
    self.decay_mask = weight_decay.mask(config.optimizer, variables['params'])
    self.matrices = trained_parts.matrices(config.optimizer, variables['params'], self.frozen)
    width_factors = width_rule.factors(config.model, config.optimizer, variables['params'])
    trained_labels = parameter_groups.without(self.labels, self.frozen)
    optimizer = partition.make(
      config.optimizer,
      config.training.steps,
      trained_labels,
      memories,
      parameter_groups.without(self.decay_mask, self.frozen),
      self.matrices,
      width_factors.rate,
    )
    self.create, self.abstract = train_state.make_initializer(
      model,
      variables,
      optimizer,
      config.training.batch_size,
      config.seed,
      mesh,
      frozen=self.frozen,
      replaced=source_dtypes,
      is_split=config.mesh.zero == 1,
      width_factors=width_factors,
    )
    self.packed = self.abstract
    if mesh.devices.flat[0].platform in train_state.PACKED_PLATFORMS:
      optimizers = partition.table_optimizers(memories)
      self.packed = train_state.pack_tables(self.abstract, trained_labels, optimizers)
    finetune = config.finetune
    self._step = train_step.TrainStep(
      model,
      optimizer,
      trained_labels,
      config.seed,
      half_loss=config.training.half_loss,
      frozen_codebook=finetune is not None and finetune.codebook == 'frozen',
      microbatches=self._accumulation(),
      frozen=tuple(self.frozen),
      shards=self._parameter_shardings(variables['params']),
      loss=loss,
    )
    self.pages = None
    if host_tables.exist(config.model):
      t = config.training
      self.pages = table_pages.TablePages(model, self.packed, t.batch_size, t.segment_length)

  def _accumulation(self) -> accumulation.GradientAccumulation | None:
    """Returns the gradient accumulation; None: the batch is one microbatch."""
    count = self._config.training.microbatches
    if count == 1:
      return None
    return accumulation.GradientAccumulation(count, self.mesh)

  def _parameter_shardings(self, params: Any) -> zero.ParameterShardings | None:
    """Returns the shardings of the trained parameters in the model and in the update.

    None: the update is not split over `data`.

    Args:
      params: the abstract parameters, with logical axes.
    """
    if self._config.mesh.zero != 1:
      return None
    in_model = jax.tree.map(lambda leaf: leaf.sharding, self.abstract.params)
    in_update = zero.split(params, in_model)
    return zero.ParameterShardings(
      model=parameter_groups.without(in_model, self.frozen),
      update=parameter_groups.without(in_update, self.frozen),
    )

  def compile(self, state: train_state.TrainState, segments: table_pages.Segments) -> None:
    """Compiles the call."""
    start_time = time.monotonic()
    traced = self._compile_first_that_fits(state, segments)
    self.is_compiled = True
    capacity.warn_of_temporaries(self.abstract, self.compiled)
    logging.info('compiled in %s', progress.format_duration(time.monotonic() - start_time))
    if self.matrices is not None:
      share = self.muon_share(traced)
      logging.info('muon: %.3g %% of the FLOPs of a step orthogonalise matrices', 100 * share)

  def _compile_first_that_fits(
    self, state: train_state.TrainState, segments: table_pages.Segments
  ) -> jax.stages.Traced:
    """Compiles the call, and returns its trace.

    With `model.remat=auto`, values are compiled in turn until one fits with some spare memory;
    usually the first one fits.
    """
    memory = memory_limits.device_memory(self.mesh)
    *attempts, last = self._remats(memory)
    if attempts and hosts.is_multiprocess():
      jax.block_until_ready(state)
      memory = memory._replace(size=min(hosts.all_gather(memory.size)))  # all choose the same
    for remat in attempts:
      traced = self._compile_if_it_fits(remat, state, segments, memory)
      if traced is not None:
        return traced
    return self._compile_with(last, state, segments)

  def _remats(self, memory: memory_limits.MemoryLimit) -> tuple[str, ...]:
    """Returns the values of `model.remat` to try, in this order."""
    model = self._config.model
    if model.remat != 'auto' or model.recurrent is not None:
      return (model.remat,)
    if memory_limits.devices_are_processor(self.mesh) or memory.size is None:
      return ('none',)
    return REMATS

  def _compile_if_it_fits(
    self,
    remat: str,
    state: train_state.TrainState,
    segments: table_pages.Segments,
    memory: memory_limits.MemoryLimit,
  ) -> jax.stages.Traced | None:
    """Compiles the call, and returns its trace; None if it does not fit into memory."""
    try:
      traced = self._compile_with(remat, state, segments)
    except jax.errors.JaxRuntimeError as error:  # of compilers that know the memory
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      logging.info('model.remat=%s needs more than the memory of %s', remat, memory.name)
      return None
    peak = memory_limits.format_bytes(capacity.peak_bytes(self.compiled))
    limit = memory_limits.format_bytes(memory.size)
    if capacity.fits(self.compiled, memory):
      logging.info('model.remat=%s: a step needs %s of %s', remat, peak, limit)
      return traced
    logging.info('model.remat=%s would need %s of %s', remat, peak, limit)
    return None

  def _compile_with(
    self, remat: str, state: train_state.TrainState, segments: table_pages.Segments
  ) -> jax.stages.Traced:
    """Compiles the call with a value of `model.remat`, and returns its trace."""
    if remat != self.remat:
      config = dataclasses.replace(self._step.model.config, remat=remat)
      model = language_model.build(config, self._vocabulary_size, jit_layers=True)
      self._step = dataclasses.replace(self._step, model=model)
      self.remat = remat
    traced = self.trace(state, segments)
    self.compiled = traced.lower().compile()
    return traced

  def muon_share(self, traced: jax.stages.Traced) -> float:
    """Returns the share of orthogonalisation in the FLOPs of a step, on one device.

    Args:
      traced: the call of many steps.
    """
    muon_config = self._config.optimizer.muon or experiment.MuonConfig()
    with sharding.use(self.mesh):
      muon_of_device = muon.flops(self.matrices, muon_config.steps)
    # The trace has the matrix products of one device for Muon, and of all devices for the model.
    traced_step = flops.matrix_flops(traced.jaxpr) / self._config.training.segments_per_call
    model_of_device = (traced_step - muon_of_device) / self.mesh.size
    return muon_of_device / (muon_of_device + model_of_device)

  def peak_bytes(self) -> int:
    """Returns the bytes of the compiled call on a device."""
    return capacity.peak_bytes(self.compiled)

  def trace(
    self, state: train_state.TrainState, segments: table_pages.Segments
  ) -> jax.stages.Traced:
    """Traces the call. State and segments may be abstract.

    Raises:
      BadInput: the compiler of the devices rejects an option of the config.
    """
    options = compiler.check_options(self._config.training, self.mesh)
    with sharding.use(self.mesh):
      if self.pages is not None:
        return self.pages.trace(self._step, state, segments, options)
      call = train_step.make_call(self._step, state, options)
      return call.trace(state, segments, np.int32(0))

  def trace_program(self, name: str) -> tuple[jax.stages.Traced, int]:
    """Returns one of NAMES, traced with abstract inputs, and the number of tokens it processes."""
    config = self._config
    t = config.training
    if name == 'train':
      shape = t.segments_per_call, t.batch_size, t.segment_length
      segments = inference_programs.abstract_segment(shape, sharding.rows_sharding(self.mesh, 1))
      return self.trace(self.packed, segments), math.prod(shape)
    variables = self._abstract_serving_variables()
    if name == 'decode':
      rows = sharding.batch_shards(self.mesh)
      return self.engine.trace_generate(variables, rows, config.evaluation_context()), rows
    length = config.evaluation_length()
    rows = self.engine.round_rows(min(t.batch_size, config.evaluation.streams))
    return self.engine.trace_score(variables, rows, length), rows * length

  def host_bytes(self, name: str) -> int:
    """Returns the bytes of host tables in all processes for one of NAMES."""
    tree = self.abstract if name == 'train' else self.abstract.variables
    leaves = host_arrays.by_name(tree).values()
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

  def _abstract_serving_variables(self) -> dict[str, Any]:
    """Returns the abstract variables of inference, with precomputed clusters of tokens."""
    state = self.abstract
    served = functools.partial(embedding_and_head.for_serving, self.engine.model.config)
    with sharding.use(self.mesh):
      codebook = jax.eval_shape(served, state.params, state.codebook)
    if codebook is not state.codebook:
      codebook = sharding.abstract(codebook, sharding.replicated(self.mesh))
    return {'params': state.params, 'codebook': codebook}

  def pack(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns a state for training, with packed tables; deletes the unpacked ones."""
    return train_state.reshape_tables(state, self.packed, delete=True)

  def unpack(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns a state for a checkpoint, with unpacked tables."""
    return train_state.reshape_tables(state, self.abstract)

  def call(
    self, state: train_state.TrainState, segments: table_pages.Segments, steps: int
  ) -> tuple[train_state.TrainState, metrics.Metrics]:
    """Trains on the first segments. The state is donated; metrics are stacked by step.

    Tables in host memory are updated in place and asynchronously: see `wait`.
    """
    if self.pages is not None:
      return self.pages.call(self.compiled, state, segments)
    state, metrics_of_call = self.compiled(state, segments, np.int32(steps))
    return state, jax.tree.map(lambda column: column[:steps], metrics_of_call)

  def wait(self) -> None:
    """Waits for all updates of tables in host memory."""
    if self.pages is not None:
      self.pages.wait()

  def lookup_reader(self, state: train_state.TrainState) -> table_pages.LookupReader | None:
    """Returns the look-up reader of segments after a state; None without host tables."""
    if self.pages is None:
      return None
    batch_size = self._config.training.batch_size
    return table_pages.LookupReader(self._step.model, state, batch_size)

  def read_ahead(self, calls: Iterator[Any], state: train_state.TrainState) -> Iterator[Any]:
    """Yields the data of calls from a state on; rows of host tables are read a call ahead."""
    if self.pages is None:
      return calls
    return self.pages.read_ahead(calls, state)

  @functools.cached_property
  def engine(self) -> inference.Engine:
    """The inference engine for evaluation."""
    config = self._config.evaluation_model()
    model = language_model.build(config, self._vocabulary_size, jit_layers=True)
    return inference.Engine.shared(model, self.mesh)

  @functools.cached_property
  def flops(self) -> flops.ModelFlops:
    """The FLOPs of the model in training."""
    t = self._config.training
    sizes = t.batch_size // t.microbatches, t.segment_length
    return flops.count(self._step.model, self.abstract.variables, *sizes)

  def evaluate(
    self,
    state: train_state.TrainState,
    split: token_split.TokenSplit,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """Scores a split, see `language_modeling.evaluate`."""
    return language_modeling.evaluate(
      self.engine, state.variables, split, self._config, report=report
    )
