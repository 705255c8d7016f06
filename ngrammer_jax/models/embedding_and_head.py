"""The embedding and the output head of all models.

B batch, T segment length, D model width, J width of the hidden states, V vocabulary.
"""

from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import (
  adaptive_softmax,
  axis_names,
  dense,
  mesh_axes,
  row_sums,
  softmax,
  token_ids,
)
from ngrammer_jax.layers.context import EmbeddingLookup
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.models import memories, precision


def scale_embedding(config: model_config.ModelConfig, embedding_VxD: jax.Array) -> jax.Array:
  """Returns embeddings [..., D] scaled as model inputs, in the compute dtype."""
  dtype = precision.compute_dtype(config)
  scale = config.width**0.5 if config.scale_embeddings else 1
  return embedding_VxD.astype(dtype) * jnp.asarray(scale, dtype)


class VocabularyModel(nn.Module):
  """Base of all models: embedding and softmax, or adaptive input and adaptive softmax.

  Attributes:
    config: model config.
    vocabulary_size: V.
  """

  config: model_config.ModelConfig
  vocabulary_size: int

  def setup(self):
    c = self.config
    V = self.vocabulary_size
    dtype = precision.compute_dtype(c)
    param_dtype = jnp.promote_types(dtype, jnp.float32)
    if c.adaptive_softmax is not None:
      a = c.adaptive_softmax
      self.adaptive_softmax = adaptive_softmax.AdaptiveSoftmax(
        vocabulary_size=V,
        width=c.width,
        cutoffs=a.cutoffs,
        divisor=a.divisor,
        embedding_width=a.embedding_width,
        tied=c.tie_embeddings,
        tied_projections=a.tied_projections,
        project_same_width=a.project_same_width,
        chunk=c.vocabulary_chunk,
        dtype=dtype,
      )
      return
    # Multiplied by sqrt(D), embeddings have unit variance.
    table_init = nn.initializers.normal(c.width**-0.5)
    bias_init = nn.initializers.zeros
    if c.recurrent is not None:
      table_init = bias_init = dense.symmetric(c.recurrent.initial)
    table_init = axis_names.with_axis_names(table_init, ('vocab', 'embed'))
    self.embedding = self.param('embedding', table_init, (V, c.width), param_dtype)
    if c.tie_embeddings:
      self.softmax_weight = self.embedding
    else:
      width = c.width if c.recurrent is None else c.recurrent.width
      self.softmax_weight = self.param('softmax_weight', table_init, (V, width), param_dtype)
    self.softmax_bias = None
    if c.softmax_bias:
      bias_init = axis_names.with_axis_names(bias_init, ('vocab',))
      self.softmax_bias = self.param('softmax_bias', bias_init, (V,), param_dtype)

  def embed(self, tokens_BxT: jax.Array) -> tuple[jax.Array, EmbeddingLookup]:
    """Returns the inputs [B, T, D], and their embedding lookup."""
    c = self.config
    token_ids.check_range('tokens', tokens_BxT, self.vocabulary_size)
    if c.adaptive_softmax is not None:
      x_BxTxD = scale_embedding(c, self.adaptive_softmax.embed(tokens_BxT))
      # There is no single embedding table; precomputed cluster ids need only the tokens.
      x_BxTxD = mesh_axes.shard_rows(x_BxTxD)
      return x_BxTxD, EmbeddingLookup(None, tokens_BxT, x_BxTxD)
    # Rows remain sharded. Columns are gathered, as the batch is sharded over the same mesh axis.
    table_VxD = nn.with_logical_constraint(scale_embedding(c, self.embedding), ('vocab', None))
    x_BxTxD = mesh_axes.shard_rows(row_sums.take(table_VxD, tokens_BxT))
    return x_BxTxD, EmbeddingLookup(table_VxD, tokens_BxT, x_BxTxD)

  def scores(
    self, hidden_BxTxJ: jax.Array, targets_BxT: jax.Array, train: bool = False
  ) -> softmax.TokenScores:
    """Returns the negative log-likelihood of every target, and whether it was predicted.

    In training, the logits are stored in the config's `loss_dtype`.
    """
    c = self.config
    token_ids.check_range('targets', targets_BxT, self.vocabulary_size)
    if c.adaptive_softmax is not None:
      return self.adaptive_softmax.scores(hidden_BxTxJ, targets_BxT)
    stored = c.logits_dtype
    if train and c.loss_dtype == 'bfloat16':
      stored = 'bfloat16'
    return softmax.token_scores(
      hidden_BxTxJ,
      self.softmax_weight,
      self.softmax_bias,
      targets_BxT,
      chunk=c.vocabulary_chunk,
      cap=c.final_logit_cap,
      stored=stored,
    )

  def logits(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] in at least float32, or log-probabilities if adaptive."""
    if self.config.adaptive_softmax is not None:
      return self.adaptive_softmax.log_probs(hidden_BxTxJ)
    return softmax.full_logits(
      hidden_BxTxJ, self.softmax_weight, self.softmax_bias, self.config.final_logit_cap
    )

  def log_probs(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """Returns log-probabilities [B, T, V] of the next tokens, in nats."""
    return jax.nn.log_softmax(self.logits(hidden_BxTxJ))


def for_serving(config: model_config.ModelConfig, params: Any, codebook: Any) -> Any:
  """Returns a codebook for serving, with the precomputed cluster id of every token.

  Clusters of the embedding are the same for every occurrence of a token, so the ids do not change.
  Other codebooks are returned unchanged.
  """
  modules = memories.ngram_modules(config)
  token_memories = {path: module for path, module in modules if module.clusters_depend_on_token}
  # With an adaptive softmax there is no single embedding table.
  if not token_memories or config.adaptive_softmax is not None:
    return codebook
  served = traverse_util.flatten_dict(codebook, keep_empty_nodes=True)
  for path, memory in token_memories.items():
    rows_VxD = scale_embedding(config, params['embedding'])
    rows_VxKxH = rows_VxD.reshape(len(rows_VxD), memory.options.heads, -1)
    rows_VxKxH = quantizer.quantizer_input(rows_VxKxH, memory.options.prenormalize)
    centroids = served[(*path, 'quantizer', 'centroids')]
    for name in [name for name in served if name[: len(path)] == path]:
      del served[name]
    served[(*path, 'quantizer', 'token_ids')] = quantizer.nearest_of_rows(rows_VxKxH, centroids)
  return traverse_util.unflatten_dict(served)
