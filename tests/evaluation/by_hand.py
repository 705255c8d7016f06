"""What a model finds in a text, one stream after the other, read by a loop."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ngrammer_jax.models import transformer
from tests.checks import random_variables


class Reader:
  """A model with random variables, and a program that reads one segment of one row.

  Keys of no memory are kept here: the past is computed again from the inputs of the layers, as in
  training.
  """

  def __init__(self, config, vocabulary_size, length):
    self.model = transformer.TransformerLM(config, vocabulary_size)
    self.length, self._empty = length, transformer.empty_memory(config, 1)
    self.variables = random_variables(self.model, np.zeros((1, 1), np.int32), self._empty)

    @jax.jit
    def read(tokens_1xT, starts_1xT, memory):
      given = self.variables, tokens_1xT, memory
      hidden, memory, _ = self.model.apply(*given, starts_BxT=starts_1xT)
      return self.model.apply(self.variables, hidden, method='logits')[0], memory

    self._read = read

  def __call__(self, split, segments: Iterable[tuple[int, int]], carry=True):
    """Nats of the targets [first, end) of each segment of a stream, and whether they are the best.

    What is read past the end of a segment changes nothing before it; what comes after a segment
    that is not full has to begin afresh.
    """
    nats, right, memory = [], [], self._empty
    for first, end in segments:
      inputs, targets, starts = split.window(first, self.length)
      given = inputs[None], starts[None], memory if carry else self._empty
      logits_TxV, memory = self._read(*given)
      logits_TxV = np.asarray(logits_TxV, np.float64)[: end - first]
      targets_T = targets[: end - first]
      of_targets_T = np.take_along_axis(logits_TxV, targets_T[:, None], axis=1)[:, 0]
      nats += [*(np.log(np.exp(logits_TxV).sum(axis=1)) - of_targets_T)]
      right += [*(logits_TxV.argmax(axis=1) == targets_T)]
    return np.array(nats), np.array(right)


def watched(owner: Any, name: str) -> list[Any]:
  """A list that from now on takes in what a function of an object returns."""
  function, returned = getattr(owner, name), []

  def watching(*args, **given):
    returned.append(function(*args, **given))
    return returned[-1]

  setattr(owner, name, watching)
  return returned
