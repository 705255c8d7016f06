"""Loads and exports the state_dict of a VQNgrammer of n-grammer-pytorch as arrays by name.

PyTorch is not needed. The arrays are
{name: tensor.numpy() for name, tensor in layer.state_dict().items()}.

N heads, H head width, E n-gram width, V rows of a head's table, K clusters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import loader_options, named_arrays
from ngrammer_jax.interop.named_arrays import ArraySource
from ngrammer_jax.layers.ngram import ngrammer

ORIGIN = 'a VQNgrammer of n-grammer-pytorch'


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int, dtype: Any = None
) -> dict[str, Any]:
  """Converts a VQNgrammer of n-grammer-pytorch to variables of `layer`.

  Source names: `vq.means` [N, K, H], `ngram.ngram_embeds.weight` [N V, E], and
  `ngram.{ngram,embeds}_layernorm.{g,b}`. The source layer norm divides by (standard deviation +
  1e-5), the layer norm of this package by sqrt(variance + 1e-6). Outputs differ by about 1e-3 for
  vectors with standard deviation 0.1, and by less for larger ones.

  Args:
    arrays: the source arrays by name.
    layer: the target layer, with the sizes and options of the source layer.
    width: D, number of input features.
    dtype: dtype of the parameters, see `named_arrays.convert`.

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.convert`.
  """
  sources = _sources(layer, width)
  arrays = named_arrays.without_wrappers(arrays, named_arrays.shapes_by_name(sources), ORIGIN)
  return named_arrays.convert(arrays, sources, ORIGIN, dtype=dtype)


def export_ngrammer(
  variables: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
) -> dict[str, np.ndarray]:
  """Converts variables of `layer` to arrays for `load_ngrammer`.

  Raises:
    BadInput: see `loader_options.check_options` and `named_arrays.restore`.
  """
  return named_arrays.restore(variables, _sources(layer, width), ORIGIN)


def _sources(layer: ngrammer.NGrammer, width: int) -> dict[str, ArraySource]:
  """Returns the source of each variable of a supported layer."""
  N = layer.heads
  V = layer.vocabulary_size
  E = layer.dim
  K = layer.clusters
  if K is None:
    raise errors.BadInput('clusters=None: an N-Grammer of n-grammer-pytorch needs clusters')
  loader_options.check_options(layer, ('heads', 'clusters', 'vocabulary_size', 'dim', 'combine'))
  loader_options.check_layer_width(layer, width)
  H = width // N
  return {
    'params/table': ArraySource('ngram.ngram_embeds.weight', (N * V, E)),
    'codebook/quantizer/centroids': ArraySource('vq.means', (N, K, H)),
    'params/unigram_norm/scale': ArraySource('ngram.embeds_layernorm.g', (N, H)),
    'params/unigram_norm/bias': ArraySource('ngram.embeds_layernorm.b', (N, H)),
    'params/ngram_norm/scale': ArraySource('ngram.ngram_layernorm.g', (N, E)),
    'params/ngram_norm/bias': ArraySource('ngram.ngram_layernorm.b', (N, E)),
  }
