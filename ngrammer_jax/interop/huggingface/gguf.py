"""GGUF files of the architecture `llama` (Llama, Mistral, SmolLM2): config, tensors, tokenizer.

The package `gguf` dequantises. Tensors get the names and the order of rows of a Hugging Face
checkpoint, and the config its keys, so that a loader of those needs to know nothing of GGUF.
"""

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
from ngrammer_jax.interop.huggingface import configs, families
from ngrammer_jax.layers.attention import rotary_scaling
from ngrammer_jax.system import file_errors, files

PIECE_VALUES = 2**17  # that are dequantised at once: they and what they come from fit in a cache
PLAIN = ('F32', 'F16', 'BF16')  # types that are not quantised, by their name in the package
# Modules by their names in a file, as in a Hugging Face checkpoint; * is the number of a layer.
MODULES = {
  **{'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head'},
  **{f'blk.*.attn_{name}': f'model.layers.*.self_attn.{name}_proj' for name in 'qkv'},
  **{f'blk.*.ffn_{n}': f'model.layers.*.mlp.{n}_proj' for n in ('gate', 'up', 'down')},
  'blk.*.attn_output': 'model.layers.*.self_attn.o_proj',
  'blk.*.attn_norm': 'model.layers.*.input_layernorm',
  'blk.*.ffn_norm': 'model.layers.*.post_attention_layernorm',
  'rope_freqs': 'rope_freqs',
}
# Keys that change the numbers of a model in ways that a Llama does not have.
FOREIGN_KEYS = re.compile(
  r'llama\.(expert_count|use_parallel_residual|.*((?<!re)scale|softcapping|clamp|alibi).*)'
  r'|llama\.rope\.scaling\.(alpha|yarn_(?!beta_).*)'
)


class StoredTensor(NamedTuple):
  """Where a tensor is, and how it is stored.

  Attributes:
    stored: its rows in the file, as bytes if they are quantised.
    shape: the shape, rows first.
    kind: the type of quantised rows, a `gguf.GGMLQuantizationType`; None: they are not quantised.
    head_width: rows of an attention head, if its rotary pairs are side by side and so have to be
      put half a head apart; None: the rows are in order.
  """

  stored: row_files.StoredArray
  shape: tuple[int, ...]
  kind: Any
  head_width: int | None = None

  @property
  def dtype(self) -> np.dtype:
    """The dtype of what `read` returns: the stored one, float32 if the tensor is quantised."""
    return self.stored.dtype if self.kind is None else np.dtype(np.float32)

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`, dequantised; reads no others.

    Of a tensor with permuted rows, it reads all rows of the heads that these belong to.
    """
    H = self.head_width or 1
    first, last = start // H * H, -(-stop // H) * H
    rows = self.stored.read(first, last)
    if self.kind is not None:
      rows = _dequantize(rows, self.kind)
    if self.head_width is not None:
      rows = rows.reshape(-1, H // 2, 2, *self.shape[1:]).swapaxes(1, 2)
    return rows.reshape(last - first, *self.shape[1:])[start - first : stop - first]


def open_file(path: pathlib.Path) -> checkpoints.Checkpoint:
  """Returns the model in a GGUF file, of which only the header is read.

  Raises:
    BadInput: the package `gguf` is missing, the file is damaged, or its architecture, tokenizer or
      a type of its tensors is not supported.
  """
  _package()
  version = checkpoints.version(path)
  with file_errors.translate_damage(path, 'download it again'), errors.named(path):
    metadata, entries = gguf_header.read(path)
    if (architecture := metadata.get('general.architecture')) != 'llama':
      raise errors.BadInput(
        f'it has the architecture {architecture!r}; of GGUF files only llama can be loaded '
        f'(Llama, Mistral, SmolLM2): use the safetensors files of this model'
      )
    tensors = {_translate_name(n): _stored_tensor(path, n, each) for n, each in entries.items()}
    stored = sorted((tensor.stored for tensor in tensors.values()), key=lambda s: s.first_byte)
    for one, other in itertools.pairwise(stored):
      if one.first_byte + one.shape[0] * one.row_bytes > other.first_byte:
        raise ValueError('two tensors overlap')
    factors = tensors.pop('rope_freqs.weight', None)
    config = _make_config(metadata, tensors)
    if factors is not None:
      config['rope_scaling'] = _factor_scaling(factors.read(0, factors.shape[0]), config)
    for name, tensor in tensors.items():
      if name.rpartition('.')[0].endswith(('q_proj', 'k_proj')):
        tensors[name] = tensor._replace(head_width=config['head_dim'])
  return checkpoints.Checkpoint(path, config, tensors, {}, {path: version})


def _package():
  """Returns the package `gguf`. Raises BadInput if it is not installed."""
  try:
    import gguf
  except ImportError as error:
    raise errors.BadInput(
      'GGUF files need the package gguf: pip install --no-deps gguf (or ngrammer_jax[gguf])'
    ) from error
  return gguf


def _dequantize(rows: np.ndarray, kind: Any) -> np.ndarray:
  """Returns the values of rows of bytes, with a row for each block.

  The package takes 16 rows at a time, which is slow for short ones: it gets long pieces as a row.
  """
  package = _package()
  block_values, block_bytes = package.GGML_QUANT_SIZES[kind]
  blocks = rows.reshape(-1, block_bytes)
  values, size = np.empty((len(blocks), block_values), np.float32), PIECE_VALUES // block_values
  for i in range(0, len(blocks), size):
    piece = blocks[i : i + size].reshape(1, -1)
    values[i : i + size] = package.dequantize(piece, kind).reshape(-1, block_values)
  return values


def _stored_tensor(path: pathlib.Path, name: str, entry: gguf_header.Entry) -> StoredTensor:
  """Returns a tensor. Raises for one that cannot be read."""
  package, shape, kind = _package(), entry.shape, entry.kind
  try:
    kind = package.GGMLQuantizationType(kind)
    values, block_bytes = package.GGML_QUANT_SIZES[kind]
    package.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
  except (ValueError, NotImplementedError) as error:
    raise errors.BadInput(
      f'{name} has the type {getattr(kind, "name", kind)}, which the package gguf cannot '
      f'dequantise: use another file'
    ) from error
  if not all(shape):
    raise ValueError(f'{name} has the shape {list(shape)}')
  if values > 1 and (len(shape) == 1 or shape[-1] % values):
    raise ValueError(f'{name}, of the shape {list(shape)}, has no whole blocks of {values} values')
  row_bytes = math.prod(shape[1:]) // values * block_bytes
  if entry.first_byte + shape[0] * row_bytes > files.size(path):
    raise ValueError(f'{name}, of the shape {list(shape)}, ends beyond the file')
  is_plain = kind.name in PLAIN
  code, stored_shape = (kind.name, shape) if is_plain else ('U8', (shape[0], row_bytes))
  stored = row_files.StoredArray(path, code, stored_shape, entry.first_byte)
  return StoredTensor(stored, shape, None if is_plain else kind)


def _translate_name(name: str) -> str:
  """Returns the name of a tensor in a Hugging Face checkpoint. Raises BadInput for another one."""
  module, _, ending = name.rpartition('.')
  layer = re.search(r'\d*$', module.rpartition('.')[0]).group()
  translated = MODULES.get(re.sub(r'\d+', '*', module))
  if translated is None or ending not in ('weight', 'bias'):
    raise errors.BadInput(f'the tensor {name} is not one of a Llama: this model is not supported')
  return f'{translated.replace("*", layer)}.{ending}'


def _make_config(metadata, tensors) -> dict[str, Any]:
  """Returns what the config.json of the model says."""

  def get(name, default=None, kind=int):
    value = metadata.get(f'llama.{name}', default)
    if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:  # the same in every layer
      value = value[0].item()
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (kind is not str and not 0 < value < math.inf):
      raise ValueError(f'llama.{name} is {value}')
    return value

  for key in filter(FOREIGN_KEYS.fullmatch, metadata):
    if np.any(metadata[key]):
      raise errors.BadInput(f'{key} is set: such a model is not a Llama, and not supported')
  layers, width, heads = get('block_count'), get('embedding_length'), get('attention.head_count')
  query = tensors['model.layers.0.self_attn.q_proj.weight']
  head_width = get('attention.key_length', query.shape[0] // heads)  # not always width / heads
  for key in ('attention.value_length', 'rope.dimension_count'):
    if get(key, head_width) != head_width:
      raise errors.BadInput(f'llama.{key} is not the width of the heads: this is not supported')
  bos, eos, eot = (metadata.get(f'tokenizer.ggml.{n}_token_id') for n in ('bos', 'eos', 'eot'))
  config = {
    'model_type': 'llama',
    'hidden_size': width,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': get('attention.head_count_kv', heads),
    'head_dim': head_width,
    'intermediate_size': get('feed_forward_length'),
    'vocab_size': tensors['model.embed_tokens.weight'].shape[0],
    'max_position_embeddings': get('context_length', 2048),
    'rms_norm_eps': get('attention.layer_norm_rms_epsilon', kind=float),
    'rope_theta': get('rope.freq_base', 10_000.0, float),
    'rope_scaling': _scaling(get),
    'tie_word_embeddings': 'lm_head.weight' not in tensors,
    'attention_bias': 'model.layers.0.self_attn.q_proj.bias' in tensors,
    'mlp_bias': 'model.layers.0.mlp.up_proj.bias' in tensors,
    'bos_token_id': bos,
    'eos_token_id': eos if None in (eos, eot) else list(dict.fromkeys([eos, eot])),
  }
  if window := metadata.get('llama.attention.sliding_window'):
    config |= {'model_type': 'mistral', 'sliding_window': window}
  return config


def _scaling(get) -> dict[str, Any] | None:
  """Returns the scaling of rotary positions that the metadata have."""
  kind = get('rope.scaling.type', 'none', str)
  if kind == 'none':
    return None
  if kind not in ('linear', 'yarn'):
    raise errors.BadInput(f'llama.rope.scaling.type is {kind}; supported: none, linear, yarn')
  factor = get('rope.scaling.factor', kind=float)
  scaling = {'rope_type': kind, 'factor': factor}
  if kind == 'yarn':
    length = get('rope.scaling.original_context_length', get('context_length'))
    scaling |= {
      'original_max_position_embeddings': length,
      'beta_fast': get('rope.scaling.yarn_beta_fast', 32.0, float),
      'beta_slow': get('rope.scaling.yarn_beta_slow', 1.0, float),
    }
    if (extra := get('rope.scaling.attn_factor', 1.0, float)) != 1:
      scaling['attention_factor'] = extra * (0.1 * math.log(factor) + 1)
  return scaling


def _factor_scaling(factors: np.ndarray, config) -> dict[str, Any]:
  """Returns the scaling that divides every frequency by its factor.

  It is `llama3` where the factors are those of a published Llama 3.x. Else they stand in a
  `longrope` with the same factors for short and long texts, which scales nothing else.
  """
  if config['rope_scaling'] is not None or factors.shape != (config['head_dim'] // 2,):
    raise ValueError(f'rope_freqs.weight has the shape {list(factors.shape)}, or a second scaling')
  if not (np.isfinite(factors).all() and (factors > 0).all()):
    raise ValueError('rope_freqs.weight has values that are not positive')
  frequencies = 1 / rotary_scaling.timescales(config['head_dim'], 1.0, config['rope_theta'])
  llama3 = RotaryScalingConfig('llama3', float(factors.max()))  # all else is as in Llama 3.x
  scaled, _ = rotary_scaling.scale(frequencies, llama3, config['rope_theta'])
  if np.allclose(factors, frequencies / scaled, rtol=1e-5, atol=0):
    return configs.write_scaling(llama3, families.LLAMA)
  scaling = {'rope_type': 'longrope', 'factor': 1.0, 'attention_factor': 1.0}
  return scaling | dict.fromkeys(('short_factor', 'long_factor'), factors.astype(float).tolist())
