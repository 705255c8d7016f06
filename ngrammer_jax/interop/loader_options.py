"""Checks that a loader supports every option of its target model or layer.

A loader names its supported options. All others must have their defaults, so a new option of the
package is refused until the loader names it.
"""

from collections.abc import Collection, Iterator, Mapping
import dataclasses
import types
from typing import Any

from flax import linen as nn

from ngrammer_jax import errors
from ngrammer_jax.config import fields, resume
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers.ngram import ngrammer

# Options that change how a model or layer is trained or computed, but not its function.
NGRAM_TRAINING_OPTIONS = ('decay', 'epsilon', 'empty', 'initial', 'padding_trains', 'exchange')
NGRAM_MEMORY_TRAINING_OPTIONS = (
  'preset',
  'deviation',
  'untrained_row',
  'optimizer',
  'learning_rate_factor',
  'table_memory',
)
LAYER_TRAINING_OPTIONS = (
  *NGRAM_TRAINING_OPTIONS,
  'dtype',
  'return_memory',
  'parent',
  'name',
  *(f'options.{name}' for name in NGRAM_MEMORY_TRAINING_OPTIONS),
)
MODEL_TRAINING_OPTIONS = (
  'dtype',
  'logits_dtype',
  'loss_dtype',
  'scan_layers',
  'remat',
  'vocabulary_chunk',
  'kernel',
  'initial',
  'dropout',
  'attention_dropout',
  'inner_dropout',
  'adaptive_softmax.dropout',
  'span.penalty',
  'span.initial',
  'span.reserve',
  'span.check_every',
  *(f'ngram.{name}' for name in NGRAM_TRAINING_OPTIONS),
)


def check_options(
  block: model_config.ModelConfig | nn.Module,
  free: Collection[str],
  required: Mapping[str, Any] = types.MappingProxyType({}),
  choices: Mapping[str, tuple[Any, ...]] = types.MappingProxyType({}),
) -> None:
  """Raises BadInput with every unsupported option of a model or layer.

  Options without a name must have their defaults. An optional block without named options must be
  None.

  Args:
    block: the config of the target model, or the target layer.
    free: keys of options with any value, such as `span.ramp`, besides training options.
    required: required values of other options, by key.
    choices: supported values of options with several ones.
  """
  if isinstance(block, model_config.ModelConfig):
    path = 'model.'
    training = MODEL_TRAINING_OPTIONS
    block.check()
  else:
    path = ''
    training = LAYER_TRAINING_OPTIONS
  named = {*required, *choices, *free}
  problems = []
  for key, value, default in _options(block, named):
    supported = choices.get(key, (required.get(key, default),))
    if key not in free and key not in training and value not in supported:
      expected = ' or '.join(repr(choice) for choice in supported)
      problems.append(f'{path}{key}={value!r} must be {expected} for these weights')
  if problems:
    raise errors.BadInput('\n'.join(problems))


def _options(
  block: Any, named: Collection[str], prefix: str = ''
) -> Iterator[tuple[str, Any, Any]]:
  """Yields key, value and default of each option; of a nested block if it is named, its options."""
  for field in dataclasses.fields(block):
    key = prefix + field.name
    value = getattr(block, field.name)
    is_named_block = any(name.startswith(f'{key}.') for name in named)
    if dataclasses.is_dataclass(value) and is_named_block:
      yield from _options(value, named, f'{key}.')
    else:
      yield key, value, field.default


def check_layer_width(layer: ngrammer.NGrammer, width: int) -> None:
  """Raises BadInput if a layer does not support inputs of this width."""
  try:
    layer.check_width(width)
  except ValueError as error:
    raise errors.BadInput(f'the layer does not fit inputs of width {width}: {error}') from error


def check_same_model(config: model_config.ModelConfig, official: model_config.ModelConfig) -> None:
  """Raises BadInput with every option that differs from the official model.

  Options of training or computation may differ.
  """
  differences = resume.differences(
    _with_explicit_blocks(config), _with_explicit_blocks(official), 'model.', _is_training_option
  )
  problems = [
    f'{key.path}={value!r} must be {expected!r} for these official settings'
    for key, value, expected in differences
  ]
  if problems:
    raise errors.BadInput('\n'.join(problems))


def _with_explicit_blocks(config: model_config.ModelConfig) -> model_config.ModelConfig:
  """Returns a config with default blocks in place of equivalent Nones."""
  return dataclasses.replace(
    config, positional=config.positions(), attention=config.attention_options()
  )


def _is_training_option(key: fields.Key) -> bool:
  return key.path.removeprefix('model.') in MODEL_TRAINING_OPTIONS
