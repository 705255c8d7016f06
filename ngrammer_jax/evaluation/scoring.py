"""Negative log-likelihood of each token of text streams; memory is carried between segments.

B batch, T segment length.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.data import streams
from ngrammer_jax.models import language_model


class Scorer:
  """Runs a model over a batch of streams, segment by segment.

  Args:
    model: the model.
    mesh: the device mesh.
    rows: batch size, rounded up to a multiple of the devices of the batch axes.
    cache_slots: tokens whose keys and values are kept. None: as many as the segment memory has.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    rows: int,
    cache_slots: int | None = None,
  ):
    memory = model.config.memory
    slots = 0 if memory is None else memory.length
    self._cache_slots = slots if cache_slots is None else cache_slots
    shards = sharding.batch_shards(mesh)
    self.rows = -(-rows // shards) * shards
    self._model, self._mesh = model, mesh
    self._score = jax.jit(
      functools.partial(_score_segment, model),
      donate_argnums=2,
      out_shardings=(sharding.replicated(mesh), sharding.rows_sharding(mesh)),
    )

  def __call__(
    self,
    params: Any,
    codebook: Any,
    num_segments: int,
    make_segment: Callable[[int, slice], streams.Segment],
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the scores of each segment while the next one is computed.

    Args:
      params, codebook: variables of the model.
      num_segments: number of segments.
      make_segment: returns the segment with an index, for a slice of the rows.

    Yields:
      Nats, whether the most likely token is correct, and whether the token is not padding, each
      [rows, T]; the first two are 0 at padding.
    """
    row_sharding = sharding.rows_sharding(self._mesh)
    memory = jax.tree.map(lambda a: jax.device_put(a, row_sharding), self._empty_memory())
    pending = None
    for index in range(num_segments):
      with sharding.use(self._mesh):
        segment = sharding.global_rows(
          self._mesh, self.rows, functools.partial(make_segment, index)
        )
        scores, memory = self._score(params, codebook, memory, segment)
      if pending is not None:
        yield jax.device_get(pending)
      pending = scores
    if pending is not None:
      yield jax.device_get(pending)

  def _empty_memory(self):
    """Returns an empty memory with a KV cache, so that no segment projects past tokens again."""
    return language_model.empty_memory(self._model.config, self.rows, self._cache_slots)

  def trace(self, params: Any, codebook: Any, length: int) -> jax.stages.Traced:
    """Returns the uncompiled program that scores a segment; the variables may be abstract."""
    shape = self.rows, length
    dtypes = np.int32, np.int32, bool, np.float32
    segment = streams.Segment(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes))
    memory, segment = sharding.abstract(
      (jax.eval_shape(self._empty_memory), segment), sharding.rows_sharding(self._mesh)
    )
    with sharding.use(self._mesh):
      return self._score.trace(params, codebook, memory, segment)

  def score_documents(
    self, params: Any, codebook: Any, documents: Sequence[np.ndarray], start: int, length: int
  ) -> Iterator[np.ndarray]:
    """Yields the nats of every token of each document, float64 [tokens].

    Args:
      params, codebook: variables of the model.
      documents: token ids without the document start.
      start: id of the document start, the first input of each document.
      length: T.
    """
    for first in range(0, len(documents), self.rows):
      group = documents[first : first + self.rows]
      num_segments = -(-max(map(len, group)) // length)
      shape = self.rows, num_segments * length
      inputs, targets = np.full(shape, start, np.int32), np.full(shape, start, np.int32)
      starts, valid = np.zeros(shape, bool), np.zeros(shape, np.float32)
      starts[:, :1] = True
      for row, ids in enumerate(group):
        inputs[row, 1 : len(ids)], targets[row, : len(ids)] = ids[:-1], ids
        valid[row, : len(ids)] = 1
      padded = streams.Segment(inputs, targets, starts, valid)

      def make_segment(index, rows, padded=padded):
        columns = slice(index * length, (index + 1) * length)
        return streams.map_segments(lambda array: array[rows, columns], padded)

      nll = [nll for nll, _, _ in self(params, codebook, num_segments, make_segment)]
      nll = np.concatenate([np.zeros((self.rows, 0)), *nll], axis=1)
      for row, ids in enumerate(group):
        yield nll[row, : len(ids)].astype(np.float64)


def _score_segment(model, params, codebook, memory, segment: streams.Segment):
  """Returns nats, correctness and validity, each [B, T], and the new memory."""
  variables = {'params': params, 'codebook': codebook}
  hidden, memory, _ = model.apply(
    variables,
    segment.tokens_BxT,
    memory,
    starts_BxT=segment.starts_BxT,
    valid_BxT=segment.valid_BxT,
  )
  scores = model.apply(variables, hidden, segment.targets_BxT, method='scores')
  valid_BxT = segment.valid_BxT > 0
  nll_BxT = jnp.where(valid_BxT, scores.nll_BxT, 0)
  return (nll_BxT, scores.correct_BxT & valid_BxT, valid_BxT), memory
