"""One block of the Transformer: attention, maybe n-grams of what it found, and feed-forward.

B batch, T segment length, S keys, D model width, N heads, H head width.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import (
  attention,
  cache,
  dropout,
  feed_forward,
  ngrammer,
  normalization,
  span,
)
from ngrammer_jax.models import ngrams, precision, view

Memory = dict[str, Any]


def empty_memory(
  config: model_config.ModelConfig,
  number: int,
  batch: int,
  cache_slots: int,
  windows: tuple[int, ...] | None = None,
  growth: int = 0,
) -> Memory:
  """What a block keeps: keys and values, or its inputs; the seam of its n-grams, or their ids.

  Inputs are kept for the longest window of its heads and `growth` tokens more; keys and values,
  by window where there are several, as far as that of theirs.
  """
  c, kept = config, {}
  looks_back = (c.convolution or 1) - 1
  if c.memory is not None and not cache_slots:
    rows = view.inputs_kept(c, windows, growth) + looks_back
    kept['hidden'] = jnp.zeros((batch, rows, c.width), precision.compute_dtype(c))
  if cache_slots:
    convolved = attention.projections(c.shared_query_key) if c.convolution is not None else ()

    def of_heads(slots, heads, queries):
      rows = {name: (looks_back, queries if name == 'query' else heads) for name in convolved}
      H, dtype = c.width // c.heads, precision.compute_dtype(c)
      return cache.empty_layer(batch, slots, heads, H, dtype, rows)

    by_size = groups(c, windows)
    if len(by_size) > 1:
      return {
        str(size): of_heads(min(size, cache_slots), len(heads), len(heads))
        for size, heads in by_size.items()
      }
    (size,) = by_size
    cache_slots = min(size or cache_slots, cache_slots)
    kept = of_heads(cache_slots, c.context_heads, c.heads)
  pairing = 'none' if c.ngram is None else c.ngram.pairing_of(number)
  if pairing == 'previous':
    kept['ngram'] = ngrammer.empty_memory(batch, c.heads, c.ngram.orders)
  elif pairing == 'attended' and kept:
    slots = cache_slots or c.memory.length
    kept['ids'] = jnp.zeros((batch, c.heads, slots), jnp.int32)
  return kept


def groups(
  config: model_config.ModelConfig, windows: tuple[int, ...] | None
) -> dict[int, tuple[int, ...]]:
  """The heads of each window, the shortest first; of none where they are not told apart."""
  if windows is None or view.chooses(config, (windows,)):
    return {max(windows or [view.WHOLE]): ()}
  return {
    size: tuple(head for head, other in enumerate(windows) if other == size)
    for size in sorted(set(windows))
  }


class Block(nn.Module):
  """Attention and feed-forward, each with a residual and norms where the config says.

  `pairing` is that of the n-gram layer after its attention (see `NGramConfig.pairing`);
  `windows`, of each head, is how far it looks at most (see `view.Windows`). None: as far as the
  memory.
  """

  config: model_config.ModelConfig
  dtype: jnp.dtype
  pairing: str = 'none'
  windows: tuple[int, ...] | None = None

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    views: dict[int, view.View],
    memory: Memory,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, Memory, span.Spans]:
    """Returns [B, T, D], the memory of this layer for the next segment, and its spans.

    The views are by window. Spans are 0 where none are learned.
    """
    c = self.config
    feed = feed_forward.FeedForward(
      c.feed_forward_width,
      c.activation,
      c.gated,
      c.bias if c.feed_forward_bias is None else c.feed_forward_bias,
      c.inner_dropout,
      self.dtype,
      name='feed_forward',
    )
    x_BxTxD = self._positioned(x_BxTxD)
    keys = (None,) * 4 if dropout_key is None else jax.random.split(dropout_key, 4)
    hidden_BxTxD, earlier = x_BxTxD, memory.get('hidden')
    look = functools.partial(self._look, views, memory, keys[2])
    x_BxTxD, segment, spans = self._add('attention', look, x_BxTxD, keys[0], earlier)
    segment['hidden'] = jax.lax.stop_gradient(hidden_BxTxD)
    memory = _remember(memory, segment, views, groups(c, self.windows), after_BxTxD=x_BxTxD)
    if c.feed_forward_width:
      valid_BxT = next(iter(views.values())).valid_BxT
      fed = lambda x_BxTxD: (feed(x_BxTxD, valid_BxT, keys[3]),)
      (x_BxTxD,) = self._add('feed_forward', fed, x_BxTxD, keys[1])
    return x_BxTxD, memory, spans

  def _look(self, views, memory, dropout_key, x_BxPxD):
    """What attention adds, what is kept of it (by window where there are), and the spans."""
    c, mix, by_size = self.config, None, groups(self.config, self.windows)
    attend = _attention(c, self.dtype)
    if view.chooses(c, self.windows and (self.windows,)):
      return self._look_far_enough(attend, views, memory, dropout_key, x_BxPxD)
    if len(by_size) == 1:
      (size,) = by_size
      seen = views[size]
      if self.pairing != 'none':
        mix = functools.partial(self._paired, seen, memory)
      cached = memory if 'keys' in memory else None
      y_BxTxD, kept = attend(
        self._within(seen, x_BxPxD), mix=mix, memory=cached, dropout_key=dropout_key, **_seen(seen)
      )
      none = span.Spans(jnp.zeros(()), jnp.zeros((len(x_BxPxD), c.context_heads)))
      return y_BxTxD, kept, kept.pop('span', none)
    params, outputs, kept, spans = self.variables['params']['attention'], [], {}, []
    for size, heads in by_size.items():
      part = attend.clone(parent=None, heads=len(heads), head_width=c.width // c.heads, name=None)
      given = {'params': attend.of_heads(params, heads)}
      key = None if dropout_key is None else jax.random.fold_in(dropout_key, size)
      seen = _seen(views[size], None if c.position == 'table' else heads)
      y_BxTxD, kept[str(size)] = part.apply(
        given,
        self._within(views[size], x_BxPxD),
        memory=memory.get(str(size)),
        dropout_key=key,
        **seen,
      )
      outputs.append(y_BxTxD)
      spans.append(kept[str(size)].pop('span'))
    return sum(outputs), kept, _joined(spans, by_size.values())

  def _paired(self, seen, memory, context_BxTxNxH, scores_BxNxTxS):
    """What attention found, joined with its n-grams; and what is kept of them."""
    found = ngrams.pairs(self.pairing, seen, memory, scores_BxNxTxS)
    return ngrams.joined(self._ngram_layer(), seen, memory, context_BxTxNxH, found)

  def _ngram_layer(self):
    return ngrams.layer(self.config, self.dtype, name='ngrammer')

  def _look_far_enough(self, attend, views, memory, dropout_key, x_BxPxD):
    """The same within the shortest window that holds the spans of these tokens.

    All of them are compiled, one is computed; in the backward pass once more, for what it keeps
    would be kept of all.
    """
    c, sizes = self.config, sorted(views)
    # The codebook of n-grams is changed once, outside of the switch.
    attend = attend.clone(parent=None, name=None, projected=self.pairing == 'none')
    names = ('span', 'pairs', *memory)

    def within(seen):
      rows = self._rows(seen)
      pair = functools.partial(ngrams.pairs, self.pairing, seen, memory)
      mix = None if self.pairing == 'none' else lambda context, scores: (context, pair(scores))

      def look(params, memory, x_BxPxD):
        cached = memory if 'keys' in memory else None
        if cached and seen.newest_BxM is not None:
          slots_Bx1xMx1 = seen.newest_BxM[:, None, :, None]
          newest = lambda name: jnp.take_along_axis(cached[name], slots_Bx1xMx1, axis=2)
          cached = cached | {name: newest(name) for name in ('keys', 'values')}
        given = {'mix': mix, 'memory': cached, 'dropout_key': dropout_key, **_seen(seen)}
        y, kept = attend.apply({'params': params}, x_BxPxD[:, -rows:], **given)
        return y, {name: kept[name] for name in names if name in kept}

      return jax.checkpoint(look)

    params, seen = self.variables['params']['attention'], views[sizes[-1]]
    x_BxTxD = x_BxPxD[:, -seen.documents_BxT.shape[1] :]
    learned = params['span']['span_kernel'], params['span']['span_bias']
    z_BxTxN = span.of_tokens(*learned, x_BxTxD, seen.valid_BxT, c.span.limit)
    index = (z_BxTxN.max() + c.span.ramp >= jnp.array(sizes[:-1])).sum()
    looks = [within(views[size]) for size in sizes]
    y, kept = jax.lax.switch(index, looks, params, memory, x_BxPxD)
    if self.pairing != 'none':
      pairs = {name: kept.pop(name) for name in ('pairs',) if name in kept}
      y, of_ngrams = ngrams.joined(self._ngram_layer(), seen, memory, y, pairs)
      project = attention.projection(y.shape[2:], c.width, c.bias, self.dtype, parent=None)
      y = project.apply({'params': params['out']}, y)
      kept |= of_ngrams
    return y, kept, kept.pop('span')

  def _rows(self, seen):
    """How many a view is of, with those that convolutions look back on."""
    return seen.position_BxP.shape[1] + (self.config.convolution or 1) - 1

  def _within(self, seen, x_BxPxD):
    return x_BxPxD[:, -self._rows(seen) :]

  def _positioned(self, x_BxTxD):
    """The input and, where every layer adds one of its own, the embedding of its position."""
    c, T = self.config, x_BxTxD.shape[1]
    if c.position != 'learned':
      return x_BxTxD
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (None, 'embed'))
    if T > c.positions().max_length:
      raise ValueError(f'a segment of {T} for {c.positions().max_length} learned positions')
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    table = self.param('position', init, (c.positions().max_length, c.width), param_dtype)
    return x_BxTxD + table[c.positions().max_length - T :].astype(self.dtype)

  def _add(self, name, sublayer, x_BxTxD, dropout_key, earlier_BxMxD=None):
    """The sum of x and a sub-layer of it, normed, and what else the sub-layer returns.

    The sub-layer is given the rows of the memory too, where there is one.
    """
    c = self.config
    policy = c.norm
    if policy == 'primer':
      policy = 'pre' if name == 'attention' else 'post'
    norm = lambda suffix: normalization.LayerNorm(
      epsilon=c.norm_epsilon, dtype=self.dtype, name=f'{name}_{suffix}'
    )
    y_BxPxD = x_BxTxD
    if earlier_BxMxD is not None:
      y_BxPxD = jnp.concatenate([earlier_BxMxD, x_BxTxD], axis=1)
    y_BxPxD = norm('norm')(y_BxPxD) if policy in ('pre', 'hybrid') else y_BxPxD
    y_BxTxD, *rest = sublayer(y_BxPxD)
    if policy in ('post', 'hybrid'):
      y_BxTxD = norm('post_norm')(y_BxTxD)
    x_BxTxD = whole_width(x_BxTxD + dropout.drop(y_BxTxD, c.dropout, dropout_key))
    if policy == 'post_skip':
      x_BxTxD = norm('post_norm')(x_BxTxD)
    return x_BxTxD, *rest


def _joined(spans, heads):
  """The spans of all heads, from those of parts of them."""
  order = [head for part in heads for head in part]
  longest_BxN = jnp.concatenate([part.longest_BxN for part in spans], axis=1)
  mean = sum(part.mean * part.longest_BxN.shape[1] for part in spans) / len(order)
  return span.Spans(mean, longest_BxN[:, jnp.argsort(jnp.array(order))])


def _seen(seen, heads=None):
  """What attention is told of a view, with what some of the heads have of what is shared."""
  shared = seen.shared
  if shared is not None and heads is not None:
    shared = tuple(part[jnp.asarray(heads)] for part in shared)
  return {
    'visible_BxTxS': seen.visible_BxTxS,
    'rotation': seen.rotation,
    'position_BxP': seen.position_BxP,
    'distance_BxTxS': seen.distance_BxTxS,
    'shared': shared,
    'valid_BxT': seen.valid_BxT,
    'distance_key': seen.distance_key,
    'causal_BxT': seen.causal_BxT,
  }


def _attention(config, dtype):
  """The attention of the config."""
  c, learned = config, None
  if c.span is not None:
    kind, initial = {'adaptive': (span.AdaptiveSpan, 0.0), 'dynamic': (span.DynamicSpan, -4.0)}[
      c.span.kind
    ]
    initial = initial if c.span.initial is None else c.span.initial
    wide = jnp.promote_types(dtype, jnp.float32)
    learned = functools.partial(
      kind, limit=c.span.limit, ramp=c.span.ramp, initial=initial, dtype=wide
    )
  return attention.Attention(
    heads=c.heads,
    bias=c.bias,
    per_dim_scale=c.per_dim_scale,
    taps=c.convolution,
    shared_query_key=c.shared_query_key,
    relative=c.position if c.position in ('relative', 'shaw', 'table') else None,
    clamp_length=c.positions().clamp_length,
    max_length=c.positions().max_length,
    sees_itself=c.memory is None or c.memory.sees_itself(),
    span=learned,
    renormalize=c.span is None or c.span.renormalize,
    persistent_vectors=0 if c.persistent is None else c.persistent.vectors,
    persistent_kind='all_attention' if c.persistent is None else c.persistent.kind,
    dropout=c.attention_dropout,
    distance_dropout=c.dropout,
    dtype=dtype,
    kernel=c.kernel,
    name='attention',
  )


def _remember(memory, segment, views, by_size, after_BxTxD):
  """The memory of a layer after a segment."""
  if len(by_size) > 1 and 'hidden' not in memory:  # keys and values, by window
    return {
      str(size): _remember(memory[str(size)], segment[str(size)], views, [size], after_BxTxD)
      for size in by_size
    }
  seen = views[next(iter(by_size))]

  def keep(name):
    if name == 'ngram':
      return segment[name]
    if name == 'ids' and seen.slots_BxT is None:
      return cache.last(memory[name].swapaxes(1, 2), segment[name], seen.valid_BxT).swapaxes(1, 2)
    if name in ('keys', 'values', 'ids'):
      return cache.write(memory[name], seen.slots_BxT, segment[name], after_BxTxD)
    return cache.last(memory[name], segment[name], seen.valid_BxT)

  return {name: keep(name) for name in memory}


def whole_width(x_BxTxD: jax.Array) -> jax.Array:
  """Activations between layers are spread over the batch only."""
  return nn.with_logical_constraint(x_BxTxD, ('batch', 'length', None))
