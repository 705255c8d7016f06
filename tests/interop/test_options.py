"""Loaders name each option of a model or layer, or refuse all its values except the default."""

import dataclasses
import re
import tracemalloc

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import (
  adaptive_span,
  loader_options,
  named_arrays,
  ngrammer_pytorch,
  praxis,
  transformer_xl,
)
from ngrammer_jax.layers import NGrammer
from tests.checks import bad_input
from tests.loops import each

MEMORY = model_config.MemoryConfig(8, 'zeros', 'memory_alone', across_documents=True)
POSITIONAL = model_config.PositionalConfig(max_length=8)
# For each loader, a config that it accepts, with the blocks that it supports.
CONFIGS = {
  adaptive_span: {
    **adaptive_span.MODEL_OPTIONS,
    **adaptive_span.FULL_SOFTMAX_OPTIONS,
    'positional': POSITIONAL,
    'memory': MEMORY,
    'span': model_config.SpanConfig(limit=8, ramp=4),
    'persistent': model_config.PersistentConfig(4),
  },
  praxis: {
    'ngram': model_config.NGramConfig(),
    'positional': model_config.PositionalConfig(),
    'attention': model_config.AttentionConfig(),
  },
  transformer_xl: {
    **transformer_xl.MODEL_OPTIONS,
    'positional': POSITIONAL,
    'memory': dataclasses.replace(MEMORY, same_length='memory'),
    'adaptive_softmax': model_config.AdaptiveSoftmaxConfig(),
  },
}
# Options with several values that a loader accepts.
ALTERNATIVES = {
  adaptive_span: ('span.epsilon_keys',),
  praxis: ('norm', 'position'),
  transformer_xl: ('norm', 'position', 'memory.same_length'),
}
LAYERS = {ngrammer_pytorch: (), praxis: (*praxis.NGRAMMER_OPTIONS, 'id_vocabulary')}
CANDIDATES = (True, False, 1, 2, 3, 0.25, 2.5, 'other')


@pytest.fixture(autouse=True)
def any_combination(monkeypatch):
  """Only the loader refuses options: also combinations that no model can have reach it."""
  monkeypatch.setattr(model_config.ModelConfig, 'check', lambda self: None)


def other_values(key, current):
  """Returns valid values of a key other than its default: all choices, or one value."""
  if key.block is not None:
    return [(key.block(),) if key.is_tuple_of_blocks else key.block()]
  values = []
  for value in key.choices or CANDIDATES:
    try:
      value = key.convert(value)
      key.check_value(value)
    except errors.BadInput:
      continue
    if value not in (key.default, current):
      values.append(value)
  return values if key.choices else values[:1]


def drawn_configs(config):
  """Yields each key of the model, and the config with another value of this key alone."""
  blocks = {}
  for key in fields.walk(model_config.ModelConfig):
    if key.path.count('.') > 1:
      continue  # a tuple of blocks, and a block of a block, is refused as a whole
    blocks[key.path] = key.block
    block_name, _, name = key.path.rpartition('.')
    block = config if not block_name else getattr(config, block_name) or blocks[block_name]()
    for value in other_values(key, getattr(block, name or key.path)):
      changed = dataclasses.replace(block, **{name or key.path: value})
      yield key, dataclasses.replace(config, **{block_name: changed}) if block_name else changed


@pytest.mark.parametrize('loader', CONFIGS)
def test_options_are_named_or_refused(loader):
  blocks = {k for k, v in CONFIGS[loader].items() if dataclasses.is_dataclass(v)} | {'initial'}
  names = {*loader.FREE_OPTIONS, *ALTERNATIVES.get(loader, ())}
  names |= {*loader_options.MODEL_TRAINING_OPTIONS}
  names = {name for name in names if '.' not in name or name.partition('.')[0] in blocks} | blocks
  refused = set()
  for key, config in drawn_configs(model_config.ModelConfig(**CONFIGS[loader])):
    with pytest.raises(errors.BadInput) as error:
      loader.load_language_model({}, config, 23)
    if 'do not match' in str(error.value):  # only the arrays are missing
      assert key.path in names or key.path.startswith('initial.')
    else:
      for line in str(error.value).splitlines():
        assert re.fullmatch(r'model\.\S+=.* must be .* for these weights', line)
      refused.add(key.path)
  assert len(refused) > 15


def with_option(config, path, value):
  block_name, _, name = path.rpartition('.')
  if not block_name:
    return dataclasses.replace(config, **{name: value})
  block = dataclasses.replace(getattr(config, block_name), **{name: value})
  return dataclasses.replace(config, **{block_name: block})


@each(
  'loader, path, value, required',
  [
    (adaptive_span, 'span.kind', 'dynamic', "'adaptive'"),
    (adaptive_span, 'span.renormalize', False, 'True'),
    (adaptive_span, 'span.limit', 12, '8'),
    (adaptive_span, 'memory.length', 7, '8'),
    (praxis, 'position', 'relative', "'rope' or 'sinusoid' or 'none'"),
    (praxis, 'ngram.orders', (2, 3), '(2,)'),
    (praxis, 'ngram.distinct_start', True, 'False'),
    (transformer_xl, 'scale_embeddings', False, 'True'),
  ],
)
def test_an_option_is_refused_with_the_value_of_the_weights(loader, path, value, required):
  config = with_option(model_config.ModelConfig(**CONFIGS[loader]), path, value)
  with bad_input(f'model.{path}={value!r} must be {required} for these weights'):
    loader.load_language_model({}, config, 23)


def with_new_field(block):
  """Returns a config block with one more field, which is not the default."""
  new = ('new_option', int, fields.field(0, 'added after the loader was written'))
  kind = dataclasses.make_dataclass(type(block).__name__, [new], bases=(type(block),), frozen=True)
  values = {f.name: getattr(block, f.name) for f in dataclasses.fields(block)}
  return kind(**values, new_option=1)


@pytest.mark.parametrize('loader', CONFIGS)
def test_options_that_are_added_to_the_config_are_refused(loader):
  config = model_config.ModelConfig(**CONFIGS[loader])
  with bad_input('model.new_option=1 must be 0 for these weights'):
    loader.load_language_model({}, with_new_field(config), 23)
  for name, block in CONFIGS[loader].items():
    if dataclasses.is_dataclass(block):
      with bad_input(f'model.{name}.new_option=1 must be 0 for these weights'):
        changed = dataclasses.replace(config, **{name: with_new_field(block)})
        loader.load_language_model({}, changed, 23)


@pytest.mark.parametrize('loader', LAYERS)
def test_options_of_a_layer_are_named_or_refused(loader):
  layer = NGrammer(heads=2, clusters=4, vocabulary_size=50)
  sizes = ('heads', 'clusters', 'vocabulary_size', 'dim', 'combine')
  named = {*sizes, *LAYERS[loader], *loader_options.LAYER_TRAINING_OPTIONS}
  refused = {f.name for f in dataclasses.fields(layer)} - named
  assert refused
  for name in refused:
    default = getattr(layer, name)
    value = (2, 3) if name == 'orders' else 7 if default is None else not default
    with bad_input(f'{name}={value!r} must be {default!r} for these weights'):
      loader.load_ngrammer({}, layer.clone(**{name: value}), 16)

  class Later(NGrammer):
    new_option: int = 0

  layer = Later(heads=2, clusters=4, vocabulary_size=50, new_option=1)
  with bad_input('new_option=1 must be 0 for these weights'):
    loader.load_ngrammer({}, layer, 16)


def test_arrays_are_restored_in_about_twice_their_memory():
  a_table, tables = np.ones((1000, 1000), np.float32), np.ones((4, 500, 500), np.float32)
  sources = {
    'params/table': named_arrays.ArraySource('table', (1000, 1000), np.transpose, added=1),
    'params/tables': named_arrays.ArraySource(
      tuple('abcd'), (500, 500), lambda a: a.transpose(0, 2, 1)
    ),
  }
  tracemalloc.start()
  variables = {'params': {'table': a_table, 'tables': tables}}
  arrays = named_arrays.restore(variables, sources, 'a test')
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 1.1 * (sum(array.nbytes for array in arrays.values()) + a_table.nbytes)
