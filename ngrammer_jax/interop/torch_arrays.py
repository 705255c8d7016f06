"""Sources of layers common to several PyTorch codes, with linear weights [out, in]."""

import itertools

import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop.named_arrays import ArraySource

# Fields of the configs of Transformer-XL and adaptive-span.
MODEL_OPTIONS = {
  'activation': 'relu',
  'gated': False,
  'feed_forward_bias': True,
  'norm': 'post_skip',
  'norm_epsilon': 1e-5,
  'final_norm': False,
}


def linear(path: str, name: str, outputs: int, inputs: int) -> dict[str, ArraySource]:
  """Returns the sources of a linear map with a bias."""
  return {
    f'{path}/kernel': ArraySource(f'{name}.weight', (outputs, inputs), np.transpose),
    f'{path}/bias': ArraySource(f'{name}.bias', (outputs,)),
  }


def layer_norm(path: str, name: str, width: int) -> dict[str, ArraySource]:
  """Returns the sources of a layer norm."""
  return {
    f'{path}/scale': ArraySource(f'{name}.weight', (width,)),
    f'{path}/bias': ArraySource(f'{name}.bias', (width,)),
  }


def split_heads(name: str, heads: int, width: int) -> ArraySource:
  """Returns the source of a projection to heads [D, N, H], from a weight [N H, D]."""
  return ArraySource(name, (width, width), lambda a: a.T.reshape(width, heads, -1))


def merge_heads(name: str, heads: int, width: int) -> ArraySource:
  """Returns the source of a projection of heads [N, H, D], from a weight [D, N H]."""
  return ArraySource(name, (width, width), lambda a: a.T.reshape(heads, -1, width))


def adaptive_softmax(
  config: model_config.ModelConfig,
  V: int,
  *,
  embedding: str,
  output: str,
  tail: str,
  is_single_table: bool,
) -> dict[str, ArraySource]:
  """Returns the sources of an adaptive softmax.

  Args:
    config: the config of the model.
    V: size of the vocabulary.
    embedding: name of the embedding.
    output: name of the output layer.
    tail: prefix of the weights of the tail clusters.
    is_single_table: whether all clusters share a table and a projection.
  """
  options = config.adaptive_softmax
  path = 'params/adaptive_softmax'
  D = config.width
  J = options.embedding_width or D
  C = len(options.cutoffs)
  # One value applies to all clusters.
  tied = options.tied_projections * ((C + 1) // len(options.tied_projections))
  sources = {}
  for i, (first, last) in enumerate(itertools.pairwise((0, *options.cutoffs, V))):
    if is_single_table:
      index, rows, width = 0, V, J
      select = _row_range(first, last)
    else:
      index, rows, width = i, last - first, J // options.divisor**i
      select = _row_range(None, None)
    table = f'{embedding}.emb_layers.{index}'
    layer = f'{output}.out_layers.{index}'
    sources[f'{path}/embedding_{i}'] = ArraySource(f'{table}.weight', (rows, width), select)
    sources[f'{path}/bias_{i}'] = ArraySource(f'{layer}.bias', (rows,), select)
    if not config.tie_embeddings:
      sources[f'{path}/softmax_weight_{i}'] = ArraySource(f'{layer}.weight', (rows, width), select)
    if width == D and (is_single_table or not options.project_same_width):
      continue
    projections = {}
    if not is_single_table or i == 0:
      projections['projection'] = f'{embedding}.emb_projs'
    if not tied[i]:
      projections['softmax_projection'] = f'{output}.out_projs'
    for name, source_name in projections.items():
      sources[f'{path}/{name}_{i}'] = ArraySource(f'{source_name}.{i}', (D, width), np.transpose)
  if C:
    sources[f'{path}/cluster_weight'] = ArraySource(f'{tail}weight', (C, J), np.flipud)
    sources[f'{path}/cluster_bias'] = ArraySource(f'{tail}bias', (C,), np.flipud)
  return sources


def _row_range(first: int | None, last: int | None):
  """Returns a function that selects rows of an array."""
  return lambda a: a[first:last]
