"""Which of some texts a model finds most likely after another one.

B batch, P tokens of a prefix, K choices, C tokens of a choice.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.models import language_model

SMALLEST = 16  # tokens of a prefix that are compiled for
SHORT = 32  # tokens of choices that are compiled for, where some are longer


class Ranker:
  """Scores choices by log p(choice | prefix), all tokens of the choice, its end too.

  The prefix is computed once, and its memory taken by each of the choices in turn.

  Args:
    model: the model.
    mesh: where it lies.
    rows: examples at a time, rounded up to a multiple of the devices of the batch.
    bidirectional: the tokens of a prefix see all of it.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    rows: int,
    bidirectional: bool = False,
  ):
    shards = sharding.batch_shards(mesh)
    self.rows = -(-rows // shards) * shards
    self._mesh = mesh
    self._score = jax.jit(
      functools.partial(_score, model, bidirectional), out_shardings=sharding.replicated(mesh)
    )

  def __call__(
    self,
    params: Any,
    codebook: Any,
    prefixes: Sequence[np.ndarray],
    choices: Sequence[Sequence[np.ndarray]],
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number of an example and the nats of its choices, negative, float64 [K].

    Examples of about the same length are computed together, so the order is another.

    Args:
      params, codebook: of the model.
      prefixes: ids of each example, the document start first.
      choices: ids of each choice of each example.
    """
    counts = {len(some) for some in choices}
    # One number of choices is compiled for as it is; of several, for few.
    number = _bucket if len(counts) > 1 else max
    tokens = [max(map(len, some), default=1) for some in choices]
    longest = _bucket(max(tokens, default=1), 2)
    sizes = [
      (_bucket(len(p), SMALLEST), number(len(c), 1), min(_bucket(n, SHORT), longest))
      for p, c, n in zip(prefixes, choices, tokens, strict=True)
    ]
    order = sorted(range(len(prefixes)), key=lambda i: sizes[i])
    while order:
      size = sizes[order[0]]
      group = [i for i in order[: self.rows] if sizes[i] == size]
      order = order[len(group) :]
      # The ids of each, and where there are any.
      prefix_2xBxP = np.zeros((2, self.rows, size[0]), np.int32)
      choices_2xKxBxC = np.zeros((2, size[1], self.rows, size[2]), np.int32)
      for row, i in enumerate(group):
        prefix_2xBxP[:, row, : len(prefixes[i])] = prefixes[i], np.ones_like(prefixes[i])
        for k, ids in enumerate(choices[i]):
          choices_2xKxBxC[:, k, row, : len(ids)] = ids, np.ones_like(ids)
      by_row = lambda array, axis=0: jax.device_put(array, sharding.rows_sharding(self._mesh, axis))
      with sharding.use(self._mesh):
        given = *map(by_row, prefix_2xBxP), *(by_row(part, 1) for part in choices_2xKxBxC)
        scores_KxB = np.asarray(self._score(params, codebook, *given), np.float64)
      for row, i in enumerate(group):
        yield i, scores_KxB[: len(choices[i]), row]


def _bucket(size, smallest):
  return max(smallest, 1 << (size - 1).bit_length()) if size else smallest


def _score(model, bidirectional, params, codebook, ids_BxP, valid_BxP, choices_KxBxC, valid_KxBxC):
  """Log-probabilities [K, B] of the choices."""
  variables = {'params': params, 'codebook': codebook}
  (B, P), C = ids_BxP.shape, choices_KxBxC.shape[2]
  starts_BxP = jnp.broadcast_to(jnp.arange(P) == 0, (B, P))
  memory = language_model.empty_memory(model.config, B, P + C, model.windows)
  hidden_BxPxD, memory, _ = model.apply(
    variables,
    ids_BxP,
    memory,
    starts_BxT=starts_BxP,
    valid_BxT=valid_BxP,
    prefix_BxT=valid_BxP > 0 if bidirectional else None,
  )
  last_Bx1x1 = jnp.maximum(valid_BxP.sum(axis=1) - 1, 0)[:, None, None]
  before_Bx1xD = jnp.take_along_axis(hidden_BxPxD, last_Bx1x1, axis=1)

  def score(choice):
    ids_BxC, valid_BxC = choice
    hidden_BxCxD, _, _ = model.apply(
      variables, ids_BxC[:, :-1], memory, valid_BxT=valid_BxC[:, :-1]
    )
    hidden_BxCxD = jnp.concatenate([before_Bx1xD, hidden_BxCxD], axis=1)
    nll_BxC = model.apply(variables, hidden_BxCxD, ids_BxC, method='scores').nll_BxT
    return -jnp.where(valid_BxC > 0, nll_BxC, 0).sum(axis=1)

  return jax.lax.map(score, (choices_KxBxC, valid_KxBxC))
