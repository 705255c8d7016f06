"""The whole of an experiment as frozen dataclasses, made once from a ConfigDict.

Sections: model, data, optimizer, training, evaluation, mesh; and the seed.
"""

import dataclasses
import difflib
import json
import pathlib
import types
import typing
from typing import Any

import ml_collections

from ngrammer_jax import errors
from ngrammer_jax.data import token_cache
from ngrammer_jax.models import config as model_config

SCHEDULES = ('cosine', 'linear', 'rsqrt', 'constant')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Adam for the dense weights, Adagrad for the n-gram tables, one schedule shape."""

  learning_rate: float = 1e-3
  schedule: str = 'cosine'  # after the warm-up
  warmup_steps: int = 100
  final_fraction: float = 0.1  # of the learning rate, at the end of cosine and linear
  beta1: float = 0.9
  beta2: float = 0.99
  epsilon: float = 1e-6
  weight_decay: float = 0.0
  clip_norm: float | None = 1.0  # of the gradient of the dense weights
  table_learning_rate: float = 0.01
  table_accumulator: float = 0.1  # where Adagrad's sum of squares starts
  table_epsilon: float = 1e-10


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """How long, in what portions, and what happens on the way."""

  steps: int = 1000
  batch_size: int = 16  # rows, over all devices
  segment_length: int = 128
  segments_per_call: int = 10  # steps that run on the device without coming back
  log_every: int = 10
  evaluate_every: int = 500  # 0: never
  checkpoint_every: int = 500
  keep_checkpoints: int = 3


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """What defines a measurement; devices and rows at a time do not."""

  streams: int = 16  # a split is cut into so many contiguous parts
  segment_length: int | None = None  # None: as in training
  max_tokens: int | None = None  # of validation during training; None: all


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; -1 takes all that are left."""

  data: int = -1
  fsdp: int = 1
  model: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
  """An experiment."""

  model: model_config.ModelConfig = model_config.ModelConfig()
  data: token_cache.DataConfig = token_cache.DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  training: TrainingConfig = TrainingConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  mesh: MeshConfig = MeshConfig()
  seed: int = 0

  def check(self) -> None:
    """Raises BadInput for a combination that cannot work. Touches no device."""
    self.model.check()
    t, o = self.training, self.optimizer
    for key in ('steps', 'batch_size', 'segment_length', 'segments_per_call', 'log_every'):
      _at_least('training', key, getattr(t, key), 1)
    _at_least('training', 'checkpoint_every', t.checkpoint_every, 1)
    _at_least('training', 'evaluate_every', t.evaluate_every, 0)
    _at_least('training', 'keep_checkpoints', t.keep_checkpoints, 1)
    _at_least('evaluation', 'streams', self.evaluation.streams, 1)
    _at_least('optimizer', 'warmup_steps', o.warmup_steps, 0)
    for key in ('steps', 'log_every', 'evaluate_every', 'checkpoint_every'):
      value = getattr(t, key)
      if value % t.segments_per_call:
        near = max(1, round(value / t.segments_per_call)) * t.segments_per_call
        raise errors.BadInput(
          f'training.{key}={value} is not a multiple of training.segments_per_call='
          f'{t.segments_per_call}: use {near}, or another segments_per_call'
        )
    if o.schedule not in SCHEDULES:
      raise errors.BadInput(
        f'optimizer.schedule={o.schedule!r} is not one of: {", ".join(SCHEDULES)}'
      )
    if o.learning_rate <= 0 or o.table_learning_rate <= 0:
      raise errors.BadInput('optimizer.learning_rate and table_learning_rate must be above 0')
    for key in ('data', 'fsdp', 'model'):
      if getattr(self.mesh, key) < 1 and getattr(self.mesh, key) != -1:
        raise errors.BadInput(f'mesh.{key}={getattr(self.mesh, key)} must be at least 1, or -1')

  def evaluation_length(self) -> int:
    """Segment length of evaluation."""
    return self.evaluation.segment_length or self.training.segment_length


def _at_least(section: str, key: str, value: int, least: int) -> None:
  if value < least:
    raise errors.BadInput(f'{section}.{key}={value} must be at least {least}')


def default() -> ml_collections.ConfigDict:
  """The default experiment as a ConfigDict; optional blocks are None."""
  return ml_collections.ConfigDict(dataclasses.asdict(Config()), type_safe=False)


def block_class(annotation: Any) -> type | None:
  """The dataclass of an (optional) block, or None for a plain value."""
  options = typing.get_args(annotation) or (annotation,)
  return next((o for o in options if dataclasses.is_dataclass(o)), None)


def resolve(fields: Any, kind: type = Config, path: str = '') -> Any:
  """Frozen dataclasses from a ConfigDict or a plain dict, checked.

  Raises:
    BadInput: an unknown key (the nearest valid one is named), a value of the wrong type,
      or an impossible combination.
  """
  hints = typing.get_type_hints(kind)
  values = {}
  for key, value in dict(fields).items():
    where = f'{path}{key}'
    if key not in hints:
      raise errors.BadInput(unknown_key(where, key, hints, path))
    block = block_class(hints[key])
    if block is None:
      values[key] = _typed(where, value, hints[key])
    elif value is not None:
      values[key] = resolve(value, block, f'{where}.')
    elif type(None) in typing.get_args(hints[key]):
      values[key] = None
    else:
      raise errors.BadInput(f'{where}=None: the section cannot be left out')
  result = kind(**values)
  if kind is Config:
    result.check()
  return result


def unknown_key(where: str, key: str, valid: Any, path: str) -> str:
  """The message for a key that does not exist, naming the nearest that does."""
  near = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.0)
  return f'unknown config key {where}: did you mean {path}{near[0]}?'


def _typed(where: str, value: Any, annotation: Any) -> Any:
  """The value in its declared type; an int is a float too."""
  options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
  if float in options and type(value) is int:
    return float(value)
  if type(value) not in options:
    names = ' or '.join('None' if o is type(None) else o.__name__ for o in options)
    raise errors.BadInput(f'{where}={value!r} is not of type {names}')
  return value


def _is_union(annotation: Any) -> bool:
  return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def save(config: Config, path: pathlib.Path) -> None:
  """Writes the resolved config as JSON."""
  path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + '\n', encoding='utf-8')


def load(path: pathlib.Path) -> Config:
  """Reads what `save` wrote."""
  return resolve(json.loads(path.read_text(encoding='utf-8')))


def ngram(**fields: Any) -> ml_collections.ConfigDict:
  """The block `model.ngram`, for config files: its defaults with some fields changed."""
  values = dataclasses.asdict(model_config.NGramConfig()) | fields
  return ml_collections.ConfigDict(values, type_safe=False)
