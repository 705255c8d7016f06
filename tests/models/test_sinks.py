"""Attention sinks against a model without a memory, which reads the visible tokens alone.

In a model of one layer, keys and values depend on their own token alone: a segment after a cache
has the outputs of a text that is made of the sinks, of the last tokens and of the segment.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.attention import AttentionConfig
from ngrammer_jax.config.evaluation import EvaluationMemory
from ngrammer_jax.config.positions import PositionalConfig, RotaryScalingConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.models import language_model
from tests import checks

B, M, S, V = 2, 11, 3, 13
YARN = PositionalConfig(scaling=RotaryScalingConfig('yarn', factor=4.0, original_length=16))


def config_of(**changes):
  sizes = {'layers': 1, 'width': 16, 'heads': 4, 'feed_forward_width': 16, 'dtype': 'float64'}
  return model_config.ModelConfig(**sizes, position='rope', key_value_heads=2, **changes)


def documents_of(rng, length):
  """Tokens and starts of a stream; its second document is longer than the memory."""
  starts = np.zeros(length, bool)
  starts[[0, 2, 33, 34]] = True
  return rng.integers(0, V, length).astype(np.int32), starts


def visible(tokens, starts, first):
  """The tokens of the current document that are in the memory before a segment."""
  begin = np.flatnonzero(starts[:first])[-1]
  kept = [i for i in range(begin, first) if i < begin + S or i >= first - (M - S)]
  return tokens[kept]


@pytest.mark.slow
@pytest.mark.parametrize(
  'kernel, positional, T', [('blocks', YARN, 5), ('xla', None, 5), ('xla', YARN, 16)]
)
def test_sinks_stand_before_the_last_tokens(kernel, positional, T):
  rng, L = np.random.default_rng(0), 80
  plain = config_of(positional=positional)
  cached = dataclasses.replace(plain, memory=MemoryConfig(M, sinks=S), kernel=kernel)
  with jax.enable_x64(True):
    model, alone = (language_model.build(c, V) for c in (cached, plain))
    tokens, starts = np.stack([documents_of(rng, L)[0] for _ in range(B)]), documents_of(rng, L)[1]
    variables = checks.random_variables(model, tokens[:, :1], model.empty_memory(B, M))
    apply = jax.jit(lambda *a, **k: model.apply(variables, *a, **k)[:2])
    alone_apply = jax.jit(lambda t: alone.apply(variables, t, alone.empty_memory(1))[0])
    memory = model.empty_memory(B, M)
    for first in range(0, L, T):
      segment = np.s_[first : first + T]
      rows = np.broadcast_to(starts[segment], (B, T))
      hidden, memory = apply(tokens[:, segment], memory, starts_BxT=rows)
      new = np.flatnonzero(starts[segment])
      count = new[0] if len(new) else T
      for row in range(B if count else 0):
        text = np.append(visible(tokens[row], starts, first), tokens[row, segment][:count])
        padded = np.zeros(M + T, np.int32)
        padded[: len(text)] = text
        expected = alone_apply(padded[None])[0, len(text) - count : len(text)]
        np.testing.assert_allclose(hidden[row, :count], expected, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize('window', [pytest.param(None, marks=pytest.mark.slow), 350])
def test_blocks_read_sinks_before_the_cache_is_full(window):
  """Empty slots, and other documents, are between the sinks and the last tokens.

  A window has its tokens, however near the slot of a sink is.
  """
  rng, T, slots = np.random.default_rng(0), 96, 320
  attention = None if window is None else AttentionConfig(window=window)
  config = config_of(memory=MemoryConfig(slots, sinks=S), attention=attention)
  tokens, starts = documents_of(rng, 5 * T)
  starts[2 * T + 50] = True
  hidden, variables = [], None
  with jax.enable_x64(True):
    for kernel in ('xla', 'blocks'):
      model = language_model.build(dataclasses.replace(config, kernel=kernel), V)
      memory = model.empty_memory(1, slots)
      variables = variables or checks.random_variables(model, tokens[None, :1], memory)
      apply = jax.jit(lambda *a, m=model, v=variables, **k: m.apply(v, *a, **k)[:2])
      parts = []
      for first in range(0, len(tokens), T):
        segment = np.s_[None, first : first + T]
        part, memory = apply(tokens[segment], memory, starts_BxT=starts[segment])
        parts.append(part)
      hidden.append(np.concatenate(parts, axis=1))
  np.testing.assert_allclose(*hidden, atol=1e-10)


def test_a_transformer_gets_a_memory_in_evaluation_alone():
  memory = EvaluationMemory(length=8, sinks=2)
  model = memory.apply(config_of())
  assert model.memory == MemoryConfig(8, sinks=2) and config_of().memory is None
  memory.check(config_of())


@pytest.mark.slow
def test_windows_of_layers_do_not_see_the_sinks():
  attention = AttentionConfig(window=4)
  plain = config_of(attention=attention, memory=MemoryConfig(M))
  plain = dataclasses.replace(plain, dtype='float32')
  cached = dataclasses.replace(plain, memory=MemoryConfig(M, sinks=S))
  tokens, hidden, variables = np.arange(2 * M)[None] % V, [], None
  for config in (plain, cached):
    model = language_model.build(config, V)
    memory = model.empty_memory(1, M)
    variables = variables or checks.random_variables(model, tokens[:, :1], memory)
    apply = jax.jit(functools.partial(model.apply, variables))
    for first in (0, M):
      part, memory, _ = apply(tokens[:, first : first + M], memory)
    hidden.append(part[:, -3:])
  np.testing.assert_allclose(*hidden, atol=1e-6)
