"""The Transformer language model: embed, n-gram layer, blocks, head.

  hidden, memory, aux = model.apply(variables, tokens, memory, starts_BxT=..., train=...)
  scores = model.apply(variables, hidden, targets, method='scores')

B batch, T segment length, S keys, D model width, V vocabulary.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import (
  attention,
  documents,
  feed_forward,
  ngrammer,
  normalization,
  position,
)
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import heads

Memory = dict[str, Any]

REMAT_POLICIES = {
  'minimal': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}


def empty_memory(config: model_config.ModelConfig, batch: int) -> Memory:
  """The memory before the first segment of `batch` streams.

  Keys: `document` int32 [B], number of the document that the last segment ended in;
  `ngram`, the seam of the n-gram layer (see `layers.ngrammer.empty_memory`).
  """
  memory = {'document': jnp.zeros((batch,), jnp.int32)}
  if config.ngram is not None:
    memory['ngram'] = ngrammer.empty_memory(batch, config.ngram.heads or config.heads)
  return memory


class Block(nn.Module):
  """Pre-norm attention and feed-forward, each with a residual."""

  config: model_config.ModelConfig
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    visible_BxTxS: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, T, D]; the arguments are those of `layers.Attention`."""
    c = self.config
    norm = functools.partial(normalization.LayerNorm, dtype=self.dtype)
    attend = attention.Attention(
      heads=c.heads, bias=c.bias, per_dim_scale=c.per_dim_scale, dtype=self.dtype, name='attention'
    )
    feed = feed_forward.FeedForward(
      c.feed_forward_width, c.activation, c.gated, c.bias, self.dtype, name='feed_forward'
    )
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    attended = attend(norm(name='attention_norm')(x_BxTxD), visible_BxTxS, rotation)
    x_BxTxD = _whole_width(x_BxTxD + _drop(attended, c, keys[0]))
    fed = feed(norm(name='feed_forward_norm')(x_BxTxD))
    return _whole_width(x_BxTxD + _drop(fed, c, keys[1]))


def _whole_width(x_BxTxD):
  """Activations between layers are spread over the batch only."""
  return nn.with_logical_constraint(x_BxTxD, ('batch', 'length', None))


def _drop(x, config, key):
  """Dropout with an explicit key, so that scanned and unrolled layers draw alike."""
  if key is None:
    return x
  keep = 1 - config.dropout
  return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)


class TransformerLM(nn.Module):
  """A decoder-only language model under the model contract.

  Parameters stand in one subtree per layer, `layer_0`, `layer_1`, ..., also when the
  layers are scanned: scanned and unrolled runs share checkpoints.
  """

  config: model_config.ModelConfig
  vocabulary_size: int

  def setup(self):
    c, V = self.config, self.vocabulary_size
    dtype = self.dtype = c.compute_dtype()
    param_dtype = jnp.promote_types(dtype, jnp.float32)
    # Multiplied by sqrt(D), the embeddings of one token then have unit variance.
    init = nn.initializers.normal(c.width**-0.5)
    table = nn.with_logical_partitioning(init, ('vocab', 'embed'))
    self.embedding = self.param('embedding', table, (V, c.width), param_dtype)
    self.softmax_weight = (
      self.embedding
      if c.tie_embeddings
      else self.param('softmax_weight', table, (V, c.width), param_dtype)
    )
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
    self.softmax_bias = (
      self.param('softmax_bias', zeros, (V,), param_dtype) if c.softmax_bias else None
    )
    if c.ngram is not None:
      n = c.ngram
      self.ngrammer = ngrammer.NGrammer(
        heads=n.heads or c.heads,
        clusters=n.clusters,
        vocabulary_size=n.vocabulary_size,
        dim=n.dim,
        combine=n.combine,
        id_vocabulary=V,
        decay=n.decay,
        epsilon=n.epsilon,
        prenormalize=n.prenormalize,
        dtype=dtype,
      )
    self.layer = [self._block()(c, dtype) for _ in range(c.layers)]
    self.final_norm = normalization.LayerNorm(dtype=dtype)

  def __call__(
    self,
    tokens_BxT: jax.Array,
    memory: Memory,
    *,
    starts_BxT: jax.Array | None = None,
    valid_BxT: jax.Array | None = None,
    prefix_BxT: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, Memory, dict[str, jax.Array]]:
    """Hidden states [B, T, D], the memory for the next segment, auxiliary losses by name.

    Args:
      tokens_BxT: int32 ids.
      memory: what the previous segment returned, or `empty_memory`.
      starts_BxT: true at the first token of a document. None: all rows continue.
      valid_BxT: 0 at padding.
      prefix_BxT: true where attention is bidirectional.
      train: draw dropout from the rng `dropout`.
    """
    c = self.config
    if starts_BxT is None:
      starts_BxT = jnp.zeros(tokens_BxT.shape, bool)
    documents_BxT = documents.numbers(starts_BxT, memory['document'])
    next_memory = {'document': documents_BxT[:, -1]}
    # Rows stay sharded, columns come together: the batch is already spread over their axis.
    table_VxD = nn.with_logical_constraint(self.embedding.astype(self.dtype), ('vocab', None))
    x_BxTxD = table_VxD[tokens_BxT]
    if c.scale_embeddings:
      x_BxTxD *= jnp.asarray(c.width**0.5, self.dtype)
    x_BxTxD = _whole_width(x_BxTxD)
    if c.ngram is not None:
      x_BxTxD, next_memory['ngram'] = self.ngrammer(
        x_BxTxD,
        ids=tokens_BxT,
        documents_BxT=documents_BxT,
        valid_BxT=valid_BxT,
        memory=memory['ngram'],
      )
    place_BxT, wide = documents.positions(starts_BxT), jnp.promote_types(self.dtype, jnp.float32)
    rotation = None
    if c.position == 'rope':
      rotation = position.rotation(
        place_BxT, c.width // c.heads, c.min_timescale, c.max_timescale, wide
      )
    elif c.position == 'sinusoid':
      x_BxTxD += position.sinusoid(place_BxT, c.width, wide).astype(self.dtype)
    drop = train and c.dropout > 0
    keys = jax.random.split(self.make_rng('dropout'), c.layers + 1) if drop else None
    x_BxTxD = _drop(x_BxTxD, c, keys[0]) if drop else x_BxTxD
    attended_BxT = documents.with_padding(documents_BxT, valid_BxT)
    visible_BxTxS = documents.visible(attended_BxT, attended_BxT, prefix_BxT)
    x_BxTxD = self._blocks(
      _whole_width(x_BxTxD), visible_BxTxS, rotation, keys[1:] if drop else None
    )
    return self.final_norm(x_BxTxD), next_memory, {}

  def scores(self, hidden_BxTxD: jax.Array, targets_BxT: jax.Array) -> heads.TokenScores:
    """Negative log-likelihood in nats of every target, and whether it was the best guess."""
    return heads.token_scores(
      hidden_BxTxD,
      self.softmax_weight,
      self.softmax_bias,
      targets_BxT,
      self.config.vocabulary_chunk,
    )

  def logits(self, hidden_BxTxD: jax.Array) -> jax.Array:
    """Logits [B, T, V] in at least float32."""
    return heads.full_logits(hidden_BxTxD, self.softmax_weight, self.softmax_bias)

  def _block(self):
    """The block class, computed again in the backward pass as the config says."""
    if self.config.remat == 'none':
      return Block
    policy = REMAT_POLICIES[self.config.remat]
    return nn.remat(Block, policy=policy, prevent_cse=not self.config.scan_layers)

  def _blocks(self, x_BxTxD, visible_BxTxS, rotation, dropout_keys):
    """All layers, in one scan over their stacked parameters or one after the other."""
    if not self.config.scan_layers or self.is_initializing():
      for i, block in enumerate(self.layer):
        key = None if dropout_keys is None else dropout_keys[i]
        x_BxTxD = block(x_BxTxD, visible_BxTxS, rotation, key)
      return x_BxTxD

    block = self._block()(self.config, self.dtype, parent=None)

    def one_layer(x_BxTxD, layer):
      params, key = layer
      return block.apply({'params': params}, x_BxTxD, visible_BxTxS, rotation, key), None

    params = [nn.unbox(self.variables['params'][f'layer_{i}']) for i in range(len(self.layer))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    x_BxTxD, _ = jax.lax.scan(one_layer, x_BxTxD, (stacked, dropout_keys))
    return x_BxTxD
