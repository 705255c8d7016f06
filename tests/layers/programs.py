"""One program for each layer and shape, and gradients against finite differences of loops."""

import functools

import jax
import numpy as np


@functools.partial(jax.jit, static_argnames=('layer', 'method', 'mutable'))
def apply(layer, variables, *inputs, method=None, mutable=False, **kwargs):
  """`layer.apply`, compiled."""
  return layer.apply(variables, *inputs, method=method, mutable=mutable, **kwargs)


def assert_gradient(gradient, function, arrays, tolerance=1e-7, step=1e-5, seed=0):
  """A gradient is what central differences of a NumPy function of float64 arrays say.

  Every array alone, along a drawn direction.
  """
  rng = np.random.default_rng(seed)
  paths, tree = jax.tree_util.tree_flatten_with_path(jax.tree.map(np.asarray, arrays))
  gradients, leaves = jax.tree.leaves(gradient), [leaf for _, leaf in paths]
  assert len(gradients) == len(leaves)
  for i, (path, leaf) in enumerate(paths):
    direction = rng.normal(size=leaf.shape)
    at = lambda far, i=i, leaf=leaf, direction=direction: function(
      tree.unflatten([*leaves[:i], leaf + far * direction, *leaves[i + 1 :]])
    )
    slope = (at(step) - at(-step)) / (2 * step)
    actual = (np.asarray(gradients[i]) * direction).sum()
    message = f'{jax.tree_util.keystr(path)}, seed {seed}'
    assert abs(actual - slope) <= tolerance * (1 + abs(slope)), f'{message}: {actual}, not {slope}'
