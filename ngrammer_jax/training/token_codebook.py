"""The compressed token ids of memories, by the vocabulary of a run."""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util
import jax

from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import token_classes, vocabularies
from ngrammer_jax.layers.ngram import uint64
from ngrammer_jax.models import memories


def fill(
  codebook: Mapping[str, Any], config: model_config.ModelConfig, vocabulary: vocabularies.Vocabulary
) -> Mapping[str, Any]:
  """Returns a codebook with the token classes of a vocabulary, and the multipliers of their hashes.

  Args:
    codebook: the codebook of a state. At the path of each memory with compressed token ids it has
      `token_classes`, int32 [V], and if its hash draws them `multipliers`, uint32 [N, 2]. The new
      arrays have their shardings.
    config: config of the model.
    vocabulary: the vocabulary of the run.
  """
  arrays = traverse_util.flatten_dict(codebook, keep_empty_nodes=True)
  compressed = [path for *path, name in arrays if name == 'token_classes']
  if not compressed:
    return codebook
  classes_V = token_classes.token_classes(*vocabulary.token_texts())
  modules = dict(memories.ngram_modules(config, vocabulary.size))
  for path in compressed:
    new = {'token_classes': classes_V}
    if (*path, 'multipliers') in arrays:
      ngram_hash = modules[tuple(path)].class_hash(classes_V)
      new['multipliers'] = uint64.split_words(ngram_hash.multipliers())
    for name, array in new.items():
      arrays[*path, name] = jax.device_put(array, arrays[*path, name].sharding)
  return traverse_util.unflatten_dict(arrays)
