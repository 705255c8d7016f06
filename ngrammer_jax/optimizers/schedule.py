"""The learning-rate schedules, as fractions of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ngrammer_jax import config as experiment

Schedule = Callable[[jax.Array], jax.Array]


def make(config: experiment.OptimizerConfig, steps: int) -> Schedule:
  """Returns the fraction of the learning rate at a step, from 0: linear warm-up, then decay.

  The warm-up of Transformer-XL differs. Its PyTorch code sets the rate after the update: the first
  update has the full rate, step s has s / warm-up, and the cosine counts the steps of the warm-up
  too. Its TensorFlow code has s / warm-up at step s, 0 at the first.

  Schedule `wsd` (warm-up, stable, decay) is 1 from the warm-up to the decay, and has the final
  fraction after it. A warm-up that ends within the decay comes first, as in nanochat.

  Args:
    config: the optimizer config.
    steps: number of steps of the run.
  """

  def fraction(step):
    return _without_drop(config, steps, step)

  def fraction_with_drop(step):
    is_dropped = step >= steps - config.drop.steps
    return fraction(step) * jnp.where(is_dropped, config.drop.fraction, 1)

  return fraction if config.drop is None else fraction_with_drop


def _without_drop(config: experiment.OptimizerConfig, steps: int, step: jax.Array) -> jax.Array:
  """Returns the fraction at a step, without the drop of the last steps."""
  step = jnp.asarray(step, float)  # float32, or float64 if enabled
  warmup = max(config.warmup_steps, 1)
  is_warmup = step < config.warmup_steps
  steps_after_warmup = max(steps - config.warmup_steps, 1)
  progress = jnp.clip((step - config.warmup_steps) / steps_after_warmup, 0, 1)

  if config.schedule == 'transformer_xl':
    decay = _cosine(step / steps, config.final_fraction)
    after_first = jnp.where(is_warmup & (step > 0), step / warmup, decay)
    return jnp.where(step == 0, 1.0, after_first)
  if config.schedule == 'transformer_xl_tensorflow':
    return jnp.where(is_warmup, step / warmup, _cosine(progress, config.final_fraction))

  if config.schedule == 'wsd':
    return jnp.where(is_warmup, (step + 1) / warmup, _stable_then_decay(config, steps, step))

  if config.schedule == 'cosine':
    decay = _cosine(progress, config.final_fraction)
  elif config.schedule == 'linear':
    decay = 1 - (1 - config.final_fraction) * progress
  elif config.schedule == 'rsqrt':
    decay = jnp.sqrt(warmup / jnp.maximum(step, warmup))
  else:  # constant
    decay = jnp.ones_like(step)
  return jnp.minimum((step + 1) / warmup, 1) * decay


def _stable_then_decay(
  config: experiment.OptimizerConfig, steps: int, step: jax.Array
) -> jax.Array:
  """Returns 1 up to the first step of the decay, then its shape down to the final fraction."""
  progress = jnp.clip((step - config.decay_start(steps)) / config.decay_steps, 0, 1)
  if config.decay_shape == 'cosine':
    return _cosine(progress, config.final_fraction)
  if config.decay_shape == '1-sqrt':  # Hägele et al. 2024
    progress = jnp.sqrt(progress)
  return 1 - (1 - config.final_fraction) * progress


def _cosine(progress: jax.Array, final_fraction: float) -> jax.Array:
  """Returns half a cosine, from 1 at progress 0 to the final fraction at progress 1."""
  return final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
