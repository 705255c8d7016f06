"""Speed and memory of a plain Transformer, compared with a nanoGPT-style model in PyTorch.

  pip install torch
  python -m benchmarks.dense_step --rounds=10 --compile --json=dense.json

The model is that of configs/quickstart.py without its n-gram memory. The model in PyTorch has the
same layers, width, heads, feed-forward, vocabulary, batch, segment and precision, tied embeddings,
layer norms before the sub-layers, Adam with its norm clipped, and no dropout. It is written as most
people write it: eager, fused causal attention (`scaled_dot_product_attention`), `cross_entropy` of
all logits, the fused Adam. What remains different: ours has rotary positions instead of learned
ones, a softmax bias, attention within documents and loss weights of tokens (both read at run time),
and reports gradient norms; PyTorch's has none of these.

--feed_forward=plain compares the feed-forward of nanoGPT, of width 4 D without a gate, on both
sides. --compile also measures `torch.compile`.

See `benchmarks.paired` for how the sides take turns. Each measurement is the mean of a few steps.
The peak memory is that of the process, with its libraries and compilers.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
import runpy
from typing import Any

import numpy as np

from benchmarks import paired

CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'
FEED_FORWARDS = {'gated': {}, 'plain': {'gated': False, 'feed_forward_width': 768}}
PASSES = ('train', 'forward')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of the model and of a step. See `ModelConfig` and `TrainingConfig` for most of them."""

  layers: int
  width: int
  heads: int
  feed_forward_width: int
  gated: bool
  vocabulary: int
  batch: int
  segment: int
  steps: int

  def tokens(self) -> np.ndarray:
    """Returns random tokens of a few steps, [steps, B, T + 1]."""
    shape = self.steps, self.batch, self.segment + 1
    return np.random.default_rng(0).integers(0, self.vocabulary, shape, np.int32)


def experiment_config(steps: int, feed_forward: str = 'gated'):
  """Returns the config of the quickstart without n-gram memory, `steps` steps in a call."""
  from ngrammer_jax import config as experiment

  config = runpy.run_path(str(CONFIG))['get_config']()
  config.model.ngram = None
  config.model.update(FEED_FORWARDS[feed_forward])
  config.training.segments_per_call = steps
  return experiment.resolve(config)


def sizes_of(config) -> Sizes:
  """Returns the sizes of a config."""
  m, t = config.model, config.training
  return Sizes(
    *(m.layers, m.width, m.heads, m.feed_forward_width, m.gated, config.data.vocabulary_size),
    *(t.batch_size, t.segment_length, t.segments_per_call),
  )


def make_jax(config) -> dict[str, Callable[[], None]]:
  """Returns functions that run `steps` training steps, or forward passes with the loss."""
  import jax

  from ngrammer_jax import sharding
  from ngrammer_jax.data import streams
  from ngrammer_jax.models import language_model
  from ngrammer_jax.training import programs

  sizes = sizes_of(config)
  tokens = sizes.tokens()
  shape = tokens[..., 1:].shape
  segments = streams.Segment(
    *(tokens[..., :-1], tokens[..., 1:], np.zeros(shape, bool), np.ones(shape, np.float32))
  )
  run = programs.Programs(config, sizes.vocabulary, sharding.make_mesh())
  state = run.create()
  run.compile(state, segments)
  model = language_model.build(config.model, sizes.vocabulary)

  @jax.jit
  def loss(params, segment):
    memory = language_model.empty_memory(config.model, sizes.batch)
    variables = {'params': params}
    hidden, _, _ = model.apply(
      variables,
      segment.tokens_BxT,
      memory,
      starts_BxT=segment.starts_BxT,
      valid_BxT=segment.valid_BxT,
    )
    return model.apply(variables, hidden, segment.targets_BxT, method='scores').nll_BxT.mean()

  def train():
    nonlocal state
    state, metrics = run.call(state, segments, sizes.steps)
    assert np.isfinite(jax.device_get(metrics['loss'])).all()

  def forward():
    for step in range(sizes.steps):
      segment = streams.map_segments(lambda array, step=step: array[step], segments)
      assert np.isfinite(loss(state.params, segment))

  return {'train': train, 'forward': forward}


def make_torch(config, is_compiled: bool = False) -> dict[str, Callable[[], None]]:
  """Returns the same functions of the model in PyTorch."""
  import torch
  from torch import nn
  from torch.nn import functional

  sizes, o = sizes_of(config), config.optimizer
  D, N = sizes.width, sizes.heads

  class Attention(nn.Module):
    def __init__(self):
      super().__init__()
      self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
      B, T, _ = x.shape
      q, k, v = (y.view(B, T, N, D // N).transpose(1, 2) for y in self.qkv(x).split(D, dim=2))
      y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      return self.out(y.transpose(1, 2).contiguous().view(B, T, D))

  class FeedForward(nn.Module):
    def __init__(self):
      super().__init__()
      self.gate = nn.Linear(D, sizes.feed_forward_width, bias=False) if sizes.gated else None
      self.inner = nn.Linear(D, sizes.feed_forward_width, bias=False)
      self.out = nn.Linear(sizes.feed_forward_width, D, bias=False)

    def forward(self, x):
      activate = lambda y: functional.gelu(y, approximate='tanh')
      if self.gate is None:
        return self.out(activate(self.inner(x)))
      return self.out(self.inner(x) * activate(self.gate(x)))

  class Block(nn.Module):
    def __init__(self):
      super().__init__()
      self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
      self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
      x = x + self.attention(self.norm_1(x))
      return x + self.feed_forward(self.norm_2(x))

  class Model(nn.Module):
    def __init__(self):
      super().__init__()
      self.embedding = nn.Embedding(sizes.vocabulary, D)
      self.position = nn.Embedding(sizes.segment, D)
      self.blocks = nn.Sequential(*(Block() for _ in range(sizes.layers)))
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

  torch.manual_seed(0)
  model = Model()
  betas = 0.9, 0.99
  optimizer = torch.optim.Adam(
    model.parameters(), o.learning_rate, betas=betas, eps=o.epsilon, fused=True
  )
  loss = torch.compile(model) if is_compiled else model
  tokens = torch.from_numpy(sizes.tokens()).long()
  steps = list(zip(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), strict=True))

  def train():
    for inputs, targets in steps:
      optimizer.zero_grad(set_to_none=True)
      value = loss(inputs, targets)
      value.backward()
      nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
      optimizer.step()
      assert np.isfinite(value.item())

  @torch.no_grad()
  def forward():
    for inputs, targets in steps:
      assert np.isfinite(loss(inputs, targets).item())

  return {'train': train, 'forward': forward}


def make_compiled_torch(config) -> dict[str, Callable[[], None]]:
  """Returns the functions of the model in PyTorch, with `torch.compile`."""
  return make_torch(config, is_compiled=True)


SIDES = {'ngrammer_jax': make_jax, 'torch': make_torch, 'torch.compile': make_compiled_torch}


def make_side(side: str, steps: int, feed_forward: str) -> dict[str, Callable[[], int]]:
  """Returns the passes of a side, see `paired.Make`."""
  runs = SIDES[side](experiment_config(steps, feed_forward))

  def repeated(run):
    run()
    return steps

  return {name: functools.partial(repeated, run) for name, run in runs.items()}


def measure(
  rounds: int = 10, steps: int = 5, feed_forward: str = 'gated', with_compile: bool = False
) -> dict[str, Any]:
  """Returns times, peak memory and ratios, see `paired.measure`."""
  names = SIDES if with_compile else list(SIDES)[:2]
  sides = {name: functools.partial(make_side, name, steps, feed_forward) for name in names}
  return paired.measure(sides, rounds)


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--steps', type=int, default=5, help='steps of one measurement')
  parser.add_argument('--feed_forward', choices=FEED_FORWARDS, default='gated')
  parser.add_argument('--compile', action='store_true', help='also measure torch.compile')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  result = measure(options.rounds, options.steps, options.feed_forward, options.compile)
  print(paired.format_table(result))
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
