"""Where tokens become vectors and hidden states become likelihoods: both ends of every model.

B batch, T segment length, D model width, J width of the hidden states, V vocabulary.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import adaptive_softmax, quantizer, softmax
from ngrammer_jax.models import block
from ngrammer_jax.models import config as model_config


def inputs(config: model_config.ModelConfig, embedding_VxD: jax.Array) -> jax.Array:
  """What embeddings, of the whole vocabulary [V, D] or others, enter the model as."""
  dtype = config.compute_dtype()
  scale = config.width**0.5 if config.scale_embeddings else 1
  return embedding_VxD.astype(dtype) * jnp.asarray(scale, dtype)


class Head(nn.Module):
  """The embedding and the softmax, or both of them adaptive.

  It shares the scope of its model, so that its parameters have no name before them.

  Attributes:
    config: of the model.
    vocabulary_size: V.
    width: J. None: that of the model, D.
  """

  config: model_config.ModelConfig
  vocabulary_size: int
  width: int | None = None

  def setup(self):
    c, a, V = self.config, self.config.adaptive_softmax, self.vocabulary_size
    dtype = c.compute_dtype()
    param_dtype = jnp.promote_types(dtype, jnp.float32)
    if a is not None:
      self.adaptive_softmax = adaptive_softmax.AdaptiveSoftmax(
        V,
        c.width,
        a.cutoffs,
        a.divisor,
        a.embedding_width,
        c.tie_embeddings,
        a.tied_projections,
        a.project_same_width,
        c.vocabulary_chunk,
        dtype,
      )
      return
    # Multiplied by sqrt(D), the embeddings of one token then have unit variance.
    normal, zeros = nn.initializers.normal(c.width**-0.5), nn.initializers.zeros
    if c.recurrent is not None:
      normal = zeros = c.recurrent.initializer()
    table = nn.with_logical_partitioning(normal, ('vocab', 'embed'))
    self.embedding = self.param('embedding', table, (V, c.width), param_dtype)
    self.softmax_weight = (
      self.embedding
      if c.tie_embeddings
      else self.param('softmax_weight', table, (V, self.width or c.width), param_dtype)
    )
    bias = nn.with_logical_partitioning(zeros, ('vocab',))
    self.softmax_bias = (
      self.param('softmax_bias', bias, (V,), param_dtype) if c.softmax_bias else None
    )

  def declare(self) -> None:
    """Makes the parameters before others of the scope: where they begin depends on the order."""

  def embed(self, tokens_BxT: jax.Array) -> tuple[jax.Array, quantizer.Vocabulary]:
    """The inputs [B, T, D], and the table that they were looked up in where there is one."""
    c = self.config
    if c.adaptive_softmax is not None:
      x_BxTxD = inputs(c, self.adaptive_softmax.embed(tokens_BxT))
      # A cluster that is looked up needs the token alone.
      return block.whole_width(x_BxTxD), quantizer.Vocabulary(None, tokens_BxT)
    # Rows stay sharded, columns come together: the batch is already spread over their axis.
    table_VxD = nn.with_logical_constraint(inputs(c, self.embedding), ('vocab', None))
    x_BxTxD = block.whole_width(table_VxD[tokens_BxT])
    return x_BxTxD, quantizer.Vocabulary(table_VxD, tokens_BxT)

  def scores(self, hidden_BxTxJ: jax.Array, targets_BxT: jax.Array) -> softmax.TokenScores:
    """Negative log-likelihood in nats of every target, and whether it was the best guess."""
    if self.config.adaptive_softmax is not None:
      return self.adaptive_softmax.scores(hidden_BxTxJ, targets_BxT)
    return softmax.token_scores(
      hidden_BxTxJ,
      self.softmax_weight,
      self.softmax_bias,
      targets_BxT,
      self.config.vocabulary_chunk,
    )

  def logits(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """Logits [B, T, V] in at least float32; log-probabilities of an adaptive softmax."""
    if self.config.adaptive_softmax is not None:
      return self.adaptive_softmax.log_probs(hidden_BxTxJ)
    return softmax.full_logits(hidden_BxTxJ, self.softmax_weight, self.softmax_bias)


def for_serving(config: model_config.ModelConfig, params: Any, codebook: Any) -> Any:
  """The codebook as its result: the cluster of every token of the vocabulary.

  For a layer on the embedding the cluster depends on the token alone. Made from the
  variables that it serves with, it is never of an earlier step; the ids are the same.
  """
  c = config
  if c.ngram is None or c.ngram.clusters is None or c.ngram.layer != 'input':
    return codebook
  if c.adaptive_softmax is not None:  # there is no table of all inputs
    return codebook
  n, rows_VxD = c.ngram, inputs(c, params['embedding'])
  rows_VxNxH = rows_VxD.reshape(len(rows_VxD), n.heads or c.heads, -1)
  centroids_NxKxH = codebook['ngrammer']['quantizer']['centroids']
  rows_VxNxH = quantizer.quantizer_input(rows_VxNxH, n.prenormalize)
  ids_VxN = quantizer.nearest_of_rows(rows_VxNxH, centroids_NxKxH)
  return {'ngrammer': {'quantizer': {'token_ids': ids_VxN}}}
