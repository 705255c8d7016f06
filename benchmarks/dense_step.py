"""Steps of a plain Transformer, beside a nanoGPT-style model in PyTorch.

Ours is the model of configs/quickstart.py without its n-gram memory. The model in PyTorch has the
same layers, width, heads, feed-forward, vocabulary, batch, segment and precision, tied embeddings,
layer norms before the sub-layers, Adam with its norm clipped, and no dropout. It is written as most
people write it: eager, fused causal attention (`scaled_dot_product_attention`), `cross_entropy` of
all logits, the fused Adam. The remaining differences: ours has rotary positions instead of learned
ones, a softmax bias, attention within documents and loss weights of tokens (both read at run time),
and reports gradient norms; PyTorch's has none of these.

Both sides have the gated feed-forward of the quickstart, or the plain one of nanoGPT, of width 4 D
without a gate. Each measurement is the mean of a few steps. The peak memory is the memory of the
process, with its libraries and compilers.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import runpy

import numpy as np

from benchmarks import paired

CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'
FEED_FORWARDS = {'gated': {}, 'plain': {'gated': False, 'feed_forward_width': 768}}
STEPS = 5  # of one measurement


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


def sides(feed_forward: str = 'gated', with_compile: bool = False) -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`; with a key of FEED_FORWARDS."""
  makers = {paired.OURS: make_jax, 'torch': make_torch}
  if with_compile:
    makers['torch.compile'] = functools.partial(make_torch, is_compiled=True)
  return {name: functools.partial(make, feed_forward) for name, make in makers.items()}


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
  m = config.model
  t = config.training
  return Sizes(
    m.layers,
    m.width,
    m.heads,
    m.feed_forward_width,
    m.gated,
    config.data.vocabulary_size,
    t.batch_size,
    t.segment_length,
    t.segments_per_call,
  )


def make_jax(feed_forward: str) -> dict[str, Callable[[], int]]:
  """Returns functions that run a few training steps, or forward passes with the loss."""
  import jax

  from ngrammer_jax import sharding
  from ngrammer_jax.data.rows import token_batch
  from ngrammer_jax.models import language_model
  from ngrammer_jax.training import programs

  config = experiment_config(STEPS, feed_forward)
  sizes = sizes_of(config)
  tokens = sizes.tokens()
  shape = tokens[..., 1:].shape
  segments = token_batch.Batch(
    tokens_BxT=tokens[..., :-1],
    targets_BxT=tokens[..., 1:],
    starts_BxT=np.zeros(shape, bool),
    valid_BxT=np.ones(shape, np.float32),
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
    return sizes.steps

  def forward():
    for step in range(sizes.steps):
      segment = token_batch.map_batches(lambda array, step=step: array[step], segments)
      assert np.isfinite(loss(state.params, segment))
    return sizes.steps

  return {'train': train, 'forward': forward}


def make_torch(feed_forward: str, is_compiled: bool = False) -> dict[str, Callable[[], int]]:
  """Returns the same functions of the model in PyTorch."""
  import torch

  from benchmarks import torch_transformer

  config = experiment_config(STEPS, feed_forward)
  sizes = sizes_of(config)
  o = config.optimizer
  torch.manual_seed(0)
  model = torch_transformer.Model(sizes)
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
      torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
      optimizer.step()
      assert np.isfinite(value.item())
    return sizes.steps

  @torch.no_grad()
  def forward():
    for inputs, targets in steps:
      assert np.isfinite(loss(inputs, targets).item())
    return sizes.steps

  return {'train': train, 'forward': forward}
