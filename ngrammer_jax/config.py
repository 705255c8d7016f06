"""The whole of an experiment as frozen dataclasses, made once from a ConfigDict.

Sections: model, data, optimizer, training, evaluation, mesh; and the seed.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import difflib
import json
import math
import pathlib
import types
import typing
from typing import Any

import ml_collections

from ngrammer_jax import errors, evaluation_config, files, finetune_config, mesh_config
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import recurrent_config

ALGORITHMS = ('adam', 'lamb', 'adagrad')
SCHEDULES = (
  *('cosine', 'linear', 'rsqrt', 'constant'),
  *('transformer_xl', 'transformer_xl_tensorflow'),  # those of the official codes
)


@dataclasses.dataclass(frozen=True)
class TableConfig:
  """Adagrad for the n-gram tables."""

  learning_rate: float = 0.01
  accumulator: float = 0.1  # where the sum of squares starts
  epsilon: float = 1e-10


@dataclasses.dataclass(frozen=True)
class AdamConfig:
  """What Adam and LAMB remember of the gradients."""

  beta1: float = 0.9
  beta2: float = 0.99


@dataclasses.dataclass(frozen=True)
class DropConfig:
  """The last steps, at a fraction of the rate that the schedule gives them."""

  steps: int = 10_000
  fraction: float = 0.1


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Adam for the dense weights, Adagrad for the n-gram tables, one schedule shape."""

  # Of the dense weights; lamb: Adam, each array by its own norm; adagrad: see `optimizers`.
  algorithm: str = 'adam'
  learning_rate: float = 1e-3
  schedule: str = 'cosine'  # after the warm-up
  warmup_steps: int = 100
  final_fraction: float = 0.1  # of the learning rate, at the end of cosine and linear
  epsilon: float = 1e-6
  weight_decay: float = 0.0
  clip_norm: float | None = 1.0  # of the gradient of the dense weights; adagrad: of each array
  adam: AdamConfig | None = None  # None: its defaults
  table: TableConfig | None = None  # the same
  drop: DropConfig | None = None


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
  """Some rows of a step are computed after others, for one update: it takes less memory."""

  parts: int = 2


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """How long, in what portions, and what happens on the way."""

  steps: int = 1000
  batch_size: int = 16  # rows, over all devices
  segment_length: int = 128
  half_loss: bool = False  # only the later half of a segment counts
  segments_per_call: int = 10  # steps that run on the device without coming back
  log_every: int = 10
  evaluate_every: int = 500  # and after the last step; 0: only then
  checkpoint_every: int = 500
  keep_checkpoints: int = 3
  accumulation: AccumulationConfig | None = None

  def calls(self, first_step: int) -> Iterator[tuple[int, int]]:
    """The first and the end step of every call from a step on.

    A call ends at the last step and wherever something happens, so that where calls end depends on
    the step alone.
    """
    every = self.segments_per_call, self.log_every, self.evaluate_every, self.checkpoint_every
    while first_step < self.steps:
      ends = [(first_step // steps + 1) * steps for steps in every if steps]
      end = min(*ends, self.steps)
      yield first_step, end
      first_step = end

  @property
  def parts(self) -> int:
    """In which the rows of a step are computed."""
    return 1 if self.accumulation is None else self.accumulation.parts


@dataclasses.dataclass(frozen=True)
class Config:
  """An experiment."""

  model: model_config.ModelConfig = model_config.ModelConfig()
  data: token_cache.DataConfig = token_cache.DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  training: TrainingConfig = TrainingConfig()
  evaluation: evaluation_config.EvaluationConfig = evaluation_config.EvaluationConfig()
  mesh: mesh_config.MeshConfig = mesh_config.MeshConfig()
  seed: int = 0
  init_from: str | None = None  # a workdir, whose newest checkpoint fine-tuning begins with
  finetune: finetune_config.FinetuneConfig | None = None

  def check(self) -> None:
    """Raises BadInput for a combination that cannot work. Touches no device."""
    self.model.check()
    if self.evaluation.memory is not None:
      self.evaluation.memory.check(self.model)
    try:
      self.evaluation_model().check()
    except errors.BadInput as error:  # what the model of training is not
      raise errors.BadInput(str(error).replace('model.memory', 'evaluation.memory')) from error
    self.data.check()
    self._check_together()
    t = self.training
    least_1 = ('steps', 'batch_size', 'segment_length', 'segments_per_call', 'log_every')
    for key in (*least_1, 'checkpoint_every', 'keep_checkpoints'):
      errors.check_at_least('training', key, getattr(t, key), 1)
    errors.check_at_least('training.accumulation', 'parts', t.parts, 1)
    errors.check_at_least('training', 'evaluate_every', t.evaluate_every, 0)
    for key in ('streams', 'segment_length', 'max_tokens'):
      if getattr(self.evaluation, key) is not None:
        errors.check_at_least('evaluation', key, getattr(self.evaluation, key), 1)
    self._check_optimizer()
    self._check_finetune()
    if not 0 <= self.seed < 2**32:
      raise errors.BadInput(f'seed={self.seed} must be from 0 to 2^32 - 1')
    self.mesh.check()

  def _check_finetune(self) -> None:
    f, length = self.finetune, self.training.segment_length
    if f is None:
      return
    f.check()
    if f.targets_length >= length - 1:
      raise errors.BadInput(
        f'training.segment_length={length} leaves nothing for inputs beside '
        f'finetune.targets_length={f.targets_length}: raise it'
      )

  def _check_optimizer(self) -> None:
    o = self.optimizer
    errors.check_at_least('optimizer', 'warmup_steps', o.warmup_steps, 0)
    for key, valid in (('schedule', SCHEDULES), ('algorithm', ALGORITHMS)):
      if getattr(o, key) not in valid:
        raise errors.BadInput(
          f'optimizer.{key}={getattr(o, key)!r} is not one of: {", ".join(valid)}'
        )
    table = o.table or TableConfig()
    for section, block, key in (
      ('optimizer', o, 'learning_rate'),
      ('optimizer', o, 'epsilon'),
      ('optimizer.table', table, 'learning_rate'),
      ('optimizer.table', table, 'epsilon'),
    ):
      if not 0 < getattr(block, key) < math.inf:
        raise errors.BadInput(f'{section}.{key}={getattr(block, key)} must be above 0')
    if not 0 <= table.accumulator < math.inf:
      raise errors.BadInput(f'optimizer.table.accumulator={table.accumulator} must be at least 0')
    for key, beta in dataclasses.asdict(o.adam or AdamConfig()).items():
      if not 0 <= beta < 1:
        raise errors.BadInput(f'optimizer.adam.{key}={beta} must be at least 0 and below 1')
    for key in ('clip_norm', 'weight_decay', 'final_fraction'):
      if getattr(o, key) is not None and not 0 <= getattr(o, key) < math.inf:
        raise errors.BadInput(f'optimizer.{key}={getattr(o, key)} must be at least 0')
    if o.algorithm == 'adagrad' and o.weight_decay:
      raise errors.BadInput(
        f'optimizer.weight_decay={o.weight_decay} is not for optimizer.algorithm="adagrad": use 0'
      )
    if o.drop is not None:
      errors.check_at_least('optimizer.drop', 'steps', o.drop.steps, 0)
      if not 0 <= o.drop.fraction < math.inf:
        raise errors.BadInput(f'optimizer.drop.fraction={o.drop.fraction} must be at least 0')

  def _check_together(self) -> None:
    """What one section asks of another."""
    t, e = self.training, self.evaluation
    if e.protocol not in streams.PROTOCOLS:
      raise errors.BadInput(
        f'evaluation.protocol={e.protocol!r} is not one of: {", ".join(streams.PROTOCOLS)}'
      )
    longest, positions = max(t.segment_length, self.evaluation_length()), self.model.positions()
    if self.model.position == 'learned' and longest > positions.max_length:
      raise errors.BadInput(
        f'model.positional.max_length={positions.max_length} positions are learned, but a segment '
        f'has {longest}: raise it, or shorten training.segment_length or evaluation.segment_length'
      )
    adaptive = self.model.adaptive_softmax
    if adaptive is not None and adaptive.cutoffs and self.data.vocabulary != 'words':
      raise errors.BadInput(
        f'model.adaptive_softmax.cutoffs={adaptive.cutoffs} need a vocabulary with the most '
        f'frequent first: data.vocabulary="words", not {self.data.vocabulary!r}'
      )

  def evaluation_length(self) -> int:
    """Segment length of evaluation."""
    return self.evaluation.segment_length or self.training.segment_length

  def evaluation_context(self) -> int:
    """Tokens that a token is predicted from at most in evaluation."""
    if self.model.recurrent is not None:
      return recurrent_config.UNBOUNDED
    memory = self.evaluation_model().memory
    return self.evaluation_length() + (memory.length if memory else 0)

  def evaluation_model(self) -> model_config.ModelConfig:
    """The model as it is evaluated: with the memory and the positions of evaluation."""
    model, other = self.model, self.evaluation.memory
    if other is None:
      return model
    said = {k: v for k, v in dataclasses.asdict(other).items() if v is not None}
    if model.recurrent is not None:
      return dataclasses.replace(model, recurrent=dataclasses.replace(model.recurrent, **said))
    clamp = {k: said.pop(k) for k in ('clamp_length',) if k in said}
    memory = dataclasses.replace(model.memory, **said)
    positional = dataclasses.replace(model.positions(), **clamp) if clamp else model.positional
    return dataclasses.replace(model, memory=memory, positional=positional)


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
  if isinstance(fields, ml_collections.ConfigDict):
    fields = fields.to_dict()
  if not isinstance(fields, Mapping):
    what = path[:-1] or 'the config'
    raise errors.BadInput(f'{what}={fields!r} is a plain value, where a section is expected')
  hints = typing.get_type_hints(kind)
  values = {}
  for key, value in fields.items():
    where = f'{path}{key}'
    if key not in hints:
      raise errors.BadInput(unknown_key(where))
    block = block_class(hints[key])
    if block is mesh_config.MeshConfig and isinstance(value, str):
      values[key] = block.named(value)
    elif block is None:
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


def unknown_key(key: str) -> str:
  """The message for a dotted key that does not exist, naming the nearest that does."""
  keys = all_keys()
  last = key.split('.')[-1]
  same = [k for k in keys if k.split('.')[-1] == last]
  begun = [k for k in keys if k.startswith(key)]
  near = difflib.get_close_matches(key, same or begun or keys, n=1, cutoff=0.0)
  return f'unknown config key {key}: did you mean {near[0]}?'


def all_keys(kind: type = Config, path: str = '') -> list[str]:
  """Every dotted key there is, sections and optional blocks included."""
  keys = []
  for name, annotation in typing.get_type_hints(kind).items():
    keys.append(path + name)
    block = block_class(annotation)
    if block is not None:
      keys += all_keys(block, f'{path}{name}.')
  return keys


def _typed(where: str, value: Any, annotation: Any) -> Any:
  """The value in its declared type; an int is a float too."""
  options = options_of(annotation)
  if float in options and type(value) is int:
    return float(value)
  sequence = next((o for o in options if typing.get_origin(o) is tuple), None)
  if sequence is not None and type(value) in (list, tuple):
    return tuple(_typed(where, item, typing.get_args(sequence)[0]) for item in value)
  if sequence is not None and type(value) is typing.get_args(sequence)[0]:
    return (value,)
  if type(value) not in options:
    name = lambda o: 'None' if o is type(None) else str(o) if o is sequence else o.__name__
    names = ' or '.join(map(name, options))
    raise errors.BadInput(f'{where}={value!r} is not of type {names}')
  return value


def options_of(annotation: Any) -> tuple[Any, ...]:
  """The types that a declared type stands for."""
  union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
  return typing.get_args(annotation) if union else (annotation,)


def save(config: Config, path: pathlib.Path) -> None:
  """Writes the resolved config as JSON."""
  files.write(path, json.dumps(dataclasses.asdict(config), indent=2) + '\n')


def load(path: pathlib.Path) -> Config:
  """Reads what `save` wrote, by earlier versions too."""
  fields = json.loads(path.read_text(encoding='utf-8'))
  check_every = fields.get('training', {}).pop('span_check_every', None)
  if check_every is not None and fields['model'].get('span') is not None:
    fields['model']['span'].setdefault('check_every', check_every)
  return resolve(fields)


def block(key: str, **fields: Any) -> ml_collections.ConfigDict:
  """An optional block such as `model.memory`, for config files: defaults with some changed."""
  kind = Config
  for name in key.split('.'):
    kind = block_class(typing.get_type_hints(kind)[name])
  return ml_collections.ConfigDict(dataclasses.asdict(kind()) | fields, type_safe=False)
