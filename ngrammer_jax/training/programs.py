"""The compiled programs of a run: the steps of a call, and the evaluation."""

from collections.abc import Callable
import functools
import logging
import time
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import progress, sharding
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.models import language_model
from ngrammer_jax.training import optimizers
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step


class Programs:
  """The programs of a run.

  Attributes:
    mesh: of the devices.

  Raises:
    BadInput: the clusters of words of an adaptive softmax do not fit the vocabulary.
  """

  def __init__(self, config: experiment.Config, vocabulary_size: int, mesh: jax.sharding.Mesh):
    self._config, self.mesh = config, mesh
    if config.model.adaptive_softmax is not None:
      config.model.adaptive_softmax.check_vocabulary(vocabulary_size)
    self._optimizer = optimizers.make(config.optimizer, config.training.steps)
    self._model = language_model.build(config.model, vocabulary_size)
    self._vocabulary_size = vocabulary_size
    self._compiled: Callable | None = None
    self._create, self._abstract = train_state.make_initializer(
      self._model, self._optimizer, config.training.batch_size, config.seed, mesh
    )

  def create(self) -> train_state.TrainState:
    """Returns the first state."""
    return self._create()

  def abstract(self) -> train_state.TrainState:
    """Returns the state without its arrays."""
    return self._abstract

  @property
  def ready(self) -> bool:
    """Whether the call is compiled."""
    return self._compiled is not None

  def compile(self, state: train_state.TrainState, segments: streams.Segment) -> None:
    """Compiles the call, apart from training, so that its time is its own."""
    began = time.monotonic()
    self._compiled = self.trace(state, segments).lower().compile()
    logging.info('compiled in %s', progress.format_duration(time.monotonic() - began))

  def trace(self, state: train_state.TrainState, segments: streams.Segment) -> jax.stages.Traced:
    """The call, not compiled yet. State and segments may be abstract."""
    c = self._config
    frozen = c.finetune is not None and c.finetune.codebook == 'frozen'
    args = self._model, self._optimizer, c.seed, state, c.training.half_loss, frozen
    with sharding.use(self.mesh):
      return train_step.make_call(*args, c.training.parts).trace(state, segments, np.int32(0))

  def call(
    self, state: train_state.TrainState, segments: streams.Segment, steps: int
  ) -> tuple[train_state.TrainState, train_step.Metrics]:
    """Makes so many steps of a call, the first ones.

    Returns:
      The state, which replaces the one passed in, and the metrics of the steps.
    """
    state, metrics = self._compiled(state, segments, np.int32(steps))
    return state, jax.tree.map(lambda column: column[:steps], metrics)

  @functools.cached_property
  def engine(self) -> inference.Engine:
    """The engine of evaluation."""
    model = language_model.build(self._config.evaluation_model(), self._vocabulary_size)
    return inference.Engine(model, self.mesh)

  def evaluate(
    self,
    state: train_state.TrainState,
    split: token_cache.TokenSplit,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """The metrics of a split, see `language_modeling.evaluate`."""
    variables = {'params': state.params, 'codebook': state.codebook}
    return language_modeling.evaluate(self.engine, variables, split, self._config, report=report)
