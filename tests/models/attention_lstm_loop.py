"""Attention LSTMs as slow NumPy loops, token by token, written from the equations."""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def parameters(rng, kind, V, w, k, L=4, S=4, parts=1, two_tables=False, gate_bias=False, gates=4):
  """Random arrays under the names of the equations."""
  d = k // parts
  shapes = {'emb': (V, w), 'Wx': (w, gates * k), 'Wh': (k, gates * k), 'b': (gates * k,)}
  shapes |= {'Wo': (d, V), 'bo': (V,)}
  if kind in ('attention', 'key_value', 'key_value_predict'):
    shapes |= dict.fromkeys(('WY', 'Whh', 'Wr', 'Wxx'), (d, d)) | {'wa': (d,)}
  if kind == 'ngram':
    shapes |= {'WN': (k, d)}
  if kind == 'recurrent_memory':
    shapes |= {'M': (V, k), 'C': (V, k), 'T': (L, k)}
    maps = ('Wz', 'Uz', 'Wr', 'Ur', 'W', 'U')
    shapes |= dict.fromkeys(maps, (k, k))
    if two_tables:
      shapes['T2'] = (L, k)
    if gate_bias:
      shapes |= {f'b{name}': (k,) for name in maps}
  return {name: rng.normal(0, 0.7, shape) for name, shape in shapes.items()}


def run(p, kind, tokens, first, state, window, zeros=False, slices=4):
  """One row: h, attention weights, h*, log-probabilities of all tokens; the state after them.

  Args:
    p: the arrays.
    kind: of readout.
    tokens, first: [T].
    state: (h, c), and the list of what earlier tokens of the document left: (token, h).
    window: L.
  """
  (h, c), past = state
  outputs = []
  for x, starts in zip(tokens, first, strict=True):
    if starts:
      h, c, past = np.zeros_like(h), np.zeros_like(c), []
    gates = p['emb'][x] @ p['Wx'] + h @ p['Wh'] + p['b']
    if len(gates) == len(h):
      h = np.tanh(gates)
    else:
      i, f, g, o = np.split(gates, 4)
      c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
      h = sigmoid(o) * np.tanh(c)
    weights, star = readout(p, kind, x, h, past, window, zeros, slices)
    logits = star @ p['Wo'] + p['bo']
    log_probs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    outputs.append((h, weights, star, log_probs))
    past = [*past, (x, h)]
  return [np.stack(column) for column in zip(*outputs, strict=True)], ((h, c), past)


def readout(p, kind, x, h, past, L, zeros, S):
  """The attention weights [L], oldest first, and h* of one token."""
  weights = np.zeros(L)
  if kind == 'none':
    return weights, h
  if kind == 'ngram':
    d = len(h) // S
    parts = [h[:d]]
    for i in range(1, S):
      before = past[-i][1] if i <= len(past) else np.zeros_like(h)
      parts.append(before[i * d : (i + 1) * d])
    return weights, np.tanh(np.concatenate(parts) @ p['WN'])
  if kind == 'recurrent_memory':
    return recurrent_memory(p, x, h, past, L)
  parts = {'attention': 1, 'key_value': 2, 'key_value_predict': 3}[kind]
  d = len(h) // parts
  key_of = lambda v: v[:d]
  value_of = lambda v: v[:d] if parts == 1 else v[d : 2 * d]
  predict = h if parts == 1 else h[-d:]
  slots = [v for _, v in past[-L:]]
  if zeros:
    slots = [np.zeros_like(h)] * (L - len(slots)) + slots
  r = np.zeros(d)
  if slots:
    scores = [p['wa'] @ np.tanh(key_of(v) @ p['WY'] + key_of(h) @ p['Whh']) for v in slots]
    a = softmax(np.array(scores))
    weights[L - len(a) :] = a
    r = sum(a_s * value_of(v) for a_s, v in zip(a, slots, strict=True))
  return weights, np.tanh(r @ p['Wr'] + predict @ p['Wxx'])


def recurrent_memory(p, x, h, past, n):
  weights = np.zeros(n)
  words = [*[token for token, _ in past], x][-n:]
  rows = range(n - len(words), n)
  a = softmax(np.array([(p['M'][w] + p['T'][i]) @ h for w, i in zip(words, rows, strict=True)]))
  weights[n - len(words) :] = a
  s = np.zeros_like(h)
  for a_i, w, i in zip(a, words, rows, strict=True):
    s = s + a_i * (p['C'][w] + (p['T2'][i] if 'T2' in p else 0))
  bias = lambda name: p.get(f'b{name}', 0)
  z = sigmoid(s @ p['Wz'] + bias('Wz') + h @ p['Uz'] + bias('Uz'))
  q = sigmoid(s @ p['Wr'] + bias('Wr') + h @ p['Ur'] + bias('Ur'))
  new = np.tanh(s @ p['W'] + bias('W') + (q * h) @ p['U'] + bias('U'))
  return weights, (1 - z) * h + z * new
