"""The training batches of a mixture.

B batch rows, T segment length.
"""

from collections.abc import Sequence
import logging
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.data import mixture as mixtures
from ngrammer_jax.data.files import fingerprints
from ngrammer_jax.data.rows import (
  cached_rows,
  interface,
  mixture_schedule,
  streamed_rows,
  token_batch,
)
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.system import hosts


class TrainSegments:
  """The training segments of a mixture: a function of the step, for any number of hosts.

  Args:
    mixture: the parts.
    config: the experiment config.
    workdir: run directory, with the fingerprints of the shards. None: no corpus is streamed.

  Attributes:
    readers: the rows of each part by name.
  """

  def __init__(
    self, mixture: mixtures.Mixture, config: experiment.Config, workdir: pathlib.Path | None
  ):
    B = config.training.batch_size
    T = config.training.segment_length
    self._schedule = mixture_schedule.MixtureSchedule(mixture.weights, B, config.data.mixture_block)
    self._batch_size = B
    self._vocabulary = mixture.vocabulary
    self._has_counts = any(corpus.encoder.has_counts for corpus in mixture.parts.values())
    self._size = f'training.batch_size={B:,} x training.segment_length={T:,}'
    self.readers: dict[str, interface.TrainRows] = {}
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
        corpus.encoder,
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
  ) -> cached_rows.CachedRows:
    """Returns the rows of a part tokenised in advance."""
    if len(split.tokens) < self._batch_size:
      source = 'training tokens'
      if name:
        source += f' of {name}'
      raise errors.BadInput(
        f'training.batch_size={self._batch_size} is more than the {len(split.tokens)} {source}'
      )
    reader = cached_rows.CachedRows(split, length, schedule)
    if reader.epochs_before(1) > 1:
      self._warn_of_epochs(name)
    return reader

  def segment(self, step: int, rows: slice = slice(None)) -> token_batch.Batch:
    """Returns the segment of a step, for a slice of the batch rows."""
    row_range = range(self._batch_size)[rows]
    segments: dict[int, token_split.Row] = {}
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
        segments[row].inputs[0] = self._vocabulary.document_start
        segments[row].starts[0] = True
    if self._has_counts:  # then every batch has them: the shapes of all steps and hosts are equal
      for row, segment in segments.items():
        if segment.counts is None:
          segments[row] = segment._replace(counts=np.ones(len(segment.inputs), bool))
    return token_batch.stack_rows(segments[row] for row in row_range)

  def row_states(self, step: int) -> list[Any] | None:
    """Returns the states, before a step, of the rows read here: a JSON value for each part.

    A part tokenised in advance has None. Returns None if no part is streamed.
    """
    parts = [reader.states(step) for reader in self.readers.values()]
    if not any(parts):
      return None
    return parts

  def restore_rows(self, step: int, states: list[Any] | None) -> None:
    """Continues at a step, with the `row_states` of all rows before it.

    Without states, the rows are read again up to the step, in a run of version 0.3.0 from its
    `places/`.
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
