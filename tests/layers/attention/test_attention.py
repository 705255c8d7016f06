import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import AdaptiveSpan, Attention, document_masks, dropout
from ngrammer_jax.layers.attention import attention, blocks, full, position, relative
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.context import Context, Keys, Positions
from ngrammer_jax.layers.normalization import LayerNorm
from tests.checks import assert_close
from tests.layers.programs import apply
from tests.layers.test_normalization import slow_layer_norm

B, T, D, N, H, M = 2, 6, 8, 2, 4, 3

# Row 0 has a second document with a prefix of two tokens, row 1 a prefix and padding.
DOCUMENTS = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
PREFIX = np.array([[0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
VALID = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
see = jax.jit(document_masks.visible)


def visible(prefix=PREFIX):
  numbers = np.where(VALID, DOCUMENTS, document_masks.PADDING)
  return np.asarray(see(numbers, numbers, prefix))


def random_parameters(rng, bias=False, per_dim_scale=False, relative=False):
  params = {name: {'kernel': rng.normal(size=(D, N, H))} for name in ('query', 'key', 'value')}
  params['out'] = {'kernel': rng.normal(size=(N, H, D))}
  if bias:
    for name, projection in params.items():
      projection['bias'] = rng.normal(size=D if name == 'out' else (N, H))
  if per_dim_scale:
    params['per_dim_scale'] = rng.normal(size=H)
  if relative:
    params |= {f'{name}_bias': rng.normal(size=(N, H)) for name in ('content', 'position')}
    params['relative'] = {'position': {'kernel': rng.normal(size=(D, N, H))}}
  return params


def turned(x_H, place):
  """x rotated by its position, feature j together with j + H/2."""
  y = np.zeros(H)
  for j in range(H // 2):
    angle = place / 10_000 ** (2 * j / H)
    y[j] = x_H[j] * np.cos(angle) - x_H[j + H // 2] * np.sin(angle)
    y[j + H // 2] = x_H[j + H // 2] * np.cos(angle) + x_H[j] * np.sin(angle)
  return y


def distance_score(distance):
  """The sinusoid of Transformer-XL."""
  angles = [distance / 10_000 ** (2 * k / D) for k in range(D // 2)]
  return np.array([*np.sin(angles), *np.cos(angles)])


def slow_attention(x, params, mask, rotated, cap=None):
  """Attention of the last tokens to all that are seen, one query at a time."""
  project = lambda name, v, n: (
    v @ params[name]['kernel'][:, n] + params[name].get('bias', np.zeros((N, H)))[n]
  )
  scale_H = np.ones(H) / np.sqrt(H)
  if 'per_dim_scale' in params:
    scale_H *= 1.442695041 * np.log1p(np.exp(params['per_dim_scale']))
  B, T, S = mask.shape
  out = np.zeros((B, T, D)) + params['out'].get('bias', 0)
  for b, t, n in np.ndindex(B, T, N):
    place = S - T + t
    query = project('query', x[b, place], n)
    query = turned(query, place) if rotated else query
    weights, values = [], []
    for s in np.flatnonzero(mask[b, t]):
      key = project('key', x[b, s], n)
      key = turned(key, s) if rotated else key
      score = (query + params.get('content_bias', np.zeros((N, H)))[n]) * scale_H @ key
      if 'relative' in params:
        r = distance_score(place - s) @ params['relative']['position']['kernel'][:, n]
        score += (query + params['position_bias'][n]) * scale_H @ r
      score = score if cap is None else cap * np.tanh(score / cap)
      weights.append(np.exp(score))
      values.append(project('value', x[b, s], n))
    context = np.array(weights) / sum(weights) @ np.array(values)
    out[b, t] += context @ params['out']['kernel'][n]
  return out


@pytest.mark.parametrize(
  'bias, per_dim_scale, rotated, cap', [(False, False, False, None), (True, True, True, 2.0)]
)
def test_equals_slow_loop(x64, bias, per_dim_scale, rotated, cap):
  rng = np.random.default_rng(0)
  x, params = rng.normal(size=(B, T, D)), random_parameters(rng, bias, per_dim_scale)
  projections = attention.Projections(bias=bias, per_dim_scale=per_dim_scale)
  layer = Attention(heads=N, projections=projections, dtype=jnp.float64, logit_cap=cap)
  mask = np.zeros((B, T, T), bool)  # the documents, prefix and padding above
  for b, t, s in np.ndindex(B, T, T):
    same = DOCUMENTS[b, s] == DOCUMENTS[b, t] and VALID[b, s] == VALID[b, t]
    mask[b, t, s] = same and (s <= t or PREFIX[b, s])
  assert visible().tolist() == mask.tolist()

  @jax.jit
  def run(x):
    rotation = position.rotation(np.arange(T), H, dtype=jnp.float64) if rotated else None
    return layer.apply(
      {'params': params}, x, Context(keys=Keys(mask), positions=Positions(rotation=rotation))
    )[0]

  assert_close(run(x), slow_attention(x, params, mask, rotated, cap), 1e-12)


@pytest.mark.parametrize('in_blocks', [False, True])
@pytest.mark.parametrize('scores_distances', [False, True])
def test_after_a_memory_of_inputs_it_equals_slow_loop(
  x64, monkeypatch, scores_distances, in_blocks
):
  """Queries are turned by their own positions, or keys are scored by their distance too.

  The scores with distances are capped: a cap is applied to the sum. The memory of the others is
  normed as the segment was.
  """
  monkeypatch.setattr(blocks, 'BLOCK', 2)
  rng = np.random.default_rng(1)
  x, params = rng.normal(size=(B, M + T, D)), random_parameters(rng, relative=scores_distances)
  scored = functools.partial(relative.RelativePosition, width=D) if scores_distances else None
  cap = 0.8 if scores_distances else None
  layer = Attention(heads=N, position=scored, dtype=jnp.float64, logit_cap=cap)
  mask = np.broadcast_to(np.tri(T, M + T, M, dtype=bool), (B, T, M + T))
  norm_params = {'scale': rng.normal(size=D), 'bias': rng.normal(size=D)}
  normed = x if scores_distances else slow_layer_norm(x, **norm_params)

  @jax.jit
  def run(x, segment):
    norm = None
    if not scores_distances:
      norm = LayerNorm(dtype=jnp.float64).bind({'params': norm_params})
    position_BxP = jnp.tile(jnp.arange(M + T), (B, 1))
    keys, rotation = Keys(mask), None
    if in_blocks:
      same = jnp.zeros_like(position_BxP)  # one document
      keys = Keys(query_documents_BxT=same[:, M:], key_documents_BxS=same)
    if not scores_distances:
      rotation = position.rotation(position_BxP, H, dtype=jnp.float64)
    context = Context(keys=keys, positions=Positions(position_BxP, rotation))
    memory = attention.LayerInputs(x[:, :M], norm)
    return layer.apply({'params': params}, segment, context, memory)[0]

  expected = slow_attention(normed, params, mask, not scores_distances, cap)
  assert_close(run(x, normed[:, M:]), expected, 1e-12)


@functools.cache
def jacobian():
  """A program of what all queries have of all inputs, and of what they are."""
  params = random_parameters(np.random.default_rng(1))
  variables = {'params': jax.tree.map(lambda leaf: leaf.astype('float32'), params)}

  def sums(x, mask):
    y = Attention(heads=N).apply(variables, x, Context(keys=Keys(mask)))[0].sum(axis=-1)
    return y, y

  return jax.jit(jax.jacrev(sums, has_aux=True))


def random_case():
  return np.random.default_rng(0).normal(size=(B, T, D)).astype('float32')


def test_a_context_without_keys_is_refused():
  with pytest.raises(ValueError, match='attention needs the keys of the segment'):
    Attention(2).init(jax.random.key(0), np.zeros((1, 2, 4), np.float32), Context())


def test_query_that_sees_nothing_stays_finite():
  gradient, y = jacobian()(random_case(), np.zeros((B, T, T), bool))
  assert np.isfinite(y).all() and np.isfinite(gradient).all()


def test_bfloat16_keeps_the_softmax_in_float32():
  x = random_case().astype(jnp.bfloat16)
  projections = attention.Projections(per_dim_scale=True)
  layer = Attention(heads=N, projections=projections, dtype=jnp.bfloat16)
  params = random_parameters(np.random.default_rng(1), per_dim_scale=True)
  params = jax.tree.map(lambda leaf: leaf.astype('float32'), params)
  context = Context(keys=Keys(visible()))
  (y, _), state = apply(layer, {'params': params}, x, context, mutable=('intermediates',))
  (probs,) = state['intermediates']['probs']
  assert y.dtype == jnp.bfloat16 and probs.dtype == jnp.float32
  # bfloat16 would miss 1 by up to 2^-9 and hold few different numbers.
  probs = np.asarray(probs)
  assert_close(probs.sum(axis=-1), np.ones((B, N, T)), 1e-6)
  assert (probs != probs.astype(jnp.bfloat16).astype('float32')).any()


def test_bfloat16_scores_are_not_rounded():
  # The second key scores 1.001 times as much as the first: one number in bfloat16.
  x = np.array([[[1, 0], [1, 1 / 32]]], jnp.bfloat16)
  identity = np.eye(2, dtype='float32')[:, None]
  params = {name: {'kernel': identity} for name in ('key', 'value')}
  params |= {'query': {'kernel': 16 * identity}, 'out': {'kernel': identity.swapaxes(0, 1)}}
  layer = Attention(heads=1, dtype=jnp.bfloat16)
  context = Context(keys=Keys(np.ones((1, 2, 2), bool)))
  _, state = apply(layer, {'params': params}, x, context, mutable=('intermediates',))
  probs = np.asarray(state['intermediates']['probs'][0])
  assert probs[0, 0, 1, 1] > probs[0, 0, 1, 0]


@pytest.mark.parametrize('platform', ['default', 'tpu'])
def test_shared_key_heads_equal_slow_loop(x64, monkeypatch, platform):
  """Query heads 0 and 1 attend to key head 0, and 2 and 3 to key head 1, also in a KV cache."""
  chosen = lambda *args, **by_platform: by_platform[platform](*args)
  monkeypatch.setattr(jax.lax, 'platform_dependent', chosen)
  rng = np.random.default_rng(0)
  query, (key, value) = rng.normal(size=(1, 3, 4, H)), rng.normal(size=(2, 1, 3, 2, H))
  cached = rng.normal(size=(2, 1, 2, 5, H))  # keys and values [B, C, M, H]
  visible = np.tri(3, 8, 5, dtype=bool)[None]
  heads = full.Heads(*map(jnp.asarray, (query, key, value)))
  cache = KeyValues(*map(jnp.asarray, cached), {})
  attend = jax.jit(
    lambda heads, cache: full.attend(heads, None, Keys(visible), cache, False, dropout.Dropout())
  )
  expected = np.zeros_like(query)
  for t, n in np.ndindex(3, 4):
    keys, values = (
      np.concatenate([old[0, n // 2], new[0, :, n // 2]])
      for old, new in zip(cached, (key, value), strict=True)
    )
    weights = np.exp(keys[: t + 6] @ query[0, t, n])
    expected[0, t, n] = weights / weights.sum() @ values[: t + 6]
  assert_close(attend(heads, cache).values_BxTxNxH, expected, 1e-12)


@pytest.mark.parametrize(
  'options, memory, problem',
  [
    (
      {'projections': attention.Projections(norm='full')},
      attention.LayerInputs(jnp.zeros((B, M, D))),
      'a norm of all key heads together, with a segment memory',
    ),
    (
      {'span': functools.partial(AdaptiveSpan, limit=T, ramp=2)},
      None,
      'spans with epsilon_keys="all"',
    ),
  ],
)
def test_what_blocks_do_not_support_is_refused(options, memory, problem):
  """A model does not ask for it: see `config.kernels`."""
  earlier = 0 if memory is None else M
  keys = Keys(
    query_documents_BxT=jnp.asarray(DOCUMENTS),
    key_documents_BxS=jnp.zeros((B, earlier + T), jnp.int32),
  )
  init = functools.partial(Attention(heads=N, **options).init, jax.random.key(0))
  x_BxTxD = jnp.zeros((B, T, D))
  with pytest.raises(ValueError, match=f'attention in blocks does not support {problem}'):
    jax.eval_shape(init, x_BxTxD, Context(keys=keys), memory)
