"""Time of the search for copies (`layers.copies`), by ranks and by comparison, for segments of T.

  python -m benchmarks.copy_search

It prints the milliseconds of 16 rows with the window and the lengths of the default
`model.copy_memory`, the best and the median of a few runs. Ids have the frequencies of words.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.layers.copies import CopySearch

ROWS = 16
SEGMENTS = (1, 32, 128, 256, 1024)
RUNS = 9


def main() -> None:
  """Prints one line for each segment length and search."""
  o = CopyMemoryConfig()
  search = CopySearch(o.window, o.lengths, o.counts)
  rng = np.random.default_rng(0)
  for T in SEGMENTS:
    ids = jnp.asarray(rng.zipf(1.3, (ROWS, search.slots + T)) % 5000, jnp.int32)
    for name in ('by_ranks', 'by_comparison'):
      find = jax.jit(getattr(search, name))
      inputs = ids, jnp.zeros_like(ids)
      jax.block_until_ready(find(*inputs))
      times = []
      for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(find(*inputs))
        times.append(1000 * (time.perf_counter() - start))
      print(f'T={T:5} {name:14} {min(times):7.2f} {np.median(times):7.2f} ms')


if __name__ == '__main__':
  main()
