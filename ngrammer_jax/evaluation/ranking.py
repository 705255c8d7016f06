"""Log-probabilities of alternative continuations (choices) of a prefix.

B batch, P tokens of a prefix, K choices, C tokens of a choice, D model.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.models import language_model

MIN_PREFIX_LENGTH = 16  # prefixes are padded to at least this many tokens
MIN_CHOICE_LENGTH = 32  # choices are padded to this, or to the longest choice if it is shorter


class Ranker:
  """Scores choices by log p(choice | prefix), summed over all tokens of the choice.

  The prefix is computed once; its memory is reused for each choice.

  Args:
    model: the model.
    mesh: the device mesh.
    rows: batch size in examples, rounded up to a multiple of the devices of the batch axes.
    bidirectional: whether the tokens of a prefix attend to the whole prefix.
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
    """Yields the index of an example and the log-probabilities of its choices, float64 [K].

    Examples of similar length are batched together, so they come in a different order.

    Args:
      params, codebook: variables of the model.
      prefixes: token ids of each example, starting with the document start.
      choices: token ids of each choice of each example.
    """
    # A number of choices shared by all examples is not padded.
    has_same_count = len({len(example) for example in choices}) == 1
    pad_count = (lambda count: max(count, 1)) if has_same_count else _next_bucket
    lengths = [max(map(len, example), default=1) for example in choices]
    max_length = _next_bucket(max(lengths, default=1), 2)
    shapes_PKC = [
      (
        _next_bucket(len(prefix), MIN_PREFIX_LENGTH),
        pad_count(len(example)),
        min(_next_bucket(length, MIN_CHOICE_LENGTH), max_length),
      )
      for prefix, example, length in zip(prefixes, choices, lengths, strict=True)
    ]
    order = sorted(range(len(prefixes)), key=lambda i: shapes_PKC[i])
    shard_rows = lambda array, axis=0: jax.device_put(
      array, sharding.rows_sharding(self._mesh, axis)
    )
    while order:
      P, K, C = shapes_PKC[order[0]]
      group = [i for i in order[: self.rows] if shapes_PKC[i] == (P, K, C)]
      order = order[len(group) :]
      # Token ids and validity, on the first axis.
      prefix_2xBxP = np.zeros((2, self.rows, P), np.int32)
      choices_2xKxBxC = np.zeros((2, K, self.rows, C), np.int32)
      for row, i in enumerate(group):
        prefix_2xBxP[:, row, : len(prefixes[i])] = prefixes[i], np.ones_like(prefixes[i])
        for k, ids in enumerate(choices[i]):
          choices_2xKxBxC[:, k, row, : len(ids)] = ids, np.ones_like(ids)
      with sharding.use(self._mesh):
        prefix = map(shard_rows, prefix_2xBxP)
        padded_choices = (shard_rows(array, 1) for array in choices_2xKxBxC)
        scores_KxB = self._score(params, codebook, *prefix, *padded_choices)
        scores_KxB = np.asarray(scores_KxB, np.float64)
      for row, i in enumerate(group):
        yield i, scores_KxB[: len(choices[i]), row]


def _next_bucket(size, smallest=1):
  """Returns the next power of two, at least `smallest`: few shapes compile few programs."""
  return max(smallest, 1 << (size - 1).bit_length()) if size else smallest


def _score(model, bidirectional, params, codebook, ids_BxP, valid_BxP, choices_KxBxC, valid_KxBxC):
  """Returns the log-probabilities of the choices, [K, B]."""
  variables = {'params': params, 'codebook': codebook}
  (B, P), C = ids_BxP.shape, choices_KxBxC.shape[2]
  starts_BxP = jnp.broadcast_to(jnp.arange(P) == 0, (B, P))
  memory = language_model.empty_memory(model.config, B, P + C)
  hidden_BxPxD, memory, _ = model.apply(
    variables,
    ids_BxP,
    memory,
    starts_BxT=starts_BxP,
    valid_BxT=valid_BxP,
    prefix_BxT=valid_BxP > 0 if bidirectional else None,
  )
  last_Bx1x1 = jnp.maximum(valid_BxP.sum(axis=1) - 1, 0)[:, None, None]
  last_hidden_Bx1xD = jnp.take_along_axis(hidden_BxPxD, last_Bx1x1, axis=1)

  def score_choice(choice):
    ids_BxC, valid_BxC = choice
    hidden_BxCxD, _, _ = model.apply(
      variables, ids_BxC[:, :-1], memory, valid_BxT=valid_BxC[:, :-1]
    )
    hidden_BxCxD = jnp.concatenate([last_hidden_Bx1xD, hidden_BxCxD], axis=1)
    nll_BxC = model.apply(variables, hidden_BxCxD, ids_BxC, method='scores').nll_BxT
    return -jnp.where(valid_BxC > 0, nll_BxC, 0).sum(axis=1)

  return jax.lax.map(score_choice, (choices_KxBxC, valid_KxBxC))
