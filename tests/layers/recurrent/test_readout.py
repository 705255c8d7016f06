"""What is read from the last outputs and words, against loops from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers.recurrent import readout, word_memory
from tests.checks import assert_close, random_variables

B, T, K, L, V = 2, 6, 6, 3, 7
# Of the slots before the segment, the first empty, and of the segment.
BEFORE = np.array([[-1, 2, 2], [-1, -1, 0]], 'int32')
DOCUMENTS = np.array([[2, 2, 3, 3, 3, 3], [1, 1, 1, 1, 2, 3]], 'int32')
ALL = np.concatenate([BEFORE, DOCUMENTS], axis=1)


def same(b, t, steps):
  """Whether the slot so many steps before a token is of its document."""
  return ALL[b, L + t - steps] == ALL[b, L + t]


def softmax(scores):
  weights = np.exp(scores)
  return weights / weights.sum() if len(weights) else weights


def slow_attention(p, h, parts, zeros):
  """h [B, L + T, K]: the outputs before the segment too."""
  J = K // parts
  key = lambda b, s: h[b, s, :J]
  value = lambda b, s: h[b, s, J : 2 * J] if parts > 1 else h[b, s]
  out = np.zeros((B, T, J))
  for b, t in np.ndindex(B, T):
    now, keys, values = L + t, [], []
    for steps in range(L, 0, -1):
      if same(b, t, steps):
        keys.append(key(b, now - steps))
        values.append(value(b, now - steps))
      elif zeros:
        keys.append(np.zeros(J))
        values.append(np.zeros(J))
    query = key(b, now) @ p['query']['kernel']
    scores = [np.tanh(k @ p['keys']['kernel'] + query) @ p['score'] for k in keys]
    attended = sum((w * v for w, v in zip(softmax(scores), values, strict=True)), start=np.zeros(J))
    predict = h[b, now, -J:]
    out[b, t] = np.tanh(attended @ p['read']['kernel'] + predict @ p['predict']['kernel'])
  return out


def slow_ngrams(p, h, slices):
  J = K // slices
  out = np.zeros((B, T, J))
  for b, t in np.ndindex(B, T):
    parts = [h[b, L + t - s, s * J : (s + 1) * J] * same(b, t, s) for s in range(slices)]
    out[b, t] = np.tanh(np.concatenate(parts) @ p['slices']['kernel'])
  return out


def slow_memory(p, h, words):
  """Of the last L words, the current one among them; words [B, L + T]."""
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  linear = lambda name, x: x @ p[name]['kernel'] + p[name]['bias']
  out = np.zeros((B, T, K))
  for b, t in np.ndindex(B, T):
    now = h[b, L + t]
    visible_steps = [steps for steps in range(L - 1, -1, -1) if same(b, t, steps)]
    table_rows = lambda table, temporal, b=b, t=t, visible_steps=visible_steps: [
      p[table][words[b, L + t - steps]] + p[temporal][L - 1 - steps] for steps in visible_steps
    ]
    weights = softmax([row @ now for row in table_rows('input_words', 'temporal')])
    s = sum(
      w * row for w, row in zip(weights, table_rows('output_words', 'output_temporal'), strict=True)
    )
    z = sigmoid(linear('update', s) + linear('update_h', now))
    q = sigmoid(linear('reset', s) + linear('reset_h', now))
    new = np.tanh(linear('candidate', s) + linear('candidate_h', q * now))
    out[b, t] = (1 - z) * now + z * new
  return out


def test_all_readouts_equal_slow_loops(x64):
  """In one program; the next memory skips padding."""
  rng = np.random.default_rng(0)
  h, words = rng.normal(size=(B, L + T, K)), rng.integers(0, V, (B, L + T)).astype('int32')
  valid = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
  memory = lambda slots_values, slots=L: {
    'documents': BEFORE[:, L - slots :],
    'kept': slots_values[:, L - slots : L],
  }
  cases = {}
  for parts, empty in ((1, 'mask'), (2, 'zeros'), (3, 'mask')):
    layer = readout.AttentionReadout(parts, L, empty, dtype=jnp.float64)
    args = h[:, L:], DOCUMENTS, memory(h[..., : 2 * K // parts]), valid
    slow = lambda p, parts=parts, empty=empty: slow_attention(p, h, parts, empty == 'zeros')
    cases[f'{parts} parts'] = layer, args, slow
  layer = readout.NGramReadout(3, dtype=jnp.float64)
  cases['ngrams'] = layer, (h[:, L:], DOCUMENTS, memory(h, 2)), lambda p: slow_ngrams(p, h, 3)
  layer = word_memory.RecurrentMemory(V, L, 2, True, dtype=jnp.float64)
  args = h[:, L:], words[:, L:], DOCUMENTS, memory(words, L - 1)
  cases['words'] = layer, args, lambda p: slow_memory(p, h, words)
  variables = {
    name: random_variables(layer, *args, dtype='float64')
    for name, (layer, args, _) in cases.items()
  }

  @jax.jit
  def run_all(variables):
    return {name: cases[name][0].apply(variables[name], *cases[name][1]) for name in cases}

  for name, (y, after) in jax.device_get(run_all(variables)).items():
    assert_close(y, cases[name][2](jax.device_get(variables[name]['params'])), 1e-12)
    slots = after['documents'].shape[1]
    ends = (L + 4, L + T) if 'parts' in name else (L + T, L + T)
    expected = [ALL[b, end - slots : end].tolist() for b, end in enumerate(ends)]
    assert after['documents'].tolist() == expected, name
