"""Attention in kernels: what the scores give, within documents, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import kernels
from ngrammer_jax.layers import context, document_masks, mesh_axes
from ngrammer_jax.layers.attention import attention, cache, fused, persistent, relative
from tests.checks import random_variables

B, T, N, H = 4, 128, 4, 32


@functools.cache
def inputs():
  """Inputs, document numbers with padding, and what is visible."""
  random = np.random.default_rng(0)
  x_BxTxD = random.normal(size=(B, T, N * H)).astype('float32')
  documents_BxT = np.cumsum(random.random((B, T)) < 0.02, axis=1)
  documents_BxT = np.where(np.arange(T) < T - 40, documents_BxT, document_masks.PADDING)
  same = documents_BxT[:, :, None] == documents_BxT[:, None]
  return x_BxTxD, documents_BxT, same & np.tri(T, dtype=bool)


def parameters(**fields):
  """Seeded weights of about the initial size."""
  layer = attention.Attention(N, kernel='xla', **fields)
  x_BxTxD, _, visible_BxTxT = inputs()
  variables = random_variables(layer, x_BxTxD, context.Context(keys=context.Keys(visible_BxTxT)))
  return jax.tree.map(lambda leaf: np.asarray(leaf) / (N * H) ** 0.5 * 2, variables)


def context_of(**fields):
  """A context that says that it is nothing but documents and causality."""
  _, documents_BxT, visible_BxTxT = inputs()
  defaults = {'query_documents_BxT': documents_BxT, 'is_plain_causal': True}
  return context.Context(keys=context.Keys(visible_BxTxT, **defaults | fields))


def output(kernel, params, x_BxTxD, is_plain_causal=True, dtype=jnp.float32, **fields):
  layer = attention.Attention(N, kernel=kernel, dtype=dtype, **fields)
  return layer.apply(params, x_BxTxD.astype(dtype), context_of(is_plain_causal=is_plain_causal))[0]


def attend(kernel, dtype=jnp.float32, **fields):
  """Value and gradients of attention."""
  x_BxTxD, documents_BxT, _ = inputs()

  def loss(params, x_BxTxD):
    y_BxTxD = output(kernel, params, x_BxTxD, dtype=dtype, **fields)
    weights = np.where(documents_BxT < 0, 0.0, 1.0)[..., None] * np.sin(np.arange(N * H))
    return (y_BxTxD * weights).sum(), y_BxTxD

  run = jax.value_and_grad(loss, has_aux=True, argnums=(0, 1))
  return jax.device_get(jax.jit(run)(parameters(), x_BxTxD))


NOTHING = frozenset()


def workload(shape, dtype):
  return fused.workload(jax.ShapeDtypeStruct(shape, dtype))


def reason(kernel, shape, dtype, *needs):
  return kernels.unsupported_reason(kernel, frozenset(needs), workload(shape, dtype))


def calls_kernel(kernel, **fields):
  own = {name: value for name, value in fields.items() if name not in ('is_plain_causal', 'dtype')}
  run = lambda params, x_BxTxD: output(kernel, params, x_BxTxD, **fields)
  program = str(jax.make_jaxpr(run)(parameters(**own), inputs()[0]))
  return 'pallas_call' in program


@pytest.mark.parametrize(
  'shape, cap',
  [((2, 2, 2), 0.3)]
  + [pytest.param(*each, marks=pytest.mark.slow) for each in (((2, 2, 2), None), (None, None))],
)
def test_splash_is_what_the_scores_give(shape, cap):
  expected = attend('xla', logit_cap=cap)
  uncapped = attend('xla')[0][1]
  assert (np.abs(expected[0][1] - uncapped).max() > 1e-3) == (cap is not None)
  assert calls_kernel('splash') and not calls_kernel('xla')
  if shape is None:
    actual = attend('splash', logit_cap=cap)
  else:
    with sharding.use(sharding.make_mesh(*shape)):
      actual = attend('splash', logit_cap=cap)
  compare = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
  jax.tree.map(compare, actual, expected)


@pytest.mark.slow
def test_in_bfloat16_splash_is_no_further_from_float32_than_the_scores_are():
  assert calls_kernel('splash', dtype=jnp.bfloat16)
  exact = attend('xla')

  def errors(kernel):
    off = lambda a, b: np.abs(a.astype('float32') - b).max()
    (_, y), gradients = jax.tree.map(off, attend(kernel, dtype=jnp.bfloat16), exact)
    return y, max(jax.tree.leaves(gradients))

  for kernel_error, reference_error in zip(errors('splash'), errors('xla'), strict=True):
    assert kernel_error < 1.5 * reference_error


def test_a_kernel_is_only_asked_where_it_can_do_it():
  assert not calls_kernel('splash', is_plain_causal=False)
  assert not calls_kernel('splash', persistent=persistent.Persistent(4))
  assert not calls_kernel(None)  # a CPU has none


@pytest.mark.parametrize(
  'kernel, shape, dtype, why',
  [
    ('splash', (1, 256, 4, 32), 'float32', None),
    ('splash', (1, 200, 4, 32), 'float32', 'is for segments that 128 divides, not for 200 tokens'),
    ('splash', (1, 256, 4, 32), 'float64', 'has no float64'),
    (
      'cudnn',
      (1, 256, 4, 32),
      'bfloat16',
      'is for GPUs, bfloat16 and head widths that 8 divides, not for cpu, bfloat16 and 32',
    ),
  ],
)
def test_what_a_kernel_cannot_do_is_left_to_the_scores(kernel, shape, dtype, why):
  capped = reason(kernel, shape, dtype, 'cap')
  assert capped == ('does not support capped scores' if kernel == 'cudnn' else why)
  assert reason(kernel, shape, dtype) == why
  assert kernels.select(kernel, NOTHING, workload(shape, dtype)) == ('xla' if why else kernel)


def test_the_last_flag_says_whether_operations_are_deterministic(monkeypatch):
  flag = '--xla_gpu_deterministic_ops='
  examples = {f'{flag}{value}': True for value in ('true', 'True', '1')} | {'': False}
  examples |= {f'{flag}true {flag}false': False, f'{flag}0 {flag}true': True}
  examples |= {f'{flag}false --xla_gpu_exclude_nondeterministic_ops=true': True}
  for flags, expected in examples.items():
    monkeypatch.setenv('XLA_FLAGS', flags)
    assert workload((1, 256, 4, 64), 'bfloat16').is_deterministic == expected


@pytest.mark.parametrize(
  'kind, kernel', [('TPU v3', 'xla'), ('TPU v4', 'splash'), ('TPU v5 lite', 'splash')]
)
def test_tpus_have_splash_from_v4_on(kind, kernel, monkeypatch):
  monkeypatch.setattr(mesh_axes, 'device', lambda: ('tpu', kind))
  select = lambda kernel, T, dtype: kernels.select(kernel, NOTHING, workload((1, T, 4, 64), dtype))
  assert select(None, 256, 'bfloat16') == select('splash', 256, 'bfloat16') == kernel
  assert select(None, 256, 'float64') == select(None, 200, 'bfloat16') == 'xla'


@pytest.mark.full
@pytest.mark.parametrize(
  'fields, extra_args',
  [
    ({'dropout': 0.1}, ('dropout_key',)),
    ({}, ('return_pairs',)),
    ({'position': functools.partial(relative.RelativePosition, width=N * H)}, ()),
  ],
)
def test_what_is_more_than_the_tokens_of_a_document_is_left_to_the_scores(fields, extra_args):
  x_BxTxD = inputs()[0]
  layer, params = attention.Attention(N, kernel='splash', **fields), parameters(**fields)

  def calls(*names):
    def run(x_BxTxD):
      more = {'dropout_key': jax.random.key(0), 'return_pairs': True}
      return layer.apply(params, x_BxTxD, context_of(), **{name: more[name] for name in names})

    return 'pallas_call' in str(jax.make_jaxpr(run)(x_BxTxD))

  assert not calls(*extra_args)
  assert calls() == bool(extra_args)


@pytest.mark.full
@pytest.mark.parametrize(
  'visibility, prefix, memory_kind, is_plain',
  [
    ({}, False, None, True),
    ({'across_documents': True}, False, None, True),
    ({'window': 3}, False, None, True),
    ({'sees_itself': False}, False, None, False),
    ({}, True, None, False),
    ({}, False, 'recent', False),
    ({}, False, 'cache', False),
    ({}, False, 'empty cache', True),
    ({'window': 3}, False, 'empty cache', True),
    ({'sees_itself': False}, False, 'empty cache', False),
    ({}, True, 'empty cache', False),
  ],
)
def test_a_context_says_whether_it_is_documents_causality_and_a_window_alone(
  visibility, prefix, memory_kind, is_plain
):
  documents_1xT = np.array([[0, 0, 1, 1, 1]])
  starts_1xT = np.array([[0, 0, 1, 0, 0]]) > 0
  prefix_1xT = documents_1xT < 1 if prefix else None
  segment = context.Segment(documents_1xT, starts_1xT, None, prefix_1xT)
  slots = cache.empty_slots(1, 2)
  earlier = {None: None, 'recent': context.empty_tokens(1, 2), 'cache': slots}
  earlier['empty cache'] = slots.replace(is_empty=True)
  result, _ = context.make(segment, context.Visibility(**visibility), earlier[memory_kind])
  assert result.keys.is_plain_causal == is_plain
