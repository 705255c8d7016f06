"""One optimiser for each kind of parameter, all on one schedule shape."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax.models import initialization

# The kind of a parameter, by the last part of its name.
LABELS = {
  'embedding': 'dense',
  'softmax_weight': 'dense',
  'projection': 'dense',
  'softmax_projection': 'dense',
  'cluster_weight': 'dense',
  'cluster_bias': 'dense',
  'softmax_bias': 'dense',
  'kernel': 'dense',
  'bias': 'dense',
  'scale': 'dense',
  'per_dim_scale': 'dense',
  'query_kernel': 'dense',
  'taps': 'dense',
  'content_bias': 'dense',
  'position_bias': 'dense',
  'distance_embedding': 'dense',
  'distance_bias': 'dense',
  'position': 'dense',
  'span': 'dense',
  'span_kernel': 'dense',
  'span_bias': 'dense',
  'persistent_keys': 'dense',
  'persistent_values': 'dense',
  'input_kernel': 'dense',
  'recurrent_kernel': 'dense',
  'score': 'dense',
  'input_words': 'dense',
  'output_words': 'dense',
  'temporal': 'dense',
  'output_temporal': 'dense',
  'table': 'ngram_table',
}


def labels(params: Any) -> Any:
  """The label of every parameter. Raises ValueError for one that has none."""

  def of(path, _):
    names = initialization.path_names(path)
    name = initialization.param_suffix(names)
    if name not in LABELS:
      raise ValueError(f'parameter {"/".join(names)} has no optimiser label; add it to LABELS')
    return LABELS[name]

  return jax.tree_util.tree_map_with_path(of, params)


def schedule(config: experiment.OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
  """Fraction of the learning rate in force at a step, from 0: linear warm-up, then the decay.

  Those of Transformer-XL differ in the warm-up. In PyTorch the rate is set after the update, so
  that the first one is made at the full rate and step s at s / warm-up, and the cosine counts
  all steps, those of the warm-up too. In TensorFlow step s has s / warm-up, the first one 0.
  """
  warmup, last = config.warmup_steps, config.final_fraction

  def dropped(step):
    if config.drop is None:
      return fraction(step)
    return fraction(step) * jnp.where(step >= steps - config.drop.steps, config.drop.fraction, 1)

  def fraction(step):
    step = jnp.asarray(step, float)  # float32, or float64 where that is on
    through = jnp.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
    cosine = lambda part: last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * part))
    if config.schedule == 'transformer_xl':
      late = jnp.where((step < warmup) & (step > 0), step / max(warmup, 1), cosine(step / steps))
      return jnp.where(step == 0, 1.0, late)
    if config.schedule == 'transformer_xl_tensorflow':
      return jnp.where(step < warmup, step / max(warmup, 1), cosine(through))
    decay = {
      'cosine': cosine(through),
      'linear': 1 - (1 - last) * through,
      'rsqrt': jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1))),
      'constant': jnp.ones_like(step),
    }[config.schedule]
    return jnp.minimum((step + 1) / max(warmup, 1), 1) * decay

  return dropped


def make(config: experiment.OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """One algorithm for dense weights, clipped by itself; Adagrad for the n-gram tables, not clipped.

  The layer norm of tiny table rows multiplies their gradients by hundreds: in one norm
  with the rest they would silence the dense weights. Spans are kept in [0, 1].
  """
  fraction, table = schedule(config, steps), config.table or experiment.TableConfig()
  by_label = optax.partition(
    {
      'dense': optax.chain(
        *_direction(config),
        optax.scale_by_learning_rate(lambda step: config.learning_rate * fraction(step)),
      ),
      'ngram_table': optax.chain(
        optax.scale_by_rss(table.accumulator, table.epsilon),
        optax.scale_by_learning_rate(lambda step: table.learning_rate * fraction(step)),
      ),
    },
    labels,
  )
  return optax.chain(by_label, optax.stateless(_spans_kept))


def largest_update(config: experiment.OptimizerConfig, values: int) -> float:
  """A bound on what one update changes of a span at most, whatever the gradients are.

  Adagrad divides by no less than the gradient. Of Adam, by the inequality of Cauchy and Schwarz,
  |m| <= (1 - b1) / sqrt(1 - b2) sqrt(sum of (b1^2 / b2)^k) sqrt(v), before m and v are corrected.
  LAMB makes the update of an array, here of `values` in [0, 1], as long as the array.
  """
  fraction = max(1.0, config.final_fraction)
  if config.drop is not None:
    fraction *= max(1.0, config.drop.fraction)
  rate = fraction * config.learning_rate
  if config.algorithm == 'adagrad':
    return rate
  adam = config.adam or experiment.AdamConfig()
  b1, b2 = adam.beta1, adam.beta2
  if b1**2 >= b2:
    return math.inf
  steps = np.arange(1, 100_000)
  powers = (1 - (b1**2 / b2) ** steps) / (1 - b1**2 / b2)
  corrected = np.sqrt(1 - b2**steps) / (1 - b1**steps)
  highest = max((np.sqrt(powers) * corrected).max(), 1 / math.sqrt(1 - b1**2 / b2))  # or at the end
  most = (1 - b1) / math.sqrt(1 - b2) * highest
  return rate * (max(most, math.sqrt(values)) if config.algorithm == 'lamb' else most)


def _direction(config):
  """The transformations that come before the learning rate."""
  if config.algorithm == 'adagrad':
    return (scale_by_adagrad(config.epsilon, config.clip_norm),)
  nothing, adam = optax.identity(), config.adam or experiment.AdamConfig()
  return (
    nothing if config.clip_norm is None else optax.stateless(_clipped(config.clip_norm)),
    optax.scale_by_adam(adam.beta1, adam.beta2, config.epsilon),
    optax.add_decayed_weights(config.weight_decay, _decays) if config.weight_decay else nothing,
    optax.scale_by_trust_ratio() if config.algorithm == 'lamb' else nothing,
  )


def _clipped(clip_norm):
  """Clips by the norm of all, with what PyTorch adds to it, to the digits of the papers' codes."""

  def clip(gradients, _):
    scale = jnp.minimum(clip_norm / (optax.tree.norm(gradients) + 1e-6), 1)
    return jax.tree.map(lambda g: scale.astype(g.dtype) * g, gradients)

  return clip


def scale_by_adagrad(epsilon: float, clip_norm: float | None) -> optax.GradientTransformation:
  """Adagrad as in adaptive span: every array is clipped by itself, and after it was summed.

  s <- s + g^2, step = min(1, clip / |g|) g / (sqrt(s) + epsilon), s from 0.
  """

  def update(gradients, sums, params=None):
    del params
    sums = jax.tree.map(lambda s, g: s + jnp.square(g), sums, gradients)

    def step(g, s):
      norm = jnp.linalg.norm(g) + 1e-10  # to the digits of the official code
      clip = 1.0 if clip_norm is None else jnp.minimum(clip_norm / norm, 1)
      return clip * g / (jnp.sqrt(s) + epsilon)

    return jax.tree.map(step, gradients, sums), sums

  return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _decays(params):
  """Which weights decay: all but spans, that have a penalty of their own."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != 'span', params)


def _spans_kept(updates, params):
  """Updates that leave spans in [0, 1]."""

  def kept(path, update, param):
    if path[-1].key != 'span':
      return update
    return jnp.clip(param + update, 0, 1) - param

  return jax.tree_util.tree_map_with_path(kept, updates, params)


def norms(tree: Any) -> dict[str, jax.Array]:
  """Global norm of the gradients of each label."""
  by_label: dict[str, list[jax.Array]] = {}
  leaves, marks = jax.tree.leaves(tree), jax.tree.leaves(labels(tree))
  for leaf, label in zip(leaves, marks, strict=True):
    by_label.setdefault(label, []).append(leaf)
  return {label: optax.tree.norm(group) for label, group in by_label.items()}
