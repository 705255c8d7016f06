"""Initial weights of other people's code, for results that are to be compared with theirs.

Without a recipe every layer draws its own: kernels of variance 1 / inputs, embeddings of
variance 1 / width, biases of 0.
"""

import dataclasses
import math
from typing import Any
import zlib

import jax

from ngrammer_jax import errors

RECIPES = ('transformer_xl', 'adaptive_span')
_BIASES = ('bias', 'softmax_bias')
_VECTORS = ('embedding', 'softmax_weight', 'cluster_weight')
_PROJECTIONS = ('projection', 'softmax_projection')
_DISTANCES = ('content_bias', 'position_bias', 'distance_embedding', 'position')


@dataclasses.dataclass(frozen=True)
class InitialConfig:
  """Initial weights of a published code.

  `transformer_xl` (PyTorch): normal, of one deviation for kernels, embeddings, u and v, and for
  the scales of norms around 1; of another for the projections of an adaptive softmax; biases 0.
  `adaptive_span`: embeddings of variance 1; kernels and biases uniform up to 1 / sqrt(inputs).
  N-gram layers, spans, persistent vectors and convolutions begin as ever.
  """

  recipe: str = 'transformer_xl'
  deviation: float = 0.02  # of transformer_xl; 0.005 in the large word rows of its TensorFlow code
  projection_deviation: float = 0.01

  def check(self, model: Any) -> None:
    """Raises BadInput for a recipe that there is not."""
    del model
    errors.check_choices('model.initial', self, {'recipe': RECIPES})
    for key in ('deviation', 'projection_deviation'):
      if not 0 < getattr(self, key) < math.inf:
        raise errors.BadInput(f'model.initial.{key}={getattr(self, key)} must be above 0')


def redrawn(config: InitialConfig, params: Any, key: jax.Array) -> Any:
  """The parameters with those of the recipe drawn again, each from a key of its name."""
  inputs = {}

  def note(path, leaf):
    *layer, last = _names(path)
    if last == 'kernel':
      # Attention's output is summed over heads and features, every other over the first axis.
      count = leaf.shape[:-1] if layer[-1] == 'out' else leaf.shape[:1]
      inputs[tuple(layer)] = math.prod(count)
    elif last == 'softmax_weight':
      inputs[()] = leaf.shape[-1]  # of the softmax_bias

  jax.tree_util.tree_map_with_path(note, params)
  draw = {'transformer_xl': _of_transformer_xl, 'adaptive_span': _of_adaptive_span}[config.recipe]

  def redraw(path, leaf):
    names = _names(path)
    if 'ngrammer' in names:
      return leaf
    own = jax.random.fold_in(key, zlib.crc32('/'.join(names).encode()))
    return draw(config, own, names, leaf, inputs.get(tuple(names[:-1])))

  return jax.tree_util.tree_map_with_path(redraw, params)


def _of_transformer_xl(config, key, names, leaf, inputs):
  del inputs
  kind = _kind(names)
  deviation = config.projection_deviation if kind in _PROJECTIONS else config.deviation
  normal = lambda: deviation * jax.random.normal(key, leaf.shape, leaf.dtype)
  if kind == 'scale':
    return 1 + normal()
  return normal() if kind in ('kernel', *_VECTORS, *_PROJECTIONS, *_DISTANCES) else leaf


def _of_adaptive_span(config, key, names, leaf, inputs):
  del config
  kind = _kind(names)
  if kind in ('embedding', 'distance_embedding'):
    return jax.random.normal(key, leaf.shape, leaf.dtype)
  if kind in _PROJECTIONS:
    inputs = leaf.shape[0]  # from the width of the cluster
  elif kind in _VECTORS:
    inputs = leaf.shape[-1]
  elif kind not in ('kernel', *_BIASES) or inputs is None:
    return leaf
  bound = inputs**-0.5
  return jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)


def _names(path):
  return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _kind(names):
  """The last part of a name, without the number of a cluster."""
  head, _, number = names[-1].rpartition('_')
  return head if number.isdigit() else names[-1]
