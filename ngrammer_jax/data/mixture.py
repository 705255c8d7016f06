"""The corpora of a run: a single one, or the parts of a mixture with one vocabulary.

Every row of the batch reads a block of segments of one part, then a block of the next one, see
`mixture_schedule`. In each part it reads on where it stopped. Where the part changes, a document
starts, so that neither attention nor a memory sees tokens of another part.

B batch rows, T segment length.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
import pathlib
from typing import Any, Protocol

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import corpora, duplicates
from ngrammer_jax.data.files import fingerprints
from ngrammer_jax.data.rows import mixture_schedule, streamed_rows, streams, token_batch
from ngrammer_jax.data.tokens import learned_vocabulary, token_cache, token_split
from ngrammer_jax.system import hosts

WARN_SHARE = 0.01  # of held-out documents, found in the training text


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The tokenised corpora of a config.

  Attributes:
    parts: the parts by name; a single corpus has the name ''.
    weights: share of each part in the training tokens.
    vocabulary: the vocabulary of all parts.
    content_hash: hash of the texts and the vocabulary, and of the weights of several parts; after a
      hyphen a hash of the starts of the training documents, absent in earlier versions.
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
    """Returns one of `split_names`: that of a part, or those of all parts one after another."""
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
  """Logs the counts of each part, and how many held-out documents are in any training text."""
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
      is_copy = np.any([_is_in(keys, part) for part in train_keys], axis=0)
      share = is_copy.mean()
      shares.append(f'{is_copy.sum():,} of {is_copy.size:,} {split} documents ({share:.1%})')
      if share > WARN_SHARE:
        level = logging.WARNING
    logging.log(
      level,
      f'{name or config.corpus}: {corpus.counts}; {", ".join(shares)} are also in the training '
      f'text{sampled}',
    )


def _is_in(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
  """Returns whether each key is one of some sorted keys."""
  return np.searchsorted(sorted_keys, keys, 'right') > np.searchsorted(sorted_keys, keys)


class TrainRows(Protocol):
  """The training rows of one corpus, `streams.TrainStreams` or `streamed_rows.StreamedRows`.

  Attributes:
    epochs: number of completed epochs after the last step read here.
  """

  epochs: int

  def rows(self, step: int, rows: range) -> dict[int, token_batch.Row]:
    """Returns the segments at a step, of those rows that read the corpus there."""

  def epochs_before(self, step: int) -> float | None:
    """Returns the number of epochs that all rows read before a step; None if it is not known."""

  def states(self, step: int) -> dict[str, Any] | None:
    """Returns the states, before a step, of the rows read here; None if they need none."""

  def restore(self, step: int, saved: dict[str, Any] | None) -> None:
    """Continues at a step, with the `states` of all rows before it."""


class TrainSegments:
  """The training segments of a mixture: a function of the step, for any number of hosts.

  Args:
    mixture: the parts.
    config: the experiment config.
    workdir: run directory; of streamed corpora it has the fingerprints of the shards. None: there
      are none.

  Attributes:
    readers: the rows of each part by name.
  """

  def __init__(self, mixture: Mixture, config: experiment.Config, workdir: pathlib.Path | None):
    B = config.training.batch_size
    T = config.training.segment_length
    self._schedule = mixture_schedule.MixtureSchedule(mixture.weights, B, config.data.mixture_block)
    self._batch_size = B
    self._vocabulary = mixture.vocabulary
    self._size = f'training.batch_size={B:,} x training.segment_length={T:,}'
    self.readers: dict[str, TrainRows] = {}
    self._epochs: dict[str, int] = {}
    for index, (name, corpus) in enumerate(mixture.parts.items()):
      schedule = mixture_schedule.PartSchedule(self._schedule, index)
      if corpus.train_shards is None:
        self.readers[name] = self._read_cache(name, corpus.splits['train'], T, schedule)
        continue
      folder = f'{mixture.content_hash[:12]}-{B}x{T}'
      if name:
        folder += f'-{index}'
      self.readers[name] = streamed_rows.StreamedRows(
        corpus.train_shards,
        mixture.vocabulary,
        schedule,
        T,
        workdir / fingerprints.FOLDER / folder,
        config.data.shuffle,
        config.data.begin_of_text,
        workdir / fingerprints.OLD_FOLDER / folder,
      )

  def _read_cache(
    self,
    name: str,
    split: token_split.TokenSplit,
    length: int,
    schedule: mixture_schedule.PartSchedule,
  ) -> streams.TrainStreams:
    """Returns the rows of a part that was tokenised in advance."""
    if len(split.tokens) < self._batch_size:
      source = 'training tokens'
      if name:
        source += f' of {name}'
      raise errors.BadInput(
        f'training.batch_size={self._batch_size} is more than the {len(split.tokens)} {source}'
      )
    reader = streams.TrainStreams(split, length, schedule)
    if reader.epochs_before(1) > 1:
      self._warn_of_epochs(name)
    return reader

  def segment(self, step: int, rows: slice = slice(None)) -> token_batch.Batch:
    """Returns the segment of a step, for a slice of the batch rows."""
    row_range = range(self._batch_size)[rows]
    segments: dict[int, token_batch.Row] = {}
    for name, reader in self.readers.items():
      segments |= reader.rows(step, row_range)
      if reader.epochs > step:
        self._warn_of_epochs(name)
      if reader.epochs > self._epochs.get(name, reader.epochs):
        logging.info('%s: epoch %s ends at step %s', name or 'data', reader.epochs, f'{step:,}')
      self._epochs[name] = reader.epochs
    if step:
      is_new_B = self._schedule.parts(step) != self._schedule.parts(step - 1)
      for row in np.array(row_range)[is_new_B[rows]]:
        inputs, _, starts = segments[row]
        inputs[0] = self._vocabulary.document_start
        starts[0] = True
    return token_batch.stack_rows(segments[row] for row in row_range)

  def row_states(self, step: int) -> list[Any] | None:
    """Returns the states, before a step, of the rows read here: a JSON value for each part.

    A part that was tokenised in advance has None. If no part is streamed, None is returned.
    """
    parts = [reader.states(step) for reader in self.readers.values()]
    if not any(parts):
      return None
    return parts

  def restore_rows(self, step: int, states: list[Any] | None) -> None:
    """Continues at a step, with the `row_states` of all rows before it.

    Without them, the rows are read again up to the step, in runs of version 0.3.0 from `places/`.
    """
    for reader, saved in zip(self.readers.values(), states or (), strict=False):
      if saved is not None:
        reader.restore(step, saved)

  def _warn_of_epochs(self, name: str) -> None:
    text = 'the whole training text'
    if name:
      text += f' of {name}'
    hosts.warn_once(f'a step of {self._size} reads {text}: lower one of them')


def merge_row_states(parts_of_hosts: Sequence[list[Any] | None]) -> list[Any] | None:
  """Joins the `TrainSegments.row_states` of all hosts: the states of all rows."""
  merged = parts_of_hosts[0]
  for parts in parts_of_hosts[1:]:
    for states, others in zip(merged or (), parts or (), strict=True):
      if states is not None:
        states['rows'] |= others['rows']
  return merged
