"""A trained run as an object: what verbs, notebooks and other programs work with."""

import dataclasses
import functools
import logging
import pathlib
from typing import Any

import jax

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, progress, sharding
from ngrammer_jax.data import corpora, token_cache
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.evaluation import language_modeling
from ngrammer_jax.models import transformer
from ngrammer_jax.training import checkpoints, optimizers, workdirs
from ngrammer_jax.training import state as train_state


@dataclasses.dataclass(frozen=True)
class Run:
  """A workdir. Nothing is read before it is asked for.

  Attributes:
    workdir: of the run.
    config: what it was trained with.
  """

  workdir: pathlib.Path
  config: experiment.Config

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """Reads and writes the run's tokens."""
    return vocabularies.load(self.workdir)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """All devices: in the shape of the config where it fits them, else all along `data`."""
    m = self.config.mesh
    try:
      return sharding.make_mesh(m.data, m.fsdp, m.model)
    except errors.BadInput as error:
      logging.info('%s; using all of them along mesh.data', error)
      return sharding.make_mesh()

  @functools.cached_property
  def model(self) -> transformer.TransformerLM:
    """The model, without its variables."""
    return transformer.TransformerLM(self.config.model, self.vocabulary.size)

  @functools.cached_property
  def state(self) -> train_state.TrainState:
    """The newest checkpoint. Raises BadInput where there is none."""
    t = self.config.training
    optimizer = optimizers.make(self.config.optimizer, t.steps)
    _, abstract = train_state.initialiser(
      self.model, optimizer, t.batch_size, self.config.seed, self.mesh
    )
    # The rows of training need not be divisible by the devices of an evaluation.
    whole = lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding.replicated(self.mesh)
    )
    abstract = abstract.replace(memory=jax.tree.map(whole, abstract.memory))
    found = checkpoints.restore_newest(self.workdir, abstract)
    if found is None:
      raise errors.BadInput(f'--workdir={self.workdir} has no checkpoint yet')
    return found[1]

  def evaluate(self, split: str = 'test') -> dict[str, Any]:
    """Scores every token of a split of the run's corpus; see `language_modeling.Evaluator`."""
    if split not in corpora.SPLITS:
      raise errors.BadInput(f'--split={split} is not one of: {", ".join(corpora.SPLITS)}')
    corpus = token_cache.prepare(self.config.data)
    workdirs.check_text(self.workdir, self.config, corpus.content_hash)
    tokens = corpus.splits[split]
    evaluate = language_modeling.Evaluator(
      self.model,
      self.mesh,
      self.config.evaluation.streams,
      self.config.evaluation_length(),
      self.config.training.batch_size,
    )
    with progress.Progress(f'evaluating {split}', len(tokens.tokens), 'tokens') as bar:
      result = evaluate(self.state.params, self.state.codebook, tokens, report=bar.advance)
    return {'split': split, 'step': int(self.state.step), **result}


def load_run(workdir: str | pathlib.Path) -> Run:
  """Opens the workdir of a run. Raises BadInput where it is none."""
  workdir = pathlib.Path(workdir)
  return Run(workdir, workdirs.load_config(workdir))
