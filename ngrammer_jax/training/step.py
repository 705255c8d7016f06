"""A training step, and a jitted call of many steps.

A step is one segment of every row, one optimizer update and one codebook update.
"""

from collections.abc import Callable, Collection
import dataclasses
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import streams
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.models import language_model, memories, parameter_groups, spans
from ngrammer_jax.optimizers import partition, row_gradient, zero
from ngrammer_jax.training import accumulation
from ngrammer_jax.training import metrics as step_metrics
from ngrammer_jax.training import state as train_state


class Rows(NamedTuple):
  """Rows of a batch: their segment, loss weights of the tokens, and memory."""

  segment: streams.Batch
  counts_BxT: jax.Array
  memory: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
  """A function of the train state and a segment of every row.

  Attributes:
    model: the model.
    optimizer: optimizer of the parameters.
    labels: label of every parameter that is trained; gradient norms are reported for each.
    seed: seed of the dropout.
    half_loss: whether only the later half of every segment counts (Transformer-XL's ablation).
    frozen_codebook: whether the codebook stays unchanged.
    microbatches: computes the gradient by microbatches. None: for all rows at once.
    frozen: names of the parameters that are not trained; the codebooks of their memories stay.
    shards: splits the update over `data`. None: each of these devices makes it all.
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

  def __call__(
    self, state: train_state.TrainState, segment: streams.Batch
  ) -> tuple[train_state.TrainState, step_metrics.Metrics]:
    """Returns the state after the segment, and the metrics of the step."""
    config = self.model.config
    if self.shards is not None:
      trained = self.shards.keep(parameter_groups.without(state.params, self.frozen))
      state = state.replace(params=parameter_groups.merge(state.params, trained))
    gradient, memory, nll, codebook = self._gradient(state, segment)
    codebook = self._with_frozen_codebooks(codebook, state.codebook)
    with jax.named_scope('optimizer'):
      trained = parameter_groups.without(state.params, self.frozen)
      if self.shards is not None:
        gradient, trained = self.shards.scatter(gradient), self.shards.scatter(trained)
      updates, opt_state = self.optimizer.update(gradient, state.opt_state, trained)
      metrics = {'loss': nll, 'update_norm': row_gradient.norm(updates)}
      for label, leaves in partition.leaves_by_label(self.labels, gradient).items():
        metrics[f'gradient_norm/{label}'] = row_gradient.norm(leaves)
      key = jax.random.fold_in(jax.random.key(self.seed), state.step)
      trained = row_gradient.apply_updates(trained, updates, key)
      if self.shards is not None:
        trained = self.shards.gather(trained)
      params = parameter_groups.merge(state.params, trained)
    metrics |= step_metrics.codebook_metrics(state.codebook, codebook, self.microbatches is None)
    if config.span is not None:
      metrics |= spans.metrics(config, params, memory)
    return state.replace(
      step=state.step + 1, params=params, codebook=codebook, opt_state=opt_state, memory=memory
    ), metrics

  def _with_frozen_codebooks(self, codebook, before):
    """Returns a codebook, for memories with frozen parameters as it was before."""
    modules = {parameter_groups.memory_of(name) for name in self.frozen} - {None}
    names = traverse_util.flatten_dict(before, sep='/')
    is_frozen = [name for name in names if parameter_groups.memory_of(name) in modules]
    return parameter_groups.merge(codebook, parameter_groups.select(before, is_frozen))

  def _gradient(self, state, segment):
    """Returns the gradient, the next memory, the mean loss and the next codebook."""
    T = segment.tokens_BxT.shape[1]
    counts_BxT = segment.valid_BxT if segment.counts_BxT is None else segment.counts_BxT
    counts_BxT = counts_BxT * (jnp.arange(T) >= (T // 2 if self.half_loss else 0))
    total = counts_BxT.sum()
    dropout_key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    rows = Rows(segment, counts_BxT, state.memory)
    if self.microbatches is None:
      gradient, lookups, memory, nll, updated = self._rows_gradient(state, rows, total, dropout_key)
      gradient = row_gradient.join(gradient, lookups, state.params)
      return gradient, memory, nll, updated.get('codebook', state.codebook)

    def microbatch_gradient(rows, number):
      key = jax.random.fold_in(dropout_key, number)
      # Auxiliary losses may be means over tokens, like the loss.
      share = rows.segment.valid_BxT.sum() / segment.valid_BxT.sum()
      gradient, lookups, memory, *rest = self._rows_gradient(state, rows, total, key, share)
      return (lookups, memory), (gradient, *rest)

    (lookups, memory), (gradient, nll, updated) = self.microbatches(microbatch_gradient, rows)
    gradient = row_gradient.join(gradient, lookups, state.params)
    statistics = updated.get('statistics', {})
    return gradient, memory, nll, update_codebook(self.model.config, state.codebook, statistics)

  def _rows_gradient(self, state, rows, total, dropout_key, share=1.0):
    """Returns the gradient of some rows, without that of tables, and the gradients of lookups.

    The two are the arguments of `row_gradient.join`. Then come the next memory, the loss and the
    updated collections.

    Args:
      state: the train state.
      rows: the rows.
      total: number of tokens that count in the loss of all rows.
      dropout_key: dropout key of these rows.
      share: tokens of these rows as a share of all.
    """
    # A loss without tables is traced only once.
    has_tables = set(jax.tree.leaves(self.labels)) != {'dense'}
    segment, mutable = rows.segment, [table.LOOKUPS] if has_tables else []
    count = 1 if self.microbatches is None else self.microbatches.num_microbatches
    if not self.frozen_codebook:
      mutable.append('codebook' if self.microbatches is None else 'statistics')

    def loss(params, perturbations):
      (hidden, memory, aux), updated = self.model.apply(
        {'params': params, 'codebook': state.codebook, **perturbations},
        segment.tokens_BxT,
        rows.memory,
        **segment.marks,
        train=True,
        rngs={'dropout': dropout_key},
        mutable=mutable,
      )
      scores = self.model.apply({'params': params}, hidden, segment.targets_BxT, method='scores')
      nll = jnp.where(rows.counts_BxT > 0, scores.nll_BxT, 0).sum() / total
      return nll + share * sum(aux.values()), (updated.pop(table.LOOKUPS, {}), memory, nll, updated)

    gradient, lookups, rest = row_gradient.grad(
      loss, state.params, count if has_tables else 0, self.frozen
    )
    return gradient, lookups, *rest


def update_codebook(config: model_config.ModelConfig, codebook: Any, statistics: Any) -> Any:
  """Returns the codebook after one update from the counts and sums of each quantiser.

  Args:
    config: model config.
    codebook: the codebook.
    statistics: the counts and sums, in the structure of the codebook.
  """
  modules = dict(memories.ngram_modules(config))
  counted = traverse_util.flatten_dict(statistics, is_leaf=lambda _, part: 'sums' in part)
  parts = traverse_util.flatten_dict(
    codebook, keep_empty_nodes=True, is_leaf=lambda path, _: path in counted
  )
  for path, part in counted.items():  # a quantiser is in the module of its memory
    quantizer = modules[path[:-1]].make_quantizer(parent=None)
    parts[path] = quantizer.update_codebook(parts[path], part)
  return traverse_util.unflatten_dict(parts)


def make_call(
  step: TrainStep, abstract: train_state.TrainState
) -> Callable[..., tuple[train_state.TrainState, step_metrics.Metrics]]:
  """Returns a jitted function of the state, stacked segments [steps, B, T] and a number of steps.

  The steps beyond that number are skipped. The state is donated. Metrics are stacked by step; those
  of skipped steps are 0.
  """
  shardings = jax.tree.map(sharding.placement, abstract)
  jitted_step = jax.jit(step, inline=True)  # one trace for both the shapes and the scan

  def step_or_skip(state, inputs):
    is_due, segment = inputs
    _, shapes = jax.eval_shape(jitted_step, state, segment)
    skip = lambda state, _: (state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    return jax.lax.cond(is_due, jitted_step, skip, state, segment)

  def call(state, segments, steps):
    numbers = jnp.arange(len(segments.tokens_BxT))
    return jax.lax.scan(step_or_skip, state, (numbers < steps, segments))

  replicated = sharding.replicated(shardings.step.mesh)
  return jax.jit(call, donate_argnums=0, out_shardings=(shardings, replicated))
