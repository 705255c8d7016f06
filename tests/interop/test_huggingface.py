"""Published models compute what the official code computes, and are written as they were read."""

import dataclasses
import json
import shutil
import zlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ngrammer_jax import errors, runs
from ngrammer_jax.interop import row_files
from ngrammer_jax.interop.huggingface import configs, published_model, tensors
from ngrammer_jax.models import block, language_model
from tests import checks
from tests.checks import rest_is_full, rest_is_slow

FOLDERS = (
  'llama_gqa',
  'llama_rope_llama3',
  'llama_rope_linear',
  'llama_rope_yarn',
  'mistral_window',
  'qwen2_window',
  'qwen3',
  'gemma2',
  'gemma3_text',
  'gpt2',
  'gpt_neox',
  'gpt_neox_serial',
  'smollm3',
  'olmo2',
  'phi3_window',
  'phi3_longrope_short',
)
# Gradients of all others are in the slow tier: they have no parameters of other kinds.
GRADIENTS = ('qwen2_window', 'gemma3_text', 'gpt2', 'gpt_neox', 'olmo2', 'phi3_window')
QUICK = (
  'gemma2',
  'gemma3_text',
  'gpt_neox',
  'gpt_neox_serial',
  'phi3_longrope_short',
  'qwen2_window',
)


@pytest.fixture
def folder():
  """The folder of a reference model by name."""
  return lambda name: checks.REFERENCE / 'hf' / name


def read_expected(folder):
  """The reference arrays of a model by name."""
  return dict(np.load(folder / 'expected.npz'))


def model_of(run, dtype):
  """The model of a run with this dtype of activations, unrolled so that blocks can be observed."""
  c = dataclasses.replace(run.config.model, dtype=dtype, scan_layers=False)
  return language_model.build(c, run.vocabulary_size)


def outputs(model, params, ids):
  """Returns loss, logits and the states between the blocks."""
  states = []

  def observe(call, args, kwargs, context):
    result = call(*args, **kwargs)
    if isinstance(context.module, block.Block) and context.method_name == '__call__':
      states.extend([args[0], result[0]] if not states else [result[0]])
    return result

  starts = jnp.zeros(ids.shape, bool).at[:, 0].set(True)
  memory, variables = model.empty_memory(len(ids)), {'params': params}
  with nn.intercept_methods(observe):
    hidden, _, _ = model.apply(variables, ids, memory, starts_BxT=starts)
  logits = model.apply(variables, hidden, method='logits')
  scores = jax.nn.log_softmax(logits[:, :-1])
  loss = -jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean()
  return loss, (logits, [*states, hidden])


def projections(gradient, expected, run, path):
  """The gradients of the parameters in the layout of the file, projected as in the reference."""
  family, V = run.published.description.family, run.vocabulary_size
  tensors.save(gradient, family, run.config.model, V, path)
  arrays, _ = row_files.stored_arrays(path)
  for name, array in arrays.items():
    values = array.read(0, array.shape[0]).ravel()
    seed = [int(expected['grad_seed']), zlib.crc32(name.encode())]
    yield name, np.random.default_rng(seed).standard_normal((4, values.size)) @ values


def check_outputs(run, expected, loss, logits, hidden):
  """Loss, logits and states between the blocks are those of the official code in float64."""
  np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=1e-10)
  np.testing.assert_allclose(loss, expected['loss'], rtol=0, atol=1e-10)
  assert len(hidden) == run.config.model.layers + 2
  for i, state in enumerate(hidden):
    key = 'hidden/final' if i == len(hidden) - 1 else f'hidden/{i}'
    np.testing.assert_allclose(state[0], expected[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
  'name', rest_is_full([name for name in FOLDERS if name not in GRADIENTS], QUICK)
)
def test_equals_the_official_model(folder, name, one_device, x64):
  run, expected = runs.load_pretrained(folder(name), 'float64'), read_expected(folder(name))
  model, ids = model_of(run, 'float64'), jnp.asarray(expected['input_ids'], jnp.int32)
  loss, (logits, hidden) = jax.jit(lambda p: outputs(model, p, ids))(run.state.params)
  check_outputs(run, expected, loss, logits, hidden)


@pytest.mark.parametrize(
  'name',
  [
    *rest_is_full(GRADIENTS, QUICK),
    *(pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS if name not in GRADIENTS),
  ],
)
def test_equals_the_official_model_and_its_gradient(folder, name, one_device, x64, tmp_path):
  run, expected = runs.load_pretrained(folder(name), 'float64'), read_expected(folder(name))
  model, ids = model_of(run, 'float64'), jnp.asarray(expected['input_ids'], jnp.int32)
  compute = jax.jit(jax.value_and_grad(lambda p: outputs(model, p, ids), has_aux=True))
  (loss, (logits, hidden)), gradient = compute(run.state.params)
  check_outputs(run, expected, loss, logits, hidden)
  given = {key.removeprefix('grad/') for key in expected if key.startswith('grad/')}
  projected = dict(projections(gradient, expected, run, tmp_path / 'gradient.safetensors'))
  assert projected.keys() == given
  for tensor, values in projected.items():
    limit = 1e-9 * np.maximum(1, np.abs(expected[f'grad/{tensor}']))
    assert (np.abs(values - expected[f'grad/{tensor}']) <= limit).all(), tensor


@pytest.mark.full
@pytest.mark.parametrize('name', rest_is_slow(FOLDERS, ['qwen2_window']))
def test_float32(folder, name, one_device):
  run = runs.load_pretrained(folder(name))
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(run.state.params)}
  assert dtypes == {np.dtype(row_files.DTYPES['BF16' if name == 'qwen2_window' else 'F32'])}
  expected = read_expected(folder(name))
  model, ids = model_of(run, 'float32'), jnp.asarray(expected['input_ids'], jnp.int32)
  logits = jax.jit(lambda p: outputs(model, p, ids)[1][0])(run.state.params)
  np.testing.assert_allclose(logits, expected['logits_float32'], rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('name', FOLDERS)
def test_round_trip(folder, name, one_device, tmp_path):
  run = runs.load_pretrained(folder(name))
  stored = run.published.checkpoint.tensors
  run.export(tmp_path / 'out', format='huggingface')
  again = published_model.open(tmp_path / 'out')
  assert again.description.family == run.published.description.family
  resolved = runs.load_run(tmp_path / 'out').config.model
  assert configs.comparable(resolved) == configs.comparable(run.config.model)
  kept = tensors.canonical(stored, run.published.description.family, 'x')
  assert kept.keys() == again.checkpoint.tensors.keys()
  for tensor, written in again.checkpoint.tensors.items():
    assert (written.dtype, written.shape) == (kept[tensor].dtype, kept[tensor].shape)
    rows = 0, written.shape[0]
    assert written.read(*rows).tobytes() == kept[tensor].read(*rows).tobytes()


def rename(source, folder, new_name, extra):
  """Writes a copy whose tensors have other names, with tensors of zeros by their shapes."""
  shutil.copytree(source, folder)
  arrays, metadata = row_files.stored_arrays(source / 'model.safetensors')
  described = {new_name(name): (array.shape, array.dtype) for name, array in arrays.items()}
  described |= {name: (shape, np.float32) for name, shape in extra.items()}
  with row_files.new_file(folder / 'model.safetensors', described, metadata) as write:
    for name, array in arrays.items():
      write(new_name(name), 0, array.read(0, array.shape[0]))


@pytest.mark.parametrize(
  ('name', 'new_name', 'extra', 'fields'),
  [
    (
      'gpt2',
      lambda name: name.removeprefix('transformer.'),
      {'h.0.attn.bias': (1, 1, 40, 40), 'h.1.attn.masked_bias': (1,)},
      lambda config: config,
    ),
    (
      'gemma3_text',
      lambda name: f'language_model.{name}',
      {'vision_tower.embed.weight': (3, 4), 'multi_modal_projector.weight': (4, 5)},
      lambda config: {'model_type': 'gemma3', 'text_config': config, 'vision_config': {'size': 1}},
    ),
    (
      'gemma3_text',
      lambda name: name.replace('model.', 'model.language_model.'),
      {'model.vision_tower.embed.weight': (3, 4)},
      lambda config: {'model_type': 'gemma3', 'text_config': config},
    ),
  ],
)
def test_other_names_of_tensors(folder, one_device, tmp_path, name, new_name, extra, fields):
  rename(folder(name), tmp_path / 'model', new_name, extra)
  path = tmp_path / 'model' / 'config.json'
  path.write_text(json.dumps(fields(json.loads(path.read_text()))))
  loaded, expected = runs.load_pretrained(tmp_path / 'model'), runs.load_pretrained(folder(name))
  assert loaded.config.model == expected.config.model
  jax.tree.map(np.testing.assert_array_equal, loaded.state.params, expected.state.params)


@pytest.mark.slow
@pytest.mark.parametrize('name', FOLDERS)
def test_the_official_code_loads_an_export(folder, name, one_device, tmp_path):
  transformers = pytest.importorskip('transformers')
  torch = pytest.importorskip('torch')
  runs.load_pretrained(folder(name)).export(tmp_path / 'out', format='huggingface')
  expected = read_expected(folder(name))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'out', attn_implementation='eager', dtype=torch.float32
  )
  with torch.no_grad():
    logits = model.eval()(torch.tensor(expected['input_ids'])).logits.numpy()
  np.testing.assert_allclose(logits, expected['logits_float32'], rtol=0, atol=3e-5)


def test_a_value_of_a_joined_tensor_counts_once(folder, tmp_path, one_device):
  """Queries, keys and values of GPT-2 are parts of the rows of one tensor."""
  copy = shutil.copytree(folder('gpt2'), tmp_path / 'gpt2')
  stored = safetensors.numpy.load_file(copy / 'model.safetensors')
  (name,) = (name for name in stored if name.endswith('h.0.attn.c_attn.weight'))
  stored[name][1, -1] = np.nan
  safetensors.numpy.save_file(stored, copy / 'model.safetensors')
  with pytest.raises(errors.BadInput, match='nan or infinite values, 1 in all'):
    runs.load_pretrained(copy).state  # noqa: B018
