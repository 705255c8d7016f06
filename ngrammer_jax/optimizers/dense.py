"""The optimizer of the dense weights: Adam, LAMB or Adagrad."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax.optimizers.schedule import Schedule


def make(
  config: experiment.OptimizerConfig, fraction: Schedule, decay_mask: Any
) -> optax.GradientTransformation:
  """Returns the optimizer of the dense weights, which clips their gradients.

  `adam` with a weight decay is what optax calls `adamw`: both names, one algorithm.

  Args:
    config: the optimizer config.
    fraction: the fraction of the learning rate at a step.
    decay_mask: whether each parameter decays; None: all do.
  """

  def rate(step):
    return config.learning_rate * fraction(step)

  scale_by_rate = optax.scale_by_learning_rate(rate)
  if config.algorithm == 'adagrad':
    return optax.chain(scale_by_adagrad(config.epsilon, config.clip_norm), scale_by_rate)

  # What is off is `identity`: the state of the chain, and so a checkpoint, has one structure.
  clip = optax.identity()
  if config.clip_norm is not None:
    clip = clip_by_norm(config.clip_norm)
  decay = optax.identity()
  if config.weight_decay:
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask)
  trust_ratio = optax.identity()
  if config.algorithm == 'lamb':
    trust_ratio = optax.scale_by_trust_ratio()
  adam = config.adam or experiment.AdamConfig()
  scale_by_adam = optax.scale_by_adam(adam.beta1, adam.beta2, config.epsilon)
  return optax.chain(clip, scale_by_adam, decay, trust_ratio, scale_by_rate)


def clip_by_norm(clip_norm: float) -> optax.GradientTransformation:
  """Clips by the global norm plus 1e-6, as PyTorch does, to reproduce the papers' codes exactly."""

  def clip(gradients, params=None):
    del params
    scale = jnp.minimum(clip_norm / (optax.tree.norm(gradients) + 1e-6), 1)
    return jax.tree.map(lambda g: scale.astype(g.dtype) * g, gradients)

  return optax.stateless(clip)


def scale_by_adagrad(epsilon: float, clip_norm: float | None) -> optax.GradientTransformation:
  """Adagrad of the adaptive span code: clips each array by its own norm, after adding its square.

  s <- s + g^2, step = min(1, clip / |g|) g / (sqrt(s) + epsilon), s from 0.
  """

  def init(params):
    return jax.tree.map(jnp.zeros_like, params)

  def add_square(s, g):
    return s + jnp.square(g)

  def step(g, s):
    norm = jnp.linalg.norm(g) + 1e-10  # as in the official code
    clip = 1.0 if clip_norm is None else jnp.minimum(clip_norm / norm, 1)
    return clip * g / (jnp.sqrt(s) + epsilon)

  def update(gradients, sums, params=None):
    del params
    sums = jax.tree.map(add_square, sums, gradients)
    return jax.tree.map(step, gradients, sums), sums

  return optax.GradientTransformation(init, update)
