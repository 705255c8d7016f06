"""Training step and losses of a segment of a Transformer-XL, beside the official PyTorch code.

12 layers of width 512, 8 rows of 128 tokens after a memory of 128, Adam with clipped gradients,
float32.
"""

from collections.abc import Callable, Mapping
import functools
import pathlib

import numpy as np

from benchmarks import paired

PEER = 'transformer-xl'
V, B, T, M, LAYERS, WIDTH, HEADS = 205, 8, 128, 128, 12, 512, 8


def sides(peers: Mapping[str, pathlib.Path]) -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`."""
  return {paired.OURS: make_jax, PEER: functools.partial(make_torch, peers.get(PEER))}


def make_jax() -> dict[str, Callable[[], None]]:
  """Returns the passes of this library."""
  import jax

  from benchmarks import span_cost
  from ngrammer_jax.config import model as model_config
  from ngrammer_jax.models import language_model

  options = {'position': 'relative', 'memory': model_config.MemoryConfig(M, 'zeros')}
  config = span_cost.post_norm_config(LAYERS, WIDTH, HEADS, **options)
  model = language_model.build(config, V)
  tokens = np.zeros((B, T), np.int32)
  params = span_cost.make_params(model)
  memory = language_model.empty_memory(config, B, M)

  @functools.partial(jax.jit, donate_argnums=1)
  def losses(params, memory):
    hidden, memory, _ = model.apply({'params': params}, tokens, memory)
    return model.apply({'params': params}, hidden, tokens, method='scores'), memory

  def evaluate():
    nonlocal memory
    _, memory = jax.block_until_ready(losses(params, memory))

  train = span_cost.trainer(model, shape=(B, T), algorithm='adam')
  return {'train': train, 'evaluate': evaluate}


def make_torch(folder: pathlib.Path | None) -> dict[str, Callable[[], None]]:
  """Returns the passes of the official code in a folder."""
  paired.import_from(PEER, folder, 'pytorch', 'pytorch/utils')
  import torch

  torch.Tensor.byte = torch.Tensor.bool  # its masks are bytes, which PyTorch no longer supports
  torch.version.cuda = torch.version.cuda or '0.0'  # which it parses, also without CUDA
  import mem_transformer

  sizes = {'tgt_len': T, 'ext_len': 0, 'mem_len': M}
  arguments = V, LAYERS, HEADS, WIDTH, WIDTH // HEADS, 4 * WIDTH, 0.0, 0.0
  model = mem_transformer.MemTransformerLM(*arguments, **sizes)
  for param in model.parameters():
    torch.nn.init.normal_(param, 0.0, 0.02)
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
  tokens = torch.randint(V, (T + 1, B))
  memory = {'train': (), 'evaluate': ()}

  def losses(name):
    result, *memory[name] = model(tokens[:-1], tokens[1:], *memory[name])
    return result

  def train():
    model.train()
    model.zero_grad()
    losses('train').mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()

  @torch.no_grad()
  def evaluate():
    model.eval()
    losses('evaluate')

  return {'train': train, 'evaluate': evaluate}
