"""Published models: fields, damaged files, shards on a mesh, and what cannot be written."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
from unittest import mock

from flax import traverse_util
import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, command_line, errors, evaluate, memory_limits, runs, sharding
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import conversion
from ngrammer_jax.config.evaluation import EvaluationConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.data import vocabularies
from ngrammer_jax.interop import row_files
from ngrammer_jax.interop.huggingface import configs, families, tensors
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.training import init_from
from ngrammer_jax.training import state as train_state
from tests import published_folders
from tests.campaigns import damages
from tests.checks import bad_input, mesh_of
from tests.loops import each
from tests.published_folders import LLAMA, V

SIZES = {
  'vocab_size': 50,
  'hidden_size': 16,
  'num_hidden_layers': 6,
  'num_attention_heads': 4,
  'intermediate_size': 24,
}
NORM = 'model.norm.weight'


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """The folder of a small Llama, read-only, and its parameters."""
  folder = tmp_path_factory.mktemp('published') / 'llama'
  return folder, published_folders.write(folder)


@pytest.fixture
def published(written):
  """The folder of that Llama."""
  return written[0]


@pytest.fixture
def copied(published, tmp_path):
  """A copy, to be damaged."""
  return shutil.copytree(published, tmp_path / 'copy')


def change_config(folder, **fields):
  """Changes fields of config.json."""
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_header(folder, name=NORM, **entry):
  """Changes the entry of a tensor in the header of the weights."""
  path = folder / 'model.safetensors'
  content = path.read_bytes()
  (length,) = struct.unpack('<Q', content[:8])
  header = json.loads(content[8 : 8 + length])
  header[name] |= entry
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + content[8 + length :])


def replace_bytes(folder, start, content):
  """Overwrites bytes of the weights; from the end if `start` is negative."""
  path = folder / 'model.safetensors'
  values = bytearray(path.read_bytes())
  start %= len(values)
  values[start : start + len(content)] = content
  path.write_bytes(values)


def rename_weights(folder):
  """Only a pickle is left."""
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def write_index(folder, **weight_map):
  """An index instead of a single file."""
  shutil.move(folder / 'model.safetensors', folder / 'part.safetensors')
  index = {'weight_map': {NORM: 'part.safetensors', **weight_map}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


DAMAGES = {
  'no config.json': lambda f: (f / 'config.json').unlink(),
  'config.json is damaged: Exp': lambda f: (f / 'config.json').write_text('{'),
  "model_type='bloom' is not one of: llama": lambda f: change_config(f, model_type='bloom'),
  'gpt_neox; auto_map names Python code for it, which is never run': lambda f: change_config(
    f, model_type='phi4', auto_map={'a': 'b'}
  ),
  "quantization_config={'bits': 4} is not supported for llama: the weights are quantised; use "
  'a model in bfloat16, float16 or float32': lambda f: change_config(
    f, quantization_config={'bits': 4}
  ),
  # Beside the fields of the text, in a model with images.
  "quantization_config={'bits': 8}, text_config={": lambda f: change_config(
    f, quantization_config={'bits': 8}, text_config=json.loads((f / 'config.json').read_text())
  ),
  'logit_scale=0.25, depth=2 are not supported for llama: this may change what the model computes; '
  'remove from config.json what is known to be harmless': lambda f: change_config(
    f, logit_scale=0.25, depth=2
  ),
  'mlp_bias=True is not supported for mistral (only mlp_bias=False): this may change what the '
  'model computes\n': lambda f: change_config(f, model_type='mistral', mlp_bias=True),
  "rope_type='dynamic' is not one of": lambda f: change_config(f, rope_scaling={'type': 'dynamic'}),
  'foo is not supported for rope_type=linear: it may change the rotary': lambda f: change_config(
    f, rope_scaling={'type': 'linear', 'factor': 2, 'foo': 1}
  ),
  "rope_type='llama3' needs factor, low": lambda f: change_config(
    f, rope_scaling={'rope_type': 'llama3'}
  ),
  "hidden_act='mish' is not one of": lambda f: change_config(f, hidden_act='mish'),
  "hidden_act=['silu'] is not of type str": lambda f: change_config(f, hidden_act=['silu']),
  'rope_scaling=[1] is not of type dict': lambda f: change_config(f, rope_scaling=[1]),
  "rope_theta='x' is not of type int or float": lambda f: change_config(f, rope_theta='x'),
  "model_type=['llama'] is not one of": lambda f: change_config(f, model_type=['llama']),
  "rope_type=['linear'] is not one of": lambda f: change_config(
    f, rope_scaling={'type': ['linear']}
  ),
  "rope_type=['linear', 'yarn'] is not one of": lambda f: change_config(
    f, rope_scaling={'type': 'linear', 'rope_type': 'yarn'}
  ),
  'head_dim=0 must be at least 1': lambda f: change_config(f, head_dim=0),
  'there is no hidden_size': lambda f: change_config(f, hidden_size=None),
  'num_hidden_layers=1000000000000 must be from 1 to 1000': lambda f: change_config(
    f, num_hidden_layers=10**12
  ),
  'max_position_embeddings={} is not of type int': lambda f: change_config(
    f, max_position_embeddings={}
  ),
  'model.key_value_heads=3 must divide model.heads=4': lambda f: change_config(
    f, num_key_value_heads=3
  ),
  'missing: model.layers.2.self_attn.q_proj.weight (16, 16)': lambda f: change_config(
    f, num_hidden_layers=3
  ),
  '9 extra; 5 are shown': lambda f: change_config(f, num_hidden_layers=1),
  'wrong shape: model.embed_tokens.weight is (288, 16), expected (99, 16)': lambda f: change_config(
    f, vocab_size=99
  ),
  'no lm_head.weight, but tie_word_embeddings=false': lambda f: change_config(
    f, tie_word_embeddings=False
  ),
  'pickles (pytorch_model.bin), which can run code': rename_weights,
  'neither model.safetensors nor': lambda f: (f / 'model.safetensors').unlink(),
  'incomplete metadata': lambda f: (
    replace_bytes(f, -4, b'')
    or os.truncate(f / 'model.safetensors', os.path.getsize(f / 'model.safetensors') - 4)
  ),
  'header too large': lambda f: replace_bytes(f, 0, struct.pack('<Q', 2**63)),
  'its header has more than 4,194,304 bytes': lambda f: change_header(
    f, '__metadata__', x=' ' * 2**22
  ),
  'invalid offset for tensor': lambda f: change_header(f, data_offsets=[0, 2**45]),
  'expected usize': lambda f: change_header(f, shape=[-16]),
  'invalid shape, data type, or offset': lambda f: change_header(f, shape=[2**40]),
  f'{NORM} in ': lambda f: change_header(f, dtype='U32'),
  'nan or infinite values, 1 in all': lambda f: replace_bytes(f, -4, struct.pack('<f', np.nan)),
  "'../x' is not a file of the folder": lambda f: write_index(f, x='../x'),
  'says that part.safetensors has x, but part.safetensors lacks it': lambda f: write_index(
    f, x='part.safetensors'
  ),
  'gone.safetensors cannot be read': lambda f: write_index(f, x='gone.safetensors'),
}


@pytest.mark.parametrize('message', DAMAGES)
def test_damage_is_named(copied, message, one_device):
  """When the model is opened, before devices and texts are used; nan while tensors stream."""
  DAMAGES[message](copied)
  with pytest.raises(errors.BadInput) as error:
    run = runs.load_pretrained(copied)
    assert message.startswith('nan')
    run.state  # noqa: B018
  assert message in f'{error.value}\n'
  assert str(copied) in str(error.value)


@pytest.mark.parametrize('options', [{'num_hidden_layers': 3}, {'tie_word_embeddings': True}])
def test_nothing_is_read_before_all_headers_are_right(tmp_path, options, monkeypatch):
  published_folders.write(tmp_path / 'head', tie_embeddings=False)
  change_header(tmp_path / 'head', 'lm_head.weight', shape=[V // 2, 32])
  change_config(tmp_path / 'head', **options)
  monkeypatch.setattr(row_files.StoredArray, 'read', None)
  with pytest.raises(errors.BadInput, match='missing: |wrong shape: lm_head'):
    runs.load_pretrained(tmp_path / 'head')


def test_a_file_that_changes_meanwhile(copied, one_device, monkeypatch):
  read = row_files.StoredArray.read

  def write_meanwhile(self, start, stop):
    os.utime(self.path, ns=(1, 1))
    return read(self, start, stop)

  monkeypatch.setattr(row_files.StoredArray, 'read', write_meanwhile)
  with pytest.raises(errors.BadInput, match=r'model\.safetensors was changed while it was read'):
    runs.load_pretrained(copied).state  # noqa: B018


def test_too_little_memory(published, one_device, monkeypatch):
  small = memory_limits.MemoryLimit('this machine', 2**12, 1)
  monkeypatch.setattr(memory_limits, 'machine_memory', lambda mesh: small)
  message = (
    'the parameters need 0.0 MiB, but this machine has 0.0 MiB: the largest array is embedding '
    '[288, 16]; use smaller sizes, or more devices with mesh.fsdp or mesh.model'
  )
  with bad_input(message):
    runs.load_pretrained(published).state  # noqa: B018


def test_too_little_memory_for_a_long_context(published, one_device, monkeypatch):
  run = runs.load_pretrained(published)
  run.variables  # noqa: B018
  small = memory_limits.MemoryLimit('this machine', 2**20, 1)
  monkeypatch.setattr(memory_limits, 'machine_memory', lambda mesh: small)
  assert run.generate([5, 6], tokens=1, context=64)[0].tokens
  with pytest.raises(errors.BadInput, match='^keys and values of context=65,536 need 8.5 MiB, but'):
    run.generate([5, 6], tokens=1, context=65_536)


def test_a_tokenizer_of_another_model(tmp_path, one_device):
  published_folders.write(tmp_path / 'small', vocabulary_size=279)
  with pytest.raises(errors.BadInput, match='the tokenizer has 280 ids, but the model 279'):
    runs.load_pretrained(tmp_path / 'small').vocabulary  # noqa: B018


def test_without_a_tokenizer(copied, one_device):
  (copied / 'tokenizer.json').unlink()
  run = runs.load_pretrained(copied)
  assert run.model.vocabulary_size == V
  message = f'{copied} has no tokenizer: add its tokenizer.json'
  with bad_input(message):
    run.vocabulary  # noqa: B018
  for arguments in {'prompts': 'a'}, {'prompts': [[1], 'a']}, {'prompts': [1, 2], 'stop': 'a'}:
    with bad_input(message):
      run.generate(tokens=2, **arguments)
  with bad_input(message):
    run.score_pairs([('a', 'b')])


def test_end_tokens_of_a_model_without_a_tokenizer(copied, one_device):
  (copied / 'tokenizer.json').unlink()
  ends = {'eos_token_id': [None, -1, 7, V, 7]}
  (copied / 'generation_config.json').write_text(json.dumps(ends))
  change_config(copied, eos_token_id=None, bos_token_id=None)
  vocabulary = runs.load_pretrained(copied).vocabulary_of_ids
  assert vocabulary.end_tokens == (7,) and vocabulary.document_end == 7


def test_token_ids_need_no_tokenizer(published, copied, one_device):
  with_tokenizer = runs.load_pretrained(published)
  (copied / 'tokenizer.json').unlink()
  without = runs.load_pretrained(copied)
  prompts = [[5, 6, 7], np.array([8]), []]
  for i, (expected, actual) in enumerate(
    zip(
      with_tokenizer.generate(prompts, tokens=3, temperature=0),
      without.generate(prompts, tokens=3, temperature=0),
      strict=True,
    )
  ):
    assert actual.prompt == expected.prompt == list(prompts[i])
    assert actual.tokens == expected.tokens and actual.text == ''
  (single,) = without.generate([5, 6, 7], tokens=3, temperature=0)
  assert single.tokens == without.generate(prompts, tokens=3, temperature=0)[0].tokens
  pairs = [([5, 6], [7]), ([], [3, 4])]
  assert without.score_pairs(pairs) == with_tokenizer.score_pairs(pairs)
  with pytest.raises(errors.BadInput, match='prompt 1: expected a text, or a list of token ids'):
    without.generate([[V]])


@pytest.mark.parametrize('is_equal', [True, False])
def test_an_output_matrix_in_a_tied_model(tmp_path, one_device, is_equal):
  params = published_folders.write(tmp_path / 'head', tie_embeddings=False)
  change_config(tmp_path / 'head', tie_word_embeddings=True)
  if is_equal:
    table = row_files.stored_arrays(tmp_path / 'head' / 'model.safetensors')[0]
    head, embedding = (table[n] for n in ('lm_head.weight', 'model.embed_tokens.weight'))
    start = head.first_byte
    replace_bytes(tmp_path / 'head', start, embedding.read(0, V).tobytes())
  run = runs.load_pretrained(tmp_path / 'head')
  assert run.config.model.tie_embeddings == is_equal
  assert ('softmax_weight' in run.state.params) != is_equal
  np.testing.assert_array_equal(run.state.params['embedding'], params['embedding'])


def test_an_output_matrix_that_cannot_be_compared(tmp_path, one_device):
  published_folders.write(tmp_path / 'head', tie_embeddings=False)
  change_config(tmp_path / 'head', tie_word_embeddings=True)
  change_header(tmp_path / 'head', 'lm_head.weight', dtype='U32')
  with pytest.raises(errors.BadInput, match=r'lm_head\.weight in .* has the dtype U32, expected'):
    runs.load_pretrained(tmp_path / 'head')


@pytest.mark.parametrize('sizes', [(8, 1, 1), (1, 2, 4), (2, 4, 1)])
def test_rows_are_read_once_into_their_shards(written, monkeypatch, sizes):
  folder, expected = written
  run, count = runs.load_pretrained(folder), {}
  read = row_files.StoredArray.read

  def count_rows(self, start, stop):
    count[self.first_byte] = count.get(self.first_byte, 0) + stop - start
    return read(self, start, stop)

  mesh = mesh_of(*sizes)
  monkeypatch.setattr(row_files.StoredArray, 'read', count_rows)
  monkeypatch.setattr(type(run), 'mesh', mesh)
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 256)
  params = run.state.params
  monkeypatch.undo()
  stored = run.published.checkpoint.tensors.values()
  assert count == {tensor.first_byte: tensor.shape[0] for tensor in stored}
  boxed = model_variables.abstract(run.model)['params']
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  shardings = sharding.shardings(boxed, mesh)
  assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings


def abstract_state(params, dtype=None):
  """A new state on one device with the shapes of parameters."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  to_struct = lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)
  return train_state.TrainState(0, jax.tree.map(to_struct, params), {}, {}, {})


def test_training_starts_from_a_published_model(tmp_path, one_device):
  folder, workdir = tmp_path / 'model', tmp_path / 'run'
  params = published_folders.write(folder, 'bfloat16')
  config = command_line.resolve(f'hf:{folder}', [('init_from', f'hf:{folder}')])
  assert config.data.vocabulary_path == str(folder)
  vocabulary = vocabularies.read('tokenizer', folder, config.data.vocabulary_size)
  assert config.training.segment_length == config.evaluation_length() == 64
  start = init_from.Start(config, workdir)
  start.check_vocabulary(vocabulary)
  workdir.mkdir()
  state = start(abstract_state(params, np.float32))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype('f4')), state.params, params)
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype('float32')}
  other = dataclasses.replace(config, model=dataclasses.replace(config.model, norm_epsilon=1e-3))
  with bad_input(
    f'init_from=hf:{folder} was trained with model.norm_epsilon=1e-06, now it is 0.001: use '
    f'--config=hf:{folder}, or omit init_from'
  ):
    init_from.Start(other, workdir)
  with bad_input(
    f'init_from=hf:{folder} has another vocabulary, of 288 token ids instead of 257: use '
    f'--config=hf:{folder}, or omit init_from'
  ):
    start.check_vocabulary(vocabularies.ByteVocabulary())


def test_a_training_keeps_what_else_is_published(tmp_path, one_device):
  folder, workdir, out = (tmp_path / name for name in ('model', 'run', 'out'))
  params = published_folders.write(folder)
  change_config(folder, bos_token_id=None, eos_token_id=[0, 5], pad_token_id=7)
  (folder / 'generation_config.json').write_text('{"temperature": 0.6, "eos_token_id": 0}')
  overrides = [('init_from', f'hf:{folder}'), ('training.segment_length', '16')]
  config = command_line.resolve(f'hf:{folder}', overrides)
  assert config.evaluation_length() == 16
  workdir.mkdir()
  workdirs.write(workdir, config, runs.load_run(folder).vocabulary, 'abc')
  state = init_from.Start(config, workdir)(abstract_state(params))
  for path in folder.glob('*config.json'):
    path.unlink()
  run = runs.load_run(workdir)
  run.__dict__.update(state=state, find_checkpoint=lambda: None)
  run.export(tmp_path / 'exported')
  exported = runs.load_run(tmp_path / 'exported')
  exported.__dict__['state'] = state
  exported.export(out, format='huggingface')
  written = {path.name: json.loads(path.read_text()) for path in out.glob('*config.json')}
  ids = {'eos_token_id': [0, 5], 'pad_token_id': 7}
  assert written['generation_config.json'] == {'temperature': 0.6} | ids
  values = written['config.json']
  assert ids.items() <= values.items() and values['bos_token_id'] is None
  assert values['max_position_embeddings'] == 64
  tokens = written['tokenizer_config.json']
  assert 'bos_token' not in tokens and tokens['eos_token'] == '<|endoftext|>'
  assert tokens['pad_token'] == run.vocabulary.token(7)
  assert runs.load_run(out).vocabulary.end_tokens == run.vocabulary.end_tokens


@pytest.mark.full
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_a_published_model_becomes_an_exported_run(tmp_path, one_device, dtype):
  folder, out = tmp_path / 'model', tmp_path / 'out'
  params = published_folders.write(folder, dtype)
  source = runs.load_run(folder)
  source.export(out)
  run = runs.load_run(out)
  assert type(run) is runs.Run and run.config == source.config
  assert run.vocabulary.definition == source.vocabulary.definition
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a, b.astype('f4')), run.state.params, params
  )
  workdirs.check_text(out, run.config, 'of any text')
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(errors.BadInput, match='has no tokenizer'):
    runs.load_run(folder).export(tmp_path / 'none')
  assert not (tmp_path / 'none').exists()
  for format in ('run', 'huggingface'):
    unread = runs.load_run(out)
    unread.__dict__['mesh'] = None  # it cannot be loaded
    with bad_input(f'--output={out} is not an empty folder; use another one'):
      unread.export(out, format=format)


@pytest.mark.full
def test_nothing_is_added_to_a_published_model(copied, tmp_path, one_device, capsys):
  names, text = sorted(path.name for path in copied.iterdir()), tmp_path / 'text.txt'
  text.write_text('a few lines of some text')
  model = f'--workdir={copied}'
  assert evaluate.main([model, f'--text={text}']) == 0
  assert 'wrote' not in capsys.readouterr().out
  assert evaluate.main([model, f'--text={text}', f'--output={tmp_path / "results"}']) == 0
  assert capsys.readouterr().out.endswith(f'wrote {tmp_path}/results/text_text.json\n')
  for analysis, flag in (('report', 'output=report.html'), ('attention', 'figure=attention.png')):
    with bad_input(
      f'{model} is a published model, to which no files are added: name the file of the results '
      f'with --{flag}'
    ):
      analyze.main([analysis, model])
  with bad_input(
    f'{model} is a published model without checkpoints: expected the workdir of ngrammer_jax.train'
  ):
    analyze.main(['checkpoint', model])
  assert sorted(path.name for path in copied.iterdir()) == names


GPT2 = {
  'norm_kind': 'layer',
  'activation': 'gelu',
  'gated': False,
  'bias': True,
  'position': 'absolute',
  'positional': {'max_length': 24},
  'feed_forward_width': 64,
  'key_value_heads': None,
}


def test_learned_positions_end(tmp_path, monkeypatch):
  """A text that has more of them is refused before devices are used."""
  folder, devices = tmp_path / 'gpt2', 'devices are used'
  published_folders.write(folder, **GPT2)
  monkeypatch.setattr(sharding, 'make_mesh', mock.Mock(side_effect=AssertionError(devices)))

  def generate(option):
    return damages.run('generate', [option, f'--workdir={folder}', '--prompt=ab'], (tmp_path,))

  for option, message in (
    ('--context=25', 'context=25 exceeds the 24 positions of the model'),
    ('--tokens=24', 'prompt 1 has 2 tokens, which with tokens=24 new ones exceed the 24 positions'),
  ):
    outcome = generate(option)
    assert outcome.shortcoming(message) is None, outcome
  assert str(generate('--tokens=23').status) == devices

  # With a segment memory they repeat, and only the context is limited.
  run = runs.load_run(folder)
  model = dataclasses.replace(run.config.model, memory=MemoryConfig(length=8))
  config = dataclasses.replace(
    run.config, model=model, evaluation=EvaluationConfig(segment_length=16)
  )
  run = dataclasses.replace(run, config=config)
  with pytest.raises(AssertionError, match=devices):
    run.generate('ab', tokens=1000)
  with pytest.raises(errors.BadInput, match='context=25 exceeds the 24 positions of the model'):
    run.generate('ab', context=25)


# A config.json of each family without what has a default, and the values that it stands for.
DEFAULTS = {
  'llama': {'norm_epsilon': 1e-6, 'tie_embeddings': False, 'key_value_heads': 4},
  'mistral': {
    'key_value_heads': 8,
    'attention.window': 4096,
    'attention.layer_pattern': ('window',),
  },
  'qwen2': {'key_value_heads': 32, 'attention.window': None, 'attention.output_bias': False},
  'qwen3': {'head_width': 128, 'attention.query_key_norm': 'head'},
  'gemma': {
    'head_width': 256,
    'key_value_heads': 16,
    'tie_embeddings': True,
    'activation': 'gelu',
    'norm_offset': True,
    'scale_embeddings': True,
    'attention.scale': None,
  },
  'gemma2': {
    'head_width': 256,
    'key_value_heads': 4,
    'tie_embeddings': True,
    'final_logit_cap': 30.0,
    'attention.logit_cap': 50.0,
    'attention.scale': 1 / 16,
    'activation': 'gelu',
    'attention.layer_pattern': ('window', 'full'),
    'attention.window': 4096,
  },
  'gemma3_text': {
    'attention.layer_pattern': ('window',) * 5 + ('full',),
    'final_logit_cap': None,
    'positional.max_timescale': 1e6,
    'positional.window_max_timescale': 1e4,
  },
  'smollm3': {
    'attention.layer_pattern': ('full', 'full', 'full', 'unrotated'),
    'tie_embeddings': True,
    'positional.max_timescale': 2e6,
    'key_value_heads': 4,
  },
  'olmo2': {'norm_epsilon': 1e-5, 'norm': 'post', 'attention.query_key_norm': 'full'},
  'phi3': {'norm_epsilon': 1e-5, 'attention.window': None, 'positional.rotary_fraction': 1.0},
  'gpt_neox': {
    'positional.rotary_fraction': 0.25,
    'attention.output_bias': True,
    'norm_epsilon': 1e-5,
    'parallel_residual': True,
    'activation': 'gelu_erf',
  },
}


def test_gemma3_without_windows_has_no_rotation_of_windows():
  positional = configs.read({'model_type': 'gemma3_text', 'sliding_window': 0} | SIZES).model[
    'positional'
  ]
  assert positional['window_max_timescale'] is None and positional['max_timescale'] == 1e6


@pytest.mark.parametrize('family', DEFAULTS)
def test_absent_fields(family):
  model = configs.read({'model_type': family} | SIZES).model
  for key, expected in DEFAULTS[family].items():
    value = model
    for name in key.split('.'):
      value = value[name]
    assert value == expected, key


@pytest.mark.full
@pytest.mark.parametrize('family', [*DEFAULTS, 'gpt2'])
def test_paths_are_those_of_the_model(family):
  """What the tensors are compared with is known without the model, and is what it has."""
  fields, names = families.FAMILIES[family].fields, families.FAMILIES[family].names
  options = SIZES | {'num_hidden_layers': 1, 'num_key_value_heads': 2, 'hidden_size': 32}
  options |= {'attention_bias': True, 'mlp_bias': True}
  options = {names.get(name, name): x for name, x in options.items() if name in fields}
  config = configs.read({'model_type': family} | options).config()
  params = model_variables.abstract(language_model.build(config, 50))['params']
  paths = {*tensors.parameter_paths(families.FAMILIES[family], config)}
  tied = {'softmax_weight'} if config.tie_embeddings else set()
  assert paths - tied == traverse_util.flatten_dict(params, sep='/').keys()


def test_absent_fields_of_a_gemma3_with_images():
  text = {'model_type': 'gemma3_text', 'hidden_size': 3840, 'num_hidden_layers': 48}
  images = {'vision_config': {'hidden_size': 1152}, 'mm_tokens_per_image': 256}
  outer = {'model_type': 'gemma3', 'image_token_index': 262144, **images}
  model = configs.read(outer | {'text_config': text}).model
  assert (model['layers'], model['heads'], model['feed_forward_width']) == (48, 8, 9216)
  for extra in ({'new_option': 3}, {'text_config': {'model_type': 'llama', **SIZES}}):
    with pytest.raises(errors.BadInput, match='new_option=3|text_config is of model_type=.llama'):
      configs.read(outer | {'text_config': text} | extra)


@pytest.mark.parametrize(
  ('family', 'options', 'name'),
  [
    ('gpt_neox', {'rotary_pct': 0.5, 'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    ('gpt_neox', {'rotary_emb_base': 2000, 'rope_theta': 2000}, 'rope_theta'),
    ('gemma2', {'sliding_window': 32, 'sliding_window_size': 32}, 'sliding_window_size'),
  ],
)
def test_a_value_that_is_said_twice(family, options, name):
  config = {'model_type': family, **SIZES, **options}
  assert configs.read(config) == configs.read({k: v for k, v in config.items() if k != name})
  with pytest.raises(errors.BadInput, match=f'{name}=7 is not supported'):
    configs.read(config | {name: 7})


# What authors and tools write beside the fields of the model.
WITHOUT_EFFECT = {
  'max_sequence_length': 64,
  'unsloth_fixed': True,
  'unsloth_version': '2025.6.2',
  'bos_token': '<s>',
  'eos_token': '</s>',
  'pad_token': '</s>',
  'sep_token': '</s>',
  'unk_token': '<unk>',
  'n_special': 0,
  'predict_special_tokens': True,
  'output_past': True,
  'badwordsids': [[0]],
  'internal_version': '7b-alpha',
  'custom_pipeline': {'text-generation': {}},
  'num_steps': 'global_step320000',
  'use_flashattn': True,
  'bias': False,
  'auto_map': {'AutoConfig': 'configuration.Config'},
}


@pytest.mark.parametrize('family', ['llama', 'phi3', 'gemma3'])
def test_fields_without_effect(family, caplog):
  config = {'model_type': family, **SIZES}
  with caplog.at_level('INFO'):
    assert configs.read(config | WITHOUT_EFFECT) == configs.read(config)
  (line,) = caplog.messages
  assert line == (
    f'auto_map of config.json is ignored, as no Python code is needed for model_type={family!r}'
  )
  with bad_input(
    f'bias=True is not supported for {configs.read(config).family.model_type} (only bias=False): '
    f'this may change what the model computes'
  ):
    configs.read(config | {'bias': True})


def test_absent_fields_of_gpt2():
  sizes = {'vocab_size': 50, 'n_embd': 16, 'n_layer': 2, 'n_head': 4}
  model = configs.read({'model_type': 'gpt2', 'scale_attn_weights': False} | sizes).model
  assert (model['feed_forward_width'], model['activation'], model['tie_embeddings']) == (
    64,
    'gelu',
    True,
  )
  assert model['positional'] == {'max_length': 1024}
  assert model['attention']['scale'] == 1


FULL, WINDOW = 'full_attention', 'sliding_attention'


@pytest.mark.parametrize(
  ('family', 'options', 'pattern'),
  [
    ('qwen2', {'max_window_layers': 4}, ('full',) * 4 + ('window',) * 2),
    ('qwen2', {'max_window_layers': 4, 'use_sliding_window': False}, ('full',)),
    ('qwen3', {'layer_types': [FULL, WINDOW] * 3}, ('full', 'window')),
    ('gemma2', {'layer_types': [WINDOW] * 6}, ('window',)),
    ('gemma3_text', {'sliding_window_pattern': 2}, ('window', 'full')),
    ('smollm3', {'no_rope_layer_interval': 2}, ('full', 'unrotated_window')),
    (
      'smollm3',
      {'no_rope_layers': [0, 1] * 3, 'layer_types': [FULL, FULL, WINDOW] * 2},
      ('unrotated', 'full', 'unrotated_window', 'full', 'unrotated', 'window'),
    ),
    ('mistral', {}, ('window',)),
    ('mistral', {'sliding_window': None}, ('full',)),
    ('phi3', {'layer_types': [FULL] * 6}, ('window',)),
  ],
)
def test_kinds_of_layers(family, options, pattern):
  windows = {'sliding_window': 7, 'use_sliding_window': True} if family != 'mistral' else {}
  if family in ('gemma2', 'gemma3_text', 'phi3'):
    windows = {'sliding_window': 7}
  attention = configs.read({'model_type': family, **SIZES, **windows, **options}).model['attention']
  assert attention['layer_pattern'] == pattern
  has_window = any('window' in kind for kind in pattern)
  assert (attention['window'] is not None) == has_window


LAYER_TYPES = (
  '^layer_types=.* must be a list of full_attention or sliding_attention for each of the 6 layers'
)
FLAGS = '^no_rope_layers=.* must be a list of 0 or 1 for each of the 6 layers'
WINDOWS_TURN_ALONE = {
  FULL: {'rope_theta': 1e4},
  WINDOW: {'rope_theta': 1e4, 'rope_type': 'yarn', 'factor': 4},
}


@each(
  'family, name, value, message',
  [
    ('qwen3', 'layer_types', [FULL] * 5, LAYER_TYPES),
    ('qwen3', 'layer_types', [FULL] * 7, LAYER_TYPES),
    ('qwen3', 'layer_types', [FULL] * 5 + ['chunked'], LAYER_TYPES),
    ('qwen3', 'layer_types', 'full', LAYER_TYPES),
    ('qwen3', 'layer_types', [[]], LAYER_TYPES),
    ('smollm3', 'no_rope_layers', [0] * 5, FLAGS),
    ('smollm3', 'no_rope_layers', [0, 1, 2] * 2, FLAGS),
    ('smollm3', 'no_rope_layers', [], FLAGS),
    ('smollm3', 'no_rope_layers', 1, FLAGS),
    ('qwen3', 'rope_parameters', WINDOWS_TURN_ALONE, f'^{WINDOW} with other rotary positions'),
    (
      'llama',
      'text_config',
      {'model_type': 'gemma3_text'},
      '^text_config=.* is not supported for llama',
    ),
  ],
)
def test_fields_that_are_refused(family, name, value, message):
  with pytest.raises(errors.BadInput, match=message):
    configs.read({'model_type': family, **SIZES, name: value})


YARN = {'factor': 4.0, 'original_max_position_embeddings': 32}
GEMMA = {'model_type': 'gemma3_text', **SIZES}


@pytest.mark.parametrize(
  ('old', 'new'),
  [
    (
      {'model_type': 'llama', **SIZES, 'rope_theta': 5e5, 'rope_scaling': {'type': 'yarn', **YARN}},
      {
        'model_type': 'llama',
        **SIZES,
        'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 5e5, **YARN},
      },
    ),
    (
      {'model_type': 'gpt_neox', **SIZES, 'rotary_pct': 0.5, 'rotary_emb_base': 77},
      {
        'model_type': 'gpt_neox',
        **SIZES,
        'rope_parameters': {'rope_theta': 77, 'partial_rotary_factor': 0.5, 'rope_type': 'default'},
      },
    ),
    (
      GEMMA
      | {'rope_theta': 8e5, 'rope_local_base_freq': 9e3, 'sliding_window_pattern': 3}
      | {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
      GEMMA
      | {'layer_types': (['sliding_attention'] * 2 + ['full_attention']) * 2}
      | {
        'rope_parameters': {
          'full_attention': {'rope_type': 'linear', 'rope_theta': 8e5, 'factor': 8.0},
          'sliding_attention': {'rope_type': 'default', 'rope_theta': 9e3},
        }
      },
    ),
    (GEMMA, {'model_type': 'gemma3', 'text_config': GEMMA, 'vision_config': {'x': 1}}),
  ],
)
def test_both_forms_of_config(old, new):
  assert configs.read(old) == configs.read(new)


def test_yarn_with_two_scales():
  scaling = {'rope_type': 'yarn', 'mscale': 1.0, 'mscale_all_dim': 0.5, **YARN}
  model = configs.read({'model_type': 'llama', **SIZES, 'rope_scaling': scaling}).model
  expected = (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)
  assert model['positional']['scaling']['attention_factor'] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'ngram': {'dim': 2}}, 'llama, the nearest, has model.ngram=None instead of'),
    ({'scale_embeddings': True}, 'has model.scale_embeddings=False instead of True'),
    ({'softmax_bias': True}, 'has model.softmax_bias=False instead of True'),
    ({'memory': {'length': 8}}, 'has model.memory=None instead of'),
  ],
)
def test_a_model_of_no_family_is_not_written(options, message):
  model = conversion.resolve({'model': LLAMA | options}).model
  with pytest.raises(errors.BadInput) as error:
    configs.write(model, V, 64)
  assert message in str(error.value)
  assert str(error.value).endswith('--format=run keeps it, as safetensors with our config')


def test_an_embedding_that_is_scaled_is_written_as_it_is_read(tmp_path, one_device):
  """A family without a scale gets rows that have it; tied to the output, they cannot."""
  options = {'scale_embeddings': True, 'tie_embeddings': False}
  params = published_folders.write(tmp_path / 'scaled', **options)
  written = runs.load_pretrained(tmp_path / 'scaled')
  assert not written.config.model.scale_embeddings
  width = written.config.model.width
  np.testing.assert_allclose(
    written.state.params['embedding'], np.asarray(params['embedding']) * width**0.5, rtol=1e-6
  )
  with pytest.raises(errors.BadInput, match='scale_embeddings=False instead of True'):
    published_folders.write(tmp_path / 'tied', **options | {'tie_embeddings': True})


LOAD = """
import dataclasses, pathlib, sys, threading, time
import jax
from ngrammer_jax import runs
from ngrammer_jax.config.mesh import MeshConfig

def host_bytes():
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) * 1024

def watch():
  while not is_done:
    peaks.append(host_bytes())
    time.sleep(0.005)

run = runs.load_run(sys.argv[1])
mesh = MeshConfig(data=1, fsdp=8)
run = dataclasses.replace(run, config=dataclasses.replace(run.config, mesh=mesh))
jax.block_until_ready(jax.numpy.zeros(1))
run.abstract_parameters, run.mesh
before, is_done, peaks = host_bytes(), False, []
thread = threading.Thread(target=watch)
thread.start()
params = run.state.params
is_done = True
thread.join()
leaves = jax.tree.leaves(params)
print(sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards), max(peaks) - before)
"""


@pytest.mark.slow
def test_a_large_model_streams_into_its_shards(tmp_path):
  """Memory above that of the arrays stays below two of the largest tensors, here 2 x 250 MiB."""
  V, D, F, layers = 32_000, 2048, 5632, 7
  config = {'model_type': 'llama', 'vocab_size': V, 'hidden_size': D, 'intermediate_size': F}
  config |= {'num_hidden_layers': layers, 'num_attention_heads': 16}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  shapes = {'model.embed_tokens': (V, D), 'lm_head': (V, D), NORM.removesuffix('.weight'): (D,)}
  of_layer = {f'self_attn.{name}_proj': (D, D) for name in 'qkvo'}
  of_layer |= {'mlp.gate_proj': (F, D), 'mlp.up_proj': (F, D), 'mlp.down_proj': (D, F)}
  of_layer |= {'input_layernorm': (D,), 'post_attention_layernorm': (D,)}
  shapes |= {f'model.layers.{i}.{n}': shape for i in range(layers) for n, shape in of_layer.items()}
  described = {f'{name}.weight': (shape, np.float32) for name, shape in shapes.items()}
  with row_files.new_file(tmp_path / 'model.safetensors', described, {}):
    pass  # zeros, which take no blocks on the disk
  environment = {**os.environ, 'JAX_NUM_CPU_DEVICES': '8', 'XLA_FLAGS': ''}
  command = [sys.executable, '-c', LOAD, str(tmp_path)]
  result = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  arrays, peak = map(int, result.stdout.split())
  assert arrays > 1.9e9 and peak - arrays < 2 * V * D * 4, (arrays, peak)
