"""Reference scores of a text, computed one stream and one segment after the other."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ngrammer_jax.models import language_model, transformer
from tests.checks import random_variables


class SegmentReader:
  """A model with random variables that reads one segment of one stream.

  It has no KV cache: keys and values of the memory are computed again from layer inputs, as in
  training.
  """

  def __init__(self, config, vocabulary_size, length):
    self.model = transformer.TransformerLM(config, vocabulary_size)
    self.length, self._empty_memory = length, language_model.empty_memory(config, 1)
    self.variables = random_variables(self.model, np.zeros((1, 1), np.int32), self._empty_memory)

    @jax.jit
    def read(tokens_1xT, starts_1xT, memory):
      hidden, memory, _ = self.model.apply(
        self.variables, tokens_1xT, memory, starts_BxT=starts_1xT
      )
      return self.model.apply(self.variables, hidden, method='logits')[0], memory

    self._read = read

  def __call__(self, split, segments: Iterable[tuple[int, int]], carry=True):
    """Returns nats and correctness of the targets [first, end) of the segments of a stream.

    Every segment is read at full length; tokens past its end do not affect earlier ones. After a
    segment that is not full, the next segment must not use the memory.
    """
    nats, correct, memory = [], [], self._empty_memory
    for first, end in segments:
      inputs, targets, starts = split.window(first, self.length)
      logits_TxV, memory = self._read(
        inputs[None], starts[None], memory if carry else self._empty_memory
      )
      logits_TxV = np.asarray(logits_TxV, np.float64)[: end - first]
      targets_T = targets[: end - first]
      target_logits_T = np.take_along_axis(logits_TxV, targets_T[:, None], axis=1)[:, 0]
      nats += [*(np.log(np.exp(logits_TxV).sum(axis=1)) - target_logits_T)]
      correct += [*(logits_TxV.argmax(axis=1) == targets_T)]
    return np.array(nats), np.array(correct)


def record_results(owner: Any, name: str) -> list[Any]:
  """Replaces a method of an object by one that appends its results to the returned list."""
  function, results = getattr(owner, name), []

  def call_and_record(*args, **kwargs):
    results.append(function(*args, **kwargs))
    return results[-1]

  setattr(owner, name, call_and_record)
  return results
