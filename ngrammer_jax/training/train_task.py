"""The data and the validation of a run."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import logging
import pathlib
from typing import Any, Protocol

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture, train_segments, vocabularies
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.system import storage
from ngrammer_jax.training import losses, token_codebook
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import state as train_state

# Methods added after version 0.3.0: a task without them has the methods of `TrainTask`.
OPTIONAL_METHODS = ('row_states', 'merge_row_states', 'restore_rows', 'loss')

DEFAULT_LOSS = 'next_token'  # the name of `losses.next_token`


class TrainTask(Protocol):
  """The interface between the training loop and its data: `CorpusTask`, or the tasks in `tasks`.

  A subclass inherits the loss of the next token, a start from random parameters, and rows without
  states. Other classes get missing `OPTIONAL_METHODS` too.

  Attributes:
    vocabulary: vocabulary of the tokens.
    content_hash: hash of all training data; a resume needs the same data.
    best_metric: the validation metric to minimise for the best checkpoint.
    patience: number of validations without an improvement after which training stops; None
      disables early stopping.
    source_dtypes: dtype of every initial parameter from another run, by name, or empty.
    validation_unit: name of the units reported by `validate`, for the log.
  """

  vocabulary: vocabularies.Vocabulary
  content_hash: str
  best_metric: str
  patience: int | None
  source_dtypes: Mapping[str, np.dtype]
  validation_unit = 'tokens'

  def segment(self, step: int, rows: slice) -> token_batch.Batch:
    """Returns some rows of the batch of a step: a pure function of its arguments."""

  def row_states(self, step: int) -> Any:
    """Returns the states before a step of the rows of this process, as a JSON value.

    By default None: `segment` needs no state.
    """
    return None

  def merge_row_states(self, states: Sequence[Any]) -> Any:
    """Returns the JSON value stored in a checkpoint for the `row_states` of all processes.

    Args:
      states: the `row_states` of each process. By default the list itself; None if all are None.
    """
    if all(each is None for each in states):
      return None
    return list(states)

  def restore_rows(self, step: int, states: Any) -> None:
    """Continues at a step.

    Args:
      step: the next step.
      states: the result of `merge_row_states`, maybe from another number of processes; None: the
        checkpoint has no states.
    """

  def initial_state(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the initial train state, given a randomly initialised one."""
    return state

  def loss(
    self, hidden_BxTxJ: jax.Array, targets_BxT: jax.Array, context: losses.LossContext
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of each token, and extra metrics, all [B, T].

    A `losses.Loss`, such as `losses.next_token`, the default, or `losses.smoothed`. Both are
    averaged over the counted tokens (`token_batch.Batch.counts_BxT`), whatever the microbatches
    and devices. A non-finite loss ends the training; non-finite extra metrics are not recorded.

    The config of the run has the name of the loss, see `loss_name`, and a resumed run needs the
    same one.
    """
    return losses.next_token(hidden_BxTxJ, targets_BxT, context)

  def validate(
    self,
    programs: training_programs.Programs,
    state: train_state.TrainState,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """Returns the metrics of the validation split.

    Calls `report` with the number of units scored since the previous call.
    """

  def format_metrics(self, result: dict[str, Any]) -> str:
    """Formats the result of `validate` for the log."""

  def log_summary(self) -> None:
    """Logs the amount of training data."""


MakeTask = Callable[[experiment.Config], TrainTask]


def add_defaults(task: Any) -> TrainTask:
  """Returns a task with the defaults of `TrainTask` for missing methods."""
  if all(hasattr(task, name) for name in OPTIONAL_METHODS):
    return task
  return _TaskWithDefaults(task)


def loss_name(task: Any) -> str:
  """Returns the name of the loss of a task; a resumed run needs the same name.

  The name is the attribute `loss_name` of the task, or the name of the method, such as
  `SmoothedTask.loss`. Without its own loss, a task has DEFAULT_LOSS.
  """
  name = getattr(task, 'loss_name', None)
  if name is not None:
    return name
  method = getattr(task, 'loss', None)
  function = getattr(method, '__func__', method)
  if function is None or function is TrainTask.loss:
    return DEFAULT_LOSS
  return getattr(function, '__qualname__', type(function).__name__).replace('<locals>.', '')


class _TaskWithDefaults:
  """A task without the optional methods, as in version 0.3.0. The user's object is unchanged."""

  def __init__(self, task: Any):
    self._task = task

  def __getattr__(self, name: str) -> Any:
    if name in OPTIONAL_METHODS and not hasattr(self._task, name):
      return functools.partial(getattr(TrainTask, name), self._task)
    return getattr(self._task, name)


class CorpusTask(TrainTask):
  """Language modeling on the text of `config.data`, as contiguous streams.

  A subclass may have its own `loss`, or mask tokens in `segment`.

  Args:
    config: the experiment config.
    workdir: run directory; a streamed corpus stores the fingerprints of its files there.
    open_corpus: opens the corpus of a data config.
    start: maps an initial state and `segment` to the state with the parameters of another run, see
      `init_from.Start`; None: random parameters.
  """

  best_metric = 'nll_nats_per_token'
  patience = None
  merge_row_states = staticmethod(train_segments.merge_row_states)

  def __init__(
    self,
    config: experiment.Config,
    workdir: pathlib.Path | None = None,
    open_corpus: Callable[[data_config.DataConfig], corpora.Corpus] = corpora.open_corpus,
    start: Any = None,
  ):
    self._config = config
    self._start = start
    self._mixture = mixture.prepare(
      config.data,
      open_corpus,
      vocabulary=_vocabulary_before(config.data, workdir),
      workdir=workdir,
    )
    self.vocabulary = self._mixture.vocabulary
    self.content_hash = self._mixture.content_hash
    self._segments = train_segments.TrainSegments(self._mixture, config, workdir)
    self._text_step = 0  # of the first step of this training
    if start is not None:
      self._text_step = start.text_step(self.content_hash)
    for corpus in self._mixture.parts.values():
      language_modeling.check_counted(
        corpus.splits['validation'], config.evaluation.max_tokens or 0
      )

  @property
  def source_dtypes(self) -> Mapping[str, np.dtype]:
    """Dtypes of the parameters of the other run by name."""
    if self._start is None:
      return {}
    return self._start.source_dtypes()

  def split_names(self) -> list[str]:
    """Returns the splits for evaluation."""
    return self._mixture.split_names()

  def segment(self, step: int, rows: slice) -> token_batch.Batch:
    """Returns rows of a step; see `train_segments.TrainSegments`."""
    return self._segments.segment(self._text_step + step, rows)

  def row_states(self, step: int) -> list[Any] | None:
    """Returns the states of the rows of streamed corpora; see `train_segments.TrainSegments`."""
    return self._segments.row_states(self._text_step + step)

  def restore_rows(self, step: int, states: list[Any] | None) -> None:
    """Continues at a step; see `train_segments.TrainSegments`."""
    self._segments.restore_rows(self._text_step + step, states)

  def initial_state(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the initial train state.

    It has the compressed token ids of the vocabulary (see `token_codebook`) and, with `start`, the
    parameters and the codebook of another run.

    Raises:
      BadInput: the config has `init_from`, but no `start` was passed.
    """
    if self._start is None and self._config.init_from is not None:
      raise errors.BadInput(
        f'init_from={self._config.init_from} is ignored by this task: pass '
        f'start=init_from.Start(config, workdir) to its constructor'
      )
    codebook = token_codebook.fill(state.codebook, self._config.model, self.vocabulary)
    state = state.replace(codebook=codebook)
    if self._start is None:
      return state
    if self._text_step:
      self.restore_rows(0, self._start.row_states())
    self._start.log_text()
    return self._start(state, self.segment)

  def validate(
    self,
    programs: training_programs.Programs,
    state: train_state.TrainState,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """Scores the validation split, or the split of each part; see `language_modeling.combine`."""
    results = {
      name: programs.evaluate(state, corpus.splits['validation'], report)
      for name, corpus in self._mixture.parts.items()
    }
    if '' in results:  # not a mixture
      return results['']
    combined = language_modeling.combine(results, self._mixture.weights)
    for name, result in results.items():
      combined[f'{name}/loss'] = result['nll_nats_per_token']
    for name, rows in self._segments.readers.items():
      epochs = rows.epochs_before(self._text_step + int(state.step))
      if epochs is not None:
        combined[f'{name}/epochs'] = epochs
    return combined

  def format_metrics(self, result: dict[str, Any]) -> str:
    """Formats nats, perplexity, and bits per byte and per character if present."""
    split = ''
    if not result['protocol']['whole_split']:
      split = f' on the first {result["tokens"]:,} tokens'
    numbers = [f'{result["nll_nats_per_token"]:.4f} nats/token']
    numbers.append(f'perplexity {result["perplexity"]:.2f}')
    for unit in ('byte', 'character'):
      bits = result.get(f'bits_per_{unit}')
      if bits is not None:
        numbers.append(f'{bits:.4f} bits/{unit}')
    for name in self._mixture.parts:
      if name:
        loss = result[f'{name}/loss']
        numbers.append(f'{name} {loss:.4f}')
    return f'{split}: {", ".join(numbers)}'

  def log_summary(self) -> None:
    """Logs the numbers of tokens and epochs, of each part."""
    t = self._config.training
    data = self._config.data
    weighted = zip(self._mixture.parts.items(), self._mixture.weights, strict=True)
    for (name, corpus), weight in weighted:
      if corpus.train_shards is not None:
        size = f'{len(corpus.train_shards.files):,} training shards'
        epochs = ''
      else:
        tokens = len(corpus.splits['train'].tokens)
        size = f'{tokens:,} training tokens'
        if corpus.encoder.has_counts:
          size += f' ({corpus.splits["train"].num_counted() / tokens:.1%} count in the loss)'
        epochs = f' are {weight * t.steps * t.tokens_per_step / tokens:.2f} epochs'
      of_part = ''
      if name:  # of a mixture
        of_part = f', of which {weight:.2%}'
      logging.info(
        f'data: {name or data.corpus}, {size}, vocabulary {self.vocabulary.size:,}; {t.steps:,} '
        f'steps of {t.tokens_per_step:,} tokens{of_part}{epochs}'
      )


def _vocabulary_before(
  data: data_config.DataConfig, workdir: pathlib.Path | None
) -> vocabularies.Vocabulary | None:
  """Returns the vocabulary of a resumed run; None: missing, damaged or of another kind.

  A learned vocabulary is reused even if the cache was deleted. A vocabulary of a file keeps its
  begin and end tokens even if the other files of its folder have changed.
  """
  if workdir is None or not reader.steps(workdir):
    return None
  vocabulary = None
  with contextlib.suppress(errors.BadInput):
    vocabulary = vocabularies.load(workdir)
  if vocabulary is None or vocabulary.kind != data.vocabulary:
    return None
  if data.vocabulary_path is not None:
    path = storage.user_path('data.vocabulary_path', data.vocabulary_path)
    read = vocabularies.read(data.vocabulary, path, data.vocabulary_size)
    if read.definition != vocabulary.definition:
      return None
  return vocabulary
