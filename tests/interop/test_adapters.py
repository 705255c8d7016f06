"""LoRA adapters: the merged tensors are those of peft and of a NumPy loop; what is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ngrammer_jax import errors, flags, runs
from ngrammer_jax.interop.huggingface import adapter_config, published_model
from tests import checks, published_folders
from tests.loops import each

ADAPTERS = checks.REFERENCE / 'adapters'
PREFIX = 'base_model.model.'
QUERY = 'model.layers.0.self_attn.q_proj'
RANK = 3
CONFIG = {'peft_type': 'LORA', 'r': RANK, 'lora_alpha': 6}


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """A Llama of two layers and width 16, with an output matrix of its own."""
  folder = tmp_path_factory.mktemp('models') / 'base'
  published_folders.write(folder, tie_embeddings=False)
  return folder


@pytest.fixture(scope='module')
def tied(tmp_path_factory):
  """The same, but its output matrix is the embedding."""
  folder = tmp_path_factory.mktemp('models') / 'tied'
  published_folders.write(folder)
  return folder


def write(folder, arrays, **config):
  """An adapter; arrays have the names of the file without its prefix."""
  folder.mkdir(exist_ok=True)
  (folder / 'adapter_config.json').write_text(json.dumps(CONFIG | config))
  contiguous = {PREFIX + name: np.ascontiguousarray(array) for name, array in arrays.items()}
  safetensors.numpy.save_file(contiguous, folder / 'adapter_model.safetensors')
  return folder


def factors(module, outputs=16, inputs=16, rank=RANK, dtype=np.float32):
  """Random A and B of a module."""
  rng = np.random.default_rng(rank)
  return {
    f'{module}.lora_A.weight': rng.standard_normal((rank, inputs)).astype(dtype),
    f'{module}.lora_B.weight': rng.standard_normal((outputs, rank)).astype(dtype),
  }


def merged(base, adapter):
  """All tensors of a model with an adapter, by name."""
  tensors = published_model.open(base, adapter).checkpoint.tensors
  return {name: tensor.read(0, tensor.shape[0]) for name, tensor in tensors.items()}


def loop(w, a, b, scale):
  """W + scale B A, in float64."""
  result = w.astype(np.float64)
  for i in range(w.shape[0]):
    for j in range(w.shape[1]):
      result[i, j] += scale * sum(float(b[i, r]) * float(a[r, j]) for r in range(len(a)))
  return result


def assert_near(actual, expected):
  """Equal within 2 ulp of the largest value."""
  assert actual.shape == expected.shape
  limit = 2 * np.spacing(np.abs(expected).max().astype(np.float32))
  assert np.abs(actual - expected).max() <= limit


@each('name', ['llama_gqa', 'gpt2', 'qwen2_window'])
def test_equals_peft(name):
  """Ranks, alphas and biases by module; matrices that are joined, and with their inputs first."""
  base = checks.REFERENCE / 'hf' / name
  actual, unadapted = merged(base, ADAPTERS / name), merged(base, None)
  expected = dict(np.load(ADAPTERS / name / 'merged.npz'))
  assert actual.keys() == unadapted.keys()
  for tensor, values in actual.items():
    if tensor in expected:
      assert_near(values, expected[tensor])
      assert not np.array_equal(values, unadapted[tensor]), tensor
    else:
      np.testing.assert_array_equal(values, unadapted[tensor])


def test_rows_are_those_of_a_loop(tmp_path, base):
  """Any rows can be read, and no others are."""
  arrays = factors(QUERY)
  adapter = write(tmp_path / 'adapter', arrays)
  tensors = published_model.open(base, adapter).checkpoint.tensors
  w = published_model.open(base).checkpoint.tensors[f'{QUERY}.weight'].read(0, 16)
  expected = loop(w, *arrays.values(), scale=6 / RANK)
  for start, stop in ((0, 16), (3, 5), (15, 16), (2, 2)):
    rows = tensors[f'{QUERY}.weight'].read(start, stop)
    assert rows.dtype == np.float32 and rows.flags.writeable
    np.testing.assert_allclose(rows, expected[start:stop], rtol=0, atol=1e-5)
  assert tensors[f'{QUERY}.weight'].shape == (16, 16)


def test_embeddings_and_tables_have_their_inputs_first(tmp_path, base):
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((RANK, published_folders.V)), rng.standard_normal((16, RANK))
  name = 'model.embed_tokens.lora_embedding_'
  adapter = write(tmp_path / 'adapter', {f'{name}A': a, f'{name}B': b})
  w = merged(base, None)['model.embed_tokens.weight']
  actual = merged(base, adapter)['model.embed_tokens.weight']
  np.testing.assert_allclose(actual, loop(w.T, a, b, 2).T, rtol=0, atol=1e-5)


@each('dtype', ['float32', 'bfloat16', 'float16'])
def test_parameters_have_the_dtype_of_the_model(tmp_path, dtype, one_device):
  """B A is added in float32 and rounded once. The adapter may have another dtype."""
  base = tmp_path / dtype
  published_folders.write(base, dtype, tie_embeddings=False)
  arrays = factors(QUERY, dtype=ml_dtypes.bfloat16)
  norm = np.linspace(1, 2, 16, dtype=np.float32)
  whole = {'model.norm.weight': norm}
  adapter = write(tmp_path / f'{dtype}-adapter', arrays | whole)
  w = merged(base, None)[f'{QUERY}.weight']
  a, b = (array.astype(np.float32) for array in arrays.values())
  exact = w.astype(np.float32) + b @ a * np.float32(2)
  for wanted in (None, 'float32', 'bfloat16'):
    run = runs.load_pretrained(base, wanted, adapter)
    kernel = run.restored.params['layer_0']['attention']['query']['kernel']
    assert kernel.dtype == jnp.dtype(wanted or dtype)
    np.testing.assert_array_equal(kernel.reshape(16, 16).T, exact.astype(kernel.dtype))
    scale = run.restored.params['final_norm']['scale']
    np.testing.assert_array_equal(scale, norm.astype(kernel.dtype))


def test_an_adapter_of_one_of_two_tied_matrices(tmp_path, tied):
  """Then they are two, as in the model that was trained; of neither or both alike, they are one."""
  embedding = merged(tied, None)['model.embed_tokens.weight']
  V = len(embedding)
  head = factors('lm_head', outputs=V)
  other = np.ones_like(embedding)
  name = 'model.embed_tokens'
  cases = [
    (head, embedding, loop(embedding, *head.values(), 2)),
    ({'lm_head.weight': other}, embedding, other),
    ({f'{name}.weight': other}, other, embedding),
    ({f'{name}.weight': other, 'lm_head.weight': other}, other, None),
    # The matrix before B A, of which both begin.
    (head | {'lm_head.base_layer.weight': other}, other, loop(other, *head.values(), 2)),
    (factors(QUERY), embedding, None),
  ]
  for arrays, input_matrix, output_matrix in cases:
    adapter = write(tmp_path / 'adapter', arrays)
    model = published_model.open(tied, adapter)
    actual = merged(tied, adapter)
    np.testing.assert_array_equal(actual['model.embed_tokens.weight'], input_matrix)
    assert model.config_values()['model']['tie_embeddings'] == (output_matrix is None)
    assert ('softmax_weight' in model.slices) == (output_matrix is not None)
    if output_matrix is not None:
      np.testing.assert_allclose(actual['lm_head.weight'], output_matrix, rtol=0, atol=1e-5)


@each(
  'config, module, rank, scale',
  [
    ({}, 'a.b', 3, 2),
    ({'use_rslora': True}, 'a.b', 3, 6 / 3**0.5),
    ({'lora_alpha': 4.5}, 'a.b', 3, 1.5),
    ({'r': None, 'lora_alpha': None}, 'a.b', 8, 1),
    ({'rank_pattern': {'b': 2}}, 'a.b', 2, 3),
    ({'rank_pattern': {'b': 2}}, 'b', 2, 3),
    # Whole parts of a name match, up to its end, and the first expression wins.
    ({'rank_pattern': {'b': 2}}, 'a.bb', 3, 2),
    ({'rank_pattern': {'b': 2}}, 'a.xb', 3, 2),
    ({'rank_pattern': {'a': 2}}, 'a.b', 3, 2),
    ({'rank_pattern': {r'.*\.(b|c)': 2, 'c': 1}}, 'x.a.c', 2, 3),
    ({'alpha_pattern': {'^a.b': 9}}, 'a.b', 3, 3),
    ({'alpha_pattern': {'b': 9}, 'rank_pattern': {'b': 4}, 'use_rslora': True}, 'a.b', 4, 4.5),
  ],
)
def test_ranks_and_scales(tmp_path, config, module, rank, scale):
  read = adapter_config.read(write(tmp_path / 'adapter', {}, **config))
  assert read.rank_of(module) == rank
  assert read.scale_of(module) == pytest.approx(scale, rel=1e-12)


@each(
  'config, problem',
  [
    ({'peft_type': 'IA3'}, "peft_type='IA3' is not supported; expected LORA"),
    ({'peft_type': None}, 'peft_type=None is not supported'),
    ({'use_dora': True}, 'use_dora=True is not supported: an adapter is merged as W'),
    ({'layer_replication': [[0, 1]]}, 'layer_replication='),
    ({'alora_invocation_tokens': [1]}, 'alora_invocation_tokens='),
    ({'trainable_token_indices': [1]}, 'trainable_token_indices='),
    ({'target_parameters': ['w']}, 'target_parameters='),
    ({'lora_bias': True}, 'lora_bias=True'),
    ({'of_tomorrow': 1}, 'of_tomorrow=1 is not supported'),
    (
      {'init_lora_weights': 'pissa_niter_4'},
      'init_lora_weights=.* was trained on a base',
    ),
    ({'r': 0}, 'r=0 must be at least 1'),
    ({'r': 2.5}, 'r=2.5 is not of type int'),
    ({'lora_alpha': 'x'}, "lora_alpha='x' is not of type float"),
    ({'lora_alpha': float('inf')}, 'lora_alpha=.* must be finite'),
    ({'rank_pattern': ['q']}, r'rank_pattern=.* must be an object'),
    ({'rank_pattern': {'q': 0}}, r"rank_pattern\['q'\]=0 must be at least 1"),
    ({'alpha_pattern': {'(': 1}}, r"alpha_pattern\['\('\] is no regular expression"),
  ],
)
def test_configs_that_are_refused(tmp_path, base, config, problem):
  adapter = write(tmp_path / 'adapter', factors(QUERY), **config)
  with pytest.raises(errors.BadInput, match=rf'adapter_config\.json: {problem}'):
    published_model.open(base, adapter)


def test_fields_without_an_effect(tmp_path, base):
  expected = merged(base, write(tmp_path / 'plain', factors(QUERY)))
  config = {
    'lora_dropout': 0.1,
    'inference_mode': True,
    'task_type': 'CAUSAL_LM',
    'target_modules': 'all-linear',
    'modules_to_save': ['classifier'],
    'fan_in_fan_out': True,  # the layer decides, as in peft
    'use_dora': False,
    'of_tomorrow': None,
    'loftq_config': {},
    'init_lora_weights': 'gaussian',
    'bias': 'all',
  }
  actual = merged(base, write(tmp_path / 'fields', factors(QUERY), **config))
  checks.assert_same_arrays(actual, expected, 0)


NAN = {name: array * np.nan for name, array in factors(QUERY).items()}
OF_IMAGES = factors('model.vision_tower.q_proj')


@each(
  'arrays, problem',
  [
    (factors(QUERY, rank=4), r'q_proj.lora_A.weight is \(4, 16\), expected \(3, 16\) with r=3 of'),
    (
      factors(QUERY, inputs=8),
      r'is \(3, 8\), expected \(3, 16\) .* adapter_config.json$',
    ),
    (factors(QUERY, outputs=8), r'lora_B.weight is \(8, 3\), expected \(16, 3\)'),
    (factors(QUERY, rank=4) | {'lm_head.weight': np.ones((3, 16))}, r'\(and 2 more\)$'),
    (
      {'lm_head.weight': np.ones((300, 16))},
      r'is \(300, 16\), expected \(288, 16\)$',
    ),
    (factors('model.norm'), r'lora_A.weight is \(3, 16\), expected \(3,\)'),
    (factors('model.layers.2.self_attn.q_proj'), r'layers.2.*lora_A.weight \(and 1 more\), which'),
    ({'score.weight': np.ones((2, 16))}, r'score.weight, which .* does not have: name the model'),
    ({f'{QUERY}.lora_magnitude_vector.weight': np.ones(16)}, 'lora_magnitude_vector'),
    ({f'{QUERY}.lora_B.bias': np.ones(16)}, 'lora_B.bias, which'),
    (OF_IMAGES, 'vision_tower'),
    (dict([*factors(QUERY).items()][:1]), 'q_proj.lora_A.weight, but not its factor lora_B'),
    ({f'{QUERY}.weight': np.ones((16, 16), np.int32)}, 'has the dtype I32, expected one of'),
    (NAN, 'adapter_model.safetensors has nan or infinite values'),
  ],
)
def test_adapters_of_another_model(tmp_path, base, arrays, problem):
  adapter = write(tmp_path / 'adapter', arrays, base_model_name_or_path='x/y')
  with pytest.raises(errors.BadInput, match=problem) as caught:
    merged(base, adapter)
  assert '\n' not in str(caught.value)


def test_adapters_of_parts_of_a_model(tmp_path, base):
  """The names of a model without its head, and those of older versions."""
  arrays = factors(QUERY)
  expected = merged(base, write(tmp_path / 'a', arrays))
  without_head = {name.removeprefix('model.'): array for name, array in arrays.items()}
  older = {name.replace('.weight', '.default.weight'): array for name, array in arrays.items()}
  for i, renamed in enumerate((without_head, older)):
    checks.assert_same_arrays(merged(base, write(tmp_path / f'{i}', renamed)), expected, 0)


def test_names_of_the_output_matrix(tmp_path):
  """That of GPT-NeoX is `embed_out` in files, and in adapters of transformers 5 `lm_head`."""
  base = checks.REFERENCE / 'hf' / 'gpt_neox'
  rows, columns = merged(base, None)['embed_out.weight'].shape
  expected = merged(base, write(tmp_path / 'a', factors('embed_out', rows, columns)))
  actual = merged(base, write(tmp_path / 'b', factors('lm_head', rows, columns)))
  checks.assert_same_arrays(actual, expected, 0)
  assert not np.array_equal(actual['embed_out.weight'], merged(base, None)['embed_out.weight'])


def test_an_adapter_of_a_model_with_images(tmp_path):
  """Only its text is read."""
  base = checks.REFERENCE / 'hf' / 'gemma3_text'
  name = 'layers.0.self_attn.o_proj'
  rows, columns = merged(base, None)[f'model.{name}.weight'].shape
  expected = merged(base, write(tmp_path / 'a', factors(f'model.{name}', rows, columns)))
  for i, prefix in enumerate(('language_model.model', 'model.language_model')):
    arrays = factors(f'{prefix}.{name}', rows, columns) | OF_IMAGES
    checks.assert_same_arrays(merged(base, write(tmp_path / f'{i}', arrays)), expected, 0)


def test_folders_that_are_no_adapter(tmp_path, base):
  def problem_of(folder):
    with pytest.raises(errors.BadInput) as caught:
      runs.load_pretrained(base, adapter=folder)
    return str(caught.value)

  adapter = write(tmp_path / 'adapter', factors(QUERY))
  with pytest.raises(errors.BadInput, match='adapter is a LoRA adapter: name the model'):
    runs.load_pretrained(adapter)
  assert 'has no adapter_config.json: expected the folder of a LoRA adapter' in problem_of(tmp_path)
  (adapter / 'adapter_model.safetensors').rename(adapter / 'adapter_model.bin')
  assert 'adapter_model.bin is a pickle, which can run code and is never' in problem_of(adapter)
  (adapter / 'adapter_model.bin').unlink()
  assert 'has no adapter_model.safetensors: get it too' in problem_of(adapter)
  (adapter / 'adapter_model.safetensors').write_bytes(b'x' * 9)
  assert 'cannot be read as safetensors' in problem_of(adapter)
  (adapter / 'adapter_config.json').write_text('[1]')
  assert 'adapter_config.json is damaged: expected an object' in problem_of(adapter)


def test_a_file_that_changes_while_it_is_read(tmp_path, base):
  adapter = write(tmp_path / 'adapter', factors(QUERY))
  checkpoint = published_model.open(base, adapter).checkpoint
  checkpoint.check_unchanged()
  write(adapter, factors(QUERY, rank=4))
  with pytest.raises(errors.BadInput, match='adapter_model.safetensors was changed'):
    checkpoint.check_unchanged()


def test_flags(tmp_path, base, trained):
  adapter = write(tmp_path / 'adapter', factors(QUERY))
  parser = flags.make_parser('generate', '')
  flags.add_run(parser)

  def load(*arguments):
    return flags.load_run(parser.parse_args([*map(str, arguments), f'--adapter={adapter}']))

  tensor = load(f'--pretrained={base}').published.checkpoint.tensors[f'{QUERY}.weight']
  np.testing.assert_array_equal(tensor.read(0, 16), merged(base, adapter)[f'{QUERY}.weight'])
  with pytest.raises(errors.BadInput, match='--adapter=.* needs the published model'):
    load(f'--workdir={base}')
  with pytest.raises(errors.BadInput, match='adapter needs the published model that it was'):
    runs.model_source.ModelSource.from_path(trained).open(adapter=adapter)


@pytest.mark.full
def test_a_merged_model_is_exported(tmp_path, base, one_device):
  """So a training can start from it."""
  adapter = write(tmp_path / 'adapter', factors(QUERY))
  runs.load_pretrained(base, adapter=adapter).export(tmp_path / 'out', format='huggingface')
  checks.assert_same_arrays(merged(tmp_path / 'out', None), merged(base, adapter), 0)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(12))
def test_drawn_adapters_equal_peft(tmp_path, seed):
  peft, torch = pytest.importorskip('peft'), pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  rng = np.random.default_rng(seed)
  folders = sorted(path.parent for path in (checks.REFERENCE / 'hf').glob('*/config.json'))
  folder = folders[rng.integers(len(folders))]

  def open_base():
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  model = open_base()
  linear = [
    name
    for name, module in model.named_modules()
    if name.count('.') > 2 and getattr(module, 'weight', torch.ones(1)).ndim == 2
  ]
  targets = rng.choice(linear, rng.integers(1, len(linear) + 1), replace=False).tolist()
  patterns = rng.choice(targets, min(len(targets), 2), replace=False).tolist()
  options = peft.LoraConfig(
    r=int(rng.integers(1, 9)),
    lora_alpha=int(rng.integers(1, 33)),
    use_rslora=bool(rng.integers(2)),
    target_modules=targets,
    rank_pattern={name: int(rng.integers(1, 9)) for name in patterns},
    alpha_pattern={patterns[0].rpartition('.')[2]: int(rng.integers(1, 33))},
    bias=str(rng.choice(['none', 'all', 'lora_only'])),
    modules_to_save=[None, ['lm_head'], ['embed_tokens']][rng.integers(3)],
  )
  torch.manual_seed(seed)
  adapted = peft.get_peft_model(model, options)
  with torch.no_grad():
    for parameter in adapted.parameters():
      if parameter.requires_grad:
        parameter.add_(0.1 * torch.randn_like(parameter))
  adapted.save_pretrained(tmp_path / 'adapter')
  again = peft.PeftModel.from_pretrained(open_base(), tmp_path / 'adapter').merge_and_unload()
  actual = merged(folder, tmp_path / 'adapter')
  expected = {name: tensor.numpy() for name, tensor in again.state_dict().items()}
  for name, values in actual.items():
    assert_near(values, expected[name.replace('embed_out', 'lm_head')])
