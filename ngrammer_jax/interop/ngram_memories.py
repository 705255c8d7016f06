"""N-gram memories of other implementations in safetensors files: names and shapes of their arrays.

The official implementations are those of `layers.ngram.memory`: LongCat-Flash-Lite, the PLE of
Qwen3.8-Flash-Next, the demo of Engram, and the Engram of DeepSeek-V4.1.

  layout = ngram_memories.qwen_ple(layer, prefix='model.layers.1.ple.')
  variables = layout.load(files, made_with={'vocabulary': 248_320, 'seed': 1234, 'index': 0})
  y, state = layer.apply(variables, x, context)
  layout.save(variables, 'memory.safetensors')

G branches, D model width, I = orders x heads, E width of a row of the table, M = I E, W taps.
"""

import itertools

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import conversion
from ngrammer_jax.interop.layouts import FileLayout, Part, Piece, Table
from ngrammer_jax.interop.scaled_floats import SCALED_VALUES
from ngrammer_jax.layers.ngram import uint64
from ngrammer_jax.layers.ngram.memory import NGramMemory

_SIZES = ('heads', 'rows', 'row_multiple', 'width')
_GATE = ('layers', 'norm_epsilon', 'seed')
_CONVOLUTION = ('convolution', 'convolution_epsilon')
# Options of any value, and the values of others that can be loaded; `orders` have to be 2, 3, ...
FREE_OPTIONS = {
  'longcat': (*_SIZES, 'eos_id'),
  'qwen_ple': (*_SIZES, *_GATE, *_CONVOLUTION, 'eos_id'),
  'engram_demo': (*_SIZES, *_GATE, *_CONVOLUTION, 'fill_id'),
  'engram_v41': (*_SIZES, *_GATE, 'fill_id'),
}
SUPPORTED_OPTIONS = {
  'longcat': dict(
    hash=('polynomial',),
    join=('mean',),
    row_rule=('longcat',),
    boundary=('eos_id',),
    projection=(True,),
  ),
  'qwen_ple': dict(hash=('ple',), boundary=('eos_id',), fill_id=(None,), norm_offset=(True,)),
  # The code of the demo has no documents; in one document, both boundaries are the same.
  'engram_demo': dict(key=('compressed',), boundary=('none', 'starts'), bias=(True,)),
  'engram_v41': dict(key=('compressed',), zero_score=('positive',)),
}
LAYER_OPTIONS_AT_INPUT = ('vocabulary_size', 'width')
LAYER_OPTIONS = (*LAYER_OPTIONS_AT_INPUT, 'block', 'branches')


def longcat(layer: NGramMemory, prefix: str = '') -> FileLayout:
  """Returns the layout of the n-gram embedding of LongCat-Flash-Lite.

  Names, for each order and head i: `embedders.i.weight` [rows, E], `post_projs.i.weight` [D, E]. In
  the official checkpoint their prefix is `model.ngram_embeddings.`. The vocabulary is the number of
  rows of `word_embeddings.weight`, if the file has it; this array is neither loaded nor written.

  Args:
    layer: the target layer, with the sizes and options of the source.
    prefix: prefix of all names.

  Raises:
    BadInput: see `conversion.check_layer`.
  """
  _check_options(layer, 'longcat')
  D, E, ngram_hash = layer.width, layer.options.width, layer.ngram_hash()
  sizes_I = tuple(itertools.chain.from_iterable(ngram_hash.sizes))
  each = lambda pattern, rows_I: tuple(
    Piece(prefix + pattern.format(i), 0, rows) for i, rows in enumerate(rows_I)
  )
  projections = each('post_projs.{}.weight', (D,) * len(sizes_I))
  part = Part('sum/projection', projections, (E,), (len(sizes_I), D, E), (0, 2, 1))
  return FileLayout(
    'the n-gram embedding of LongCat-Flash-Lite',
    prefix,
    Table(each('embedders.{}.weight', sizes_I), layer.table_shape()),
    (part,),
    ngram_hash,
    numbers={},
    codebook={},
    embedding=f'{prefix}word_embeddings.weight',
  )


def qwen_ple(layer: NGramMemory, prefix: str = '', hash_prefix: str | None = None) -> FileLayout:
  """Returns the layout of the PLE of Qwen3.8-Flash-Next.

  Names: `ple_embedding.ngram_embedding.weight` [rows, E], `key_proj.weight` [G D, M],
  `value_proj.weight` [D, M], `norm_{key,query,conv}.weight` [G D], `conv1d.weight` [G D, 1, W].

  Args:
    layer: the target layer, with the sizes and options of the source; `options.row_multiple` is
      that of the source.
    prefix: prefix of all names.
    hash_prefix: prefix of `multipliers` [N], `table_sizes` [I] and `offsets` [I], which are checked
      and written. None: the file does not have them.

  Raises:
    BadInput: see `conversion.check_layer`.
  """
  _check_options(layer, 'qwen_ple')
  G, D, ngram_hash, shape = layer.branches, layer.width, layer.ngram_hash(), layer.table_shape()
  all_rows = lambda name, rows: (Piece(prefix + name, 0, rows),)
  norm = lambda name: all_rows(f'norm_{name}.weight', G * D)
  parts = [
    *_projections(layer, all_rows('key_proj.weight', G * D), all_rows('value_proj.weight', D)),
    _branch_vectors(layer, 'gate/key_norm/scale', norm('key')),
    _branch_vectors(layer, 'gate/query_norm/scale', norm('query')),
  ]
  if layer.options.convolution:
    parts.append(_branch_vectors(layer, 'gate/convolution_norm/scale', norm('conv')))
    parts.append(_taps(layer, all_rows('conv1d.weight', G * D)))
  names = {}
  if hash_prefix is not None:
    names = {name: hash_prefix + name for name in ('multipliers', 'table_sizes', 'offsets')}
  return FileLayout(
    'the PLE of Qwen3.8-Flash-Next',
    prefix,
    Table(all_rows('ple_embedding.ngram_embedding.weight', shape[0]), shape),
    tuple(parts),
    ngram_hash,
    _numbers(names, ngram_hash, is_flat=True),
    codebook={},
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
    hash_prefix: prefix of `multipliers` [N] and `table_sizes` [orders, heads], which are checked
      and written. None: the file does not have them.

  Raises:
    BadInput: see `conversion.check_layer`; or the classes are not those of the vocabulary.
  """
  _check_options(layer, 'engram_demo')
  G, D = layer.branches, layer.width
  ngram_hash, codebook = _compressed(layer, token_classes)
  all_rows = lambda name, rows: (Piece(prefix + name, 0, rows),)
  each = lambda pattern: tuple(Piece(prefix + pattern.format(g), 0, D) for g in range(G))
  parts = [
    *_projections(layer, each('key_projs.{}.weight'), all_rows('value_proj.weight', D)),
    _branch_vectors(layer, 'gate/key/bias', each('key_projs.{}.bias')),
    Part('gate/value/bias', all_rows('value_proj.bias', D), (), (D,), (0,)),
    _branch_vectors(layer, 'gate/key_norm/scale', each('norm1.{}.weight')),
    _branch_vectors(layer, 'gate/query_norm/scale', each('norm2.{}.weight')),
  ]
  if layer.options.convolution:
    norms = each('short_conv.norms.{}.weight')
    parts.append(_branch_vectors(layer, 'gate/convolution_norm/scale', norms))
    parts.append(_taps(layer, all_rows('short_conv.conv.weight', G * D)))
  names = {'offsets': f'{prefix}multi_head_embedding.offsets'}
  if hash_prefix is not None:
    names |= {name: hash_prefix + name for name in ('multipliers', 'table_sizes')}
  rows = sum(map(sum, ngram_hash.sizes))
  return FileLayout(
    'the demo of Engram',
    prefix,
    Table(all_rows('multi_head_embedding.embedding.weight', rows), layer.table_shape()),
    tuple(parts),
    ngram_hash,
    _numbers(names, ngram_hash),
    codebook,
  )


def engram_v41(
  layer: NGramMemory, token_classes: np.ndarray, *, scale: str | None, prefix: str = ''
) -> FileLayout:
  """Returns the layout of the Engram of DeepSeek-V4.1.

  Names: `embed` [rows, E], `wkv` [D (G + 1), M], `q_weight` and `k_weight` [G, D].

  With `scale`, the table is of 8-bit floats (e4m3), and each 32 values of a row have a scale, a
  power of 2 (e8m0). It is loaded as their product, exact in float32. Writing takes the smallest
  scales with which no value overflows: what was loaded is written without loss.

  Args:
    layer: the target layer, with the sizes and options of the source.
    token_classes: the compressed id of each token id [V].
    scale: name of the scales of the table, [rows, E / 32], after the prefix; no published source
      that we know has this name. None: the table is not of 8 bits.
    prefix: prefix of all names.

  Raises:
    BadInput: see `conversion.check_layer`; the classes are not those of the vocabulary; or the
      width is not a multiple of 32.
  """
  _check_options(layer, 'engram_v41')
  G, D, E = layer.branches, layer.width, layer.options.width
  if scale is not None and E % SCALED_VALUES:
    raise errors.BadInput(
      f'options.width={E} must be a multiple of {SCALED_VALUES}, the values of a scale: use '
      f'scale=None for a table that is not of 8 bits'
    )
  ngram_hash, codebook = _compressed(layer, token_classes)
  wkv, rows = f'{prefix}wkv', sum(map(sum, ngram_hash.sizes))
  vectors = lambda path, name: Part(path, (Piece(prefix + name, 0, G),), (D,), (G, D), (0, 1))
  return FileLayout(
    'the Engram of DeepSeek-V4.1',
    prefix,
    Table(
      (Piece(f'{prefix}embed', 0, rows),),
      layer.table_shape(),
      None if scale is None else prefix + scale,
    ),
    (
      *_projections(layer, (Piece(wkv, 0, G * D),), (Piece(wkv, G * D, (G + 1) * D),)),
      vectors('gate/key_norm/scale', 'k_weight'),
      vectors('gate/query_norm/scale', 'q_weight'),
    ),
    ngram_hash,
    numbers={},
    codebook=codebook,
  )


def _check_options(layer, layout_name):
  """Raises BadInput for options that the layout does not have."""
  layers, longest = layer.options.layers, max(layer.options.orders, default=2)
  supported = SUPPORTED_OPTIONS[layout_name] | {'orders': (tuple(range(2, longest + 1)),)}
  free = [f'options.{name}' for name in FREE_OPTIONS[layout_name]]
  free += LAYER_OPTIONS if layers else LAYER_OPTIONS_AT_INPUT
  conversion.check_layer(
    layer, free, {f'options.{name}': values for name, values in supported.items()}
  )
  if layers and layer.block not in layers:
    raise errors.BadInput(f'block={layer.block} is not one of options.layers={layers}')


def _compressed(layer, token_classes):
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


def _numbers(names, ngram_hash, is_flat=False):
  """Returns the integers of the hash under the names that they have in the file."""
  sizes = np.array(ngram_hash.sizes, np.int64)
  values = {
    'multipliers': ngram_hash.multipliers().astype(np.int64),
    'table_sizes': sizes.ravel() if is_flat else sizes,
    'offsets': np.cumsum(sizes) - sizes.ravel(),
  }
  return {stored_name: values[name] for name, stored_name in names.items()}


def _projections(layer, key_pieces, value_pieces):
  """Returns the projections of e to keys [M, G, D] and to values [M, D]."""
  o, G, D = layer.options, layer.branches, layer.width
  M = len(o.orders) * o.heads * o.width
  key = Part('gate/key/kernel', key_pieces, (M,), (G, D, M), (2, 0, 1))
  return key, Part('gate/value/kernel', value_pieces, (M,), (D, M), (1, 0))


def _branch_vectors(layer, path, pieces):
  """Returns a parameter [G, D], whose rows in the file are single values."""
  return Part(path, pieces, (), (layer.branches, layer.width), (0, 1))


def _taps(layer, pieces):
  """Returns the taps [W, G, D], the present token first; in the file it is last."""
  W = layer.options.convolution
  shape = layer.branches, layer.width, W
  return Part('gate/convolution/taps', pieces, (1, W), shape, (2, 0, 1), is_reversed=True)
