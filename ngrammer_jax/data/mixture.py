"""The corpora of a run: a single one, or the parts of a mixture with one vocabulary.

Every row of the batch reads a block of segments of one part, then a block of the next one, see
`mixture_schedule`. In each part it continues from its last position. A change of part starts a
document, so that neither attention nor a memory sees tokens of another part.

B batch rows, T segment length.
"""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import logging
import pathlib

import numpy as np

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import corpora, duplicates
from ngrammer_jax.data.files import fingerprints
from ngrammer_jax.data.tokens import learned_vocabulary, token_cache, token_split
from ngrammer_jax.system import hosts

WARN_SHARE = 0.01  # of held-out documents, found in the training text


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The corpora of a config; streamed training splits are not tokenised yet.

  Attributes:
    parts: the parts by name; a single corpus has the name ''.
    weights: share of each part in the training tokens.
    vocabulary: the vocabulary of all parts.
    content_hash: hash of `TokenCorpus.content_hash`, and of the weights, temperature and block of
      several parts; after a hyphen a hash of the starts of the training documents, absent in old
      runs.
  """

  parts: Mapping[str, token_cache.TokenCorpus]
  weights: tuple[float, ...]
  vocabulary: vocabularies.Vocabulary
  content_hash: str

  def split_names(self) -> list[str]:
    """Returns the names of all splits, such as 'test' and, of a part, 'test/PART'."""
    corpora_of_parts = self.parts.values()
    shared = [s for s in corpora.SPLITS if all(s in corpus.splits for corpus in corpora_of_parts)]
    of_parts = []
    for part, corpus in self.parts.items():
      if part:
        of_parts += [f'{split}/{part}' for split in corpus.splits]
    return shared + of_parts

  def split(self, name: str) -> token_split.TokenSplit:
    """Returns one of `split_names`: the split of a part, or of all parts joined."""
    split, _, part = name.partition('/')
    parts = self.parts.values()
    if part:
      parts = [self.parts[part]]
    return token_split.join([corpus.splits[split] for corpus in parts])


def prepare(
  config: data_config.DataConfig,
  open_corpus: Callable[[data_config.DataConfig], corpora.Corpus] = corpora.open_corpus,
  may_delete: bool = True,
  vocabulary: vocabularies.Vocabulary | None = None,
  workdir: pathlib.Path | None = None,
) -> Mixture:
  """Loads the tokenised corpora of a config from the cache, or tokenises them.

  Args:
    config: data config.
    open_corpus: opens the corpus of a data config.
    may_delete: see `token_cache.prepare`.
    vocabulary: the vocabulary. None: see `learned_vocabulary.open_vocabulary`.
    workdir: run directory, with the fingerprints of the shards.

  Raises:
    BadInput: see `corpora.open_corpus`, `learned_vocabulary.open_vocabulary` and
      `token_cache.prepare`.
  """
  config.check()
  opened = []
  prepared = []
  for index, part in enumerate(config.parts().values()):
    with config.errors_of_part(index):
      folders = f'*-{index}' if config.mixture else '*'
      sizes = fingerprints.first_sizes(workdir, folders)
      opened.append(dataclasses.replace(open_corpus(part), first_sizes=sizes))
  if vocabulary is None:
    vocabulary = learned_vocabulary.open_vocabulary(config, opened, may_delete)
  for index, part in enumerate(config.parts().values()):
    with config.errors_of_part(index):
      prepared.append(token_cache.prepare(part, opened[index], vocabulary, may_delete))
  if hosts.is_primary():
    _log_counts(config, prepared)
  parts = dict(zip(config.parts(), prepared, strict=True))
  return Mixture(parts, config.weights(), vocabulary, _content_hash(config, prepared))


def _content_hash(config: data_config.DataConfig, prepared: list[token_cache.TokenCorpus]) -> str:
  """Returns the hash of a mixture, see `Mixture`."""
  content_hash = prepared[0].content_hash
  if config.mixture:
    hashes = [corpus.content_hash for corpus in prepared]
    weights = [part.weight for part in config.mixture]
    text = json.dumps([hashes, weights, config.mixture_temperature, config.mixture_block])
    content_hash = hashlib.sha256(text.encode()).hexdigest()
  starts = [c.splits['train'].starts.tobytes() for c in prepared if 'train' in c.splits]
  return f'{content_hash}-{hashlib.sha256(b"".join(starts)).hexdigest()[:16]}'


def _log_counts(config: data_config.DataConfig, prepared: list[token_cache.TokenCorpus]) -> None:
  """Logs the counts of each part, and the number of held-out documents in any training text."""
  train_keys = [corpus.document_keys['train'] for corpus in prepared]
  sampled = ''
  if config.is_streamed:
    sampled = f' (of shards, the first {duplicates.COMPARED_BYTES >> 20} MB)'
  for name, corpus in zip(config.parts(), prepared, strict=True):
    shares = []
    level = logging.INFO
    for split, keys in corpus.document_keys.items():
      if split == 'train':
        continue
      is_copy = np.any([duplicates.is_in(keys, part) for part in train_keys], axis=0)
      share = is_copy.mean()
      if share:
        shares.append(f'{is_copy.sum():,} of {is_copy.size:,} {split} documents ({share:.1%})')
      if share > WARN_SHARE:
        level = logging.WARNING
    copies = f'no held-out document is in the training text{sampled}'
    if shares:
      copies = f'{", ".join(shares)} are also in the training text{sampled}'
    logging.log(level, f'{name or config.corpus}: {corpus.counts}; {copies}')
