"""A model that is traced and compiled in no time, to try the loop and all that is around it.

`Programs` stands for `programs.Programs`: the loop, its data, checkpoints, records, signals and
processes are the real ones. What it learns depends on every token and on the order of the steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.runs import restoring
from ngrammer_jax.training import flops, programs
from ngrammer_jax.training import state as train_state


class Programs:
  """See `programs.Programs`."""

  def __init__(self, config, vocabulary_size, mesh, source=None, loss=None):
    self._config, self.mesh, self.is_compiled = config, mesh, False
    self.remat = config.model.remat
    self.labels, self.frozen = {'embedding': 'ngram_table'}, {}
    self.decay_mask = {'embedding': False}
    place = lambda rows: sharding.rows_sharding(mesh) if rows else sharding.replicated(mesh)
    leaf = lambda shape, dtype, rows=False: jax.ShapeDtypeStruct(shape, dtype, sharding=place(rows))
    self.pack = self.unpack = lambda state: state
    self.abstract = train_state.TrainState(
      step=leaf((), jnp.int32),
      params={'embedding': leaf((8,), jnp.float32)},
      codebook={},
      opt_state={},
      memory={'rows': leaf((config.training.batch_size,), jnp.float32, rows=True)},
    )

  def create(self):
    leaf_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
    make = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
    put = lambda leaf, place: jax.make_array_from_callback(
      leaf.shape, place, lambda index: make(leaf)[index]
    )
    return jax.tree.map(put, self.abstract, leaf_shardings)

  def lookup_reader(self, state):
    return None

  def read_ahead(self, calls, state):
    return calls

  def wait(self):
    pass

  def compile(self, state, segments):
    self.is_compiled = True

  def peak_bytes(self):
    return 2**20

  @property
  def flops(self):
    return flops.ModelFlops(per_segment=0, per_token=10, per_key=0, length=16)

  def call(self, state, segments, steps):
    leaf_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
    state, metrics = _steps(leaf_shardings)(state, segments.tokens_BxT, np.int32(steps))
    return state, jax.tree.map(lambda column: column[:steps], metrics)

  def evaluate(self, state, split, report):
    report(len(split.tokens))
    return {
      'nll_nats_per_token': float(np.abs(np.asarray(state.params['embedding'])).sum()),
      'perplexity': 2.0,
      'bits_per_byte': None,
      'top1_accuracy': 0.5,
      'tokens': len(split.tokens),
      'protocol': {'whole_split': True},
    }


@functools.cache
def _compiled(places, tree):
  leaf_shardings = jax.tree.unflatten(tree, places)

  def step(state, tokens_BxT):
    x_BxT = tokens_BxT.astype(jnp.float32) / 257
    kernel = jnp.sin(jnp.arange(8.0)[:, None] * jnp.arange(x_BxT.shape[1]))
    rows_B = 0.5 * state.memory['rows'] + x_BxT.sum(axis=1)
    embedding = 0.9 * state.params['embedding'] + (kernel @ x_BxT.T * rows_B).mean(axis=1)
    loss = jnp.abs(embedding).mean()
    after = state.replace(
      step=state.step + 1, params={'embedding': embedding}, memory={'rows': rows_B}
    )
    return after, {'loss': loss, 'gradient_norm/dense': loss}

  def step_or_skip(state, numbered):
    is_trained, tokens_BxT = numbered
    skip = lambda state, _: (state, {'loss': jnp.nan, 'gradient_norm/dense': jnp.nan})
    return jax.lax.cond(is_trained, step, skip, state, tokens_BxT)

  def call(state, segments, steps):
    return jax.lax.scan(step_or_skip, state, (jnp.arange(len(segments)) < steps, segments))

  everywhere = sharding.replicated(leaf_shardings.step.mesh)
  return jax.jit(call, out_shardings=(leaf_shardings, everywhere))


def _steps(leaf_shardings):
  leaves, tree = jax.tree.flatten(leaf_shardings)
  return _compiled(tuple(leaves), tree)


def abstract_variables(run):
  """See `restoring.abstract_variables`."""
  state = Programs(run.config, run.vocabulary_size, run.mesh).abstract
  return {'params': state.params, 'codebook': state.codebook}


def install(patch=setattr) -> None:
  """Has the loop train this model: in a test by monkeypatch.setattr."""
  patch(programs, 'Programs', Programs)
  patch(restoring, 'abstract_variables', abstract_variables)
