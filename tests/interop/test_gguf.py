"""GGUF files: names, order of rows and values against the package; damaged headers."""

import struct
import sys
import zlib

import jax
import numpy as np
import pytest

from ngrammer_jax import errors, runs
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import gguf_header, published
from ngrammer_jax.inference import sampling
from ngrammer_jax.interop.huggingface import configs, gguf, published_model
from tests import checks, gguf_files
from tests.checks import bad_input
from tests.gguf_files import H, K, N
from tests.loops import each

package = pytest.importorskip('gguf')


def write(tmp_path, metadata=None, tensors=None):
  path = tmp_path / 'model.gguf'
  metadata = gguf_files.metadata() if metadata is None else metadata
  path.write_bytes(gguf_files.content(metadata, tensors or gguf_files.tensors()))
  return path


def test_names_shapes_and_config(tmp_path):
  checkpoint = gguf.open_file(write(tmp_path))
  expected = {'model.embed_tokens': (40, 32), 'model.norm': (32,)}
  layer = {
    'input_layernorm': (32,),
    'post_attention_layernorm': (32,),
    'self_attn.q_proj': (32, 32),
    'self_attn.k_proj': (16, 32),
    'self_attn.v_proj': (16, 32),
    'self_attn.o_proj': (32, 32),
    'mlp.gate_proj': (64, 32),
    'mlp.up_proj': (64, 32),
    'mlp.down_proj': (32, 64),
  }
  expected |= {f'model.layers.0.{name}': shape for name, shape in layer.items()}
  shapes = {name.removesuffix('.weight'): t.shape for name, t in checkpoint.tensors.items()}
  assert shapes == expected and not published.has_tokenizer(checkpoint.path)
  config = checkpoint.config
  assert config['rms_norm_eps'] == float(np.float32(1e-5)) != 1e-5
  assert config['tie_word_embeddings'] and config['head_dim'] == H
  assert (config['num_attention_heads'], config['num_key_value_heads']) == (N, K)
  description = configs.read(config)
  assert (description.vocabulary_size, description.positions) == (40, 64)


def test_rows_of_heads_are_put_in_order(tmp_path):
  """The converter put row h d/2 + j of a head at 2j + h, with the key heads for keys."""
  tensors = gguf_files.tensors()
  for name, heads in (('q', N), ('k', K)):
    rows = np.arange(heads * H, dtype=np.float32)
    moved = rows.reshape(heads, 2, H // 2).swapaxes(1, 2).reshape(-1)
    tensors[f'blk.0.attn_{name}.weight'] = gguf_files.plain(np.repeat(moved[:, None], 32, 1))
    tensors[f'blk.0.attn_{name}.bias'] = gguf_files.plain(moved)
  checkpoint = gguf.open_file(write(tmp_path, tensors=tensors))
  assert checkpoint.config['attention_bias']
  for name, heads in (('q', N), ('k', K)):
    for ending, axes in (('weight', (..., 0)), ('bias', ...)):
      tensor = checkpoint.tensors[f'model.layers.0.self_attn.{name}_proj.{ending}']
      for start, stop in ((0, heads * H), (3, 5), (H - 1, H + 1), (2, 2)):
        rows = tensor.read(start, stop)
        np.testing.assert_array_equal(rows[axes], np.arange(start, stop))
        assert rows.flags.writeable


@pytest.mark.parametrize('piece', [256, 768, 2**17])
def test_every_type_is_dequantised_as_by_the_package(tmp_path, monkeypatch, piece):
  """Row by row, bit for bit, in pieces of any length."""
  monkeypatch.setattr(gguf, 'PIECE_VALUES', piece)
  rng, seen = np.random.default_rng(0), []
  for kind, (values, size) in package.GGML_QUANT_SIZES.items():
    try:
      package.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
      continue
    columns, rows = 2 * max(values, 16), 5
    stored = rng.integers(0, 256, (rows, columns // values * size), np.uint8)
    tensors = {'x': ((rows, columns), int(kind), stored.tobytes())}
    path = tmp_path / 'one.gguf'
    path.write_bytes(gguf_files.content({}, tensors))
    _, entries = gguf_header.read(path)
    stored_tensor = gguf._stored_tensor('x', entries['x'])
    with np.errstate(all='ignore'):
      expected = package.dequantize(stored, kind)
      for start, stop in ((0, rows), (1, 2), (2, 5)):
        read = stored_tensor.read(start, stop)
        assert read.dtype == stored_tensor.dtype and read.shape == (stop - start, columns)
        actual = read.astype(np.float32)
        nan = np.isnan(actual) & np.isnan(expected[start:stop])
        same = actual.view(np.uint32) == expected[start:stop].view(np.uint32)
        assert (same | nan).all(), kind.name
    seen.append(kind.name)
  types = {'F32', 'F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0', 'Q4_K', 'Q5_K', 'Q6_K'}
  assert types <= set(seen)


def test_factors_of_frequencies(tmp_path):
  """Those of Llama 3 are its formula; any others stand one by one."""
  theta, half = 500_000.0, H // 2
  wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
  smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
  llama3 = 1 / ((1 - smooth) / 8 + smooth)
  metadata = gguf_files.metadata(**{'llama.rope.freq_base': theta})
  for factors in (llama3, np.array([1.0, 2.5, 3.0, 7.0])):
    tensors = gguf_files.tensors() | {'rope_freqs.weight': gguf_files.plain(factors)}
    config = gguf.open_file(write(tmp_path, metadata, tensors)).config
    scaling = configs.read(config).model['positional']['scaling']
    if factors is llama3:
      assert scaling == {
        'kind': 'llama3',
        'factor': 8.0,
        'low_frequency_factor': 1.0,
        'high_frequency_factor': 4.0,
        'original_length': 8192,
      }
    else:
      assert scaling['kind'] == 'longrope' and scaling['attention_factor'] == 1
      assert scaling['short_factors'] == scaling['long_factors'] == factors.tolist()
  for factors in (np.ones(3), np.array([1, 0, 1, 1.0]), np.array([1, np.nan, 1, 1])):
    tensors = gguf_files.tensors() | {'rope_freqs.weight': gguf_files.plain(factors)}
    with pytest.raises(errors.BadInput, match='is damaged: rope_freqs.weight has'):
      gguf.open_file(write(tmp_path, metadata, tensors))


def test_scaling_of_the_metadata(tmp_path):
  def scaling(**keys):
    keys = {f'llama.rope.scaling.{name}': x for name, x in keys.items()}
    return gguf.open_file(write(tmp_path, gguf_files.metadata(**keys))).config['rope_scaling']

  assert scaling(type='none') is None
  assert scaling(type='linear', factor=2.5) == {'rope_type': 'linear', 'factor': 2.5}
  yarn = scaling(type='yarn', factor=4.0, original_context_length=16)
  assert yarn == {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 16,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
  }
  with pytest.raises(errors.BadInput, match='is longrope; supported: none, linear, yarn'):
    scaling(type='longrope', factor=2.0)


@each(
  'changes, problem',
  [
    ({'general.architecture': 'qwen2'}, "the architecture 'qwen2'; of GGUF files only llama"),
    ({'llama.expert_count': 8}, 'llama.expert_count is set'),
    ({'llama.rope.scaling.yarn_log_multiplier': 0.1}, 'yarn_log_multiplier is set'),
    ({'llama.attention.key_length': 8, 'llama.attention.value_length': 4}, 'value_length is not'),
    ({'llama.rope.dimension_count': 4}, 'rope.dimension_count is not the width of the heads'),
    ({'llama.block_count': 2**31 - 1}, 'num_hidden_layers=2147483647 must be from 1 to 1000'),
    ({'llama.block_count': 2}, '9 missing.*model.layers.1.self_attn.k_proj.weight'),
    ({'llama.attention.head_count': 64}, 'head_dim=0|llama.attention.key_length is 0'),
    ({'llama.block_count': 'two'}, 'llama.block_count is two'),
    ({'llama.attention.head_count': 0}, 'llama.attention.head_count is 0'),
    ({'llama.attention.head_count_kv': 4}, r'k_proj.weight is \(16, 32\), expected \(32, 32\)'),
    ({'llama.attention.head_count': [4, 2]}, 'llama.attention.head_count is'),
    ({'llama.attention.layer_norm_rms_epsilon': None}, 'layer_norm_rms_epsilon is None'),
    ({'general.alignment': 0}, 'general.alignment is 0'),
  ],
)
def test_models_that_are_not_supported(tmp_path, changes, problem):
  with pytest.raises(errors.BadInput, match=rf'(?s)model\.gguf.*{problem}'):
    published_model.open(write(tmp_path, gguf_files.metadata(**changes)))


def test_heads_that_do_not_fit_the_width(tmp_path):
  """As in Mistral Nemo: their width is that of the rows, whether a key says it or not."""
  tensors = gguf_files.tensors()
  for name, rows in (('q', 48), ('k', 24), ('v', 24)):
    tensors[f'blk.0.attn_{name}.weight'] = gguf_files.plain(np.ones((rows, 32)))
  tensors['blk.0.attn_output.weight'] = gguf_files.plain(np.ones((32, 48)))
  for changes in ({}, {'llama.attention.key_length': 12}, {'llama.rope.dimension_count': 12}):
    path = write(tmp_path, gguf_files.metadata(**changes), tensors)
    assert gguf.open_file(path).config['head_dim'] == 12


def test_a_vocabulary_of_a_file_with_another_name(tmp_path):
  path = tmp_path / 'blob'
  metadata = gguf_files.metadata(**gguf_files.tokenizer())
  path.write_bytes(gguf_files.content(metadata, gguf_files.tensors()))
  assert vocabularies.read('tokenizer', path).end_tokens == (1, 0)


def test_a_window_makes_a_mistral(tmp_path):
  metadata = gguf_files.metadata(**{'llama.attention.sliding_window': 6})
  description = configs.read(gguf.open_file(write(tmp_path, metadata)).config)
  assert description.family.model_type == 'mistral'
  assert description.model['attention']['window'] == 6


WHOLE = gguf_files.content(gguf_files.metadata(), gguf_files.tensors())
# A list of one text, and one that makes too many.
LISTS = gguf_files.content({'a': ['x'], 'b': ['y']}, {}).replace(
  struct.pack('<QQ', 1, 1) + b'y', struct.pack('<QQ', 2**20, 1) + b'y'
)


def with_number(after, code, number, skip=0):
  """The file with a number behind the first occurrence of a text replaced."""
  at = WHOLE.index(after) + len(after) + skip
  packed = struct.pack(f'<{code}', number)
  return WHOLE[:at] + packed + WHOLE[at + len(packed) :]


@each(
  'damage, problem',
  [
    (lambda: b'', 'the file ends inside its header'),
    (lambda: b'GGUE' + WHOLE[4:], 'it does not begin with GGUF'),
    (lambda: with_number(b'GGUF', 'I', 1), 'it has version 1 of the format'),
    (lambda: with_number(b'GGUF', 'I', 3 << 24), 'it has version 50331648 of the format'),
    (lambda: with_number(b'GGUF', 'Q', 2**12 + 1, 4), '4,097 tensors and 9 keys, expected'),
    (lambda: with_number(b'GGUF', 'Q', 2**60, 12), 'it has 11 tensors and 1,152,921,504,606,84'),
    (lambda: with_number(b'GGUF', 'Q', 2**12, 4), 'has 0 dimensions'),
    (lambda: with_number(b'GGUF', 'Q', 2**12, 12), 'ends inside its header|unknown type|codec'),
    (lambda: LISTS, 'it has more than 1,048,576 strings'),
    (lambda: with_number(b'GGUF', 'Q', 2**63, 20), 'the file ends inside its header'),
    (lambda: with_number(b'general.architecture', 'I', 77), 'a value has the unknown type 77'),
    (lambda: WHOLE[:100], 'the file ends inside its header'),
    (lambda: WHOLE[:700], 'the file ends inside its header'),
    (lambda: WHOLE[:-1000], 'ends beyond the file'),
    (lambda: with_number(b'token_embd.weight', 'I', 5), 'token_embd.weight has 5 dimensions'),
    (lambda: with_number(b'token_embd.weight', 'I', 2**31), 'has 2147483648 dimensions'),
    (lambda: with_number(b'token_embd.weight', 'Q', 2**40, 4), 'ends beyond the file'),
    (lambda: with_number(b'token_embd.weight', 'q', -1, 12), 'ends beyond the file'),
    (lambda: with_number(b'token_embd.weight', 'Q', 0, 4), r'has the shape \[40, 0\]'),
    (lambda: with_number(b'token_embd.weight', 'I', 99, 20), 'token_embd.weight has the type 99'),
    (lambda: with_number(b'token_embd.weight', 'I', 24, 20), 'token_embd.weight has the type I8'),
    (lambda: with_number(b'token_embd.weight', 'I', 12, 20), 'has no whole blocks of 256 values'),
    (lambda: with_number(b'token_embd.weight', 'Q', 2**62, 24), 'ends beyond the file'),
    (lambda: with_number(b'blk.0.attn_output.weight', 'Q', 0, 24), 'two tensors overlap'),
    (
      lambda: with_number(b'token_embd.weight', 'Q', 16, 24),
      'token_embd.weight does not begin at a multiple of 32 bytes',
    ),
    (lambda: WHOLE.replace(b'output_norm.weight', b'output_nor\xff.weight'), 'codec'),
    (lambda: WHOLE.replace(b'blk.0.ffn_up', b'blk.0.ffn_uq'), 'blk.0.ffn_uq.weight is not one'),
    (lambda: WHOLE.replace(b'blk.0.attn_q', b'blk.0.attn_k'), 'blk.0.attn_k.weight twice'),
    (lambda: WHOLE.replace(b'token_embd', b'output_emb'), 'output_emb.weight is not one'),
    (lambda: b'GGUF' + bytes(20), 'it has version 0 of the format'),
  ],
)
def test_damaged_headers(tmp_path, damage, problem):
  """One sentence, before anything large is read or allocated."""
  path = tmp_path / 'model.gguf'
  path.write_bytes(damage())
  with pytest.raises(errors.BadInput, match=problem):
    gguf.open_file(path)


def test_a_long_header_is_refused(tmp_path):
  """A file of 1 TB, without blocks on the disk, whose header claims a text of half of it."""
  path = tmp_path / 'model.gguf'
  with path.open('wb') as file:
    file.write(b'GGUF' + struct.pack('<IQQQ', 3, 0, 1, 2**39))
    file.truncate(2**40)
  with pytest.raises(errors.BadInput, match='its header has more than 67,108,864 bytes'):
    gguf.open_file(path)


def test_without_the_package(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with bad_input(
    'GGUF files need the package gguf: pip install --no-deps gguf (or ngrammer_jax[gguf])'
  ):
    gguf.open_file(write(tmp_path))


def test_a_file_that_becomes_shorter(tmp_path, one_device):
  path = write(tmp_path)
  run = runs.load_run(path)
  assert run.parameter_dtypes  # its headers are read
  path.write_bytes(path.read_bytes()[:-4000])
  with pytest.raises(errors.BadInput, match=r'model\.gguf was changed while it was read'):
    run.state  # noqa: B018


def write_parts(folder, parts):
  """The files of a model that is split, with the names that the package gives them."""
  folder.mkdir(exist_ok=True)
  files = []
  for number, part in enumerate(parts, start=1):
    files.append(folder / f'model-{number:05}-of-{len(parts):05}.gguf')
    files[-1].write_bytes(part)
  return files


def test_a_split_model_is_the_whole_one(tmp_path):
  """From any of its files; the first may have no tensors."""
  metadata = gguf_files.metadata(**gguf_files.tokenizer())
  tensors = gguf_files.tensors()
  whole = gguf.open_file(write(tmp_path, metadata, tensors))
  keys = {'split.count': 3, 'split.tensors.count': len(tensors)}
  without_tensors = [gguf_files.content(metadata | keys | {'split.no': 0}, {})]
  for number in (1, 2):
    part = dict([*tensors.items()][number - 1 :: 2])
    without_tensors.append(gguf_files.content(keys | {'split.no': number}, part))
  for i, parts in enumerate((gguf_files.split(metadata, tensors, 3), without_tensors)):
    files = write_parts(tmp_path / f'{i}', parts)
    for file in files:
      checkpoint = gguf.open_file(file)
      assert checkpoint.config == whole.config and set(checkpoint.versions) == set(files)
      assert checkpoint.tensors.keys() == whole.tensors.keys()
      for name, tensor in whole.tensors.items():
        rows = tensor.read(0, tensor.shape[0])
        np.testing.assert_array_equal(checkpoint.tensors[name].read(0, tensor.shape[0]), rows)
      assert published.read(file, None).end_tokens == (1, 0)
    files[1].write_bytes(files[1].read_bytes() + b'x')
    with pytest.raises(errors.BadInput, match='model-00002-of-00003.gguf was changed'):
      checkpoint.check_unchanged()


@pytest.mark.full
def test_a_model_that_the_package_splits(tmp_path):
  writer = package.GGUFWriter(tmp_path / 'model.gguf', 'llama', split_max_tensors=4)
  for key, value in gguf_files.metadata().items():
    if isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
  rng, arrays = np.random.default_rng(0), {}
  for name, (shape, _, _) in gguf_files.tensors().items():
    arrays[name] = rng.standard_normal(shape).astype(np.float32)
    writer.add_tensor(name, arrays[name])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  files = sorted(tmp_path.iterdir())
  assert [file.name for file in files] == [f'model-0000{i}-of-00003.gguf' for i in (1, 2, 3)]
  tensors = gguf.open_file(files[2]).tensors
  norm = tensors['model.norm.weight'].read(0, gguf_files.D)
  np.testing.assert_array_equal(norm, arrays['output_norm.weight'])
  assert len(tensors) == len(arrays)


def test_parts_that_are_missing_or_of_another_model(tmp_path):
  metadata, tensors = gguf_files.metadata(), gguf_files.tensors()

  def problem_of(file):
    with pytest.raises(errors.BadInput) as caught:
      published_model.open(file)
    return str(caught.value)

  def changed(number, **keys):
    """Files of which one has other keys."""
    parts = gguf_files.split(metadata, tensors, 3)
    own = {'split.count': 3, 'split.no': number, 'split.tensors.count': len(tensors)}
    own |= {key.replace('_', '.'): value for key, value in keys.items()}
    if number == 0:
      own = metadata | own
    parts[number] = gguf_files.content(own, dict([*tensors.items()][number::3]))
    return write_parts(tmp_path / 'changed', parts)

  files = write_parts(tmp_path / 'missing', gguf_files.split(metadata, tensors, 3))
  files[1].unlink()
  text = f'{files[2]}: it is one of 3 files of a model, and model-0000'
  assert problem_of(files[2]) == f'{text}2-of-00003.gguf is missing: get all files'
  files[0].unlink()
  assert problem_of(files[2]) == f'{text}1-of-00003.gguf is missing (and 1 more): get all files'
  files[2].rename(tmp_path / 'renamed.gguf')
  text = 'it is one of 3 files of a model: name them NAME-00001-of-00003.gguf and so on'
  assert text in problem_of(tmp_path / 'renamed.gguf')
  text = 'model-00002-of-00003.gguf: split.no is 2, but the name of the file says 1'
  assert text in problem_of(changed(1, split_no=2)[0])
  assert 'split.count is 4, but the name of the file says 3' in problem_of(
    changed(2, split_count=4)[0]
  )
  text = 'it has 11 tensors, but split.tensors.count is 12'
  assert text in problem_of(changed(0, split_tensors_count=12)[0])
  parts = gguf_files.split(metadata, tensors, 3)
  files = write_parts(tmp_path / 'changed', [parts[0], parts[1], parts[2][:-4000]])
  assert 'ends beyond the file' in problem_of(files[0])
  parts[2] = parts[2].replace(b'split.no', b'split.of')
  assert 'split.no is None' in problem_of(write_parts(tmp_path / 'changed', parts)[0])
  keys = {'split.count': 2, 'split.no': 1, 'split.tensors.count': len(tensors)}
  first = gguf_files.content(metadata | keys | {'split.no': 0}, tensors)
  second = gguf_files.content(keys, {'output_norm.weight': tensors['output_norm.weight']})
  files = write_parts(tmp_path / 'twice', [first, second])
  assert 'another part has output_norm.weight too' in problem_of(files[0])
  # A folder of GGUF files is not a model.
  assert 'has no config.json: name its file model-00001-of-00002.gguf' in problem_of(
    files[0].parent
  )


@pytest.mark.slow
def test_real_model(one_device):
  """SmolLM2, where its package is installed: tokens, log-probabilities, greedy tokens, chat."""
  expected = checks.smollm2_expected()
  try:
    run = runs.load_pretrained('smollm2_135m_instruct')
  except errors.BadInput as error:
    pytest.skip(str(error))
  for name, length in (('english', 160), ('python', 160), ('enwik8', 768)):
    if f'text/{name}' not in expected:
      continue
    ids = run.vocabulary.encode(str(expected[f'text/{name}']).encode())
    assert zlib.crc32(ids.astype(np.int64)) == expected[f'ids_crc32/{name}']
    (nats,) = run.engine.score_documents(run.variables, [ids], None, length)
    np.testing.assert_allclose(-nats, expected[f'logprob/{name}'], atol=5e-4)
  prompts = [str(expected[f'prompt/{name}']) for name in ('capital', 'code')]
  completions = run.generate(prompts, tokens=24, temperature=0, context=64)
  for name, completion in zip(('capital', 'code'), completions, strict=True):
    assert completion.tokens == expected[f'greedy_ids/{name}'].tolist()
  prompt = run.vocabulary.encode(str(expected['prompt/chat']).encode(), special=True)
  greedy = sampling.SamplingConfig(temperature=0)
  tokens = run.engine.generate(run.variables, [prompt], [0], greedy, 64)
  assert [int(next(tokens)[0]) for _ in range(24)] == expected['greedy_ids/chat'].tolist()


@pytest.mark.slow
def test_real_model_in_bfloat16(one_device):
  """The weights stay in two bytes each while they are used."""
  try:
    run = runs.load_pretrained('smollm2_135m_instruct', 'bfloat16')
  except errors.BadInput as error:
    pytest.skip(str(error))
  (completion,) = run.generate('The capital of France is', tokens=4, temperature=0, context=64)
  assert completion.text.startswith(' Paris.')
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(run.variables)) < 270e6


@pytest.mark.full
def test_reference_model(one_device):
  """Log-probabilities and greedy tokens of the official Llama with the dequantised weights."""
  folder = checks.REFERENCE / 'hf' / 'llama_gguf'
  expected = np.load(folder / 'expected.npz')
  run = runs.load_run(folder / 'model.gguf')
  ids = expected['input_ids'][0]
  assert (
    run.vocabulary.encode(str(expected['text']).encode(), special=True).tolist() == ids.tolist()
  )
  logits = expected['logits'][0, :-1]
  logits -= logits.max(axis=-1, keepdims=True)
  nats = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(ids) - 1), ids[1:]]
  (actual,) = run.engine.score_documents(run.variables, [ids], None, 32)
  np.testing.assert_allclose(actual, nats, atol=3e-5)
