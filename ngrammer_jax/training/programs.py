"""What a run computes, for the windows in force: the steps of a call, and the evaluation.

Where spans are learned, a program is compiled for windows that hold them, and exchanged when
they move. Everything else has one program.
"""

from collections.abc import Callable
import functools
import itertools
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import progress, sharding
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.models import language_model, view
from ngrammer_jax.training import manifest, optimizers, windows
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step


class Programs:
  """The programs of a run, and which of them is in force.

  Attributes:
    mesh: where everything lies.
    windows: in force. None: spans are not learned, or cannot be followed.
    changes: of the windows so far.

  Raises:
    BadInput: the clusters of words of an adaptive softmax do not fit the vocabulary.
  """

  def __init__(self, config: experiment.Config, vocabulary_size: int, mesh: jax.sharding.Mesh):
    self._config, self.mesh = config, mesh
    if config.model.adaptive_softmax is not None:
      config.model.adaptive_softmax.check_vocabulary(vocabulary_size)
    self._optimizer = optimizers.make(config.optimizer, config.training.steps)
    self._model = language_model.build(config.model, vocabulary_size)
    self._evaluated = language_model.build(config.evaluation_model(), vocabulary_size)
    self._compiled: dict[view.Windows | None, Callable] = {}
    self._engines: dict[view.Windows | None, inference.Engine] = {}
    self.windows, self.changes = windows.first(config.model), 0
    self._fitted, self._growth = windows.fitted(config.model), windows.growth(config)

  def create(self) -> train_state.TrainState:
    """The first state."""
    return self._initialiser(self.windows)[0]()

  def abstract(self, known: manifest.Manifest | None = None) -> train_state.TrainState:
    """The state without its arrays, for the windows of a checkpoint, which come into force."""
    if self._fitted and known is not None and known.windows is not None:
      self.windows, self.changes = tuple(map(tuple, known.windows)), known.changes
    return self._initialiser(self.windows)[1]

  def checked(self, state: train_state.TrainState, step: int) -> train_state.TrainState:
    """The state at a step, fitted where it is time for that."""
    due = self._fitted and step % self._config.model.span.check_every == 0
    return self.fitted(state) if due else state

  def fitted(self, state: train_state.TrainState) -> train_state.TrainState:
    """The state for windows that hold its spans, which come into force."""
    m = self._config.model
    if not self._fitted:
      return state
    found = windows.chosen(m, windows.spans(m, state.params), self.windows, self.changes)
    if found == self.windows:
      return state
    self.windows, self.changes = found, self.changes + 1
    logging.info('step %s  windows, %s', f'{int(state.step):,}', self.described())
    resize = jax.jit(
      functools.partial(windows.resized, m, windows=found, more=self._growth),
      out_shardings=sharding.rows_sharding(self.mesh),
    )
    with sharding.use(self.mesh):
      return state.replace(memory=resize(state.memory))

  def described(self) -> str:
    """The windows: of runs of equal layers, as heads x tokens."""
    if not self._fitted:
      return f'{", ".join(map(str, self.windows[0]))} tokens, as long as the spans of a segment are'
    described, first = [], 0
    for sizes, run in itertools.groupby(self.windows, sorted):
      last = first + len(list(run)) - 1
      layers = f'layer {first}' if first == last else f'layers {first}-{last}'
      counted = ', '.join(f'{sizes.count(size)} x {size}' for size in sorted(set(sizes)))
      described.append(f'{layers}: {counted}')
      first = last + 1
    return f'heads x tokens: {"; ".join(described)}'

  @property
  def ready(self) -> bool:
    """Whether the call is compiled."""
    return self.windows in self._compiled

  def compile(self, state: train_state.TrainState, segments: streams.Segment) -> None:
    """Compiles the call, apart from training, so that its time is its own."""
    began = time.monotonic()
    self._compiled[self.windows] = self.trace(state, segments).lower().compile()
    number = f' (program {len(self._compiled)})' if len(self._compiled) > 1 else ''
    logging.info('compiled in %s%s', progress.format_duration(time.monotonic() - began), number)

  def trace(self, state: train_state.TrainState, segments: streams.Segment) -> jax.stages.Traced:
    """The call, not compiled yet. State and segments may be abstract."""
    c, model = self._config, self._model.clone(windows=self.windows)
    frozen = c.finetune is not None and c.finetune.codebook == 'frozen'
    given = model, self._optimizer, c.seed, state, c.training.half_loss, frozen, c.training.parts
    with sharding.use(self.mesh):
      return train_step.make_call(*given).trace(state, segments, np.int32(0))

  def call(
    self,
    state: train_state.TrainState,
    segments: streams.Segment,
    first: int,
    before: train_step.Metrics | None = None,
  ) -> tuple[train_state.TrainState, train_step.Metrics, bool]:
    """Makes the steps of a call that are still to be made.

    Args:
      state: to go on from.
      segments: of all steps of the call.
      first: the number of the first of them.
      before: metrics of those that are made.

    Returns:
      The state, the metrics, and whether all is done. If not, a span has outgrown its window.
    """
    state, metrics = self._compiled[self.windows](state, segments, np.int32(first))
    if not self._fitted:
      return state, metrics, True
    made = metrics.pop('made')
    if before is not None:
      metrics = jax.tree.map(lambda new, old: jnp.where(made, new, old), metrics, before)
    return state, metrics, int(state.step) == first + self._config.training.segments_per_call

  def engine(self, state: train_state.TrainState) -> inference.Engine:
    """The engine of evaluation, with windows that hold the spans of a state."""
    model = self.evaluated(state)
    if model.windows not in self._engines:
      self._engines[model.windows] = inference.Engine(model, self.mesh)
    return self._engines[model.windows]

  def evaluate(
    self,
    state: train_state.TrainState,
    split: token_cache.TokenSplit,
    max_tokens: int | None,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """The metrics of a split, see `language_modeling.evaluate`."""
    variables = {'params': state.params, 'codebook': state.codebook}
    return language_modeling.evaluate(
      self.engine(state), variables, split, self._config, max_tokens=max_tokens, report=report
    )

  def evaluated(self, state: train_state.TrainState) -> language_model.LanguageModel:
    """The model as a state is evaluated, with windows that hold its spans.

    Those in force may not, after the last step of a call; they stay what they are, for a resume
    must not depend on what was evaluated.
    """
    m = self._config.model
    if not self._fitted:
      return self._evaluated.clone(windows=self.windows)
    least = windows.chosen(m, windows.spans(m, state.params), reserve=0)
    longer = lambda *layers: tuple(map(max, *layers))
    return self._evaluated.clone(windows=tuple(map(longer, self.windows, least)))

  def _initialiser(self, of: view.Windows | None) -> tuple[Any, Any]:
    model, c = self._model.clone(windows=of), self._config
    return train_state.make_initializer(
      model, self._optimizer, c.training.batch_size, c.seed, self.mesh, self._growth
    )
