"""Activations, by the names of the config (`config.activations`)."""

import functools

import jax
import jax.numpy as jnp


def squared_relu(x: jax.Array) -> jax.Array:
  """Returns max(x, 0)^2 (Primer)."""
  return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {
  'gelu': jax.nn.gelu,  # the tanh form
  'gelu_erf': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'squared_relu': squared_relu,
  'softmax': jax.nn.softmax,  # over the inner width (FF-attn of all-attention)
}
