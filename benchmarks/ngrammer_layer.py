"""The N-Grammer layer, beside n-grammer-pytorch; the memory of its programs, and a floor.

  python -m benchmarks.against_peers --cases ngrammer_layer   # the sides take turns
  python -m benchmarks.ngrammer_layer                         # memory and floor

The passes are the forward pass in evaluation, and forward and backward pass with the k-means update
in training. The memory is the temporary memory of the compiled JAX programs, also as a ratio to
the size of the distances of all tokens to all centroids, [B, T, N, K] in float32.

The floor is a lower bound for every implementation: the products of all tokens with all centroids
(2 B T N K H operations, at the speed of one large matrix product on this machine), and reading and
writing the embeddings once.
"""

from collections.abc import Callable
import functools
import time

import numpy as np

from benchmarks import paired

B, T, N, H, K, V, E = 8, 1024, 16, 64, 1024, 768 * 256, 8
D = N * H


def sides() -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`."""
  return {paired.OURS: make_jax, 'n-grammer-pytorch': make_torch}


def compile_jax():
  """Returns the programs of the layer by name, and their arguments."""
  from flax import linen as nn
  import jax
  import jax.numpy as jnp

  from ngrammer_jax.layers import NGrammer

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


def make_jax() -> dict[str, Callable[[], None]]:
  """Returns functions that run the layer once, by name."""
  import jax

  programs, arguments = compile_jax()

  def run(program):
    jax.block_until_ready(program(*arguments))

  return {name: functools.partial(run, program) for name, program in programs.items()}


def make_torch() -> dict[str, Callable[[], None]]:
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
  import jax
  import jax.numpy as jnp

  a = jnp.ones((B * T, D))
  b = jnp.ones((D, K * H * N // D))
  product = jax.jit(functools.partial(jnp.matmul, precision='highest')).lower(a, b).compile()
  seconds = []
  for _ in range(6):
    start = time.perf_counter()
    jax.block_until_ready(product(a, b))
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def main() -> None:
  """Prints the memory and the floor."""
  distances = 4 * B * T * N * K
  for name, program in compile_jax()[0].items():
    size = program.memory_analysis().temp_size_in_bytes
    print(f'{name}: {size / 1e6:.0f} MB, {size / distances:.2f} of {distances / 1e6:.0f} MB')
  sizes = f'{2 * B * T * N * K * H / 1e9:.1f} GFLOP, {2 * 4 * B * T * D / 1e6:.0f} MB'
  print(f'floor: {sizes}; {floor():.3f} s as one matrix product')


if __name__ == '__main__':
  main()
