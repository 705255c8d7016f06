"""GGUF files of the architecture `llama` (Llama, Mistral, SmolLM2): config, tensors, tokenizer.

The package `gguf` dequantises. Tensors get the names and the order of rows of a Hugging Face
checkpoint, and the config its keys, so loaders need not handle GGUF.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import math
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.data.vocabularies import gguf_header
from ngrammer_jax.interop import row_files
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints
from ngrammer_jax.interop.huggingface import families, rotary_fields
from ngrammer_jax.layers.attention import rotary_scaling
from ngrammer_jax.system import file_errors, files, git_lfs

PIECE_VALUES = 2**17  # dequantised at once: source and result fit in a cache
PLAIN = ('F32', 'F16', 'BF16')  # unquantised types, by their name in the package
# Modules by their names in a file, as in a Hugging Face checkpoint; * is the number of a layer.
MODULES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
  'blk.*.attn_q': 'model.layers.*.self_attn.q_proj',
  'blk.*.attn_k': 'model.layers.*.self_attn.k_proj',
  'blk.*.attn_v': 'model.layers.*.self_attn.v_proj',
  'blk.*.attn_output': 'model.layers.*.self_attn.o_proj',
  'blk.*.attn_norm': 'model.layers.*.input_layernorm',
  'blk.*.ffn_gate': 'model.layers.*.mlp.gate_proj',
  'blk.*.ffn_up': 'model.layers.*.mlp.up_proj',
  'blk.*.ffn_down': 'model.layers.*.mlp.down_proj',
  'blk.*.ffn_norm': 'model.layers.*.post_attention_layernorm',
  'rope_freqs': 'rope_freqs',
}
# Keys that change the numbers of a model, unsupported by Llama.
FOREIGN_KEYS = re.compile(
  r'llama\.(expert_count|use_parallel_residual|.*((?<!re)scale|softcapping|clamp|alibi).*)'
  r'|llama\.rope\.scaling\.(alpha|yarn_(?!beta_).*)'
)


class GgufTensor(NamedTuple):
  """A stored tensor, a `checkpoint.StoredTensor`.

  Attributes:
    stored: its rows in the file, as bytes if they are quantised.
    shape: the shape, rows first.
    quantization: the type of quantised rows, a `gguf.GGMLQuantizationType`; None: not quantised.
    head_width: rows of an attention head with adjacent rotary pairs, to be moved half a head apart;
      None: rows in order.
  """

  stored: row_files.StoredArray
  shape: tuple[int, ...]
  quantization: Any
  head_width: int | None = None

  @property
  def dtype(self) -> np.dtype:
    """The dtype returned by `read`: the stored one, or float32 if quantised."""
    if self.quantization is None:
      return self.stored.dtype
    return np.dtype(np.float32)

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`, dequantised; reads no others.

    For permuted rows, reads whole heads.
    """
    H = self.head_width or 1
    first = start // H * H
    last = -(-stop // H) * H
    rows = self.stored.read(first, last)
    if self.quantization is not None:
      rows = _dequantize(rows, self.quantization)
    if self.head_width is not None:
      rows = rows.reshape(-1, H // 2, 2, *self.shape[1:]).swapaxes(1, 2)
    return rows.reshape(last - first, *self.shape[1:])[start - first : stop - first]


def open_file(path: pathlib.Path) -> checkpoints.Checkpoint:
  """Returns the model in a GGUF file; reads only the header.

  Args:
    path: the file, or one of the files of a split model, see `gguf_header`.

  Raises:
    BadInput: the package `gguf` is missing, a file is damaged or missing, or its architecture,
      tokenizer or a type of its tensors is not supported.
  """
  parts = gguf_header.parts(path)
  for part in parts:
    git_lfs.check_file(part)
  _package()
  versions = {part: checkpoints.version(part) for part in parts}
  with file_errors.translate_damage(path, 'download it again'), errors.named(path):
    metadata, entries = gguf_header.read(path)
    architecture = metadata.get('general.architecture')
    if architecture != 'llama':
      raise errors.BadInput(
        f'it has the architecture {architecture!r}; of GGUF files only llama can be loaded '
        f'(Llama, Mistral, SmolLM2): use the safetensors files of this model'
      )
    tensors = {}
    for name, entry in entries.items():
      tensors[_translate_name(name)] = _stored_tensor(name, entry)
    _check_no_overlap(tensor.stored for tensor in tensors.values())
    factors = tensors.pop('rope_freqs.weight', None)
    config = _make_config(metadata, tensors)
    if factors is not None:
      config['rope_scaling'] = _factor_scaling(factors.read(0, factors.shape[0]), config)
    for name, tensor in tensors.items():
      if name.rpartition('.')[0].endswith(('q_proj', 'k_proj')):
        tensors[name] = tensor._replace(head_width=config['head_dim'])
  return checkpoints.Checkpoint(path, config, tensors, text_files={}, versions=versions)


def _check_no_overlap(arrays: Iterable[row_files.StoredArray]) -> None:
  """Raises ValueError if two arrays of a file overlap."""
  by_place = sorted(arrays, key=lambda array: (array.path, array.first_byte))
  for array, following in itertools.pairwise(by_place):
    if array.path != following.path:
      continue
    if array.first_byte + array.shape[0] * array.row_bytes > following.first_byte:
      raise ValueError('two tensors overlap')


def _package():
  """Returns the package `gguf`. Raises BadInput if it is not installed."""
  try:
    import gguf
  except ImportError as error:
    raise errors.BadInput(
      'GGUF files need the package gguf: pip install --no-deps gguf (or ngrammer_jax[gguf])'
    ) from error
  return gguf


def _dequantize(rows: np.ndarray, quantization: Any) -> np.ndarray:
  """Returns the values of rows of bytes, with a row for each block.

  The package takes 16 rows at a time, slow for short rows, so rows are joined to long pieces.
  """
  package = _package()
  block_values, block_bytes = package.GGML_QUANT_SIZES[quantization]
  blocks = rows.reshape(-1, block_bytes)
  values = np.empty((len(blocks), block_values), np.float32)
  size = PIECE_VALUES // block_values
  for i in range(0, len(blocks), size):
    piece = blocks[i : i + size].reshape(1, -1)
    values[i : i + size] = package.dequantize(piece, quantization).reshape(-1, block_values)
  return values


def _stored_tensor(name: str, entry: gguf_header.Entry) -> GgufTensor:
  """Returns a tensor. Raises if it cannot be read."""
  shape = entry.shape
  quantization = _quantization(name, entry.kind)
  block_values, block_bytes = _package().GGML_QUANT_SIZES[quantization]
  if not all(shape):
    raise ValueError(f'{name} has the shape {list(shape)}')
  if block_values > 1 and (len(shape) == 1 or shape[-1] % block_values):
    raise ValueError(
      f'{name}, of the shape {list(shape)}, has no whole blocks of {block_values} values'
    )
  row_bytes = math.prod(shape[1:]) // block_values * block_bytes
  if entry.first_byte + shape[0] * row_bytes > files.size(entry.path):
    raise ValueError(f'{name}, of the shape {list(shape)}, ends beyond the file')
  if quantization.name in PLAIN:
    stored = row_files.StoredArray(entry.path, quantization.name, shape, entry.first_byte)
    return GgufTensor(stored, shape, quantization=None)
  stored = row_files.StoredArray(entry.path, 'U8', (shape[0], row_bytes), entry.first_byte)
  return GgufTensor(stored, shape, quantization)


def _quantization(name: str, number: int) -> Any:
  """Returns the `gguf.GGMLQuantizationType` of a number. Raises BadInput for an unknown one."""
  package = _package()
  quantization = number
  try:
    quantization = package.GGMLQuantizationType(number)
    _, block_bytes = package.GGML_QUANT_SIZES[quantization]
    package.dequantize(np.zeros((1, block_bytes), np.uint8), quantization)
  except (ValueError, NotImplementedError) as error:
    raise errors.BadInput(
      f'{name} has the type {getattr(quantization, "name", number)}, which the package gguf cannot '
      f'dequantise: use another file'
    ) from error
  return quantization


def _translate_name(name: str) -> str:
  """Returns the Hugging Face name of a tensor. Raises BadInput for an unknown tensor."""
  module, _, ending = name.rpartition('.')
  layer = re.search(r'\d*$', module.rpartition('.')[0]).group()
  translated = MODULES.get(re.sub(r'\d+', '*', module))
  if translated is None or ending not in ('weight', 'bias'):
    raise errors.BadInput(f'the tensor {name} is not one of a Llama: this model is not supported')
  return f'{translated.replace("*", layer)}.{ending}'


@dataclasses.dataclass(frozen=True)
class _LlamaMetadata:
  """The metadata `llama.NAME`, checked."""

  metadata: Mapping[str, Any]

  def integer(self, name: str, default: int | None = None) -> int:
    """Returns a positive integer. Raises ValueError for another value."""
    return self._positive(name, default, int)

  def number(self, name: str, default: float | None = None) -> float:
    """Returns a positive finite number. Raises ValueError for another value."""
    return self._positive(name, default, (int, float))

  def text(self, name: str, default: str) -> str:
    """Returns a text. Raises ValueError for another value."""
    value = self._value(name, default)
    if not isinstance(value, str):
      raise ValueError(f'llama.{name} is {value}')
    return value

  def _positive(self, name: str, default: Any, allowed: type | tuple[type, ...]) -> Any:
    value = self._value(name, default)
    if not isinstance(value, allowed) or not 0 < value < math.inf:
      raise ValueError(f'llama.{name} is {value}')
    return value

  def _value(self, name: str, default: Any) -> Any:
    value = self.metadata.get(f'llama.{name}', default)
    if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:  # the same in every layer
      return value[0].item()
    return value


def _make_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
  """Returns the content of the model's config.json."""
  for key in metadata:
    if FOREIGN_KEYS.fullmatch(key) and np.any(metadata[key]):
      raise errors.BadInput(f'{key} is set: such a model is not a Llama, and not supported')
  llama = _LlamaMetadata(metadata)
  layers = llama.integer('block_count')
  width = llama.integer('embedding_length')
  heads = llama.integer('attention.head_count')
  query = tensors['model.layers.0.self_attn.q_proj.weight']
  # It is not always width / heads.
  head_width = llama.integer('attention.key_length', query.shape[0] // heads)
  for name in ('attention.value_length', 'rope.dimension_count'):
    if llama.integer(name, head_width) != head_width:
      raise errors.BadInput(f'llama.{name} is not the width of the heads: this is not supported')
  config = {
    'model_type': 'llama',
    'hidden_size': width,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': llama.integer('attention.head_count_kv', heads),
    'head_dim': head_width,
    'intermediate_size': llama.integer('feed_forward_length'),
    'vocab_size': tensors['model.embed_tokens.weight'].shape[0],
    'max_position_embeddings': llama.integer('context_length', 2048),
    'rms_norm_eps': llama.number('attention.layer_norm_rms_epsilon'),
    'rope_theta': llama.number('rope.freq_base', 10_000.0),
    'rope_scaling': _scaling(llama),
    'tie_word_embeddings': 'lm_head.weight' not in tensors,
    'attention_bias': 'model.layers.0.self_attn.q_proj.bias' in tensors,
    'mlp_bias': 'model.layers.0.mlp.up_proj.bias' in tensors,
    'bos_token_id': metadata.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': _end_tokens(metadata),
  }
  window = metadata.get('llama.attention.sliding_window')
  if window:
    config |= {'model_type': 'mistral', 'sliding_window': window}
  return config


def _end_tokens(metadata: Mapping[str, Any]) -> int | list[int] | None:
  """Returns the end token, or all end tokens of texts, turns and messages."""
  names = ('eos_token_id', 'eot_token_id', 'eom_token_id')
  ends = [metadata.get(f'tokenizer.ggml.{name}') for name in names]
  distinct = list(dict.fromkeys(end for end in ends if end is not None))
  if len(distinct) > 1:
    return distinct
  return distinct[0] if distinct else None


def _scaling(llama: _LlamaMetadata) -> dict[str, Any] | None:
  """Returns the scaling of rotary positions in the metadata."""
  scaling_type = llama.text('rope.scaling.type', 'none')
  if scaling_type == 'none':
    return None
  if scaling_type not in ('linear', 'yarn'):
    raise errors.BadInput(
      f'llama.rope.scaling.type is {scaling_type}; supported: none, linear, yarn'
    )
  factor = llama.number('rope.scaling.factor')
  scaling = {'rope_type': scaling_type, 'factor': factor}
  if scaling_type == 'yarn':
    original_length = llama.integer(
      'rope.scaling.original_context_length', llama.integer('context_length')
    )
    scaling |= {
      'original_max_position_embeddings': original_length,
      'beta_fast': llama.number('rope.scaling.yarn_beta_fast', 32.0),
      'beta_slow': llama.number('rope.scaling.yarn_beta_slow', 1.0),
    }
    attention_factor = llama.number('rope.scaling.attn_factor', 1.0)
    if attention_factor != 1:
      scaling['attention_factor'] = attention_factor * (0.1 * math.log(factor) + 1)
  return scaling


def _factor_scaling(factors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the scaling that divides every frequency by its factor.

  It is `llama3` for the factors of a published Llama 3.x. Otherwise it is a `longrope` with the
  same factors for short and long texts, without other scaling.
  """
  if config['rope_scaling'] is not None or factors.shape != (config['head_dim'] // 2,):
    raise ValueError(f'rope_freqs.weight has the shape {list(factors.shape)}, or a second scaling')
  if not (np.isfinite(factors).all() and (factors > 0).all()):
    raise ValueError('rope_freqs.weight has values that are not positive')
  frequencies = 1 / rotary_scaling.timescales(config['head_dim'], 1.0, config['rope_theta'])
  llama3 = RotaryScalingConfig('llama3', float(factors.max()))  # all else is as in Llama 3.x
  scaled, _ = rotary_scaling.scale(frequencies, llama3, config['rope_theta'])
  if np.allclose(factors, frequencies / scaled, rtol=1e-5, atol=0):
    return rotary_fields.write_scaling(llama3, families.LLAMA)
  values = factors.astype(float).tolist()
  return {
    'rope_type': 'longrope',
    'factor': 1.0,
    'attention_factor': 1.0,
    'short_factor': values,
    'long_factor': values,
  }
