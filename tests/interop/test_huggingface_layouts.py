"""Published models in pieces, in batches, packed and on meshes: logits of the official code."""

import dataclasses

import jax
import numpy as np
import pytest

from ngrammer_jax import runs, sharding
from ngrammer_jax.inference import sampling
from ngrammer_jax.models import language_model
from tests import checks
from tests.checks import mesh_of, rest_is_slow
from tests.interop.test_huggingface import FOLDERS

GREEDY = sampling.SamplingConfig(temperature=0.0)
MESHES = (2, 1, 4), (1, 8, 1)  # data, fsdp, model
MODELS = *FOLDERS, 'llama_gguf'


@pytest.fixture
def reference_model():
  """The run of a reference model by name, and what the official code computes with it."""
  root = checks.REFERENCE / 'hf'

  def load(name, dtype):
    if name == 'llama_gguf':
      pytest.importorskip('gguf')
    path = root / name / ('model.gguf' if name == 'llama_gguf' else '')
    return runs.load_pretrained(path, dtype), dict(np.load(root / name / 'expected.npz'))

  return load


def make_model(run, scan_layers=False):
  """The model of a run in float64."""
  config = dataclasses.replace(run.config.model, dtype='float64', scan_layers=scan_layers)
  return language_model.build(config, run.model.vocabulary_size)


def make_program(model):
  """A function that returns the logits of a segment and the memory after it."""

  @jax.jit
  def compute(params, tokens, memory, starts, valid=None):
    variables, inputs = {'params': params}, {'starts_BxT': starts, 'valid_BxT': valid}
    hidden, memory, _ = model.apply(variables, tokens, memory, **inputs)
    return model.apply(variables, hidden, method='logits'), memory

  return compute


def logits_in_pieces(compute, params, ids, memory, sizes):
  """The logits of rows that are read in pieces of these sizes, padded to the largest."""
  T, parts, first = max(sizes), [], 0
  for size in sizes:
    tokens, valid = np.zeros((len(ids), T), np.int32), np.zeros((len(ids), T), np.float32)
    tokens[:, :size], valid[:, :size] = ids[:, first : first + size], 1
    starts = np.zeros(tokens.shape, bool)
    starts[:, 0] = first == 0
    logits, memory = compute(params, tokens, memory, starts, valid)
    parts.append(np.asarray(logits)[:, :size])
    first += size
  return np.concatenate(parts, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_logits_with_a_cache_in_pieces_of_any_size(reference_model, name, one_device, x64):
  run, expected = reference_model(name, 'float64')
  ids, model = expected['input_ids'], make_model(run)
  B, L = ids.shape
  compute = make_program(model)
  drawn, rng = [], np.random.default_rng(L)
  while sum(drawn) < L:
    drawn.append(min(int(rng.integers(1, 8)), L - sum(drawn)))
  for sizes in ([1] * L, drawn, [L]):
    memory = model.empty_memory(B, L)
    logits = logits_in_pieces(compute, run.state.params, ids, memory, sizes)
    np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=1e-9, err_msg=str(sizes))


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_greedy_continuation_in_a_batch(reference_model, name, one_device):
  """The first row is continued beside shorter prompts, whose next tokens are known too."""
  run, expected = reference_model(name, 'float32')
  ids, official = expected['input_ids'].astype(np.int32), expected['logits']
  lengths = [(0, ids.shape[1]), (-1, 3), (-1, ids.shape[1] // 2), (0, 1)]
  prompts = [ids[row, :length] for row, length in lengths]
  count = len(expected['greedy_ids'])
  context = ids.shape[1] + count
  tokens = run.engine.generate(run.variables, prompts, [0] * 4, GREEDY, context)
  generated = np.array([next(tokens) for _ in range(count)])
  assert generated[:, 0].tolist() == expected['greedy_ids'].tolist()
  assert generated[0].tolist() == [official[row, n - 1].argmax() for row, n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_greedy_continuation_in_turns(reference_model, name, one_device):
  """The prompt is read token by token, and in pieces; then each token that was found."""
  run, expected = reference_model(name, 'float32')
  prompt, greedy = expected['input_ids'][0].tolist(), expected['greedy_ids'].tolist()
  for size in (1, 5, len(prompt)):
    context = len(prompt) + len(greedy)
    read = run.engine.start_incremental_decoding(run.variables, 0, GREEDY, context)
    for first in range(0, len(prompt), size):
      found = [read(prompt[first : first + size])]
    while len(found) < len(greedy):
      found.append(read(found[-1:]))
    assert found == greedy, size


@pytest.mark.full
@pytest.mark.parametrize('name', rest_is_slow(MODELS, ['gpt2']))
def test_documents_in_one_row_equal_each_alone(reference_model, name, one_device, x64):
  run, expected = reference_model(name, 'float64')
  model, ids = make_model(run), expected['input_ids']
  L = ids.shape[1]
  documents = [(0, L - 2), (-1, 7), (-1, 1), (0, L // 2)]  # row of the reference, and length
  tokens = np.concatenate([ids[row, :length] for row, length in documents])[None]
  official = np.concatenate([expected['logits'][row, :length] for row, length in documents])
  starts = np.zeros(tokens.shape, bool)
  starts[0, np.cumsum([0, *(length for _, length in documents[:-1])])] = True
  logits, _ = make_program(model)(run.state.params, tokens, model.empty_memory(1), starts)
  np.testing.assert_allclose(logits[0], official, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('sizes', MESHES)
def test_logits_on_a_mesh(reference_model, name, sizes, x64, monkeypatch):
  run, expected = reference_model(name, 'float64')
  mesh = mesh_of(*sizes)
  monkeypatch.setattr(type(run), 'mesh', mesh)
  params = run.state.params
  ids = np.resize(expected['input_ids'], (8, expected['input_ids'].shape[1]))
  rows = sharding.rows_sharding(mesh)
  starts = np.arange(ids.shape[1]) == np.zeros((8, 1))
  inputs = jax.device_put((ids.astype(np.int32), starts), rows)
  for scan_layers in (True, False):
    model = make_model(run, scan_layers)
    with sharding.use(mesh):
      memory = jax.device_put(model.empty_memory(8), rows)
      logits, _ = make_program(model)(params, inputs[0], memory, inputs[1])
    official = np.resize(expected['logits'], logits.shape)
    np.testing.assert_allclose(logits, official, rtol=0, atol=1e-9, err_msg=f'{scan_layers=}')
  # A width that the devices do not divide is not sharded.
  is_sharded = any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
  assert is_sharded == (run.config.model.width % sizes[1] == 0)
