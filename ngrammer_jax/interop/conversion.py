"""Named arrays of other frameworks, checked, converted to variables of this package and back."""

import collections
from collections.abc import Callable, Collection, Mapping
import dataclasses
import itertools
import logging
import operator
import re
import types
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers.ngram import ngrammer

Shapes = Mapping[str, tuple[int, ...]]

# Options that change how a model or layer is trained or computed, but not its function.
NGRAM_TRAINING_OPTIONS = ('decay', 'epsilon', 'empty', 'initial', 'padding_trains', 'exchange')
NGRAM_MEMORY_TRAINING_OPTIONS = (
  *('preset', 'deviation', 'untrained_row'),
  *('optimizer', 'learning_rate_factor', 'table_memory'),
)
LAYER_TRAINING_OPTIONS = (
  *(*NGRAM_TRAINING_OPTIONS, 'dtype', 'return_memory', 'parent', 'name'),
  *(f'options.{name}' for name in NGRAM_MEMORY_TRAINING_OPTIONS),
)
# Fields of the configs of Transformer-XL and adaptive-span in PyTorch.
TORCH_MODEL_OPTIONS = {
  **{'activation': 'relu', 'gated': False, 'feed_forward_bias': True},
  **{'norm': 'post_skip', 'norm_epsilon': 1e-5, 'final_norm': False},
}
MODEL_TRAINING_OPTIONS = (
  *('dtype', 'logits_dtype', 'scan_layers', 'remat', 'vocabulary_chunk', 'kernel', 'initial'),
  *('dropout', 'attention_dropout', 'inner_dropout', 'adaptive_softmax.dropout'),
  *('span.penalty', 'span.initial', 'span.reserve', 'span.check_every'),
  *(f'ngram.{name}' for name in NGRAM_TRAINING_OPTIONS),
)


# Put before all names by DataParallel, torch.compile, and models around the language model.
WRAPPERS = {'module.', '_orig_mod.', 'model.', 'transformer.'}
SHOWN = 5  # arrays of an error


@dataclasses.dataclass(frozen=True)
class Source:
  """The source of one variable: an array, or several arrays of one shape.

  Attributes:
    name: name of the source array, or a tuple of names.
    shape: shape of the source array, or of each of them.
    convert: function from the source array, or from all of them stacked, to the variable. It
      returns a view: `restore` writes the variable into it.
    added: constant that is added to all values of the view.
  """

  name: str | tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray] = lambda array: array
  added: int = 0

  @property
  def names(self) -> tuple[str, ...]:
    """Names of all source arrays."""
    return (self.name,) if isinstance(self.name, str) else self.name

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """Shape of the argument of `convert`."""
    return self.shape if isinstance(self.name, str) else (len(self.name), *self.shape)


Sources = Mapping[str, Source]  # by the path of the variable


def names(sources: Sources) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of all source arrays by name."""
  return {name: source.shape for source in sources.values() for name in source.names}


def convert(
  arrays: Mapping[str, Any],
  sources: Sources,
  origin: str,
  ignored: Collection[str] = (),
  dtype: Any = None,
) -> dict[str, Any]:
  """Converts source arrays to variables, a nested dict.

  Codebooks get a uniform cluster usage.

  Args:
    arrays: the source arrays by name.
    sources: the source of each variable by its path, such as `params/layer_0/attention/bias`.
    origin: description of the source model, for the error message.
    ignored: names of arrays that may be present and are not used.
    dtype: dtype of the parameters, such as 'bfloat16'. None: float32, which trains, also of arrays
      in half precision; float64 stays float64 in 64-bit mode.

  Raises:
    BadInput: see `check_shapes`; or names the arrays with values that are not finite.
  """
  expected = names(sources)
  check_shapes(expected, {n: np.shape(array) for n, array in arrays.items()}, origin, ignored)
  check_finite(origin, {name: count_not_finite(np.asarray(arrays[name])) for name in expected})
  variables = {}
  for path, source in sources.items():
    values = [_in_float32(np.asarray(arrays[name])) for name in source.names]
    value = source.convert(values[0] if isinstance(source.name, str) else np.stack(values))
    value = value + source.added if source.added else value
    variables[path] = jnp.asarray(value, dtype if path.startswith('params/') else None)
    if path.startswith('codebook/'):  # other frameworks do not store the cluster usage
      quantizer, (N, K, _) = path.removesuffix('centroids'), value.shape
      variables[f'{quantizer}usage'] = jnp.full((N, K), 1 / K, variables[path].dtype)
      variables[f'{quantizer}changed'] = jnp.zeros(N)
  return traverse_util.unflatten_dict(variables, sep='/')


def _in_float32(array: np.ndarray) -> np.ndarray:
  """Returns floats of at least 32 bits."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return array.astype(jnp.promote_types(array.dtype, jnp.float32)) if is_float else array


def count_not_finite(values: np.ndarray) -> int:
  """Returns the number of values that are nan or infinite."""
  return values.size - int(np.count_nonzero(np.isfinite(values)))


def check_finite(origin: str, counts: Mapping[str, int]) -> None:
  """Raises BadInput that names the arrays with values that are not finite, and counts these."""
  if broken := [f'{name} ({count:,})' for name, count in counts.items() if count]:
    more = f' and {len(broken) - SHOWN:,} more arrays' if len(broken) > SHOWN else ''
    raise errors.BadInput(
      f'{origin} has values that are nan or infinite, {sum(counts.values()):,} in all, in '
      f'{", ".join(broken[:SHOWN])}{more}: the source is damaged, or its training diverged; load '
      f'an earlier checkpoint'
    )


def without_wrappers(
  arrays: Mapping[str, Any], expected: Collection[str], origin: str
) -> Mapping[str, Any]:
  """Returns arrays without the wrappers before all names, such as `module.`, if they then fit.

  Args:
    arrays: the arrays by name.
    expected: the names that are needed.
    origin: description of the source model, for the log.
  """
  fits = lambda prefix: all(prefix + name in arrays for name in expected)
  first = next(iter(expected), '')
  prefixes = [name.removesuffix(first) for name in arrays if name.endswith(first)]
  for prefix in () if fits('') else filter(fits, prefixes):
    if not set(re.findall(r'[^.]*\.|[^.]+', prefix)) - WRAPPERS:
      logging.info('%s: reading the arrays without %r before their names', origin, prefix)
      return {name.removeprefix(prefix): array for name, array in arrays.items()}
  return arrays


def restore(variables: Mapping[str, Any], sources: Sources, origin: str) -> dict[str, np.ndarray]:
  """Converts variables back to source arrays by name: the inverse of `convert`.

  A constant that was added to float32 values is subtracted up to rounding.

  Args:
    variables: nested variables of this package; the usage of codebooks is left out.
    sources: the source of each variable by its path.
    origin: description of the source model, for the error message.

  Raises:
    BadInput: lists every variable that is missing, extra or of a wrong shape.
  """
  leaves = traverse_util.flatten_dict(nn.unbox(dict(variables)), sep='/')
  is_usage = re.compile(r'codebook/(.*/)?(usage|changed)').fullmatch
  leaves = {path: np.asarray(leaf) for path, leaf in leaves.items() if not is_usage(path)}
  shape_of = lambda source: source.convert(np.broadcast_to(0, source.stacked_shape)).shape
  expected = {path: shape_of(source) for path, source in sources.items()}
  check_shapes(expected, {path: leaf.shape for path, leaf in leaves.items()}, origin)
  arrays: dict[str, np.ndarray] = {}
  for path, source in sources.items():
    values = leaves[path]
    stacked = np.zeros(source.stacked_shape, values.dtype)
    if isinstance(source.name, str):  # several variables may be parts of one array
      stacked = arrays.setdefault(source.name, stacked)
    else:
      arrays.update(zip(source.name, stacked, strict=True))
    source.convert(stacked)[...] = values - values.dtype.type(source.added)
  return arrays


def check_shapes(
  expected: Shapes, shapes: Shapes, origin: str, ignored: Collection[str] = ()
) -> None:
  """Raises BadInput that counts the arrays that are missing, extra or of a wrong shape.

  It shows five of them, and first what all of the names begin with.

  Args:
    expected: shape of each array that is needed, by name.
    shapes: shape of each array that there is, by name.
    origin: description of the source model, for the error message.
    ignored: names of arrays that may be present and are not used.
  """
  wrong = {name: shape for name, shape in expected.items() if shapes.get(name, shape) != shape}
  kinds = {
    'missing': [f'{name} {shape}' for name, shape in expected.items() if name not in shapes],
    'extra': [f'{n} {shape}' for n, shape in shapes.items() if n not in {*expected, *ignored}],
    'wrong shape': [f'{name} is {shapes[name]}, expected {wrong[name]}' for name in wrong],
  }
  if total := sum(map(len, kinds.values())):
    lines = [[f'\n  {kind}: {text}' for text in each] for kind, each in kinds.items()]
    shown = ''.join([line for row in itertools.zip_longest(*lines) for line in row if line][:SHOWN])
    counts = ', '.join(f'{len(each)} {kind}' for kind, each in kinds.items() if each)
    places = ((name, match.end()) for name in shapes for match in re.finditer('[./]', name))
    prefixes = collections.Counter(name[:at] for name, at in places if name[at:] in expected)
    (prefix, count), *_ = [*prefixes.most_common(1), ('', 0)]
    is_unknown = 2 * count > len(shapes)
    raise errors.BadInput(
      f'{f"names begin with the prefix {prefix!r}: remove it. " if is_unknown else ""}'
      f'{total} {"arrays do" if total > 1 else "array does"} not match {origin}'
      f'{f" ({counts}; {SHOWN} are shown)" if total > SHOWN else ""}. '
      f'Check the config against the arrays.{shown}'
    )


def torch_layer(path: str, name: str, *shape: int) -> dict[str, Source]:
  """Returns the sources of a layer of PyTorch with a bias: a norm, or a linear map [out, in]."""
  weight, bias = Source(f'{name}.weight', shape, np.transpose), Source(f'{name}.bias', shape[:1])
  return {f'{path}/{"kernel" if len(shape) > 1 else "scale"}': weight, f'{path}/bias': bias}


def torch_heads(name: str, heads: int, width: int) -> Source:
  """Returns the source of a projection to heads [D, N, H] of PyTorch, whose weight is [N H, D]."""
  return Source(name, (width, width), lambda a: a.T.reshape(width, heads, -1))


def torch_merged_heads(name: str, heads: int, width: int) -> Source:
  """Returns the source of a projection of heads [N, H, D] of PyTorch, whose weight is [D, N H]."""
  return Source(name, (width, width), lambda a: a.T.reshape(heads, -1, width))


def torch_adaptive_softmax(
  config: model_config.ModelConfig, V: int, names: tuple[str, str, str], is_single_table: bool
) -> dict[str, Source]:
  """Returns the sources of an adaptive softmax of PyTorch.

  Args:
    config: the config of the model.
    V: size of the vocabulary.
    names: names of the embedding and of the output layer, and prefix of the weights of the tails.
    is_single_table: whether all clusters share a table and a projection.
  """
  adaptive, D = config.adaptive_softmax, config.width
  embedding, output, cluster = names
  path, J, C = 'params/adaptive_softmax', adaptive.embedding_width or D, len(adaptive.cutoffs)
  is_tied = adaptive.tied_projections * ((C + 1) // len(adaptive.tied_projections))
  sources = {}
  for i, (first, last) in enumerate(itertools.pairwise((0, *adaptive.cutoffs, V))):
    index, width = (0, J) if is_single_table else (i, J // adaptive.divisor**i)
    rows = V if is_single_table else last - first
    select = operator.itemgetter(slice(first, last) if is_single_table else slice(None))
    table, layer = f'{embedding}.emb_layers.{index}', f'{output}.out_layers.{index}'
    sources[f'{path}/embedding_{i}'] = Source(f'{table}.weight', (rows, width), select)
    sources[f'{path}/bias_{i}'] = Source(f'{layer}.bias', (rows,), select)
    if not config.tie_embeddings:
      sources[f'{path}/softmax_weight_{i}'] = Source(f'{layer}.weight', (rows, width), select)
    if width == D and (is_single_table or not adaptive.project_same_width):
      continue
    projections = {}
    if not is_single_table or i == 0:
      projections['projection'] = f'{embedding}.emb_projs'
    if not is_tied[i]:
      projections['softmax_projection'] = f'{output}.out_projs'
    for name, source_name in projections.items():
      sources[f'{path}/{name}_{i}'] = Source(f'{source_name}.{i}', (D, width), np.transpose)
  if C:
    sources[f'{path}/cluster_weight'] = Source(f'{cluster}weight', (C, J), np.flipud)
    sources[f'{path}/cluster_bias'] = Source(f'{cluster}bias', (C,), np.flipud)
  return sources


def check_options(
  block: model_config.ModelConfig | nn.Module,
  free: Collection[str],
  required: Mapping[str, Any] = types.MappingProxyType({}),
  choices: Mapping[str, tuple[Any, ...]] = types.MappingProxyType({}),
) -> None:
  """Raises BadInput that names every option of a model or layer that cannot be loaded.

  Options that are not named must have their defaults, and an optional block of which no option is
  named must be None.

  Args:
    block: the config of the target model, or the target layer.
    free: keys such as `span.ramp` of options of any value, besides those of training.
    required: the value that other options must have, by key.
    choices: the values that can be loaded, of options with several ones.
  """
  path, training, problems = '', LAYER_TRAINING_OPTIONS, []
  if isinstance(block, model_config.ModelConfig):
    path, training = 'model.', MODEL_TRAINING_OPTIONS
    block.check()
  for key, value, default in _options(block, {*required, *choices, *free}):
    values = choices.get(key, (required.get(key, default),))
    if key not in free and key not in training and value not in values:
      expected = ' or '.join(map(repr, values))
      problems.append(f'{path}{key}={value!r} must be {expected} for these weights')
  if problems:
    raise errors.BadInput('\n'.join(problems))


def check_width(layer: ngrammer.NGrammer, width: int) -> None:
  """Raises BadInput if a layer cannot have inputs of this width."""
  try:
    layer.check(width)
  except ValueError as error:
    raise errors.BadInput(f'the layer does not fit inputs of width {width}: {error}') from error


def check_same_model(config: model_config.ModelConfig, official: model_config.ModelConfig) -> None:
  """Raises BadInput that names every option of a config with another model than the official one.

  Options that change only how a model is trained or computed may differ.
  """
  # None stands for the default options of these blocks.
  configs = [
    dataclasses.replace(c, positional=c.positions(), attention=c.attention_options())
    for c in (config, official)
  ]
  may_differ = lambda key: key.path.removeprefix('model.') in MODEL_TRAINING_OPTIONS
  problems = [
    f'{key.path}={value!r} must be {expected!r} for these official settings'
    for key, value, expected in fields.differences(*configs, 'model.', may_differ)
  ]
  if problems:
    raise errors.BadInput('\n'.join(problems))


def _options(block, named, prefix=''):
  """Yields key, value and default of each option; of a nested block if it is named, its options."""
  for field in dataclasses.fields(block):
    key, value = prefix + field.name, getattr(block, field.name)
    if dataclasses.is_dataclass(value) and any(name.startswith(f'{key}.') for name in named):
      yield from _options(value, named, f'{key}.')
    else:
      yield key, value, field.default
