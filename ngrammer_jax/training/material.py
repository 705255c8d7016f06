"""What a run is trained on and judged by."""

from collections.abc import Callable
import logging
import pathlib
from typing import Any, Protocol

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.data import corpora, packing, streams, token_cache
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.training import programs
from ngrammer_jax.training import state as train_state


class Material(Protocol):
  """What the loop knows of it: a corpus here, the tasks in `tasks`.

  Attributes:
    vocabulary: of the tokens.
    content_hash: of all there is to learn from; a resume asks for the same.
    judged_by: the metric of a validation whose least value is the best.
    patience: validations without a better one after which training ends. None: it goes on.
  """

  vocabulary: vocabularies.Vocabulary
  content_hash: str
  judged_by: str
  patience: int | None

  def segment(self, step: int, rows: slice) -> streams.Segment:
    """What some rows of the batch see at a step, a function of nothing else."""

  def first(self, state: train_state.TrainState) -> train_state.TrainState:
    """What training begins with, of a state that was just made."""

  def validate(
    self, run: programs.Programs, state: train_state.TrainState, report: Callable[[int], None]
  ) -> dict[str, Any]:
    """The metrics of the validation split; `report` is called while it is scored."""

  def said(self, result: dict[str, Any]) -> str:
    """These metrics, to read."""

  def describe(self) -> None:
    """Logs what is about to be learned."""


class Corpus:
  """The text of `config.data`, as contiguous streams.

  Args:
    config: the experiment.
    workdir: of the run, where a corpus that is read as it is needed has its places.
    find: see `token_cache.prepare`.
  """

  judged_by, patience = 'nll_nats_per_token', None

  def __init__(
    self,
    config: experiment.Config,
    workdir: pathlib.Path | None = None,
    find: Callable[[token_cache.DataConfig], corpora.Corpus] | None = None,
  ):
    self._config, t = config, config.training
    self._corpus = token_cache.prepare(config.data, find)
    self.vocabulary, self.content_hash = self._corpus.vocabulary, self._corpus.content_hash
    if self._corpus.train_shards is not None:
      if workdir is None:
        raise ValueError(f'data.corpus={config.data.corpus!r} needs a workdir for its places')
      B, T = t.batch_size, t.segment_length
      places = workdir / 'places' / f'{self.content_hash[:12]}-{B}x{T}'
      self._packing = packing.PackedDataset(
        self._corpus.train_shards, self.vocabulary, B, T, places
      )
      return
    self._split = self._corpus.splits['train']
    if len(self._split.tokens) < t.batch_size:
      raise errors.BadInput(
        f'training.batch_size={t.batch_size} is more than the {len(self._split.tokens)} training '
        f'tokens'
      )

  def segment(self, step: int, rows: slice) -> streams.Segment:
    """See `streams.train_segment`, or `packing.PackedDataset`."""
    if self._corpus.train_shards is not None:
      return self._packing.segment(step, rows)
    t = self._config.training
    return streams.train_segment(self._split, step, t.batch_size, t.segment_length, rows)

  def first(self, state: train_state.TrainState) -> train_state.TrainState:
    """As it was made."""
    return state

  def validate(
    self, run: programs.Programs, state: train_state.TrainState, report: Callable[[int], None]
  ) -> dict[str, Any]:
    """See `language_modeling.evaluate`."""
    validation, limit = self._corpus.splits['validation'], self._config.evaluation.max_tokens
    return run.evaluate(state, validation, limit, report)

  def said(self, result: dict[str, Any]) -> str:
    """Nats, perplexity and bits per byte."""
    bits, split = result['bits_per_byte'], ''
    if not result['protocol']['whole_split']:
      split = f' on the first {result["tokens"]:,} tokens'
    bits = '' if bits is None else f', {bits:.4f} bits/byte'
    nats = result['nll_nats_per_token']
    return f'{split}: {nats:.4f} nats/token, perplexity {result["perplexity"]:.2f}{bits}'

  def describe(self) -> None:
    """Tokens and epochs."""
    t, stream = self._config.training, self._corpus.train_shards
    if stream is not None:
      logging.info(
        'data: %s, shards of training: %s, vocabulary %s; %s steps of %s tokens',
        self._config.data.corpus,
        f'{len(stream.names):,}',
        f'{self.vocabulary.size:,}',
        f'{t.steps:,}',
        f'{t.batch_size * t.segment_length:,}',
      )
      return
    tokens = len(self._split.tokens)
    logging.info(
      'data: %s, %s training tokens, vocabulary %s; %s steps of %s tokens are %.2f epochs',
      self._config.data.corpus,
      f'{tokens:,}',
      f'{self.vocabulary.size:,}',
      f'{t.steps:,}',
      f'{t.batch_size * t.segment_length:,}',
      t.steps * t.batch_size * t.segment_length / tokens,
    )
