"""N-gram memories of other implementations in safetensors files: names and shapes of their arrays.

The implementations (see `layers.ngram.memory`): LongCat-Flash-Lite, the PLE of Qwen3.8-Flash-Next,
the demo of Engram, and the Engram of DeepSeek-V4.1.

  layout = ngram_memories.qwen_ple(layer, prefix='model.layers.1.ple.')
  variables = layout.load(files, made_with={'vocabulary': 248_320, 'seed': 1234, 'index': 0})
  y, state = layer.apply(variables, x, context)
  layout.save(variables, 'memory.safetensors')

G branches, D model width, I = orders x heads, E width of a row of the table, M = I E, W taps.
"""

from collections.abc import Mapping, Sequence
import itertools

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.interop.file_layout import FileLayout, StoredTable
from ngrammer_jax.interop.loader_options import check_options
from ngrammer_jax.interop.named_arrays import ArraySource
from ngrammer_jax.layers.ngram import uint64
from ngrammer_jax.layers.ngram.memory import NGramMemory

_SIZE_OPTIONS = ('heads', 'rows', 'row_multiple', 'width')
_GATE_OPTIONS = ('layers', 'norm_epsilon', 'seed')
_CONVOLUTION_OPTIONS = ('convolution', 'convolution_epsilon')
# Options of any value, and the values of others that can be loaded; `orders` have to be 2, 3, ...
FREE_OPTIONS = {
  'longcat': (*_SIZE_OPTIONS, 'eos_id'),
  'qwen_ple': (*_SIZE_OPTIONS, *_GATE_OPTIONS, *_CONVOLUTION_OPTIONS, 'eos_id'),
  'engram_demo': (*_SIZE_OPTIONS, *_GATE_OPTIONS, *_CONVOLUTION_OPTIONS, 'fill_id'),
  'engram_v41': (*_SIZE_OPTIONS, *_GATE_OPTIONS, 'fill_id'),
}
SUPPORTED_OPTIONS = {
  'longcat': {
    'hash': ('polynomial',),
    'join': ('mean',),
    'row_rule': ('longcat',),
    'boundary': ('eos_id',),
    'projection': (True,),
  },
  'qwen_ple': {
    'hash': ('ple',),
    'boundary': ('eos_id',),
    'fill_id': (None,),
    'norm_offset': (True,),
  },
  'engram_demo': {
    'key': ('compressed',),
    'boundary': ('none', 'starts'),  # the code of the demo has no documents; both are the same
    'bias': (True,),
  },
  'engram_v41': {
    'key': ('compressed',),
    'zero_score': ('positive',),
  },
}
LAYER_OPTIONS_AT_INPUT = ('vocabulary_size', 'width')
LAYER_OPTIONS = (*LAYER_OPTIONS_AT_INPUT, 'block', 'branches')


def longcat(layer: NGramMemory, prefix: str = '') -> FileLayout:
  """Returns the layout of the n-gram embedding of LongCat-Flash-Lite.

  Names, for each order and head i: `embedders.i.weight` [rows, E], `post_projs.i.weight` [D, E]. In
  the official checkpoint their prefix is `model.ngram_embeddings.`. The vocabulary is the number of
  rows of `word_embeddings.weight` if present; this array is neither loaded nor written.

  Args:
    layer: the target layer, with the sizes and options of the source.
    prefix: prefix of all names.

  Raises:
    BadInput: see `loader_options.check_options`.
  """
  _check_options(layer, 'longcat')
  D = layer.width
  E = layer.options.width
  ngram_hash = layer.ngram_hash()
  sizes_I = tuple(itertools.chain.from_iterable(ngram_hash.sizes))
  tables = _numbered(f'{prefix}embedders.{{}}.weight', len(sizes_I))
  projections = ArraySource(
    name=_numbered(f'{prefix}post_projs.{{}}.weight', len(sizes_I)),
    shape=(D, E),
    convert=lambda a: a.transpose(0, 2, 1),
  )
  return FileLayout(
    origin='the n-gram embedding of LongCat-Flash-Lite',
    prefix=prefix,
    table=StoredTable(dict(zip(tables, sizes_I, strict=True)), layer.table_shape()),
    sources={'params/sum/projection': projections},
    hash=ngram_hash,
    embedding=f'{prefix}word_embeddings.weight',
  )


def qwen_ple(layer: NGramMemory, prefix: str = '', hash_prefix: str | None = None) -> FileLayout:
  """Returns the layout of the PLE of Qwen3.8-Flash-Next.

  Names: `ple_embedding.ngram_embedding.weight` [rows, E], `key_proj.weight` [G D, M],
  `value_proj.weight` [D, M], `norm_{key,query,conv}.weight` [G D], `conv1d.weight` [G D, 1, W].

  Args:
    layer: the target layer, with the sizes and options of the source; `options.row_multiple` must
      match the source.
    prefix: prefix of all names.
    hash_prefix: prefix of `multipliers` [N], `table_sizes` [I] and `offsets` [I], checked and
      written. None: not in the file.

  Raises:
    BadInput: see `loader_options.check_options`.
  """
  _check_options(layer, 'qwen_ple')
  G, D, M = _sizes(layer)
  ngram_hash = layer.ngram_hash()
  rows, width = layer.table_shape()

  def norm(name: str) -> ArraySource:
    return _branch_vectors(layer, f'{prefix}norm_{name}.weight', (G * D,))

  sources = _projections(
    layer,
    key_name=f'{prefix}key_proj.weight',
    key_shape=(G * D, M),
    value_name=f'{prefix}value_proj.weight',
  )
  sources['params/gate/key_norm/scale'] = norm('key')
  sources['params/gate/query_norm/scale'] = norm('query')
  sources |= _convolution(layer, norm('conv'), f'{prefix}conv1d.weight')
  stored_names = {}
  if hash_prefix is not None:
    stored_names = {name: hash_prefix + name for name in ('multipliers', 'table_sizes', 'offsets')}
  return FileLayout(
    origin='the PLE of Qwen3.8-Flash-Next',
    prefix=prefix,
    table=StoredTable({f'{prefix}ple_embedding.ngram_embedding.weight': rows}, (rows, width)),
    sources=sources,
    hash=ngram_hash,
    hash_numbers=_hash_numbers(stored_names, ngram_hash, is_flat=True),
  )


def engram_demo(
  layer: NGramMemory, token_classes: np.ndarray, prefix: str = '', hash_prefix: str | None = None
) -> FileLayout:
  """Returns the layout of the demo of Engram.

  Names: `multi_head_embedding.{embedding.weight,offsets}` [rows, E] and [I], for each branch g
  `key_projs.g.{weight,bias}` [D, M] and [D], `norm1.g.weight` (of keys), `norm2.g.weight` (of
  queries) and `short_conv.norms.g.weight` [D], and `value_proj.{weight,bias}` [D, M] and [D],
  `short_conv.conv.weight` [G D, 1, W].

  Args:
    layer: the target layer, with the sizes and options of the source.
    token_classes: the compressed id of each token id [V], such as the `lookup_table` of the demo.
    prefix: prefix of all names.
    hash_prefix: prefix of `multipliers` [N] and `table_sizes` [orders, heads], checked and written.
      None: not in the file.

  Raises:
    BadInput: see `loader_options.check_options`; or classes of another vocabulary.
  """
  _check_options(layer, 'engram_demo')
  G, D, M = _sizes(layer)
  ngram_hash, codebook = _compressed(layer, token_classes)

  def vectors(pattern: str) -> ArraySource:
    return _branch_vectors(layer, _numbered(prefix + pattern, G), (D,))

  sources = _projections(
    layer,
    key_name=_numbered(f'{prefix}key_projs.{{}}.weight', G),
    key_shape=(D, M),
    value_name=f'{prefix}value_proj.weight',
  )
  sources |= {
    'params/gate/key/bias': vectors('key_projs.{}.bias'),
    'params/gate/value/bias': ArraySource(f'{prefix}value_proj.bias', (D,)),
    'params/gate/key_norm/scale': vectors('norm1.{}.weight'),
    'params/gate/query_norm/scale': vectors('norm2.{}.weight'),
  }
  convolution_norm = vectors('short_conv.norms.{}.weight')
  sources |= _convolution(layer, convolution_norm, f'{prefix}short_conv.conv.weight')
  stored_names = {'offsets': f'{prefix}multi_head_embedding.offsets'}
  if hash_prefix is not None:
    stored_names |= {name: hash_prefix + name for name in ('multipliers', 'table_sizes')}
  rows = {f'{prefix}multi_head_embedding.embedding.weight': _num_rows(ngram_hash)}
  return FileLayout(
    origin='the demo of Engram',
    prefix=prefix,
    table=StoredTable(rows, layer.table_shape()),
    sources=sources,
    hash=ngram_hash,
    hash_numbers=_hash_numbers(stored_names, ngram_hash),
    codebook=codebook,
  )


def engram_v41(layer: NGramMemory, token_classes: np.ndarray, *, prefix: str = '') -> FileLayout:
  """Returns the layout of the Engram of DeepSeek-V4.1.

  Names: `embed` [rows, E], `wkv` [D (G + 1), M], `q_weight` and `k_weight` [G, D].

  Arrays of 8 bits are refused.

  Args:
    layer: the target layer, with the sizes and options of the source.
    token_classes: the compressed id of each token id [V].
    prefix: prefix of all names.

  Raises:
    BadInput: see `loader_options.check_options`; or classes of another vocabulary.
  """
  _check_options(layer, 'engram_v41')
  G, D, M = _sizes(layer)
  ngram_hash, codebook = _compressed(layer, token_classes)
  keys_and_values = f'{prefix}wkv'
  shape = ((G + 1) * D, M)

  def select_keys(a: np.ndarray) -> np.ndarray:
    return a[: G * D].reshape(G, D, M).transpose(2, 0, 1)

  def select_values(a: np.ndarray) -> np.ndarray:
    return a[G * D :].T

  return FileLayout(
    origin='the Engram of DeepSeek-V4.1',
    prefix=prefix,
    table=StoredTable({f'{prefix}embed': _num_rows(ngram_hash)}, layer.table_shape()),
    sources={
      'params/gate/key/kernel': ArraySource(keys_and_values, shape, select_keys),
      'params/gate/value/kernel': ArraySource(keys_and_values, shape, select_values),
      'params/gate/key_norm/scale': ArraySource(f'{prefix}k_weight', (G, D)),
      'params/gate/query_norm/scale': ArraySource(f'{prefix}q_weight', (G, D)),
    },
    hash=ngram_hash,
    codebook=codebook,
  )


def _check_options(layer: NGramMemory, layout_name: str) -> None:
  """Raises BadInput for options outside of the layout."""
  layers = layer.options.layers
  free = [f'options.{name}' for name in FREE_OPTIONS[layout_name]]
  free += LAYER_OPTIONS if layers else LAYER_OPTIONS_AT_INPUT
  supported = SUPPORTED_OPTIONS[layout_name]
  choices = {f'options.{name}': values for name, values in supported.items()}
  longest = max(layer.options.orders, default=2)
  choices['options.orders'] = (tuple(range(2, longest + 1)),)
  check_options(layer, free, choices=choices)
  if layers and layer.block not in layers:
    raise errors.BadInput(f'block={layer.block} is not one of options.layers={layers}')


def _compressed(
  layer: NGramMemory, token_classes: np.ndarray
) -> tuple[hashes.NumpyHash, dict[str, np.ndarray]]:
  """Returns the hash and the variables of a memory with compressed token ids."""
  classes_V = np.asarray(token_classes, np.int32)
  if classes_V.shape != (layer.vocabulary_size,):
    raise errors.BadInput(
      f'token_classes has the shape {classes_V.shape}, but vocabulary_size='
      f'{layer.vocabulary_size}: use the classes of the vocabulary of the layer'
    )
  ngram_hash = layer.class_hash(classes_V)
  multipliers = uint64.split_words(ngram_hash.multipliers())
  return ngram_hash, {'token_classes': classes_V, 'multipliers': multipliers}


def _num_rows(ngram_hash: hashes.NumpyHash) -> int:
  """Returns the rows of the tables of all orders and heads."""
  return sum(itertools.chain.from_iterable(ngram_hash.sizes))


def _hash_numbers(
  stored_names: Mapping[str, str], ngram_hash: hashes.NumpyHash, is_flat: bool = False
) -> dict[str, np.ndarray]:
  """Returns the integers of the hash by their names in the file."""
  sizes = np.array(ngram_hash.sizes, np.int64)
  offsets = np.cumsum(sizes) - sizes.ravel()
  if is_flat:
    sizes = sizes.ravel()
  values = {
    'multipliers': ngram_hash.multipliers().astype(np.int64),
    'table_sizes': sizes,
    'offsets': offsets,
  }
  return {stored_name: values[name] for name, stored_name in stored_names.items()}


def _sizes(layer: NGramMemory) -> tuple[int, int, int]:
  """Returns G, D and M."""
  options = layer.options
  M = len(options.orders) * options.heads * options.width
  return layer.branches, layer.width, M


def _numbered(pattern: str, count: int) -> tuple[str, ...]:
  """Returns numbered names of arrays."""
  return tuple(pattern.format(number) for number in range(count))


def _projections(
  layer: NGramMemory,
  *,
  key_name: str | Sequence[str],
  key_shape: tuple[int, ...],
  value_name: str,
) -> dict[str, ArraySource]:
  """Returns the sources of the projections of e to keys [M, G, D] and to values [M, D]."""
  G, D, M = _sizes(layer)

  def split_keys(kernel: np.ndarray) -> np.ndarray:
    return kernel.reshape(G, D, M).transpose(2, 0, 1)

  return {
    'params/gate/key/kernel': ArraySource(key_name, key_shape, split_keys),
    'params/gate/value/kernel': ArraySource(value_name, (D, M), np.transpose),
  }


def _branch_vectors(
  layer: NGramMemory, name: str | tuple[str, ...], shape: tuple[int, ...]
) -> ArraySource:
  """Returns the source of a parameter [G, D]: one array, or one for each branch."""
  return ArraySource(name, shape, lambda a: a.reshape(layer.branches, layer.width))


def _convolution(layer: NGramMemory, norm: ArraySource, name: str) -> dict[str, ArraySource]:
  """Returns the sources of the norm [G, D] and of the taps [W, G, D] of a convolution, if any.

  The present token is the first tap here, the last one in the file.
  """
  W = layer.options.convolution
  if not W:
    return {}
  G, D, _ = _sizes(layer)

  def newest_first(taps: np.ndarray) -> np.ndarray:
    return taps.reshape(G, D, W).transpose(2, 0, 1)[::-1]

  return {
    'params/gate/convolution_norm/scale': norm,
    'params/gate/convolution/taps': ArraySource(name, (G * D, 1, W), newest_first),
  }
