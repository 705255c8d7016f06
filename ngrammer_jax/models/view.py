"""Who sees whom in a segment, and where tokens stand: worked out once, for all layers.

B batch, T segment length, M memory, S = M + T keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import attention, cache, documents, local, position
from ngrammer_jax.models import precision

# Of every layer, of every head, how many tokens back it looks at most. Where tokens have spans of
# their own: those that a layer chooses from, segment by segment.
Windows = tuple[tuple[int, ...], ...]
WHOLE = 0  # the window of heads that are not told apart


class View(NamedTuple):
  """What layers share about a segment, for heads with one window.

  visible_BxTxS, rotation, position_BxP, distance_BxTxS, shared, distance_key and causal_BxT are
  those of `layers.Attention`; documents_BxT are the numbers of the documents; slots_BxT is where
  the keys and values of the valid tokens are kept (see `layers.cache`), None where they are not;
  newest_BxM are the slots that it has, None where it has all of them.
  """

  visible_BxTxS: jax.Array
  rotation: tuple[jax.Array, jax.Array] | None
  position_BxP: jax.Array
  documents_BxT: jax.Array
  slots_BxT: jax.Array | None = None
  valid_BxT: jax.Array | None = None
  distance_BxTxS: jax.Array | None = None
  shared: attention.Shared | None = None
  newest_BxM: jax.Array | None = None
  distance_key: jax.Array | None = None
  causal_BxT: jax.Array | None = None


class Segment(NamedTuple):
  """What is given of a segment: documents, their starts, padding, and prefixes."""

  documents_BxT: jax.Array
  starts_BxT: jax.Array
  valid_BxT: jax.Array | None
  prefix_BxT: jax.Array | None


def sizes(windows: Windows | None) -> list[int]:
  """The windows that there are."""
  return [WHOLE] if windows is None else sorted({size for layer in windows for size in layer})


def chooses(config: model_config.ModelConfig, windows: Windows | None) -> bool:
  """Whether layers choose their window as they see the tokens: spans are functions of them."""
  return windows is not None and config.span is not None and config.span.kind == 'dynamic'


def caches(config: model_config.ModelConfig, windows: Windows | None) -> list[int]:
  """The windows whose keys and values are kept apart. One that is chosen is part of the longest."""
  return sizes(windows)[-1:] if chooses(config, windows) else sizes(windows)


def inputs_kept(
  config: model_config.ModelConfig, windows: tuple[int, ...] | None, growth: int = 0
) -> int:
  """Tokens whose inputs a layer keeps in training: a window that grows finds them there."""
  longest = config.memory.length if windows is None else max(windows) + growth
  return min(longest, config.memory.length)


def views(
  config: model_config.ModelConfig,
  segment: Segment,
  memory: dict[str, Any],
  shared: attention.Shared | None,
  windows: Windows | None = None,
) -> tuple[dict[int, View], dict[str, Any]]:
  """The view of each window, and what the next segment will know of the tokens kept."""
  c = config
  attended_BxT = segment.documents_BxT
  if c.memory is not None and c.memory.across_documents:
    attended_BxT = jnp.zeros_like(attended_BxT)
    # Positions run on too.
    segment = segment._replace(starts_BxT=jnp.zeros_like(segment.starts_BxT))
  make = lambda *of: _view(c, segment, attended_BxT, shared, *of)
  if 'cache' in memory:
    kept = memory['cache'] if windows is not None else {WHOLE: memory['cache']}
    both = {size: _cached(segment, attended_BxT, known) for size, known in kept.items()}
    of_each = {int(size): make(int(size), *before) for size, (before, _) in both.items()}
    known = {size: known for size, (_, known) in both.items()}
    if chooses(c, windows):
      (whole,) = kept.values()
      for size in sizes(windows):
        if size < whole['documents'].shape[1]:
          before, _ = _cached(segment, attended_BxT, whole, cache.newest(whole, size))
          of_each[size] = make(size, *before)
    return of_each, {'cache': known if windows is not None else known[WHOLE]}
  recent = memory.get('recent')
  if recent is None:
    position_BxT = documents.positions(segment.starts_BxT)
    return {WHOLE: make(WHOLE, None, position_BxT, position_BxT)}, {}
  position_BxT = documents.positions(segment.starts_BxT, recent['position'])
  position_BxP = jnp.concatenate([recent['positions'], position_BxT], axis=1)
  last = lambda before, new: cache.last(before, new, segment.valid_BxT)
  known = {
    'documents': last(recent['documents'], attended_BxT),
    'positions': last(recent['positions'], position_BxT),
    'position': last(recent['position'][:, None], position_BxT + 1)[:, 0],
  }
  of_each = {}
  for size in sizes(windows):
    M = min(size or position_BxP.shape[1], recent['documents'].shape[1])
    before = recent['documents'][:, recent['documents'].shape[1] - M :]
    rows = position_BxP[:, position_BxP.shape[1] - position_BxT.shape[1] - M :]
    of_each[size] = make(size, before, position_BxT, rows)
  return of_each, {'recent': known}


def _cached(segment, attended_BxT, kept, newest_BxM=None):
  """What a cache tells of the tokens before, of positions, slots and distances; the next one.

  With `newest_BxM`, of the tokens in these slots.
  """
  T = attended_BxT.shape
  counted_BxT = jnp.ones(T, bool) if segment.valid_BxT is None else segment.valid_BxT
  position_BxT = documents.positions(segment.starts_BxT, kept['position'])
  slots_BxT = cache.slots(kept, counted_BxT)
  index_BxT = cache.indices(kept, counted_BxT)
  documents_BxM, index_BxM = kept['documents'], kept['index']
  if newest_BxM is not None:
    of_newest = lambda array: jnp.take_along_axis(array, newest_BxM, axis=1)
    documents_BxM, index_BxM = of_newest(documents_BxM), of_newest(index_BxM)
  index_BxS = jnp.concatenate([index_BxM, index_BxT], axis=1)
  distance_BxTxS = index_BxT[:, :, None] - index_BxS[:, None, :]
  known = cache.advance(kept, slots_BxT, attended_BxT, position_BxT, counted_BxT)
  before = documents_BxM, position_BxT, position_BxT, slots_BxT, distance_BxTxS, newest_BxM
  return before, known


def _view(
  config,
  segment,
  attended_BxT,
  shared,
  size,
  before_BxM,
  position_BxT,
  position_BxP,
  slots_BxT=None,
  distance_BxTxS=None,
  newest_BxM=None,
):
  """The view of one window."""
  c, T = config, attended_BxT.shape[1]
  attended_BxT = key_documents_BxS = documents.with_padding(attended_BxT, segment.valid_BxT)
  if before_BxM is not None:
    key_documents_BxS = jnp.concatenate([before_BxM, attended_BxT], axis=1)
  window, itself = None, True
  if c.memory is not None:
    itself, window = c.memory.sees_itself(), c.memory.window()
    if size != WHOLE:  # counted as the memory is
      window += min(size - c.memory.length, 0)
  M = key_documents_BxS.shape[1] - T
  # With a prefix, a token sees later ones too.
  free = window is None or not M or slots_BxT is not None or segment.prefix_BxT is not None
  F = 1 if free or window > M + 1 else local.blocks(T, M)
  visible_BxTxS = documents.visible(
    local.of_queries(attended_BxT, F),
    local.of_keys(key_documents_BxS, F, T),
    segment.prefix_BxT,
    window,
    distance_BxTxS,
    itself,
  )
  rotation = None
  if c.position == 'rope':
    wide = jnp.promote_types(precision.compute_dtype(c), jnp.float32)
    timescales = c.positions().min_timescale, c.positions().max_timescale
    rotation = position.rotation(position_BxP, c.width // c.heads, *timescales, wide)
  known = visible_BxTxS, rotation, position_BxP, segment.documents_BxT, slots_BxT
  # Then what is visible is what kernels know: the document of a token, as far as itself.
  alone = before_BxM is None and segment.prefix_BxT is None and window is None and itself
  causal_BxT = attended_BxT if alone else None
  return View(*known, segment.valid_BxT, distance_BxTxS, shared, newest_BxM, causal_BxT=causal_BxT)
