"""The examples of docs/interop.md run, and compute what the official implementations do."""

import pathlib
import re
import zlib

from flax import linen as nn
import jax
import numpy as np
import pytest

from ngrammer_jax.interop import praxis
from ngrammer_jax.layers import NGrammer
from tests import checks
from tests.checks import assert_close, assert_same_arrays

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'interop.md'
EXAMPLES = re.findall(r'```python\n(.*?)```', DOCS.read_text(encoding='utf-8'), re.S)
# Others need weights of 50 billion values.
PRAXIS, PRAXIS_LAYER, TRANSFORMER_XL, ADAPTIVE_SPAN, *_ = EXAMPLES


def run(example):
  """Returns the variables of an example by name."""
  names: dict = {}
  exec(example, names)
  return names


def save_arrays(f, name, **inputs):
  """Writes the parameters and the inputs of reference arrays where an example reads them."""
  params = {k.removeprefix('param/'): v for k, v in f.items() if k.startswith('param/')}
  np.savez(f'{name}.npz', **{k: v.astype('float32') for k, v in params.items()})
  np.savez(f'{name}_inputs.npz', **inputs)
  return params


def test_packed_sequences_of_praxis(reference, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  f = reference('lm_plain')
  packed = {name: f[f'packed/{name}'] for name in ('paddings', 'segment_ids', 'segment_pos')}
  params = save_arrays(f, 'praxis', ids=f['ids'], **packed)
  names = run(PRAXIS)
  exported = {k.removeprefix('params/'): v for k, v in np.load('exported.npz').items()}
  assert_same_arrays(exported, params, 1e-6)
  is_valid = packed['paddings'] == 0
  assert_close(np.asarray(names['logits'])[is_valid], f['packed/logits'][is_valid], 2e-5)


@pytest.mark.slow
def test_a_layer_of_praxis(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  layer = NGrammer(heads=2, clusters=4, vocabulary_size=50, dim=4, return_memory=False)
  x = np.ones((1, 5, 16), np.float32)
  variables = nn.unbox(layer.init(jax.random.key(1), x))
  np.savez('vq_ngrammer.npz', **praxis.export_ngrammer(variables, layer, 16))
  assert_close(run(PRAXIS_LAYER)['y_BxTxD'], layer.apply(variables, x), 1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
  'example, name, file',
  [
    (TRANSFORMER_XL, 'transformer_xl', 'xl_base'),
    (ADAPTIVE_SPAN, 'adaptive_span', 'span_adaptive'),
  ],
)
def test_streams_of_the_pytorch_codes(reference, tmp_path, monkeypatch, example, name, file):
  monkeypatch.chdir(tmp_path)
  f = reference(file)
  tokens = f['x'] if 'x' in f else np.stack([f[f'x/{s}'] for s in range(3)])
  params = save_arrays(f, name, tokens=tokens)
  names = run(example)
  assert_same_arrays(names['exported'], params, 1e-6)
  for number, log_probs in enumerate(names['log_probs']):
    assert_close(log_probs, f[f'logprob/{number}'], 1e-4)
  assert number == 2


API = DOCS.parent / 'python_api.md'
(FORWARD,) = (
  block
  for block in re.findall(r'```python\n(.*?)```', API.read_text(encoding='utf-8'), re.S)
  if 'def forward(' in block
)


@pytest.mark.full
def test_logits_hidden_states_and_gradients_of_the_python_api(x64, one_device, tmp_path):
  """The example in float64 on a tiny model equals transformers."""
  folder = checks.REFERENCE / 'hf' / 'llama_gqa'
  expected = dict(np.load(folder / 'expected.npz'))
  example = FORWARD
  for old, new in (
    (
      "'smollm2_135m_instruct')",
      f"{str(folder)!r}, 'float64', overrides={{'model.dtype': 'float64'}})",
    ),
    ("text = run.vocabulary.encode(b'The cat sat on the mat.')\n", ''),
    ('[run.vocabulary.add_start(text)]', repr(expected['input_ids'].tolist())),
  ):
    assert example.count(old) == 1, old
    example = example.replace(old, new)
  names = run(example)
  np.testing.assert_allclose(names['logits'], expected['logits'], rtol=0, atol=1e-10)
  states = [expected[f'hidden/{i}'] for i in range(1, len(names['states']))]
  for state, official in zip(names['states'], [*states, expected['hidden/final']], strict=True):
    np.testing.assert_allclose(state[0], official, rtol=0, atol=1e-10)
  gradients = names['gradients']
  assert gradients.keys() == names['run'].published.checkpoint.tensors.keys()
  for name, array in gradients.items():
    seed = [int(expected['grad_seed']), zlib.crc32(name.encode())]
    projected = np.random.default_rng(seed).standard_normal((4, array.size)) @ array.ravel()
    np.testing.assert_allclose(projected, expected[f'grad/{name}'], rtol=1e-9, atol=1e-9)
