"""What several tests of training share: what a run left behind, and how to disturb it."""

import dataclasses
import json
import math
import os
import pathlib
import signal
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.checkpoints import manifest, reader
from ngrammer_jax.models import language_model
from ngrammer_jax.training import recorder, train_task
from ngrammer_jax.training import state as train_state


def arrays(workdir: pathlib.Path, step: int | None = None) -> dict[str, Any]:
  """Dtype, shape and checksum of every array of a checkpoint, of the last one if none is named."""
  step = reader.steps(workdir)[-1] if step is None else step
  return manifest.verify(workdir / 'checkpoints' / str(step)).leaves


def records(workdir: pathlib.Path) -> list[dict[str, float]]:
  """The lines of metrics.jsonl, without the times."""
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  times = ('tokens_per_second', 'mfu', 'goodput')
  return [{k: v for k, v in line.items() if k not in times} for line in lines]


def names(workdir: pathlib.Path) -> list[str]:
  """Of all folders of checkpoints."""
  return sorted(path.name for path in (workdir / 'checkpoints').iterdir())


def cut(path: pathlib.Path) -> None:
  """Halves a file."""
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path) -> None:
  """Flips a bit in the middle of a file."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 16
  path.write_bytes(content)


def damage(checkpoint: pathlib.Path) -> tuple[pathlib.Path, bytes]:
  """Flips a bit of the largest file of arrays; returns its name and what it holds then."""
  path = max(checkpoint.rglob('d/*'), key=lambda path: path.stat().st_size)
  flip(path)
  return path.relative_to(checkpoint), path.read_bytes()


def write_config(path: pathlib.Path, config: experiment.Config) -> pathlib.Path:
  """A config file for a command line."""
  fields = dataclasses.asdict(config)
  path.write_text(
    f'import ml_collections\ndef get_config(): return ml_collections.ConfigDict({fields!r})\n'
  )
  return path


def drawn_state(abstract: train_state.TrainState) -> train_state.TrainState:
  """A state with drawn parameters and zeros beside them; compiles nothing."""
  random = np.random.default_rng(0)

  def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(random.normal(0, 0.1, leaf.shape).astype(leaf.dtype), leaf.sharding)

  def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

  return jax.tree.map(zeros, abstract).replace(params=jax.tree.map(draw, abstract.params))


def no_initialization(monkeypatch: Any) -> None:
  """Has training begin with drawn parameters: the first state takes as long to compile as a step.

  It is for models without a codebook.
  """
  make_initializer = train_state.make_initializer

  def make_drawn(
    model: Any, variables: Any, optimizer: Any, batch_size: int, *args: Any, **given: Any
  ) -> tuple[Any, train_state.TrainState]:
    _, abstract = make_initializer(model, variables, optimizer, batch_size, *args, **given)
    assert not abstract.codebook

    def create() -> train_state.TrainState:
      memory = language_model.empty_memory(model.config, batch_size)
      shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.memory)
      return drawn_state(abstract).replace(memory=jax.device_put(memory, shardings))

    return create, abstract

  monkeypatch.setattr(train_state, 'make_initializer', make_drawn)


def no_validation(monkeypatch: Any) -> None:
  """Leaves the evaluation out, which has programs of its own."""
  result = {'nll_nats_per_token': 1.0, 'perplexity': math.e, 'bits_per_byte': None}
  result['protocol'] = {'whole_split': True}
  monkeypatch.setattr(train_task.CorpusTask, 'validate', lambda *args: result)


def signal_at(monkeypatch: Any, signals: dict[int, signal.Signals]) -> None:
  """Sends this process signals, each once, in the call that ends with a step."""
  add = recorder.Recorder.add

  def add_and_send(self, done, metrics):
    add(self, done, metrics)
    if done in signals:
      os.kill(os.getpid(), signals.pop(done))

  monkeypatch.setattr(recorder.Recorder, 'add', add_and_send)
