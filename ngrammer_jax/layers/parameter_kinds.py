"""Kinds of parameters, by their logical axis names (see `layers.axis_names`).

  matrix      a linear map; also convolution taps, persistent vectors and sub-keys
  embedding   vectors of tokens or of positions, and the output matrix
  vector      a norm, bias, gate, scale or span
  table       looked-up rows, of n-grams or of product keys

Weight decay uses the kind; Muon and the width rule use the inputs and outputs of a map.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ngrammer_jax.layers.ngram import table


class MapAxes(NamedTuple):
  """The axes of the inputs and of the outputs of a linear map; the others stack several maps."""

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]


# The linear maps by the axis names of their kernels. `heads` without `kv`, and `gates` at the end,
# are no features: they are one number for each head, or for each gate.
LINEAR_MAPS = {
  ('embed', 'heads', 'kv'): MapAxes((0,), (1, 2)),  # to queries, keys, values
  ('heads', 'kv', 'embed'): MapAxes((0, 1), (2,)),  # from the heads
  ('heads', 'kv', None): MapAxes((1,), (2,)),  # from shared keys to queries, one for each head
  ('embed', 'mlp'): MapAxes((0,), (1,)),
  ('mlp', 'embed'): MapAxes((0,), (1,)),
  ('embed', 'gates', 'mlp'): MapAxes((0,), (1, 2)),  # to the gates of an LSTM
  (None, 'embed'): MapAxes((0,), (1,)),  # from the rows of a memory
  (None, None, 'embed'): MapAxes((0, 1), (2,)),  # from several rows
  ('embed', None): MapAxes((0,), (1,)),  # to the width of rows that multiply
  (None, 'branches', 'embed'): MapAxes((0,), (2,)),  # from rows to keys, one for each branch
  ('embed', 'heads'): MapAxes((0,), (1,)),  # to the span of each head
  ('embed', 'gates'): MapAxes((0,), (1,)),  # to a gate
  (None, 'gates'): MapAxes((0,), (1,)),  # from some channels to the gate of each head
}
_NUMBERS = ('heads', 'gates')  # last axes without features

# Axes along which arrays of one kind are stacked: a stack of vectors is no matrix.
STACKS = ('layers', 'branches', 'buckets', 'gates')
EMBEDDED = ('vocab', 'vocab_clusters', 'position')  # axes whose entries have a vector each


class ParameterKind(NamedTuple):
  """The kind of a parameter.

  Attributes:
    name: `matrix`, `embedding`, `vector` or `table`.
    axes: axes of a linear map. None: not a linear map.
    has_features: whether the outputs of the map are features, and not one number for each head or
      gate.
  """

  name: str
  axes: MapAxes | None = None
  has_features: bool = False


def of(names: Sequence[str | None]) -> ParameterKind:
  """Returns the kind of a parameter with these logical axis names."""
  names = tuple(names)
  axes = LINEAR_MAPS.get(names)
  has_features = axes is not None and names[-1] not in _NUMBERS
  return ParameterKind(_name(names), axes, has_features)


def _name(names: tuple[str | None, ...]) -> str:
  """Returns the name of the kind."""
  if table.AXES[0] in names:
    return 'table'
  axes = [name for name in names if name not in STACKS]
  if 'heads' in axes and 'kv' in axes:  # together they are the features of all heads
    axes.remove('kv')
  if 'norm' in axes or len(axes) < 2:
    return 'vector'
  if any(name in EMBEDDED for name in axes):
    return 'embedding'
  return 'matrix'
