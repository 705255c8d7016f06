"""Speed of the N-Grammer layer, compared with n-grammer-pytorch on the same cores.

  pip install torch==2.13.0 n-grammer-pytorch==0.0.14
  python benchmarks/ngrammer_layer.py --json=layer.json

Both are measured in turn, and the best of all rounds counts: the forward pass in evaluation, and
forward and backward pass with the k-means update in training. A ratio is the time of
n-grammer-pytorch over that of ngrammer_jax. The memory ratio is the temporary memory of the
compiled JAX program, the larger of the two passes, over the size of the distances of all tokens to
all centroids, [B, T, N, K] in float32.

The floor is a lower bound for every implementation: the products of all tokens with all centroids
(2 B T N K H operations, at the speed of one large matrix product on this machine), and reading and
writing the embeddings once.
"""

import argparse
import functools
import json
import pathlib
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers import NGrammer

B, T, N, H, K, V, E = 8, 1024, 16, 64, 1024, 768 * 256, 8
D = N * H


def compile_jax():
  """Returns the programs of the layer by name, and their arguments."""
  layer = NGrammer(heads=N, clusters=K, vocabulary_size=V, dim=E)
  random = np.random.default_rng(0)
  x, cotangent = (jnp.asarray(random.normal(size=(B, T, D)), jnp.float32) for _ in range(2))
  variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))

  def evaluate(variables, x):
    return layer.apply(variables, x)[0]

  def train(variables, x):
    def loss(params, x):
      state = {'params': params, 'codebook': variables['codebook']}
      (y, _), updated = layer.apply(state, x, mutable=['codebook'])
      return (y * cotangent).sum(), updated

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables['params'], x)

  passes = {'eval': evaluate, 'train': train}
  arguments = variables, x
  programs = {name: jax.jit(run).lower(*arguments).compile() for name, run in passes.items()}
  return programs, arguments


def make_jax():
  """Returns functions that run the layer once, and their temporary memory in bytes, by name."""
  programs, arguments = compile_jax()
  run = lambda program: jax.block_until_ready(program(*arguments))
  runs = {name: functools.partial(run, program) for name, program in programs.items()}
  return runs, {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}


def make_torch():
  """Returns functions that run the layer of n-grammer-pytorch once, by name."""
  import n_grammer_pytorch
  import torch

  layer = n_grammer_pytorch.VQNgrammer(
    num_clusters=K, dim_per_head=H, num_heads=N, ngram_vocab_size=V, ngram_emb_dim=E
  )
  random = torch.Generator().manual_seed(0)
  x, cotangent = (torch.randn(B, T, D, generator=random) for _ in range(2))

  def evaluate():
    layer.eval()
    with torch.no_grad():
      layer(x)

  def train():
    layer.train()
    layer.zero_grad()
    (layer(x.clone().requires_grad_()) * cotangent).sum().backward()

  return {'eval': evaluate, 'train': train}


def floor() -> float:
  """Returns the seconds of one matrix product with as many operations as the distances."""
  a, b = jnp.ones((B * T, D)), jnp.ones((D, K * H * N // D))
  product = jax.jit(functools.partial(jnp.matmul, precision='highest'))
  jax.block_until_ready(product(a, b))
  return min(measure(lambda: jax.block_until_ready(product(a, b)))[0] for _ in range(5))


def measure(function) -> tuple[float, float]:
  """Returns the wall and processor seconds of one call."""
  wall, processor = time.perf_counter(), time.process_time()
  function()
  return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  jax_runs, temporary = make_jax()
  libraries = {'ngrammer_jax': jax_runs, 'n-grammer-pytorch': make_torch()}
  times = {(library, name): [] for library, runs in libraries.items() for name in runs}
  for round_number in range(options.rounds + 1):
    for library, runs in libraries.items():
      for name, run in runs.items():
        run()  # fills the caches again after the other library
        seconds = measure(run)
        if round_number:  # the first one is a warm-up
          times[library, name].append(seconds)

  best = {key: tuple(map(min, zip(*rounds, strict=True))) for key, rounds in times.items()}
  result = {'shape': {'B': B, 'T': T, 'N': N, 'H': H, 'K': K, 'V': V, 'E': E}}
  print(f'{"":<20}{"pass":<8}{"wall s":>9}{"median":>9}{"CPU s":>9}{"tokens/s":>12}')
  for (library, name), (wall, processor) in best.items():
    median = float(np.median([wall for wall, _ in times[library, name]]))
    print(f'{library:<20}{name:<8}{wall:9.3f}{median:9.3f}{processor:9.3f}{B * T / wall:12,.0f}')
    result[f'{library}/{name}'] = {'wall_s': wall, 'median_wall_s': median, 'cpu_s': processor}
  for name in ('eval', 'train'):
    wall, processor = (
      best['n-grammer-pytorch', name][i] / best['ngrammer_jax', name][i] for i in range(2)
    )
    result |= {f'{name}_ratio': wall, f'{name}_cpu_ratio': processor}
    print(f'{name}_ratio: {wall:.2f} (CPU seconds {processor:.2f})')
  distances = 4 * B * T * N * K
  result['temporary_bytes'] = {**temporary, 'distances': distances}
  result['memory_ratio'] = max(temporary.values()) / distances
  megabytes = {name: round(size / 1e6) for name, size in result['temporary_bytes'].items()}
  print(f'memory_ratio: {result["memory_ratio"]:.4f} (MB: {megabytes})')
  bound = result['floor_s'] = floor()
  wall = best['ngrammer_jax', 'eval'][0]
  print(
    f'floor: {2 * B * T * N * K * H / 1e9:.1f} GFLOP, {2 * 4 * B * T * D / 1e6:.0f} MB; '
    f'{bound:.3f} s as one matrix product, evaluation takes {wall / bound:.1f} times that'
  )
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
