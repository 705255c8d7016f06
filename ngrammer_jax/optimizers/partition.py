"""One optimizer for each parameter label; all share the shape of the schedule."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.models import parameter_groups, spans
from ngrammer_jax.optimizers import row_gradient, tables

FROZEN = 'frozen'
Memories = Sequence[NGramMemoryConfig]


def labels(params: Any, memories: Memories = (), frozen: Collection[str] = ()) -> Any:
  """Returns the label of every parameter.

  `dense`, or for tables, which have an axis `ngram_vocab`: `ngram_table`, or the name of the n-gram
  memory (see `models.memories`) if it has an optimizer of its own. `frozen` if it is not
  trained.

  Args:
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
    memories: the n-gram memories of the model.
    frozen: names of the parameters that are not trained.

  Raises:
    ValueError: a parameter has no logical axis names.
  """

  def label(path, leaf):
    name = sharding.leaf_name(path)
    if not is_boxed(leaf):
      raise ValueError(f'parameter {name} has no axis names: use nn.with_logical_partitioning')
    if name in frozen:
      return FROZEN
    if 'ngram_vocab' not in leaf.names:
      return 'dense'
    return next((entry.key for entry in path if entry.key in own_labels), 'ngram_table')

  own_labels = table_optimizers(memories)
  is_boxed = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
  return jax.tree_util.tree_map_with_path(label, params, is_leaf=is_boxed)


def table_optimizers(memories: Sequence[NGramMemoryConfig]) -> dict[str, str]:
  """Returns the name of the optimizer of each label of tables."""
  own = {ngram_memory.name(i): m.optimizer for i, m in enumerate(memories) if has_own_optimizer(m)}
  return {'ngram_table': 'adagrad'} | own


def has_own_optimizer(memory: NGramMemoryConfig) -> bool:
  """Whether a memory has another optimizer than the tables of label `ngram_table`."""
  return (memory.optimizer, memory.learning_rate_factor) != ('adagrad', None)


def schedule(config: experiment.OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
  """Returns the fraction of the learning rate at a step, from 0: linear warm-up, then decay.

  The warm-up of Transformer-XL differs. Its PyTorch code sets the rate after the update: the first
  update has the full rate, step s has s / warm-up, and the cosine counts the steps of the warm-up
  too. Its TensorFlow code has s / warm-up at step s, 0 at the first.
  """
  warmup, final, drop = config.warmup_steps, config.final_fraction, config.drop

  def fraction(step):
    step = jnp.asarray(step, float)  # float32, or float64 if enabled
    decayed = jnp.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
    cosine = lambda share: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * share))
    if config.schedule == 'transformer_xl':
      later = jnp.where((step < warmup) & (step > 0), step / max(warmup, 1), cosine(step / steps))
      return jnp.where(step == 0, 1.0, later)
    if config.schedule == 'transformer_xl_tensorflow':
      return jnp.where(step < warmup, step / max(warmup, 1), cosine(decayed))
    decay = {
      'cosine': cosine(decayed),
      'linear': 1 - (1 - final) * decayed,
      'rsqrt': jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1))),
      'constant': jnp.ones_like(step),
    }[config.schedule]
    return jnp.minimum((step + 1) / max(warmup, 1), 1) * decay

  if drop is None:
    return fraction
  return lambda step: fraction(step) * jnp.where(step >= steps - drop.steps, drop.fraction, 1)


def make(
  config: experiment.OptimizerConfig, steps: int, labels: Any, memories: Memories = ()
) -> optax.GradientTransformation:
  """Returns the optimizer: clipped gradients for dense weights, Adagrad for most n-gram tables.

  The gradients of the tables are not part of the clipped norm: the layer norm of tiny table rows
  multiplies them by hundreds, so that they would scale the dense gradients to almost 0. Spans are
  clipped to [0, 1], and do not decay: they have their own penalty.

  Args:
    config: the optimizer config.
    steps: number of steps of the run, for the schedule.
    labels: label of every parameter that is trained.
    memories: the n-gram memories of the model; each may have its own optimizer.
  """
  fraction = schedule(config, steps)
  decays = jax.tree_util.tree_map_with_path(lambda path, _: not spans.is_span(path), labels)
  transforms = {
    'dense': optax.chain(
      *_dense_transforms(config, decays),
      optax.scale_by_learning_rate(lambda step: config.learning_rate * fraction(step)),
    ),
    'ngram_table': tables.make('adagrad', config, fraction),
  }
  for i, memory in enumerate(memories):
    if has_own_optimizer(memory):
      transforms[ngram_memory.name(i)] = tables.make(
        memory.optimizer, config, fraction, memory.learning_rate_factor
      )
  partition = optax.partition(transforms, labels)
  factors = {rate.part: rate.factor for rate in config.rates}
  by_part = [optax.stateless(lambda updates, _: _scale_parts(updates, factors))] if factors else []
  return optax.chain(partition, *by_part, optax.stateless(spans.clip_updates))


def _scale_parts(updates, factors):
  """Multiplies the updates of parts of the model by the factors of their learning rates."""

  def scale(path, update):
    factor = factors.get(parameter_groups.group_of(sharding.leaf_name(path)), 1)
    if row_gradient.is_row_gradient(update):
      return update.replace(values=factor * update.values)
    return factor * update

  is_leaf = row_gradient.is_row_gradient
  return jax.tree_util.tree_map_with_path(scale, updates, is_leaf=is_leaf)


def _dense_transforms(config, decay_mask):
  """Returns the transformations of dense gradients that precede the learning rate."""
  if config.algorithm == 'adagrad':
    return (scale_by_adagrad(config.epsilon, config.clip_norm),)
  # `adam` with a weight decay is what optax calls `adamw`: both names, one algorithm.
  identity, adam = optax.identity(), config.adam or experiment.AdamConfig()
  decay = optax.add_decayed_weights(config.weight_decay, decay_mask)
  clip = optax.stateless(lambda gradients, _: _clip_by_norm(gradients, config.clip_norm))
  return (
    identity if config.clip_norm is None else clip,
    optax.scale_by_adam(adam.beta1, adam.beta2, config.epsilon),
    decay if config.weight_decay else identity,
    optax.scale_by_trust_ratio() if config.algorithm == 'lamb' else identity,
  )


def _clip_by_norm(gradients, clip_norm):
  """Clips by the global norm plus 1e-6, as PyTorch does, to reproduce the papers' codes exactly."""
  scale = jnp.minimum(clip_norm / (optax.tree.norm(gradients) + 1e-6), 1)
  return jax.tree.map(lambda g: scale.astype(g.dtype) * g, gradients)


def scale_by_adagrad(epsilon: float, clip_norm: float | None) -> optax.GradientTransformation:
  """Adagrad of the adaptive span code: clips each array by its own norm, after adding its square.

  s <- s + g^2, step = min(1, clip / |g|) g / (sqrt(s) + epsilon), s from 0.
  """

  def update(gradients, sums, params=None):
    del params
    sums = jax.tree.map(lambda s, g: s + jnp.square(g), sums, gradients)

    def step(g, s):
      norm = jnp.linalg.norm(g) + 1e-10  # as in the official code
      clip = 1.0 if clip_norm is None else jnp.minimum(clip_norm / norm, 1)
      return clip * g / (jnp.sqrt(s) + epsilon)

    return jax.tree.map(step, gradients, sums), sums

  return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def leaves_by_label(labels: Any, tree: Any) -> dict[str, list[Any]]:
  """Groups the leaves of a tree of parameters or gradients by their labels."""
  groups: dict[str, list[Any]] = {}
  jax.tree.map(lambda label, leaf: groups.setdefault(label, []).append(leaf), labels, tree)
  return groups
