"""Adaptive input and adaptive softmax (Grave et al. 2017, Baevski and Auli 2019).

The vocabulary, most frequent word first, is cut into a head and tails. A tail has narrower vectors
and a projection to the width of the model; the head chooses between its words and the tails:

  log p(w) = log p_head(w), or log p_head(tail i) + log p_i(w)

B batch, T segment length, D model width, V vocabulary, I words of one cluster, J its width,
C tails.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import softmax


class AdaptiveSoftmax(nn.Module):
  """Vectors of all words: on the way in, and as output layer.

  Parameters of cluster i, the head being 0: `embedding_i` [I, J], `projection_i` [J, D] where
  there is one, `bias_i` [I]; `softmax_weight_i` and `softmax_projection_i` where they are not tied;
  and `cluster_weight` [C, J of the head], `cluster_bias` [C], for the tails in order.

  Attributes:
    vocabulary_size: V.
    width: D.
    cutoffs: the first word of every tail.
    divisor: each tail is so many times narrower than the cluster before.
    embedding_width: J of the head. None: D.
    tied: the output layer has the embeddings.
    tied_projections: for each cluster, whether the output layer has the projection of the
      embeddings, or one of its own.
    project_same_width: where the divisor is above 1, there is a projection also from D to D.
    chunk: words whose logits exist at one time. None: as many as the head has.
    dtype: of the computation.
  """

  vocabulary_size: int
  width: int
  cutoffs: tuple[int, ...] = ()
  divisor: int = 1
  embedding_width: int | None = None
  tied: bool = True
  tied_projections: tuple[bool, ...] = (True,)
  project_same_width: bool = True
  chunk: int | None = None
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    clusters = range(len(self.cutoffs) + 1)
    self._borders = (0, *self.cutoffs, self.vocabulary_size)
    self._tables = [self._table(f'embedding_{i}', i) for i in clusters]
    self._projections = self._all_projections('projection', [True for _ in clusters])
    self._weights = (
      self._tables if self.tied else [self._table(f'softmax_weight_{i}', i) for i in clusters]
    )
    shared = self.tied_projections * len(clusters) if len(self.tied_projections) == 1 else None
    shared = self.tied_projections if shared is None else shared
    own = self._all_projections('softmax_projection', [not each for each in shared])
    self._output_projections = [
      mine if mine is not None else theirs
      for mine, theirs in zip(own, self._projections, strict=True)
    ]
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    size = lambda i: self._borders[i + 1] - self._borders[i]
    self._biases = [self.param(f'bias_{i}', zeros, (size(i),), param_dtype) for i in clusters]
    if self.cutoffs:
      C, init = len(self.cutoffs), nn.initializers.normal(self._width(0) ** -0.5)
      self._cluster_weight = self.param('cluster_weight', init, (C, self._width(0)), param_dtype)
      self._cluster_bias = self.param('cluster_bias', nn.initializers.zeros, (C,), param_dtype)

  def embed(self, tokens_BxT: jax.Array) -> jax.Array:
    """The vectors of words [B, T, D], not scaled."""
    x_BxTxD = 0
    for i, (table_IxJ, projection_JxD) in enumerate(
      zip(self._tables, self._projections, strict=True)
    ):
      inside_BxT, index_BxT = self._place(tokens_BxT, i)
      rows_BxTxJ = table_IxJ.astype(self.dtype)[index_BxT]
      if projection_JxD is not None:
        rows_BxTxJ = rows_BxTxJ @ projection_JxD.astype(self.dtype)
      x_BxTxD += jnp.where(inside_BxT[..., None], rows_BxTxJ, 0)
    return x_BxTxD

  def scores(self, hidden_BxTxD: jax.Array, targets_BxT: jax.Array) -> softmax.TokenScores:
    """Negative log-likelihood in nats of every target, and whether it was the best guess."""
    summary = lambda i: softmax.summary(
      *self._output(hidden_BxTxD, i), self._place(targets_BxT, i)[1], self.chunk or self._borders[1]
    )
    head, tails_BxTxC = summary(0), self._tail_logits(hidden_BxTxD)
    log_sum_BxT = jnp.logaddexp(head.log_sum_BxT, jax.nn.logsumexp(tails_BxTxC, axis=-1))
    nll_BxT = log_sum_BxT - head.target_BxT
    best_logit_BxT, best_BxT = head.best_logit_BxT, head.best_BxT
    for i in range(1, len(self._tables)):
      inside_BxT, _ = self._place(targets_BxT, i)
      tail, tail_BxT = summary(i), tails_BxTxC[..., i - 1]
      of_tail_BxT = log_sum_BxT - tail_BxT + tail.log_sum_BxT - tail.target_BxT
      nll_BxT = jnp.where(inside_BxT, of_tail_BxT, nll_BxT)
      logit_BxT = tail_BxT + tail.best_logit_BxT - tail.log_sum_BxT
      best_BxT = jnp.where(logit_BxT > best_logit_BxT, self._borders[i] + tail.best_BxT, best_BxT)
      best_logit_BxT = jnp.maximum(logit_BxT, best_logit_BxT)
    return softmax.TokenScores(nll_BxT, best_BxT == targets_BxT)

  def log_probs(self, hidden_BxTxD: jax.Array) -> jax.Array:
    """Log-probabilities [B, T, V] of all words, in nats."""
    logits = lambda i: softmax.full_logits(*self._output(hidden_BxTxD, i))
    tails_BxTxC = self._tail_logits(hidden_BxTxD)
    head = jax.nn.log_softmax(jnp.concatenate([logits(0), tails_BxTxC], axis=-1))
    S, parts = self._borders[1], [head[..., : self._borders[1]]]
    for i in range(1, len(self._tables)):
      parts.append(head[..., S + i - 1, None] + jax.nn.log_softmax(logits(i)))
    return jnp.concatenate(parts, axis=-1)

  def _tail_logits(self, hidden_BxTxD):
    """How likely the head finds each tail, as logits [B, T, C]."""
    if not self.cutoffs:
      dtype = jnp.promote_types(self.dtype, jnp.float32)
      return jnp.full((*hidden_BxTxD.shape[:2], 1), jnp.finfo(dtype).min / 4, dtype)
    hidden_BxTxJ = self._projected(hidden_BxTxD, 0)
    return softmax.full_logits(hidden_BxTxJ, self._cluster_weight, self._cluster_bias)

  def _output(self, hidden_BxTxD, i):
    """What the logits of a cluster are made of: hidden states, weights and biases."""
    return self._projected(hidden_BxTxD, i), self._weights[i], self._biases[i]

  def _projected(self, hidden_BxTxD, i):
    projection_JxD = self._output_projections[i]
    if projection_JxD is None:
      return hidden_BxTxD
    return hidden_BxTxD @ projection_JxD.astype(self.dtype).T

  def _place(self, tokens_BxT, i):
    """Which tokens are in a cluster, and their number in it (any, for the others)."""
    first, last = self._borders[i : i + 2]
    inside_BxT = (tokens_BxT >= first) & (tokens_BxT < last)
    return inside_BxT, jnp.clip(tokens_BxT - first, 0, last - first - 1)

  def _width(self, i):
    return (self.embedding_width or self.width) // self.divisor**i

  def _table(self, name, i):
    shape = self._borders[i + 1] - self._borders[i], self._width(i)
    init = nn.with_logical_partitioning(
      nn.initializers.normal(self.width**-0.5), ('vocab', 'embed')
    )
    return self.param(name, init, shape, jnp.promote_types(self.dtype, jnp.float32))

  def _all_projections(self, name, wanted):
    """The projection of every cluster, None where it is not wanted or not needed."""
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    projections = []
    for i, there in enumerate(wanted):
      J = self._width(i)
      needed = J != self.width or (self.divisor > 1 and self.project_same_width)
      init = nn.with_logical_partitioning(nn.initializers.normal(J**-0.5), (None, 'embed'))
      # One for all where the clusters have one width.
      of = 0 if self.divisor == 1 and name == 'projection' else i
      if not (there and needed):
        projections.append(None)
      elif of < i:
        projections.append(projections[of])
      else:
        projections.append(self.param(f'{name}_{i}', init, (J, self.width), param_dtype))
    return projections
