"""The optimizer of the dense weights: Adam, LAMB, Adagrad, or Muon beside Adam."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.optimizers import muon, weight_decay
from ngrammer_jax.optimizers.schedule import Schedule


def make(
  config: experiment.OptimizerConfig,
  fraction: Schedule,
  decay_mask: Any,
  matrices: Mapping[str, muon.Kernel] | None,
  rate_factors: Mapping[str, float],
) -> optax.GradientTransformation:
  """Returns the optimizer of the dense weights, which clips their gradients.

  `adam` with a weight decay equals optax's `adamw`.

  Args:
    config: the optimizer config.
    fraction: the fraction of the learning rate at a step.
    decay_mask: whether each parameter decays; None: all do.
    matrices: the matrices trained by Muon, see `muon.find_matrices`.
    rate_factors: factors of the learning rates, by name; not applied to weight decay.
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
  if rate_factors:  # within the place of the decay, so that the structure stays
    decay = optax.chain(scale_by_name(rate_factors), decay)
  trust_ratio = optax.identity()
  if config.algorithm == 'lamb':
    trust_ratio = optax.scale_by_trust_ratio()
  adam = config.adam or experiment.AdamConfig()
  scale_by_adam = optax.scale_by_adam(adam.beta1, adam.beta2, config.epsilon)
  if config.algorithm == 'muon':
    others = optax.chain(scale_by_adam, decay, scale_by_rate)
    return optax.chain(clip, _muon_beside(others, config, fraction, matrices, rate_factors))
  return optax.chain(clip, scale_by_adam, decay, trust_ratio, scale_by_rate)


def _muon_beside(
  others: optax.GradientTransformation,
  config: experiment.OptimizerConfig,
  fraction: Schedule,
  matrices: Mapping[str, muon.Kernel],
  rate_factors: Mapping[str, float],
) -> optax.GradientTransformation:
  """Returns Muon of the matrices, and another optimizer of all other weights."""
  muon_config = config.muon or experiment.MuonConfig()

  def rate(step):
    return muon_config.learning_rate * fraction(step)

  def label(path, leaf):
    del leaf
    return 'matrix' if sharding.leaf_name(path) in matrices else 'other'

  def labels(params):
    return jax.tree_util.tree_map_with_path(label, params, is_leaf=sharding.is_boxed)

  decay = optax.add_decayed_weights(weight_decay.of_matrices(config))
  if muon_config.scale == 'moonlight':  # the size of Adam's updates; other scales fit any width
    decay = optax.chain(scale_by_name(rate_factors), decay)
  of_matrices = optax.chain(
    muon.scale_by_muon(muon_config, matrices),
    decay,
    optax.scale_by_learning_rate(rate),
  )
  return optax.partition({'matrix': of_matrices, 'other': others}, labels)


def scale_by_name(factors: Mapping[str, float]) -> optax.GradientTransformation:
  """Multiplies updates by factors, by name; other updates are unchanged."""

  def scale(path, update):
    return factors.get(sharding.leaf_name(path), 1.0) * update

  def scale_all(updates, params=None):
    del params
    return jax.tree_util.tree_map_with_path(scale, updates)

  return optax.stateless(scale_all)


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
