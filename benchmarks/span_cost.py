"""A training step whose spans may be 2,048 tokens and are 32, against a fixed span of 64.

  python benchmarks/span_cost.py --json=span_cost.json

Three models of the adaptive-span kind, equal but for attention, take turns: spans of 32 (all
ramp) under a limit of 2,048, in the windows of 64 that hold them; a fixed span of 64;
and those spans of 32 again with attention to all 2,048 tokens. The median of all rounds counts.
`ratio` is the first over the second, at most 1.25; `whole_ratio` the third over the second.
"""

import argparse
import functools
import json
import pathlib
import time

from flax import linen as nn
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.data import streams
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from ngrammer_jax.training import optimizers, windows
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

LIMIT, FIXED, V = 2048, 64, 205
B, T, LAYERS, WIDTH, HEADS = 4, 512, 4, 256, 4


def model_of(memory: int, span: model_config.SpanConfig | None, fitted: bool):
  """A model of the adaptive-span paper."""
  config = model_config.ModelConfig(
    layers=LAYERS,
    width=WIDTH,
    heads=HEADS,
    feed_forward_width=4 * WIDTH,
    activation='relu',
    gated=False,
    feed_forward_bias=True,
    norm='post_skip',
    final_norm=False,
    tie_embeddings=False,
    scale_embeddings=False,
    position='table',
    positional=model_config.PositionalConfig(max_length=memory),
    memory=model_config.MemoryConfig(memory, 'zeros', 'memory_alone', across_documents=True),
    span=span,
    scan_layers=False,
  )
  config.check()
  sizes = windows.chosen(config, np.zeros((LAYERS, HEADS))) if fitted else None
  return transformer.TransformerLM(config, V, sizes)


def stepper(model):
  """A function that makes one step, and goes on from there with the next."""
  optimizer = optimizers.make(
    experiment.OptimizerConfig(algorithm='adagrad', learning_rate=1e-6, clip_norm=0.03), 1000
  )
  random = np.random.default_rng(0)
  tokens = random.integers(0, V, (B, T + 1), dtype=np.int32)
  ones = np.ones((B, T), np.float32)
  segment = streams.Segment(tokens[:, :-1], tokens[:, 1:], np.zeros((B, T), bool), ones)
  memory = transformer.empty_memory(model.config, B, windows=model.windows)
  start = transformer.empty_memory(model.config, B)
  initial = functools.partial(model.clone(windows=None).init, jax.random.key(0))
  params = nn.unbox(jax.jit(initial)(tokens[:, :1], start))['params']
  state = train_state.TrainState(np.int32(0), params, {}, optimizer.init(params), memory)
  step = jax.jit(functools.partial(train_step.train_step, model, optimizer, 0))
  step = step.lower(state, segment).compile()
  holder = [state]

  def run():
    holder[0], _ = jax.block_until_ready(step(holder[0], segment))

  return run


def main() -> None:
  """Prints a table, and writes it as JSON where asked."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--json', type=pathlib.Path, help='where to write the result')
  options = parser.parse_args()
  span = model_config.SpanConfig(limit=LIMIT, ramp=32)
  models = {
    'spans of 32, fitted': model_of(LIMIT, span, True),
    'fixed span of 64': model_of(FIXED, None, False),
    'spans of 32, all keys': model_of(LIMIT, span, False),
  }
  runs = {name: stepper(model) for name, model in models.items()}
  seconds = {name: [] for name in runs}
  for round_number in range(options.rounds + 1):
    for name, run in runs.items():
      began = time.perf_counter()
      run()
      if round_number:  # the first one warms up
        seconds[name].append(time.perf_counter() - began)
  medians = {name: float(np.median(times)) for name, times in seconds.items()}
  fitted, fixed, whole = medians.values()
  result = {'seconds': medians, 'ratio': fitted / fixed, 'whole_ratio': whole / fixed}
  for name, median in medians.items():
    print(f'{name:<24}{median:8.3f} s{B * T / median:10,.0f} tokens/s{median / fixed:8.2f}')
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
