"""A nanoGPT-style Transformer in PyTorch, as most people write it.

See `dense_step.py` for a CPU, and `accelerator.py` for a GPU.
"""

import math
import statistics
import time
import types

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
  """Causal attention of several heads."""

  def __init__(self, sizes):
    super().__init__()
    D = sizes.width
    self.heads = sizes.heads
    self.qkv = nn.Linear(D, 3 * D, bias=False)
    self.out = nn.Linear(D, D, bias=False)

  def forward(self, x):
    B, T, D = x.shape
    N = self.heads
    H = D // self.heads
    q, k, v = (y.view(B, T, N, H).transpose(1, 2) for y in self.qkv(x).split(D, dim=2))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(y.transpose(1, 2).contiguous().view(B, T, D))


class FeedForward(nn.Module):
  """Feed-forward layer, gated or not."""

  def __init__(self, sizes):
    super().__init__()
    D = sizes.width
    F = sizes.feed_forward_width
    self.gate = nn.Linear(D, F, bias=False) if sizes.gated else None
    self.inner = nn.Linear(D, F, bias=False)
    self.out = nn.Linear(F, D, bias=False)

  def forward(self, x):
    activate = lambda y: functional.gelu(y, approximate='tanh')
    if self.gate is None:
      return self.out(activate(self.inner(x)))
    return self.out(self.inner(x) * activate(self.gate(x)))


class Block(nn.Module):
  """Attention and feed-forward, each after a layer norm."""

  def __init__(self, sizes):
    super().__init__()
    self.norm_1, self.norm_2 = (nn.LayerNorm(sizes.width) for _ in range(2))
    self.attention = Attention(sizes)
    self.feed_forward = FeedForward(sizes)

  def forward(self, x):
    x = x + self.attention(self.norm_1(x))
    return x + self.feed_forward(self.norm_2(x))


class Model(nn.Module):
  """Transformer with learned positions and tied embeddings; returns the mean loss."""

  def __init__(self, sizes):
    super().__init__()
    D = sizes.width
    self.embedding = nn.Embedding(sizes.vocabulary, D)
    self.position = nn.Embedding(sizes.segment, D)
    self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
    self.norm = nn.LayerNorm(D)
    self.head = nn.Linear(D, sizes.vocabulary, bias=False)
    for weight in self.parameters():
      if weight.ndim > 1:
        nn.init.normal_(weight, std=0.02)
    self.head.weight = self.embedding.weight

  def forward(self, tokens, targets):
    x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
    logits = self.head(self.norm(self.blocks(x)))
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def measure(config, rows: int, steps: int, warmup: int) -> dict:
  """Times training steps of the model of a config in PyTorch, compiled and in bfloat16.

  Flash attention, cross-entropy of logits in float32, the fused Adam, and no reading of a result
  but the loss. On a CPU the model is not compiled.

  Args:
    config: of the experiment; its feed-forward width is padded to a multiple of 16 here alone.
    rows: rows of a batch.
    steps: steps that are timed.
    warmup: steps before them.
  """
  m = config.model
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  V, T = config.data.vocabulary_size, config.training.segment_length
  sizes = types.SimpleNamespace(
    layers=m.layers,
    width=m.width,
    heads=m.heads,
    feed_forward_width=-(-m.feed_forward_width // 16) * 16,
    gated=m.gated,
    vocabulary=V,
    segment=T,
  )
  torch.manual_seed(0)
  torch.set_float32_matmul_precision('high')
  with torch.device(device):
    model = Model(sizes)
  is_compiled = device == 'cuda'
  loss = torch.compile(model) if is_compiled else model
  o = config.optimizer
  optimizer = torch.optim.Adam(model.parameters(), o.learning_rate, fused=True)
  tokens = torch.randint(0, V, (4, rows, T + 1), device=device)
  seconds = []
  for step in range(warmup + steps):
    start = time.perf_counter()
    inputs, targets = tokens[step % 4, :, :-1], tokens[step % 4, :, 1:].contiguous()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16):
      value = loss(inputs, targets)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
    optimizer.step()
    assert math.isfinite(value.item())  # also waits
    seconds.append(time.perf_counter() - start)
  parameters = sum(weight.numel() for weight in model.parameters())
  # Of a token: products with all matrices but positions, and both products of causal attention,
  # which has half of all pairs, as `training.flops` counts.
  products = parameters - model.position.weight.numel()
  forward = 2 * products + 2 * m.layers * T * m.width
  result = {
    'device': torch.cuda.get_device_name() if is_compiled else 'cpu',
    'torch': torch.__version__,
    'compiled': is_compiled,
    'parameters': parameters,
    'tokens': rows * T,
    'seconds': statistics.median(seconds[warmup:]),
    'all_seconds': seconds,
    'model_flops': 3 * forward * rows * T,
  }
  if is_compiled:
    result['peak_bytes'] = torch.cuda.max_memory_allocated()
  return result
