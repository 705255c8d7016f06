"""Loads and exports the state_dict of a VQNgrammer of n-grammer-pytorch as arrays by name.

PyTorch is not needed. The arrays are
{name: tensor.numpy() for name, tensor in layer.state_dict().items()}.

N heads, H head width, E n-gram width, V rows of a head's table, K clusters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import conversion
from ngrammer_jax.layers.ngram import ngrammer

ORIGIN = 'a VQNgrammer of n-grammer-pytorch'


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int, dtype: Any = None
) -> dict[str, Any]:
  """Converts a VQNgrammer of n-grammer-pytorch to variables of `layer`.

  Source names: `vq.means` [N, K, H], `ngram.ngram_embeds.weight` [N V, E], and
  `ngram.{ngram,embeds}_layernorm.{g,b}`. The source layer norm divides by (standard deviation
  + 1e-5), the layer norm of this package by sqrt(variance + 1e-6). The outputs differ by about
  1e-3 if the standard deviation of a vector is about 0.1, and by less if it is larger.

  Args:
    arrays: the source arrays by name.
    layer: the target layer, with the sizes and options of the source layer.
    width: D, number of input features.
    dtype: dtype of the parameters, see `conversion.convert`.

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: see `conversion.check_options` and `conversion.convert`.
  """
  sources = _sources(layer, width)
  arrays = conversion.without_wrappers(arrays, conversion.names(sources), ORIGIN)
  return conversion.convert(arrays, sources, ORIGIN, dtype=dtype)


def export_ngrammer(
  variables: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
) -> dict[str, np.ndarray]:
  """Converts variables of `layer` to the arrays that `load_ngrammer` reads.

  Raises:
    BadInput: see `conversion.check_options` and `conversion.restore`.
  """
  return conversion.restore(variables, _sources(layer, width), ORIGIN)


def _sources(layer: ngrammer.NGrammer, width: int) -> dict[str, conversion.Source]:
  """Returns the source of each variable of a supported layer."""
  N, V, E, K = layer.heads, layer.vocabulary_size, layer.dim, layer.clusters
  if K is None:
    raise errors.BadInput('clusters=None: an N-Grammer of n-grammer-pytorch needs clusters')
  conversion.check_options(layer, ('heads', 'clusters', 'vocabulary_size', 'dim', 'combine'))
  conversion.check_width(layer, width)
  H, Source = width // N, conversion.Source
  sources = {
    'params/table': Source('ngram.ngram_embeds.weight', (N * V, E)),
    'codebook/quantizer/centroids': Source('vq.means', (N, K, H)),
  }
  for name, source_name, size in (('unigram_norm', 'embeds', H), ('ngram_norm', 'ngram', E)):
    for part, letter in (('scale', 'g'), ('bias', 'b')):
      norm_name = f'ngram.{source_name}_layernorm.{letter}'
      sources[f'params/{name}/{part}'] = Source(norm_name, (N, size))
  return sources
