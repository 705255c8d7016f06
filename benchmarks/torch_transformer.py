"""A nanoGPT-style Transformer in PyTorch, as most people write it, see `dense_step.py`."""

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
    x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
    logits = self.head(self.norm(self.blocks(x)))
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
