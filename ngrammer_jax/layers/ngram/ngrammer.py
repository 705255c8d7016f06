"""The N-Grammer layer: latent n-grams looked up in hashed tables (Roy et al. 2022).

For every head, with the cluster id z_t of the token x_t (section 3):

  g_t = table[hash(z_t, z_{t-1}, ...)]
  y_t = [LN(x_t)[: H - E]; LN(g_t)]  ('concat')  or  LN(x_t) + LN(g_t)  ('add')

B batch, T segment length, S tokens of memory and segment, N heads, H head width, E n-gram width,
K clusters, V rows of the table of one head and order, G orders, R slots of the memory.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.ngram.memory import PER_HEAD_JOINS, NGramMemoryConfig
from ngrammer_jax.config.ngram.ngrammer import memory_options
from ngrammer_jax.layers.context import Context, EmbeddingLookup
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.ngram.windows import Windows


class NGrammer(nn.Module):
  """Combines every token with the embeddings of its latent n-grams.

  A drop-in layer from [B, T, D] to [B, T, D]. The centroids are in the mutable collection
  `codebook` (see `ProductQuantizer`), everything else is in `params`. The n-gram tables are one
  parameter [G N V, E] with logical axes `ngram_vocab`, `ngram_embed`, looked up by gather.

  Attributes:
    heads: N, number of heads, a divisor of D. Features are head-major.
    clusters: K, number of clusters of each head. None: n-grams of the raw `ids`, without clusters.
    vocabulary_size: V, rows of the table of each head and order, not the vocabulary of tokens.
    dim: E, width of an n-gram vector. 'concat' replaces the last G E features of each head; 'add'
      needs E = H.
    combine: 'concat' or 'add'.
    orders: lengths of the n-grams; (2,) is the paper, (2, 3) adds tri-grams.
    distinct_start: whether positions before a document have their own id instead of id 0.
    id_vocabulary: number of distinct raw ids, required if clusters is None.
    decay, epsilon, prenormalize, empty, initial: options of the quantiser.
    padding_trains: whether padding is treated like other tokens, in codebook and output.
    exchange: how devices exchange the gradient of the tables, see `table.TableSharding`.
    dtype: dtype of the output. None: dtype of the input. Parameters, centroids and norm statistics
      have at least float32.
    return_memory: whether to return the memory too, or the embeddings alone.

  Raises:
    ValueError: an empty input, a shape other than [B, T, D], incompatible sizes, a memory of
      another number of rows, or too few primes between V and 2 V for N heads.
  """

  heads: int
  clusters: int | None
  vocabulary_size: int
  dim: int = 8
  combine: str = 'concat'
  orders: tuple[int, ...] = (2,)
  distinct_start: bool = False
  id_vocabulary: int | None = None
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False
  empty: str = 'shrink'
  initial: str = 'uniform'
  padding_trains: bool = False
  exchange: str = 'auto'
  dtype: jnp.dtype | None = jnp.float32
  return_memory: bool = True

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    *,
    ids: jax.Array | None = None,
    documents_BxT: jax.Array | None = None,
    valid_BxT: jax.Array | None = None,
    pair_ids: jax.Array | None = None,
    earlier_ids: jax.Array | None = None,
    vocabulary: EmbeddingLookup | None = None,
    memory: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]] | jax.Array:
    """Returns the combined embeddings [B, T, D] and the memory for the next segment.

    Without `return_memory`, only the embeddings.

    The intermediate `lookup` has the `ids` [B, T, N] at each place and the `rows` [B, T, G N].

    Args:
      x_BxTxD: embeddings.
      ids: raw ids [B, T] or [B, T, N], for a layer without a quantiser.
      documents_BxT: document number of each token (any integers >= 0 that change at document
        boundaries). No n-gram crosses a boundary. None means one document per row.
      valid_BxT: 0 at padding. Unless padding_trains, its output is 0 and the codebook ignores it.
      pair_ids: positions to pair with instead of the predecessor, see `pairs.paired_ids`. Pairs may
        cross document boundaries, but the first token of a document has no pair. The layer then
        takes no memory, and returns the `ids` [B, T, N] of the segment.
      earlier_ids: ids [B, M, N] of tokens before the segment; pair_ids count from the first one.
      vocabulary: the embedding lookup of x, see `ProductQuantizer`.
      memory: the memory returned by the previous segment; None at the start of a stream, or
        `empty_memory`.
    """
    if x_BxTxD.ndim != 3 or not x_BxTxD.size:
      raise ValueError(
        f'an NGrammer needs inputs [B, T, D] with at least one token, not of shape '
        f'{x_BxTxD.shape}: for one sequence [T, D], pass x[None]'
      )
    width = x_BxTxD.shape[-1]
    self.check_width(width)
    self._check_ids(ids, pair_ids, memory)
    self._check_memory(memory, len(x_BxTxD))
    pairing = 'previous'
    if pair_ids is not None:
      pairing = 'attended'
    dtype = self.dtype
    if dtype is None:
      dtype = x_BxTxD.dtype
    layer = NGramMemory(
      self._options(pairing),
      self.id_vocabulary,
      width,
      dtype=dtype,
      id_columns=self.heads,
      is_at_embedding=vocabulary is not None,
    )
    nn.share_scope(self, layer)
    context = Context(
      tokens_BxT=ids,
      documents_BxT=documents_BxT,
      valid_BxT=valid_BxT,
      vocabulary=vocabulary,
      pair_BxNxT=pair_ids,
    )
    state = None if memory is None else {'window': memory}
    if earlier_ids is not None and pair_ids is not None:
      state = {'ids': earlier_ids.swapaxes(1, 2)}
    y_BxTxD, state, ids_BxTxN = layer.join_with_ids(x_BxTxD, context, state)
    if not self.return_memory:
      return y_BxTxD
    if pair_ids is not None:
      return y_BxTxD, {'ids': ids_BxTxN}
    if state is None:  # of 1-grams
      return y_BxTxD, None
    return y_BxTxD, state['window']

  def empty_memory(self, batch: int) -> dict[str, jax.Array]:
    """Returns the memory before the first segment, see `windows.Windows`."""
    return Windows(max(self.orders)).empty_state(batch, self.heads)

  def check_width(self, width: int) -> None:
    """Raises ValueError if the sizes of the layer do not fit inputs of this width, D."""
    if self.combine not in PER_HEAD_JOINS:
      raise ValueError(f'combine {self.combine!r} is not one of {", ".join(PER_HEAD_JOINS)}')
    if not isinstance(self.orders, tuple):
      raise ValueError(f'orders={self.orders!r} must be a tuple such as (2,) or (2, 3)')
    self._options('previous').check_sizes(width)

  check = check_width  # its name in earlier versions

  def _check_ids(
    self, ids: jax.Array | None, pair_ids: jax.Array | None, memory: dict[str, jax.Array] | None
  ) -> None:
    """Raises ValueError for missing or incompatible arguments."""
    if self.clusters is not None and self.clusters < 1:
      raise ValueError(f'clusters={self.clusters} must be at least 1, or None for raw ids')
    if self.clusters is None and (ids is None or self.id_vocabulary is None):
      raise ValueError('an NGrammer without clusters needs raw ids and their id_vocabulary')
    if pair_ids is not None and memory is not None:
      raise ValueError('pair_ids cannot be combined with a memory: pass earlier_ids')
    if pair_ids is not None and self.orders != (2,):
      raise ValueError(f'pair_ids need orders=(2,), not {self.orders}')

  def _check_memory(self, memory: dict[str, jax.Array] | None, batch: int) -> None:
    """Raises ValueError for a memory of another number of rows."""
    for name, array in (memory or {}).items():
      if jnp.shape(array)[:1] != (batch,):
        raise ValueError(
          f'the memory of an NGrammer has {name} of the shape {list(jnp.shape(array))}, but the '
          f'input has {batch} rows: pass the memory that the previous segment of the same rows '
          f'returned, or empty_memory({batch})'
        )

  def _options(self, pairing: str) -> NGramMemoryConfig:
    return memory_options(self, layers=(0,), point='after_attention', pairing=pairing)
