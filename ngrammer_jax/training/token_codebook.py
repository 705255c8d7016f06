"""The compressed token ids of n-gram memories, which depend on the vocabulary of a run."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

import jax
import numpy as np

from ngrammer_jax.config import ngram_memory
from ngrammer_jax.data import token_classes
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.layers.ngram import uint64


def fill(
  codebook: Mapping[str, Any],
  memories: Sequence[ngram_memory.NGramMemoryConfig],
  vocabulary: vocabularies.Vocabulary,
) -> Mapping[str, Any]:
  """Returns a codebook with the token classes of a vocabulary, and the multipliers of their hashes.

  Args:
    codebook: the codebook of a state. Each memory with compressed token ids has `token_classes`,
      int32 [V], and if its hash draws them `multipliers`, uint32 [N, 2], below `ngram_memory_<i>`
      or `layer_<l>/ngram_memory_<i>`. The new arrays have their shardings.
    memories: `model.ngram_memories`.
    vocabulary: the vocabulary of the run.
  """
  if not any(memory.key == 'compressed' for memory in memories):
    return codebook
  classes_V = token_classes.token_classes(*vocabularies.token_texts(vocabulary))

  def fill_tree(tree, path):
    if not isinstance(tree, Mapping):
      return tree
    tree = {name: fill_tree(child, (*path, name)) for name, child in tree.items()}
    if 'token_classes' in tree:
      new = {'token_classes': classes_V}
      if 'multipliers' in tree:
        new['multipliers'] = _multipliers(memories, path, classes_V)
      tree |= {name: _put(array, like=tree[name]) for name, array in new.items()}
    return tree

  return fill_tree(codebook, ())


def _multipliers(memories, path: tuple[str, ...], classes_V: np.ndarray) -> np.ndarray:
  """Returns the words of the multipliers for the number of classes, uint32 [N, 2].

  Args:
    memories: `model.ngram_memories`.
    path: names of the modules that lead to the classes.
    classes_V: class of every token id.
  """
  numbers = dict(re.findall(r'(layer|ngram_memory)_(\d+)', '/'.join(path)))
  memory = memories[int(numbers['ngram_memory'])]
  hash_of_ids = memory.hashes(len(classes_V))[memory.index(int(numbers.get('layer', 0)))]
  hash_of_classes = dataclasses.replace(hash_of_ids, vocabulary=int(classes_V.max()) + 1)
  return uint64.split_words(hash_of_classes.multipliers())


def _put(array: np.ndarray, like: jax.Array) -> jax.Array:
  """Returns an array on the devices of another one of the same shape, with its sharding."""
  return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])
