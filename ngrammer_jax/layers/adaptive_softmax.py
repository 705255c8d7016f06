"""Adaptive input and adaptive softmax (Grave et al. 2017, Baevski and Auli 2019).

The vocabulary, most frequent words first, is divided into clusters: a head, and tails with narrower
embeddings and a projection to the width of the model. The head predicts its words and the tails:

  log p(w) = log p_head(w) in the head,  log p_head(tail i) + log p_i(w) in tail i

B batch, T segment length, D model width, V vocabulary, I words of one cluster, J its width,
C tails.
"""

from collections.abc import Iterable

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, row_sums, softmax


class AdaptiveSoftmax(nn.Module):
  """Embeddings and output layer of the whole vocabulary.

  Parameters of cluster i (0 is the head): `embedding_i` [I, J], `projection_i` [J, D] if there is
  one, `bias_i` [I]; `softmax_weight_i` and `softmax_projection_i` if they are not tied; and of the
  tails, `cluster_weight` [C, J of the head] and `cluster_bias` [C].

  Attributes:
    vocabulary_size: V.
    width: D.
    cutoffs: the first word of every tail.
    divisor: ratio of the widths of successive clusters.
    embedding_width: J of the head. None means D.
    tied: the output layer uses the embeddings as weights.
    tied_projections: for each cluster, whether the output layer uses the projection of the
      embeddings. A single value applies to all clusters.
    project_same_width: with a divisor above 1, clusters of width D have a projection too.
    chunk: number of words whose logits exist at once. None means the size of the head.
    dtype: dtype of the computation.
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
    zeros = nn.initializers.zeros
    self._boundaries = (0, *self.cutoffs, self.vocabulary_size)
    self._tables = [self._table(f'embedding_{i}', i) for i in clusters]
    projections = self._make_projections('projection', clusters)
    self._projections = [projections.get(i) for i in clusters]
    if self.tied:
      self._weights = self._tables
    else:
      self._weights = [self._table(f'softmax_weight_{i}', i) for i in clusters]
    is_tied = self.tied_projections * (len(clusters) // len(self.tied_projections))
    untied = [i for i in clusters if not is_tied[i]]
    output_projections = projections | self._make_projections('softmax_projection', untied)
    self._output_projections = [output_projections.get(i) for i in clusters]
    self._biases = [self._param(f'bias_{i}', zeros, (self._size(i),), ('vocab',)) for i in clusters]
    if self.cutoffs:
      C = len(self.cutoffs)
      J = self._width(0)
      normal = nn.initializers.normal(J**-0.5)
      self._cluster_weight = self._param('cluster_weight', normal, (C, J), ('vocab_clusters', None))
      self._cluster_bias = self._param('cluster_bias', zeros, (C,), (None,))

  def embed(self, tokens_BxT: jax.Array) -> jax.Array:
    """Returns the embeddings of words, [B, T, D], not scaled."""
    x_BxTxD = 0
    for i, projection_JxD in enumerate(self._projections):
      is_member_BxT, index_BxT = self._index_in_cluster(tokens_BxT, i)
      rows_BxTxJ = row_sums.take(self._tables[i].astype(self.dtype), index_BxT)
      if projection_JxD is not None:
        rows_BxTxJ = rows_BxTxJ @ projection_JxD.astype(self.dtype)
      x_BxTxD += jnp.where(is_member_BxT[..., None], rows_BxTxJ, 0)
    return x_BxTxD

  def scores(self, hidden_BxTxD: jax.Array, targets_BxT: jax.Array) -> softmax.TokenScores:
    """Returns the negative log-likelihood of every target, and whether it was predicted."""
    head = self._summary(hidden_BxTxD, targets_BxT, 0)
    tails_BxTxC = self._tail_logits(hidden_BxTxD)
    log_sum_BxT = jnp.logaddexp(head.log_sum_BxT, jax.nn.logsumexp(tails_BxTxC, axis=-1))
    nll_BxT = log_sum_BxT - head.target_BxT
    best_logit_BxT = head.best_logit_BxT
    best_BxT = head.best_BxT
    for i in range(1, len(self._tables)):
      is_member_BxT, _ = self._index_in_cluster(targets_BxT, i)
      tail = self._summary(hidden_BxTxD, targets_BxT, i)
      tail_BxT = tails_BxTxC[..., i - 1]
      tail_nll_BxT = log_sum_BxT - tail_BxT + tail.log_sum_BxT - tail.target_BxT
      nll_BxT = jnp.where(is_member_BxT, tail_nll_BxT, nll_BxT)
      logit_BxT = tail_BxT + tail.best_logit_BxT - tail.log_sum_BxT
      tail_best_BxT = self._boundaries[i] + tail.best_BxT
      best_BxT = jnp.where(logit_BxT > best_logit_BxT, tail_best_BxT, best_BxT)
      best_logit_BxT = jnp.maximum(logit_BxT, best_logit_BxT)
    return softmax.TokenScores(nll_BxT, best_BxT == targets_BxT)

  def log_probs(self, hidden_BxTxD: jax.Array) -> jax.Array:
    """Returns log-probabilities [B, T, V] of all words, in nats."""
    tails_BxTxC = self._tail_logits(hidden_BxTxD)
    logits = jnp.concatenate([self._logits(hidden_BxTxD, 0), tails_BxTxC], axis=-1)
    head = jax.nn.log_softmax(logits)
    S = self._boundaries[1]  # number of words in the head
    log_probs = [head[..., :S]]
    for i in range(1, len(self._tables)):
      tail = jax.nn.log_softmax(self._logits(hidden_BxTxD, i))
      log_probs.append(head[..., S + i - 1, None] + tail)
    return jnp.concatenate(log_probs, axis=-1)

  def _summary(self, hidden_BxTxD: jax.Array, targets_BxT: jax.Array, i: int) -> softmax.Summary:
    """Returns the softmax over the words of a cluster."""
    hidden_BxTxJ = self._project(hidden_BxTxD, i)
    _, index_BxT = self._index_in_cluster(targets_BxT, i)
    return softmax.summary(
      hidden_BxTxJ,
      self._weights[i],
      self._biases[i],
      index_BxT,
      chunk=self.chunk or self._boundaries[1],
    )

  def _logits(self, hidden_BxTxD: jax.Array, i: int) -> jax.Array:
    """Returns the logits of the words of a cluster, [B, T, I]."""
    hidden_BxTxJ = self._project(hidden_BxTxD, i)
    return softmax.full_logits(hidden_BxTxJ, self._weights[i], self._biases[i])

  def _tail_logits(self, hidden_BxTxD: jax.Array) -> jax.Array:
    """Returns the logits of the tails in the head, [B, T, C]."""
    if not self.cutoffs:
      dtype = jnp.promote_types(self.dtype, jnp.float32)
      return jnp.full((*hidden_BxTxD.shape[:2], 1), jnp.finfo(dtype).min / 4, dtype)
    hidden_BxTxJ = self._project(hidden_BxTxD, 0)
    return softmax.full_logits(hidden_BxTxJ, self._cluster_weight, self._cluster_bias)

  def _project(self, hidden_BxTxD: jax.Array, i: int) -> jax.Array:
    """Returns hidden states of the width of a cluster, [B, T, J]."""
    projection_JxD = self._output_projections[i]
    if projection_JxD is None:
      return hidden_BxTxD
    return hidden_BxTxD @ projection_JxD.astype(self.dtype).T

  def _index_in_cluster(self, tokens_BxT: jax.Array, i: int) -> tuple[jax.Array, jax.Array]:
    """Returns which tokens are in a cluster, and their index in it (arbitrary for others)."""
    first, end = self._boundaries[i : i + 2]
    is_member_BxT = (tokens_BxT >= first) & (tokens_BxT < end)
    return is_member_BxT, jnp.clip(tokens_BxT - first, 0, end - first - 1)

  def _size(self, i: int) -> int:
    return self._boundaries[i + 1] - self._boundaries[i]

  def _width(self, i: int) -> int:
    return (self.embedding_width or self.width) // self.divisor**i

  def _table(self, name: str, i: int) -> jax.Array:
    normal = nn.initializers.normal(self.width**-0.5)
    return self._param(name, normal, (self._size(i), self._width(i)), ('vocab', 'embed'))

  def _make_projections(self, name: str, clusters: Iterable[int]) -> dict[int, jax.Array]:
    """Returns the projections by cluster, for clusters that need one."""
    is_shared = self.divisor == 1 and name == 'projection'  # clusters have the same width
    projections = {}
    for i in clusters:
      J = self._width(i)
      if J == self.width and (self.divisor == 1 or not self.project_same_width):
        continue
      if is_shared and i > 0:
        projections[i] = projections[0]
      else:
        normal = nn.initializers.normal(J**-0.5)
        projections[i] = self._param(f'{name}_{i}', normal, (J, self.width), (None, 'embed'))
    return projections

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
  ) -> jax.Array:
    init = axis_names.with_axis_names(init, names)
    return self.param(name, init, shape, jnp.promote_types(self.dtype, jnp.float32))
