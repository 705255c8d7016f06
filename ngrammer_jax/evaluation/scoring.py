"""The negative log-likelihood of every token of some streams, memory carried along.

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
  """Runs a model over streams, segment by segment, some rows at a time.

  Args:
    model: the model.
    mesh: where it lies.
    rows: streams at a time, rounded up to a multiple of the devices of the batch.
  """

  def __init__(self, model: language_model.LanguageModel, mesh: jax.sharding.Mesh, rows: int):
    shards = sharding.batch_shards(mesh)
    self.rows = -(-rows // shards) * shards
    self._model, self._mesh = model, mesh
    self._score = jax.jit(
      functools.partial(_score_segment, model),
      donate_argnums=2,
      out_shardings=(sharding.replicated(mesh), sharding.rows_sharding(mesh)),
    )

  def __call__(
    self, params: Any, codebook: Any, segments: int, make: Callable[[int, slice], streams.Segment]
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the scores of each segment while the next one is computed.

    Args:
      params, codebook: of the model.
      segments: how many there are.
      make: from the number of a segment and a slice of the rows to the segment.

    Yields:
      Nats and correctness of the best guess, 0 at padding, and validity, each [rows, T].
    """
    place = sharding.rows_sharding(self._mesh)
    memory = jax.tree.map(lambda a: jax.device_put(a, place), self._empty())
    waiting = None
    for index in range(segments):
      part = functools.partial(make, index)
      with sharding.use(self._mesh):
        segment = sharding.global_rows(self._mesh, self.rows, part)
        scores, memory = self._score(params, codebook, memory, segment)
      if waiting is not None:
        yield jax.device_get(waiting)
      waiting = scores
    if waiting is not None:
      yield jax.device_get(waiting)

  def _empty(self):
    """Keys and values of the memory are kept, and not projected anew for every segment."""
    config = self._model.config
    slots = config.memory.length if config.memory is not None else 0
    windows = self._model.windows if slots else None
    return language_model.empty_memory(config, self.rows, slots, windows)

  def trace(self, params: Any, codebook: Any, length: int) -> jax.stages.Traced:
    """The program that scores a segment, not compiled yet. The variables may be abstract."""
    shape = self.rows, length
    like = streams.Segment(
      *(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.int32, bool, np.float32))
    )
    given = jax.eval_shape(self._empty), like
    given = sharding.abstract(given, sharding.rows_sharding(self._mesh))
    with sharding.use(self._mesh):
      return self._score.trace(params, codebook, *given)

  def documents(
    self, params: Any, codebook: Any, documents: Sequence[np.ndarray], start: int, length: int
  ) -> Iterator[np.ndarray]:
    """Yields the nats of every token of each document, float64 [tokens].

    Args:
      params, codebook: of the model.
      documents: ids without the document start.
      start: the document start, first input of each.
      length: T.
    """
    for first in range(0, len(documents), self.rows):
      group = documents[first : first + self.rows]
      segments = -(-max(map(len, group)) // length)
      shape = self.rows, segments * length
      inputs, targets = np.full(shape, start, np.int32), np.full(shape, start, np.int32)
      starts, valid = np.zeros(shape, bool), np.zeros(shape, np.float32)
      starts[:, :1] = True
      for row, ids in enumerate(group):
        inputs[row, 1 : len(ids)], targets[row, : len(ids)] = ids[:-1], ids
        valid[row, : len(ids)] = 1
      whole = streams.Segment(inputs, targets, starts, valid)

      def make(index, rows, whole=whole):
        cut = slice(index * length, (index + 1) * length)
        return streams.map_segments(lambda array: array[rows, cut], whole)

      nll = [nll for nll, _, _ in self(params, codebook, segments, make)]
      nll = np.concatenate([np.zeros((self.rows, 0)), *nll], axis=1)
      for row, ids in enumerate(group):
        yield nll[row, : len(ids)].astype(np.float64)


def _score_segment(model, params, codebook, memory, segment: streams.Segment):
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
