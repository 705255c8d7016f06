"""Token-by-token generation with a KV cache.

B batch, T tokens of one call: the padded prompt length, then 1; V vocabulary.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.decoding import sampling
from ngrammer_jax.models import language_model

MIN_PADDED_LENGTH = 16


class Generator:
  """Generates continuations of prompts with a model.

  Prompts are padded to a power of two, so that only a few lengths are compiled; after the prompt,
  one compiled step generates every token. The result of a row does not depend on the other rows.

  Args:
    model: the model.
    mesh: the device mesh.
    context: context length; each token is predicted from at most this many preceding tokens.
    rows: batch size, rounded up to a multiple of the devices of the batch axes.
    bidirectional: whether the tokens of a prompt attend to the whole prompt.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    context: int,
    rows: int,
    bidirectional: bool = False,
  ):
    shards = sharding.batch_shards(mesh)
    self.rows = -(-rows // shards) * shards
    self.context = context
    self._mesh, self._bidirectional = mesh, bidirectional
    # A scan over layers would stack, and so copy, the cache of all layers at every token.
    config = dataclasses.replace(model.config, scan_layers=False)
    self._model = model.clone(config=config)
    self._row_sharding = sharding.rows_sharding(mesh)
    self._decode_step = jax.jit(
      functools.partial(_decode_step, self._model),
      donate_argnames='memory',
      # Every host reads the tokens of all rows.
      out_shardings=(sharding.replicated(mesh), self._row_sharding, sharding.replicated(mesh)),
    )

  def __call__(
    self,
    params: Any,
    codebook: Any,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    config: sampling.SamplingConfig,
  ) -> Iterator[np.ndarray]:
    """Yields the next token of every prompt, int32 [len(prompts)]; the iterator does not end.

    The next token is dispatched before the current one is yielded.

    Args:
      params, codebook: variables of the model.
      prompts: token ids that begin with the document start; at most `rows` prompts of at most
        `context` tokens.
      seeds: random seed of each row.
      config: sampling options.
    """
    longest = max(map(len, prompts))
    T = min(max(MIN_PADDED_LENGTH, 1 << (longest - 1).bit_length()), max(self.context, longest))
    tokens_BxT = np.zeros((self.rows, T), np.int32)
    valid_BxT = np.zeros((self.rows, T), np.int32)
    for row, prompt in enumerate(prompts):
      tokens_BxT[row, : len(prompt)] = prompt
      valid_BxT[row, : len(prompt)] = 1
    starts_BxT = np.arange(T) == np.where(valid_BxT.any(axis=1), 0, T)[:, None]
    shard_rows = lambda array: jax.device_put(array, self._row_sharding)
    with sharding.use(self._mesh):
      sampler = sampling.SamplerParams.from_config(config, self._model.vocabulary_size)
      seeds_B = shard_rows(np.resize(np.asarray(seeds, np.uint32), self.rows))
      decode_step = functools.partial(self._decode_step, params, codebook, seeds_B, sampler)
      segment = tuple(map(shard_rows, (tokens_BxT, starts_BxT, valid_BxT)))
      prefix_BxT = shard_rows(valid_BxT > 0) if self._bidirectional else None
      no_start_Bx1 = shard_rows(np.zeros((self.rows, 1), bool))
      valid_Bx1 = shard_rows(np.ones((self.rows, 1), np.int32))
      memory = jax.tree.map(shard_rows, self._empty_memory())
      token_B, memory, index = decode_step(segment, prefix_BxT, memory=memory, index=jnp.int32(0))
    while True:
      with sharding.use(self._mesh):
        segment = token_B[:, None], no_start_Bx1, valid_Bx1
        next_B, memory, index = decode_step(segment, None, memory=memory, index=index)
      yield np.asarray(token_B)[: len(prompts)]
      token_B = next_B

  def _empty_memory(self):
    # One slot less than the context, which includes the current token.
    slots = max(self.context - 1, 1)
    return language_model.empty_memory(self._model.config, self.rows, slots)

  def trace(self, params: Any, codebook: Any) -> jax.stages.Traced:
    """Traces the program that generates one token. The variables may be abstract."""
    abstract = lambda dtype, *shape: jax.ShapeDtypeStruct((self.rows, *shape), dtype)
    segment = abstract(np.int32, 1), abstract(bool, 1), abstract(np.int32, 1)
    seeds_B, memory = abstract(np.uint32), jax.eval_shape(self._empty_memory)
    seeds_B, segment, memory = sharding.abstract((seeds_B, segment, memory), self._row_sharding)
    config = sampling.SamplingConfig()
    sampler = sampling.SamplerParams.from_config(config, self._model.vocabulary_size)
    sampler, index = sharding.abstract(
      (sampler, jax.ShapeDtypeStruct((), np.int32)), sharding.replicated(self._mesh)
    )
    with sharding.use(self._mesh):
      args = params, codebook, seeds_B, sampler, segment, None
      return self._decode_step.trace(*args, memory=memory, index=index)


def _decode_step(model, params, codebook, seeds_B, sampler, segment, prefix_BxT, *, memory, index):
  """Runs the model on a segment and samples the token after the last valid token of each row."""
  tokens_BxT, starts_BxT, valid_BxT = segment
  variables = {'params': params, 'codebook': codebook}
  hidden_BxTxD, memory, _ = model.apply(
    variables, tokens_BxT, memory, starts_BxT=starts_BxT, valid_BxT=valid_BxT, prefix_BxT=prefix_BxT
  )
  last_Bx1x1 = jnp.maximum(valid_BxT.sum(axis=1) - 1, 0)[:, None, None]
  hidden_Bx1xD = jnp.take_along_axis(hidden_BxTxD, last_Bx1x1, axis=1)
  log_probs_Bx1xV = model.apply(variables, hidden_Bx1xD, method='log_probs')
  # The key depends on the seed and the token index alone, not on the other rows.
  make_key = lambda seed: jax.random.fold_in(jax.random.key(seed), index)
  token_B = sampling.sample_tokens(log_probs_Bx1xV[:, 0], sampler, jax.vmap(make_key)(seeds_B))
  return token_B, memory, index + 1
