"""The recurrent language model: embed, n-gram layer, one LSTM, readout, head (Daniluk et al. 2017).

It keeps the contract of `transformer.TransformerLM`; its memory is the state of the LSTM, what the
readout looks back at, and the number of the document.

B batch, T segment length, D model width, K hidden size, J width of the readout, V vocabulary.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import (
  documents,
  dropout,
  ngrammer,
  readout,
  recurrence,
  recurrent_memory,
  softmax,
)
from ngrammer_jax.models import block, heads, ngrams, precision

Memory = block.Memory


def empty_memory(config: model_config.ModelConfig, batch: int, cache_slots: int = 0) -> Memory:
  """The memory before the first segment of `batch` streams.

  Args:
    config: of the model.
    batch: B.
    cache_slots: not 0 where tokens are taken one by one: what the readout looks back at is then
      carried even if `carry_memory` is not set.

  Keys: `document` int32 [B], number of the document that the last segment ended in; `ngram`, the
  seam of the n-gram layer; `state` (see `layers.recurrence.empty_state`); and `window` (see
  `layers.readout.empty_memory`) where it is carried.
  """
  c, r = config, config.recurrent
  memory = {
    'document': jnp.zeros((batch,), jnp.int32),
    'state': recurrence.empty_state(batch, r.hidden, r.cell, precision.compute_dtype(c)),
  }
  if c.ngram is not None:
    memory['ngram'] = ngrammer.empty_memory(batch, c.ngram.heads or c.heads, c.ngram.orders)
  if r.slots and (r.carry_memory or cache_slots):
    memory['window'] = empty_window(config, batch)
  return memory


def empty_window(config: model_config.ModelConfig, batch: int) -> readout.Memory:
  """Before a stream: nothing of what the readout looks back at."""
  r = config.recurrent
  width = None if r.readout == 'recurrent_memory' else r.hidden
  if r.readout == 'key_value_predict':
    width = 2 * r.width  # what predicts is not looked back at
  return readout.empty_memory(batch, r.slots, width, precision.compute_dtype(config))


class RecurrentLM(nn.Module):
  """A recurrent language model under the model contract."""

  config: model_config.ModelConfig
  vocabulary_size: int

  def setup(self):
    c, r, V = self.config, self.config.recurrent, self.vocabulary_size
    dtype, init = precision.compute_dtype(c), recurrence.symmetric(r.initial)
    self.head = heads.Head(c, V, r.width)
    nn.share_scope(self, self.head)
    self.head.declare()
    if c.ngram is not None:
      self.ngrammer = ngrams.layer(c, dtype, V)
    self.recurrence = recurrence.Recurrence(r.hidden, r.cell, r.forget_bias, init, dtype)
    if r.readout == 'recurrent_memory':
      how = r.window, r.temporal_tables, r.gate_bias, init, dtype
      self.readout = recurrent_memory.RecurrentMemory(V, *how)
    elif r.readout == 'ngram':
      self.readout = readout.NGramReadout(r.slices, init, dtype)
    elif r.readout != 'none':
      self.readout = readout.AttentionReadout(r.parts, r.window, r.empty_slots, init, dtype)

  def empty_memory(self, batch: int, cache_slots: int = 0) -> Memory:
    """The memory before the first segment of `batch` streams, see `empty_memory`."""
    return empty_memory(self.config, batch, cache_slots)

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
    """Hidden states [B, T, J], the memory for the next segment, no auxiliary losses.

    For the arguments see `TransformerLM.__call__`. The recurrent layer reads from left to right: a
    prefix that sees all of itself is an error.
    """
    if prefix_BxT is not None:
      raise ValueError('a prefix sees later tokens, model.recurrent knows none')
    if starts_BxT is None:
      starts_BxT = jnp.zeros(tokens_BxT.shape, bool)
    if valid_BxT is not None:  # nothing starts at padding
      starts_BxT = starts_BxT & (valid_BxT > 0)
    documents_BxT = documents.numbers(starts_BxT, memory['document'])
    after = {'document': documents_BxT[:, -1]}
    x_BxTxD, vocabulary = self.head.embed(tokens_BxT)
    if self.config.ngram is not None:
      x_BxTxD, after['ngram'] = self.ngrammer(
        x_BxTxD,
        ids=tokens_BxT,
        documents_BxT=documents_BxT,
        valid_BxT=valid_BxT,
        vocabulary=vocabulary,
        memory=memory['ngram'],
      )
    first, last = self._dropout_keys(train)
    x_BxTxD = block.shard_activations(dropout.drop(x_BxTxD, self.config.outer_dropout, first))
    h_BxTxK, after['state'] = self.recurrence(
      x_BxTxD, memory['state'], starts_BxT=starts_BxT, valid_BxT=valid_BxT
    )
    h_BxTxJ, window = self._read(h_BxTxK, tokens_BxT, documents_BxT, memory, valid_BxT)
    if 'window' in memory:
      after['window'] = window
    return dropout.drop(h_BxTxJ, self.config.outer_dropout, last), after, {}

  def _read(self, h_BxTxK, tokens_BxT, documents_BxT, memory, valid_BxT):
    """What the readout makes of the outputs, and what it will look back at."""
    if self.config.recurrent.readout == 'none':
      return h_BxTxK, None
    window = memory.get('window')
    if window is None:  # every segment begins with nothing
      window = empty_window(self.config, len(tokens_BxT))
    words = (tokens_BxT,) if self.config.recurrent.readout == 'recurrent_memory' else ()
    return self.readout(h_BxTxK, *words, documents_BxT, window, valid_BxT)

  def _dropout_keys(self, train):
    """For the embeddings and for the result; or None."""
    if not train or not self.config.outer_dropout:
      return None, None
    return jax.random.split(self.make_rng('dropout'))

  def scores(self, hidden_BxTxJ: jax.Array, targets_BxT: jax.Array) -> softmax.TokenScores:
    """See `heads.Head.scores`."""
    return self.head.scores(hidden_BxTxJ, targets_BxT)

  def logits(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """See `heads.Head.logits`."""
    return self.head.logits(hidden_BxTxJ)

  def log_probs(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """Log-probabilities [B, T, V] of the token after each, in nats."""
    return jax.nn.log_softmax(self.head.logits(hidden_BxTxJ))
