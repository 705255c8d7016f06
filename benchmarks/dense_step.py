"""Speed and memory of a plain Transformer, compared with a nanoGPT-style model in PyTorch.

  pip install torch
  python benchmarks/dense_step.py --rounds=10 --compile --json=dense.json

The model is that of configs/quickstart.py without its n-gram memory. The model in PyTorch has the
same layers, width, heads, feed-forward, vocabulary, batch, segment and precision, tied embeddings,
layer norms before the sub-layers, Adam with its norm clipped, and no dropout. It is written as most
people write it: eager, fused causal attention (`scaled_dot_product_attention`), `cross_entropy` of
all logits, the fused Adam. What remains different: ours has rotary positions instead of learned
ones, a softmax bias, attention within documents and loss weights of tokens (both read at run time),
and reports gradient norms; PyTorch's has none of these.

--feed_forward=plain compares the feed-forward of nanoGPT, of width 4 D without a gate, on both
sides. --compile also measures `torch.compile`.

Every side is a process of its own, which runs only when it is asked to, so that their threads do
not compete. The sides take turns; each measurement is the mean of a few steps. A ratio is the time
of PyTorch over that of ngrammer_jax: of the best measurements, and the median of the ratios of
consecutive ones. The peak memory is that of the process, with its libraries and compilers.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import pathlib
import resource
import runpy
import statistics
import time
from typing import Any

import numpy as np

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


def serve(connection, side: str, steps: int, feed_forward: str) -> None:
  """Runs a pass for each name that arrives, and answers with its measurement; None ends it."""
  try:
    config = experiment_config(steps, feed_forward)
    runs = SIDES[side](config)
    for run in runs.values():
      run()
  except Exception as error:  # the other process reports it
    connection.send(f'{type(error).__name__}: {error}')
    return
  connection.send(None)
  while (name := connection.recv()) is not None:
    start, cpu_start = time.perf_counter(), time.process_time()
    runs[name]()
    connection.send(
      {
        'seconds': (time.perf_counter() - start) / steps,
        'cpu_seconds': (time.process_time() - cpu_start) / steps,
        'peak_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
      }
    )


@contextlib.contextmanager
def worker(side: str, steps: int, feed_forward: str) -> Iterator[Callable[[str], dict[str, float]]]:
  """Starts a side in a process; yields a function that measures one of its passes.

  Raises:
    RuntimeError: the side did not start.
  """
  context = multiprocessing.get_context('spawn')
  connection, other = context.Pipe()
  process = context.Process(target=serve, args=(other, side, steps, feed_forward), daemon=True)
  process.start()
  other.close()

  def measure_pass(name: str) -> dict[str, float]:
    connection.send(name)
    return connection.recv()

  try:
    if (error := connection.recv()) is not None:
      raise RuntimeError(f'{side} did not start: {error}')
    yield measure_pass
    connection.send(None)
  finally:
    process.join(10)
    process.terminate()


def measure(
  rounds: int = 10, steps: int = 5, feed_forward: str = 'gated', with_compile: bool = False
) -> dict[str, Any]:
  """Returns times, peak memory and ratios, by side and pass.

  Sides that do not start are named under `skipped`.
  """
  result, rows = {'skipped': {}}, {}
  with contextlib.ExitStack() as stack:
    sides = {}
    for side in SIDES if with_compile else list(SIDES)[:2]:
      try:
        sides[side] = stack.enter_context(worker(side, steps, feed_forward))
      except RuntimeError as error:
        result['skipped'][side] = str(error)
    for number in range(rounds):
      order = list(sides) if number % 2 else list(sides)[::-1]
      for name in PASSES:
        for side in order:
          rows.setdefault((side, name), []).append(sides[side](name))
  for (side, name), measured in rows.items():
    columns = {key: [row[key] for row in measured] for key in measured[0]}
    entry = result.setdefault(side, {'peak_mib': 0.0})
    entry['peak_mib'] = max(entry['peak_mib'], *columns['peak_mib'])
    entry[name] = {'best': min(columns['seconds']), 'median': statistics.median(columns['seconds'])}
    entry[name]['cpu_median'] = statistics.median(columns['cpu_seconds'])
    ours = [row['seconds'] for row in rows.get(('ngrammer_jax', name), ())]
    if ours and side != 'ngrammer_jax':
      ratios = [other / own for other, own in zip(columns['seconds'], ours, strict=True)]
      entry[name]['ratio_best'] = min(columns['seconds']) / min(ours)
      entry[name]['ratio_median'] = statistics.median(ratios)
  return result


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
  if importlib.util.find_spec('torch') is None:
    parser.error('PyTorch is not installed: pip install torch')
  result = measure(options.rounds, options.steps, options.feed_forward, options.compile)
  columns = ('best', 'median', 'cpu_median', 'ratio_best', 'ratio_median')
  print(f'{"side":<14}{"pass":<9}', *(f'{column:>13}' for column in columns), f'{"peak MiB":>9}')
  for side in (side for side in SIDES if side in result):
    for name in PASSES:
      cells = (result[side][name].get(column) for column in columns)
      cells = (f'{"":>13}' if cell is None else f'{cell:>13.4f}' for cell in cells)
      print(f'{side:<14}{name:<9}', *cells, f'{result[side]["peak_mib"]:>9.0f}')
  for reason in result['skipped'].values():
    print(reason)
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
