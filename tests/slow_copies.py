"""The copies of a text in NumPy, from the definition."""

import numpy as np


def slow_copies(search, ids, classes, documents):
  """The token after the longest match of each token, and its bucket."""
  after, buckets = np.full(len(ids), -1), np.zeros(len(ids), int)
  for t in range(len(ids)):
    start = np.flatnonzero(documents == documents[t])[0]
    for level in reversed(range(len(search.lengths))):
      n = search.lengths[level]
      if t - n + 1 < start:
        continue
      ends = range(max(start + n - 1, t - search.window), t)
      last = classes[t - n + 1 : t + 1]
      matches = [j for j in ends if (classes[j - n + 1 : j + 1] == last).all()]
      if matches:
        after[t] = ids[matches[-1] + 1]
        buckets[t] = search.counts * level + min(len(matches), search.counts)
        break
  return after, buckets
