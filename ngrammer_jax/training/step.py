"""A training step, and a jitted call of many steps.

A step is one segment of every row, one optimizer update and one codebook update.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers.ngram import host_rows, table
from ngrammer_jax.models import language_model, memories, parameter_groups, spans
from ngrammer_jax.optimizers import partition, row_gradient, zero
from ngrammer_jax.training import accumulation, losses
from ngrammer_jax.training import metrics as step_metrics
from ngrammer_jax.training import state as train_state


class Rows(NamedTuple):
  """Rows of a batch: their segment, loss weights of the tokens, memory, and rows of tables."""

  segment: token_batch.Batch
  counts_BxT: jax.Array
  memory: Any
  table_rows: Any


class RowsGradient(NamedTuple):
  """The gradient of some rows, and the other results of the pass.

  Attributes:
    gradient: gradient by path, without tables.
    lookups: gradients of the lookups in tables. `row_gradient.join` takes both.
    memory: the next memory of the rows.
    metrics: the loss and its extra metrics, see `losses.means`.
    updated: the updated collections of the model.
  """

  gradient: dict[row_gradient.Path, Any]
  lookups: dict[row_gradient.Path, Any]
  memory: Any
  metrics: step_metrics.Metrics
  updated: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
  """A function of the train state and a segment of every row.

  Attributes:
    model: the model.
    optimizer: optimizer of the parameters.
    labels: label of every trained parameter; gradient norms are reported by label.
    seed: seed of the dropout.
    half_loss: whether the loss is only on the later half of every segment (Transformer-XL's
      ablation).
    frozen_codebook: whether the codebook stays unchanged.
    microbatches: computes the gradient by microbatches. None: for all rows at once.
    frozen: names of the frozen parameters; the codebooks of their memories are frozen too.
    shards: shards the update over `data`. None: each device computes the whole update.
    loss: the loss of each token.
  """

  model: language_model.LanguageModel
  optimizer: optax.GradientTransformation
  labels: Any
  seed: int
  half_loss: bool = False
  frozen_codebook: bool = False
  microbatches: accumulation.GradientAccumulation | None = None
  frozen: Collection[str] = ()
  shards: zero.ParameterShardings | None = None
  loss: losses.Loss = losses.next_token

  def __call__(
    self, state: train_state.TrainState, segment: token_batch.Batch, table_rows: Any = None
  ) -> tuple[train_state.TrainState, step_metrics.Metrics]:
    """Returns the state after the segment, and the metrics of the step.

    Args:
      state: the train state.
      segment: a segment of every row.
      table_rows: the collection `host_rows.ROWS`. None: no tables in host memory.
    """
    config = self.model.config
    if self.shards is not None:
      trained = self.shards.keep(parameter_groups.without(state.params, self.frozen))
      state = state.replace(params=parameter_groups.merge(state.params, trained))
    gradient, memory, metrics, codebook = self._gradient(state, segment, table_rows or {})
    codebook = self._with_frozen_codebooks(codebook, state.codebook)
    with jax.named_scope('optimizer'):
      params, opt_state, norms = self._update(state, gradient)
    metrics |= norms
    metrics |= step_metrics.codebook_metrics(state.codebook, codebook, self.microbatches is None)
    if config.span is not None:
      metrics |= spans.metrics(config, params, memory)
    next_state = state.replace(
      step=state.step + 1, params=params, codebook=codebook, opt_state=opt_state, memory=memory
    )
    return next_state, metrics

  def _update(
    self, state: train_state.TrainState, gradient: Any
  ) -> tuple[Any, Any, step_metrics.Metrics]:
    """Returns the updated parameters and optimizer state, and the norms of update and gradient."""
    trained = parameter_groups.without(state.params, self.frozen)
    if self.shards is not None:
      gradient = self.shards.scatter(gradient)
      trained = self.shards.scatter(trained)
    updates, opt_state = self.optimizer.update(gradient, state.opt_state, trained)
    norms = {'update_norm': row_gradient.norm(updates)}
    for label, leaves in partition.leaves_by_label(self.labels, gradient).items():
      norms[f'gradient_norm/{label}'] = row_gradient.norm(leaves)
    key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    trained = row_gradient.apply_updates(trained, updates, key)
    if self.shards is not None:
      trained = self.shards.gather(trained)
    return parameter_groups.merge(state.params, trained), opt_state, norms

  def _with_frozen_codebooks(self, codebook: Any, before: Any) -> Any:
    """Returns a codebook, unchanged for memories with frozen parameters."""
    frozen_memories = {parameter_groups.memory_of(name) for name in self.frozen} - {None}
    names = traverse_util.flatten_dict(before, sep='/')
    frozen = [name for name in names if parameter_groups.memory_of(name) in frozen_memories]
    return parameter_groups.merge(codebook, parameter_groups.select(before, frozen))

  def _gradient(
    self, state: train_state.TrainState, segment: token_batch.Batch, table_rows: Any
  ) -> tuple[Any, Any, step_metrics.Metrics, Any]:
    """Returns the gradient, the next memory, the metrics of the loss and the next codebook."""
    T = segment.tokens_BxT.shape[1]
    first_counted = T // 2 if self.half_loss else 0
    counts_BxT = segment.counted * (jnp.arange(T) >= first_counted)
    total = counts_BxT.sum()
    dropout_key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    rows = Rows(segment, counts_BxT, state.memory, table_rows)
    if self.microbatches is None:
      result = self._rows_gradient(state, rows, total, dropout_key)
      gradient = row_gradient.join(result.gradient, result.lookups, state.params)
      codebook = result.updated.get('codebook', state.codebook)
      return gradient, result.memory, result.metrics, codebook

    def microbatch_gradient(rows: Rows, number: jax.Array) -> tuple[Any, Any]:
      key = jax.random.fold_in(dropout_key, number)
      # Auxiliary losses may be means over tokens, like the loss.
      share = rows.segment.valid_BxT.sum() / segment.valid_BxT.sum()
      result = self._rows_gradient(state, rows, total, key, share)
      sums = result.gradient, result.metrics, result.updated
      return (result.lookups, result.memory), sums

    (lookups, memory), (gradient, metrics, updated) = self.microbatches(microbatch_gradient, rows)
    gradient = row_gradient.join(gradient, lookups, state.params)
    statistics = updated.get('statistics', {})
    codebook = update_codebook(self.model.config, state.codebook, statistics)
    return gradient, memory, metrics, codebook

  def _rows_gradient(
    self,
    state: train_state.TrainState,
    rows: Rows,
    total: jax.Array,
    dropout_key: jax.Array,
    share: jax.Array | float = 1.0,
  ) -> RowsGradient:
    """Returns the gradient of some rows.

    Args:
      state: the train state.
      rows: the rows.
      total: number of counted tokens of all rows.
      dropout_key: dropout key of these rows.
      share: tokens of these rows as a share of all.
    """
    # A loss without tables is traced only once.
    has_tables = set(jax.tree.leaves(self.labels)) != {'dense'}
    segment = rows.segment
    mutable = []
    parts = 0
    if has_tables:
      mutable.append(table.LOOKUPS)
      parts = 1
      if self.microbatches is not None:
        parts = self.microbatches.num_microbatches
    if not self.frozen_codebook:
      if self.microbatches is None:
        mutable.append('codebook')
      else:
        mutable.append('statistics')

    def loss(params: Any, perturbations: Any) -> tuple[jax.Array, tuple[Any, ...]]:
      variables = {'params': params, 'codebook': state.codebook, **perturbations}
      if rows.table_rows:
        variables[host_rows.ROWS] = rows.table_rows
      (hidden, memory, aux), updated = self.model.apply(
        variables,
        segment.tokens_BxT,
        rows.memory,
        **segment.marks,
        train=True,
        rngs={'dropout': dropout_key},
        mutable=mutable,
      )
      context = losses.LossContext(self.model, params, segment, rows.counts_BxT, total)
      metrics = losses.means(self.loss, hidden, context)
      lookups = updated.pop(table.LOOKUPS, {})
      return metrics['loss'] + share * sum(aux.values()), (lookups, memory, metrics, updated)

    gradient, lookups, (memory, metrics, updated) = row_gradient.grad(
      loss, state.params, parts, self.frozen
    )
    return RowsGradient(gradient, lookups, memory, metrics, updated)


def update_codebook(config: model_config.ModelConfig, codebook: Any, statistics: Any) -> Any:
  """Returns the codebook after one update from the counts and sums of each quantiser.

  Args:
    config: model config.
    codebook: the codebook.
    statistics: the counts and sums, in the structure of the codebook.
  """

  def has_sums(_: Any, variables: Mapping[str, Any]) -> bool:
    return 'sums' in variables

  def has_statistics(path: tuple[str, ...], _: Any) -> bool:
    return path in statistics_by_path

  modules = dict(memories.ngram_modules(config))
  statistics_by_path = traverse_util.flatten_dict(statistics, is_leaf=has_sums)
  variables_by_path = traverse_util.flatten_dict(
    codebook, keep_empty_nodes=True, is_leaf=has_statistics
  )
  for path, counts_and_sums in statistics_by_path.items():
    memory = modules[path[:-1]]  # a quantiser is in the module of its memory
    quantizer = memory.make_quantizer(parent=None)
    variables_by_path[path] = quantizer.update_codebook(variables_by_path[path], counts_and_sums)
  return traverse_util.unflatten_dict(variables_by_path)


def make_call(
  step: TrainStep,
  abstract: train_state.TrainState,
  compiler_options: Mapping[str, bool | str] | None = None,
) -> Callable[..., tuple[train_state.TrainState, step_metrics.Metrics]]:
  """Returns a jitted function of the state, stacked segments [steps, B, T] and a number of steps.

  Steps beyond that number are skipped. The state is donated. Metrics are stacked by step, 0 for
  skipped steps.

  Args:
    step: the training step.
    abstract: shapes, dtypes and shardings of the state.
    compiler_options: options of XLA by name.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  jitted_step = jax.jit(step, inline=True)  # one trace for both the shapes and the scan

  def step_or_skip(state, inputs):
    is_due, segment = inputs
    _, shapes = jax.eval_shape(jitted_step, state, segment)

    def skip(state, _):
      return state, accumulation.zeros(shapes)

    return jax.lax.cond(is_due, jitted_step, skip, state, segment)

  def call(state, segments, steps):
    numbers = jnp.arange(len(segments.tokens_BxT))
    return jax.lax.scan(step_or_skip, state, (numbers < steps, segments))

  replicated = sharding.replicated(shardings.step.mesh)
  return jax.jit(
    call,
    donate_argnums=0,
    out_shardings=(shardings, replicated),
    compiler_options=dict(compiler_options or {}),
  )
