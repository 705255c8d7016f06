"""The data and the validation of a run."""

from collections.abc import Callable
import logging
import pathlib
from typing import Any, Protocol

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import corpora, packing, seen_files, streams, token_cache, vocabularies
from ngrammer_jax.training import programs, token_codebook
from ngrammer_jax.training import state as train_state


class TrainTask(Protocol):
  """The interface between the training loop and its data: `CorpusTask`, or the tasks in `tasks`.

  Attributes:
    vocabulary: vocabulary of the tokens.
    content_hash: hash of all training data; a resume needs the same data.
    best_metric: the validation metric whose lowest value marks the best checkpoint.
    patience: number of validations without an improvement after which training stops; None
      disables early stopping.
  """

  vocabulary: vocabularies.Vocabulary
  content_hash: str
  best_metric: str
  patience: int | None

  def segment(self, step: int, rows: slice) -> streams.Segment:
    """Returns some rows of the batch of a step: a pure function of its arguments."""

  def initial_state(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the state that training starts from, given a randomly initialised one."""

  def validate(
    self, run: programs.Programs, state: train_state.TrainState, report: Callable[[int], None]
  ) -> dict[str, Any]:
    """Returns the metrics of the validation split; `report` is called with units of progress."""

  def format_metrics(self, result: dict[str, Any]) -> str:
    """Formats the result of `validate` for the log."""

  def log_summary(self) -> None:
    """Logs the amount of training data."""


class CorpusTask:
  """Language modeling on the text of `config.data`, as contiguous streams.

  Args:
    config: the experiment config.
    workdir: run directory; a streamed corpus stores its reader positions there.
    find: finds the corpus, see `token_cache.prepare`.
    start: from an initial state to that with the parameters of another run, see
      `init_from.Start`; None: training starts from random parameters.
  """

  best_metric, patience = 'nll_nats_per_token', None

  def __init__(
    self,
    config: experiment.Config,
    workdir: pathlib.Path | None = None,
    find: Callable[[data_config.DataConfig], corpora.Corpus] | None = None,
    start: Callable[[train_state.TrainState], train_state.TrainState] | None = None,
  ):
    self._config, self._start, t = config, start, config.training
    self._corpus = token_cache.prepare(
      config.data, find, first_sizes=seen_files.first_sizes(workdir)
    )
    self.vocabulary, self.content_hash = self._corpus.vocabulary, self._corpus.content_hash
    if self._corpus.train_shards is not None:
      if workdir is None:
        raise ValueError(
          f'data.corpus={config.data.corpus!r} needs a workdir for its reader positions'
        )
      B, T = t.batch_size, t.segment_length
      positions_dir = workdir / 'places' / f'{self.content_hash[:12]}-{B}x{T}'
      self._packing = packing.PackedDataset(
        self._corpus.train_shards,
        *(self.vocabulary, B, T, positions_dir),
        *(config.data.shuffle, config.data.begin_of_text),
      )
      return
    self._split = self._corpus.splits['train']
    if len(self._split.tokens) < t.batch_size:
      raise errors.BadInput(
        f'training.batch_size={t.batch_size} is more than the {len(self._split.tokens)} training '
        f'tokens'
      )

  def segment(self, step: int, rows: slice) -> streams.Segment:
    """Returns rows of a step; see `streams.train_segment` and `packing.PackedDataset`."""
    if self._corpus.train_shards is not None:
      return self._packing.segment(step, rows)
    t = self._config.training
    return streams.train_segment(self._split, step, t.batch_size, t.segment_length, rows)

  def initial_state(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the state that training starts from.

    It has the parameters and the codebook of another run, if `start` says so, and otherwise the
    compressed token ids of the vocabulary, see `token_codebook`.
    """
    if self._start is not None:
      return self._start(state)
    codebook = token_codebook.fill(state.codebook, self._config.model, self.vocabulary)
    return state.replace(codebook=codebook)

  def validate(
    self, run: programs.Programs, state: train_state.TrainState, report: Callable[[int], None]
  ) -> dict[str, Any]:
    """Scores the validation split; see `language_modeling.evaluate`."""
    return run.evaluate(state, self._corpus.splits['validation'], report)

  def format_metrics(self, result: dict[str, Any]) -> str:
    """Formats nats, perplexity, and bits per byte and per character if there are any."""
    is_full_split = result['protocol']['whole_split']
    split = '' if is_full_split else f' on the first {result["tokens"]:,} tokens'
    parts = [f'{result["nll_nats_per_token"]:.4f} nats/token']
    parts.append(f'perplexity {result["perplexity"]:.2f}')
    for unit in ('byte', 'character'):
      bits = result.get(f'bits_per_{unit}')
      parts += [] if bits is None else [f'{bits:.4f} bits/{unit}']
    return f'{split}: {", ".join(parts)}'

  def log_summary(self) -> None:
    """Logs the numbers of tokens and epochs."""
    t, shards = self._config.training, self._corpus.train_shards
    if shards is not None:
      size, epochs = f'{len(shards.files):,} training shards', ''
    else:
      tokens = len(self._split.tokens)
      size = f'{tokens:,} training tokens'
      epochs = f' are {t.steps * t.tokens_per_step / tokens:.2f} epochs'
    logging.info(
      'data: %s, %s, vocabulary %s; %s steps of %s tokens%s',
      self._config.data.corpus,
      size,
      f'{self.vocabulary.size:,}',
      f'{t.steps:,}',
      f'{t.tokens_per_step:,}',
      epochs,
    )
