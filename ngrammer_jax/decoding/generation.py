"""Continues texts token by token, each token computed once.

B batch, T tokens of one call: a bucket of the prompts' lengths, then 1; V vocabulary.
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

SMALLEST_BUCKET = 16


class Generator:
  """A model that continues prompts.

  Prompts are padded to a power of two, so that few lengths are ever compiled; after them
  every token is the same compiled step. A row gives what it would give alone.

  Args:
    model: the model.
    mesh: where it lies.
    context: tokens that a token is predicted from, at most; of a longer text the last ones.
    rows: prompts at a time, rounded up to a multiple of the devices of the batch.
    bidirectional: the tokens of a prompt see all of it.
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
    # A scan would stack the cache of all layers, a copy at every token.
    config = dataclasses.replace(model.config, scan_layers=False)
    self._model = model.clone(config=config)
    self._by_row = sharding.rows_sharding(mesh)
    self._advance = jax.jit(
      functools.partial(_advance, self._model),
      donate_argnames='memory',
      # Every host looks at the tokens of all rows.
      out_shardings=(sharding.replicated(mesh), self._by_row, sharding.replicated(mesh)),
    )

  def __call__(
    self,
    params: Any,
    codebook: Any,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    how: sampling.Sampling,
  ) -> Iterator[np.ndarray]:
    """Yields the next token of every prompt, int32 [len(prompts)], without end.

    The token that comes next is computed while the one before is looked at.

    Args:
      params, codebook: of the model.
      prompts: ids, the document start first; at most `rows` prompts of at most `context`.
      seeds: what each row draws with.
      how: tokens are drawn.
    """
    longest = max(map(len, prompts))
    T = min(max(SMALLEST_BUCKET, 1 << (longest - 1).bit_length()), max(self.context, longest))
    tokens_BxT = np.zeros((self.rows, T), np.int32)
    valid_BxT = np.zeros((self.rows, T), np.int32)
    for row, prompt in enumerate(prompts):
      tokens_BxT[row, : len(prompt)] = prompt
      valid_BxT[row, : len(prompt)] = 1
    starts_BxT = np.arange(T) == np.where(valid_BxT.any(axis=1), 0, T)[:, None]
    by_row = lambda array: jax.device_put(array, self._by_row)
    with sharding.use(self._mesh):
      limits = sampling.Limits.of(how, self._model.vocabulary_size)
      seeds_B = by_row(np.resize(np.asarray(seeds, np.uint32), self.rows))
      given = params, codebook, seeds_B, limits
      segment = tuple(map(by_row, (tokens_BxT, starts_BxT, valid_BxT)))
      prefix_BxT = by_row(valid_BxT > 0) if self._bidirectional else None
      never_Bx1 = by_row(np.zeros((self.rows, 1), bool))
      always_Bx1 = by_row(np.ones((self.rows, 1), np.int32))
      token_B, memory, count = self._advance(
        *given, segment, prefix_BxT, memory=jax.tree.map(by_row, self._empty()), count=jnp.int32(0)
      )
    while True:
      with sharding.use(self._mesh):
        segment = token_B[:, None], never_Bx1, always_Bx1
        next_B, memory, count = self._advance(*given, segment, None, memory=memory, count=count)
      yield np.asarray(token_B)[: len(prompts)]
      token_B = next_B

  def _empty(self):
    # One slot less than the context: the token itself takes the last place.
    slots = max(self.context - 1, 1)
    return language_model.empty_memory(self._model.config, self.rows, slots, self._model.windows)

  def trace(self, params: Any, codebook: Any) -> jax.stages.Traced:
    """The program of one more token, not compiled yet. The variables may be abstract."""
    like = lambda dtype, *shape: jax.ShapeDtypeStruct((self.rows, *shape), dtype)
    segment = like(np.int32, 1), like(bool, 1), like(np.int32, 1)
    seeds_B, memory = like(np.uint32), jax.eval_shape(self._empty)
    by_row = sharding.abstract((seeds_B, segment, memory), self._by_row)
    limits = sampling.Limits.of(sampling.Sampling(), self._model.vocabulary_size)
    shared = limits, jax.ShapeDtypeStruct((), np.int32)
    limits, count = sharding.abstract(shared, sharding.replicated(self._mesh))
    seeds_B, segment, memory = by_row
    with sharding.use(self._mesh):
      given = params, codebook, seeds_B, limits, segment, None
      return self._advance.trace(*given, memory=memory, count=count)


def _advance(model, params, codebook, seeds_B, limits, segment, prefix_BxT, *, memory, count):
  """Takes the tokens of a segment in, and draws the one after the last of each row."""
  tokens_BxT, starts_BxT, valid_BxT = segment
  variables = {'params': params, 'codebook': codebook}
  hidden_BxTxD, memory, _ = model.apply(
    variables, tokens_BxT, memory, starts_BxT=starts_BxT, valid_BxT=valid_BxT, prefix_BxT=prefix_BxT
  )
  last_Bx1x1 = jnp.maximum(valid_BxT.sum(axis=1) - 1, 0)[:, None, None]
  hidden_Bx1xD = jnp.take_along_axis(hidden_BxTxD, last_Bx1x1, axis=1)
  log_probs_Bx1xV = model.apply(variables, hidden_Bx1xD, method='log_probs')
  # Of the seed and the place in the answer alone: not of the other rows.
  key_of = lambda seed: jax.random.fold_in(jax.random.key(seed), count)
  token_B = sampling.draw(log_probs_Bx1xV[:, 0], limits, jax.vmap(key_of)(seeds_B))
  return token_B, memory, count + 1
