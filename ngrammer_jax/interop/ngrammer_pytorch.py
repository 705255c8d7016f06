"""The state_dict of n-grammer-pytorch's VQNgrammer, as plain arrays by name, to ours.

No PyTorch is needed: {name: tensor.numpy() for name, tensor in layer.state_dict().items()}.

N heads, H head width, E n-gram width, V rows of a head's table, K clusters.
"""

from collections.abc import Mapping
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.interop import arrays as interop_arrays
from ngrammer_jax.layers import ngrammer


def load_ngrammer(
  arrays: Mapping[str, Any], layer: ngrammer.NGrammer, width: int
) -> dict[str, Any]:
  """Variables of `layer` from a VQNgrammer of n-grammer-pytorch.

  Its names: `vq.means` [N, K, H], `ngram.ngram_embeds.weight` [N V, E], and
  `ngram.{ngram,embeds}_layernorm.{g,b}`. Its layer norms divide by the standard deviation
  plus 1e-5 and ours by the root of the variance plus 1e-6: outputs are equal to about 1e-3
  where a vector's deviation is about 0.1, and closer where it is larger.

  Args:
    arrays: their arrays by name.
    layer: our layer, with the sizes and switches of theirs.
    width: D, features of the input.

  Returns:
    {'params': ..., 'codebook': ...} for `layer.apply`.

  Raises:
    BadInput: listing every missing, extra and misshapen array; or a layer that it cannot be.
  """
  N, V, E, K = layer.heads, layer.vocabulary_size, layer.dim, layer.clusters
  if K is None or layer.orders != (2,) or width % N:
    raise errors.BadInput(
      f'n-grammer-pytorch has clusters and bi-grams, and heads that divide the width, not '
      f'clusters={K}, orders={layer.orders} and {N} heads of a width of {width}'
    )
  H, Source = width // N, interop_arrays.Source
  sources = {
    ('params', 'table'): Source(('ngram.ngram_embeds.weight',), (N * V, E)),
    ('codebook', 'quantizer', 'centroids'): Source(('vq.means',), (N, K, H)),
  }
  for ours, theirs, size in (('unigram_norm', 'embeds', H), ('ngram_norm', 'ngram', E)):
    for part, letter in (('scale', 'g'), ('bias', 'b')):
      sources['params', ours, part] = Source((f'ngram.{theirs}_layernorm.{letter}',), (N, size))
  variables = interop_arrays.convert(arrays, sources, 'a VQNgrammer of n-grammer-pytorch')
  return interop_arrays.with_usage(variables)
