"""Arrays in half precision, under names with prefixes: as other codes save them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import (
  adaptive_span,
  named_arrays,
  ngrammer_pytorch,
  praxis,
  transformer_xl,
)
from ngrammer_jax.interop.huggingface import families, tensors
from ngrammer_jax.layers import NGrammer
from ngrammer_jax.layers.attention.attention import Attention

ARGS = {'n_layer': 2, 'n_head': 2, 'd_head': 8, 'd_model': 16, 'd_inner': 32, 'tgt_len': 8}
ADAPTIVE_ARGS = {'hidden_size': 16, 'nb_heads': 2, 'nb_layers': 2, 'attn_span': 8} | {
  'inner_hidden_size': 32
}
LAYER = NGrammer(heads=2, clusters=8, vocabulary_size=50, dim=4)


def loaders():
  """A loader of each code in PyTorch, and shapes of its arrays."""
  config = transformer_xl.config_from_args(ARGS)
  yield (
    functools.partial(transformer_xl.load_language_model, config=config, vocabulary_size=23),
    named_arrays.shapes_by_name(transformer_xl._sources(config, 23)),
  )
  config = adaptive_span.config_from_args(ADAPTIVE_ARGS)
  yield (
    functools.partial(adaptive_span.load_language_model, config=config, vocabulary_size=23),
    named_arrays.shapes_by_name(adaptive_span._sources(config, 23)),
  )
  yield (
    functools.partial(ngrammer_pytorch.load_ngrammer, layer=LAYER, width=16),
    named_arrays.shapes_by_name(ngrammer_pytorch._sources(LAYER, 16)),
  )


def draw(shapes, dtype):
  rng = np.random.default_rng(0)
  return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_trains_is_float32(dtype):
  """The values are those of the arrays: sums and means of halves are exact in float32."""
  for load, shapes in loaders():
    arrays = draw(shapes, dtype)
    loaded = load(arrays)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype('float32')}
    expected = load({name: array.astype(np.float32) for name, array in arrays.items()})
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def praxis_loaders():
  """A loader of each module of praxis, and shapes of its arrays."""
  config = model_config.ModelConfig(layers=2, width=16, heads=2, feed_forward_width=32)
  yield (
    functools.partial(praxis.load_language_model, config=config, vocabulary_size=23),
    named_arrays.shapes_by_name(praxis._language_model_sources(config, 23)),
  )
  for load, find, layer in (
    (praxis.load_ngrammer, praxis._layer_ngrammer_sources, LAYER),
    (praxis.load_attention, praxis._layer_attention_sources, Attention(heads=2)),
  ):
    shapes = named_arrays.shapes_by_name(find(layer, 16))
    yield functools.partial(load, layer=layer, width=16), shapes


@pytest.mark.full
def test_dtype_is_that_of_the_parameters():
  for load, shapes in [*loaders(), *praxis_loaders()]:
    params, expected = (
      load(draw(shapes, np.float32), dtype=d)['params'] for d in ('bfloat16', None)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
    compare = lambda a, b: np.testing.assert_array_equal(a, b.astype('bfloat16'))
    jax.tree.map(compare, params, expected)


def test_float64_stays_in_64_bit_mode(x64):
  for load, shapes in loaders():
    params = load(draw(shapes, np.float64))['params']
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float64')}


@pytest.mark.parametrize(
  'prefix', ['module.', '_orig_mod.', 'model.', 'transformer.', 'module._orig_mod.model.']
)
def test_known_wrappers_are_removed_and_said(caplog, prefix):
  caplog.set_level('INFO')
  for load, shapes in loaders():
    arrays = draw(shapes, np.float32)
    wrapped = load({prefix + name: array for name, array in arrays.items()})
    jax.tree.map(np.testing.assert_array_equal, wrapped, load(arrays))
  messages = [message for message in caplog.messages if f'without {prefix!r} before' in message]
  assert len(messages) == 3


def test_a_wrapper_is_left_where_the_names_then_do_not_fit():
  for load, shapes in loaders():
    arrays = {f'module.{name}': array for name, array in draw(shapes, np.float32).items()}
    del arrays[max(arrays)]
    with pytest.raises(errors.BadInput) as error:
      load(arrays)
    first, *others = str(error.value).splitlines()
    assert first.startswith("names begin with the prefix 'module.': remove it. ")
    assert f'({len(shapes)} missing, {len(shapes) - 1} extra; 5 are shown)' in first
    assert len(others) == 5


@pytest.mark.parametrize('prefix', ['net.', 'encoder.decoder.', 'modules.', 'params/lm/'])
def test_an_unknown_prefix_is_named_first(prefix):
  for load, shapes in loaders():
    with pytest.raises(errors.BadInput) as error:
      load({prefix + name: array for name, array in draw(shapes, np.float32).items()})
    assert str(error.value).startswith(f'names begin with the prefix {prefix!r}: remove it. ')
    assert len(str(error.value).splitlines()) == 6


def test_values_that_are_not_finite_are_counted():
  for load, shapes in loaders():
    arrays, names = draw(shapes, np.float16), list(shapes)[:2]
    for name in names:
      arrays[name].reshape(-1)[:2] = np.nan, np.inf
    with pytest.raises(errors.BadInput) as error:
      load(arrays)
    assert f'infinite values, 4 in all, in {names[0]} (2), {names[1]} (2): ' in str(error.value)
    broken = {name: np.full_like(array, np.nan) for name, array in draw(shapes, float).items()}
    more = f' and {len(shapes) - 5} more arrays: ' if len(shapes) > 5 else ': '
    with pytest.raises(errors.BadInput, match=more):
      load(broken)


def test_names_that_fit_stay_as_they_are():
  arrays = {'module.a': np.ones(2), 'module.module.a': np.zeros(2)}
  assert named_arrays.without_wrappers(arrays, ('module.a',), 'x') is arrays


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', 'model.'])
@pytest.mark.parametrize('family', ['llama', 'gpt2', 'gemma3_text'])
def test_tensors_of_published_models_may_be_wrapped(caplog, family, prefix):
  caplog.set_level('INFO')
  family = families.FAMILIES[family]
  first, embedding = family.layers.partition('.')[0], f'{family.tensors["embedding"].name}.weight'
  names = [embedding, 'lm_head.weight', f'{family.layers}0.module.weight']
  bare = [name.removeprefix(f'{first}.') for name in names]
  for written in (names, bare):
    wrapped = {prefix + name: 0 for name in written}
    if not {*wrapped} & {*names}:  # the bare names with `model.` are those of the family
      assert [*tensors.canonical(wrapped, family, 'x')] == names
      assert f'x: reading the arrays without {prefix!r} before their names' in caplog.messages
    assert [*tensors.canonical(dict.fromkeys(written, 0), family, 'x')] == names


@pytest.mark.parametrize('prefix', ['', 'module.', '_orig_mod.module.'])
@pytest.mark.parametrize('outer', ['model.language_model.', 'language_model.model.'])
def test_tensors_of_a_text_model_beside_images_may_be_wrapped(outer, prefix):
  names = ['model.embed_tokens.weight', 'lm_head.weight', 'model.layers.0.mlp.up_proj.weight']
  written = [name.replace('model.', outer, 1) for name in names]
  written += ['model.vision_tower.embeddings.weight', 'multi_modal_projector.norm.weight']
  stored = {prefix + name: 0 for name in written}
  assert [*tensors.canonical(stored, families.FAMILIES['gemma3_text'], 'x')] == names


def test_other_names_of_published_models_stay():
  """Then the error about names says what they begin with."""
  for name in ('net.model.embed_tokens.weight', 'net.embed_tokens.weight'):
    assert [*tensors.canonical({name: 0}, families.FAMILIES['llama'], 'x')] == [name]
