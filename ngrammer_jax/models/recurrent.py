"""The recurrent language model: embed, memories, one LSTM, readout, head (Daniluk et al. 2017).

It has the interface of `transformer.TransformerLM`. Its memory contains the state of the LSTM, the
window of the readout, and the document number.

B batch, T segment length, D model width, K hidden size, J width of the readout, V vocabulary.
"""

import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import dense, document_masks, dropout, mesh_axes
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.recurrent import readout, recurrence, word_memory
from ngrammer_jax.layers.state import Memory, State
from ngrammer_jax.models import embedding_and_head, memories, precision


def empty_window(config: model_config.ModelConfig, batch: int) -> State:
  """Returns the window of the readout before the first segment."""
  r = config.recurrent
  width = None if r.readout == 'recurrent_memory' else r.hidden
  if r.readout == 'key_value_predict':
    width = 2 * r.width  # keys and values
  return readout.empty_memory(batch, r.slots, width, precision.compute_dtype(config))


class RecurrentLM(embedding_and_head.VocabularyModel):
  """A recurrent language model."""

  def setup(self):
    super().setup()  # first: initial values depend on the order of the parameters
    self.between_blocks = memories.make(self.config, self.vocabulary_size).between_blocks
    for memory in self.between_blocks:
      setattr(self, memory.name, memory.make())
    r = self.config.recurrent
    dtype = precision.compute_dtype(self.config)
    init = dense.symmetric(r.initial)
    self.recurrence = recurrence.Recurrence(
      hidden=r.hidden,
      cell=r.cell,
      forget_bias=r.forget_bias,
      initializer=init,
      dtype=dtype,
    )
    if r.readout == 'recurrent_memory':
      self.readout = word_memory.RecurrentMemory(
        vocabulary_size=self.vocabulary_size,
        window=r.window,
        temporal_tables=r.temporal_tables,
        bias=r.gate_bias,
        initializer=init,
        dtype=dtype,
      )
    elif r.readout == 'ngram':
      self.readout = readout.NGramReadout(slices=r.slices, initializer=init, dtype=dtype)
    elif r.readout != 'none':
      self.readout = readout.AttentionReadout(
        parts=r.num_slices,
        window=r.window,
        empty=r.empty_slots,
        initializer=init,
        dtype=dtype,
      )

  def empty_memory(self, batch: int, cache_slots: int = 0) -> Memory:
    """Returns the memory before the first segment of `batch` streams.

    Args:
      batch: B.
      cache_slots: positive for token-by-token decoding. Decoding carries the window of the readout
        even without `carry_memory`.

    Keys: `document` int32 [B], document number of the last token; `state`, see
    `recurrence.empty_state`; the states of the memories at the input (see `models.memories`); and,
    if it is carried, `window`, see `readout.empty_memory`.
    """
    r = self.config.recurrent
    dtype = precision.compute_dtype(self.config)
    memory = {
      'document': jnp.zeros((batch,), jnp.int32),
      'state': recurrence.empty_state(batch, r.hidden, r.cell, dtype),
    }
    memory |= memories.empty_states(memories.make(self.config).between_blocks, batch)
    if r.slots and (r.carry_memory or cache_slots):
      memory['window'] = empty_window(self.config, batch)
    return memory

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
    """Returns hidden states [B, T, J], the memory for the next segment, no auxiliary losses.

    For the arguments see `TransformerLM.__call__`.

    Raises:
      ValueError: a prefix; a recurrent layer cannot attend to later tokens.
    """
    if prefix_BxT is not None:
      raise ValueError('prefix_BxT attends to later tokens: model.recurrent only supports None')
    if starts_BxT is None:
      starts_BxT = jnp.zeros(tokens_BxT.shape, bool)
    if valid_BxT is not None:  # no document starts at padding
      starts_BxT = starts_BxT & (valid_BxT > 0)
    documents_BxT = document_masks.numbers(starts_BxT, memory['document'])
    next_memory = {'document': documents_BxT[:, -1]}
    x_BxTxD, vocabulary = self.embed(tokens_BxT)
    context = Context(
      tokens_BxT=tokens_BxT,
      starts_BxT=starts_BxT,
      documents_BxT=documents_BxT,
      valid_BxT=valid_BxT,
      vocabulary=vocabulary,
    )
    for ngram_memory in self.between_blocks:
      module = getattr(self, ngram_memory.name)
      x_BxTxD, state = ngram_memory.apply(module, x_BxTxD, context, memory)
      next_memory |= state
    input_key, output_key = self._dropout_keys(train)
    x_BxTxD = dropout.drop(x_BxTxD, self.config.outer_dropout, input_key)
    x_BxTxD = mesh_axes.shard_rows(x_BxTxD)
    h_BxTxK, next_memory['state'] = self.recurrence(
      x_BxTxD, memory['state'], starts_BxT=starts_BxT, valid_BxT=valid_BxT
    )
    h_BxTxJ, window = self._read(h_BxTxK, tokens_BxT, documents_BxT, memory, valid_BxT)
    if 'window' in memory:
      next_memory['window'] = window
    h_BxTxJ = dropout.drop(h_BxTxJ, self.config.outer_dropout, output_key)
    return h_BxTxJ, next_memory, {}

  def _read(
    self,
    h_BxTxK: jax.Array,
    tokens_BxT: jax.Array,
    documents_BxT: jax.Array,
    memory: Memory,
    valid_BxT: jax.Array | None,
  ) -> tuple[jax.Array, State | None]:
    """Returns the output of the readout, and its window for the next segment."""
    if self.config.recurrent.readout == 'none':
      return h_BxTxK, None
    window = memory.get('window')
    if window is None:  # not carried
      window = empty_window(self.config, len(tokens_BxT))
    if self.config.recurrent.readout == 'recurrent_memory':
      return self.readout(h_BxTxK, tokens_BxT, documents_BxT, window, valid_BxT)
    return self.readout(h_BxTxK, documents_BxT, window, valid_BxT)

  def _dropout_keys(self, train: bool) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the keys for the dropout of embeddings and of outputs, None without dropout."""
    if not train or not self.config.outer_dropout:
      return None, None
    input_key, output_key = jax.random.split(self.make_rng('dropout'))
    return input_key, output_key
