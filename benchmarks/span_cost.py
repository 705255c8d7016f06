"""Cost of one long span among short ones, relative to a short fixed memory.

  python benchmarks/span_cost.py --json=span_cost.json

Models of the adaptive-span paper with different attention are measured in turn: learned spans with
a limit of 8,192, where one head of one layer has a span of 2,200 tokens and all others 30 to 60;
the same limit with short spans only; the same limit with all spans of 8,192; and no spans, with a
fixed memory of 512. `train` is a training step, `score` the scoring of the same tokens with a KV
cache, `write` the generation of one token. The result is the median over rounds; `ratio` is
relative to the fixed memory.
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

from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import language_model
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

LIMIT, FIXED, LONG, V = 8192, 512, 2200, 205
B, T, LAYERS, WIDTH, HEADS = 4, 512, 4, 256, 4


def post_norm_config(layers: int, width: int, heads: int, **options) -> model_config.ModelConfig:
  """Returns the blocks of the Transformer-XL and adaptive-span papers, with further options."""
  config = model_config.ModelConfig(
    layers=layers,
    width=width,
    heads=heads,
    feed_forward_width=4 * width,
    activation='relu',
    gated=False,
    feed_forward_bias=True,
    norm='post_skip',
    final_norm=False,
    **options,
  )
  config.check()
  return config


def make_model(memory: int, span: model_config.SpanConfig | None = None):
  """Returns a model of the adaptive-span paper."""
  config = post_norm_config(
    LAYERS,
    WIDTH,
    HEADS,
    tie_embeddings=False,
    scale_embeddings=False,
    position='table',
    positional=model_config.PositionalConfig(max_length=memory),
    memory=model_config.MemoryConfig(memory, 'zeros', 'memory_alone', across_documents=True),
    span=span,
    scan_layers=False,
  )
  return language_model.build(config, V)


def short_spans():
  """Returns spans of 30 to 60 tokens, [layers, heads]."""
  return np.random.default_rng(0).uniform(30, 60, (LAYERS, HEADS))


def one_long_span():
  """Returns short spans, with one long span in the last layer."""
  spans = short_spans()
  spans[-1, 0] = LONG
  return spans


def make_params(model, spans=None):
  """Returns parameters, with the given spans in tokens."""
  tokens = np.zeros((B, 1), np.int32)
  start = language_model.empty_memory(model.config, B)
  initial = functools.partial(model.init, jax.random.key(0))
  params = nn.unbox(jax.jit(initial)(tokens, start))['params']
  if spans is not None:
    for layer, layer_spans in enumerate(spans):
      span_params = params[f'layer_{layer}']['attention']['span']
      span_params['span'] = jnp.asarray(layer_spans / LIMIT, span_params['span'].dtype)
  return params


def trainer(model, spans=None, shape=(B, T), algorithm='adagrad'):
  """Returns a function that trains one step, from the state of the previous call."""
  random = np.random.default_rng(0)
  tokens = random.integers(0, V, (shape[0], shape[1] + 1), dtype=np.int32)
  ones = np.ones(shape, np.float32)
  segment = token_batch.Batch(tokens[:, :-1], tokens[:, 1:], np.zeros(shape, bool), ones)
  memory = language_model.empty_memory(model.config, shape[0])
  params = make_params(model, spans)
  config = experiment.OptimizerConfig(algorithm=algorithm, learning_rate=1e-6, clip_norm=0.03)
  labels = jax.tree.map(lambda _: 'dense', params)
  optimizer = partition.make(config, 1000, labels)
  state = train_state.TrainState(np.int32(0), params, {}, optimizer.init(params), memory)
  step = jax.jit(train_step.TrainStep(model, optimizer, labels, seed=0), donate_argnums=0)
  step = step.lower(state, segment).compile()
  holder = [state]

  def run():
    holder[0], _ = jax.block_until_ready(step(holder[0], segment))

  return run


def scorer(model, spans, length):
  """Returns a function that reads `length` tokens of each row, after those of the previous call."""
  params = make_params(model, spans)
  slots = spans.cache_slots(model.config, params)
  memory = language_model.empty_memory(model.config, B, slots)
  tokens = np.random.default_rng(0).integers(0, V, (B, length), dtype=np.int32)
  apply = lambda params, memory, tokens: model.apply({'params': params}, tokens, memory)[:2]
  apply = jax.jit(apply, donate_argnums=1).lower(params, memory, tokens).compile()
  holder = [memory]

  def run():
    _, holder[0] = jax.block_until_ready(apply(params, holder[0], tokens))

  return run


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  adaptive = make_model(LIMIT, model_config.SpanConfig(limit=LIMIT, ramp=32))
  fixed_memory = f'a fixed memory of {FIXED}'
  models = {
    f'one span of {LONG:,}': (adaptive, one_long_span()),
    'short spans': (adaptive, short_spans()),
    f'all spans of {LIMIT:,}': (adaptive, np.full((LAYERS, HEADS), LIMIT)),
    fixed_memory: (make_model(FIXED), None),
  }
  score = functools.partial(scorer, length=T)
  write = functools.partial(scorer, length=1)
  result = {}
  for name, make, tokens in (('train', trainer, T), ('score', score, T), ('write', write, 1)):
    runs = {key: make(*arguments) for key, arguments in models.items()}
    medians = measure_in_turn(runs, options.rounds)
    fixed = medians[fixed_memory]
    result[name] = {'seconds': medians, 'ratio': {k: v / fixed for k, v in medians.items()}}
    for model, median in medians.items():
      rate = f'{B * tokens / median:10,.0f} tokens/s'
      print(f'{name:<8}{model:<26}{median:9.4f} s{rate}{median / fixed:8.2f}', flush=True)
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


def measure_in_turn(runs, rounds):
  """Returns the median seconds of each function; the functions take turns."""
  seconds = {name: [] for name in runs}
  for round_number in range(rounds + 1):
    for name, run in runs.items():
      start_time = time.perf_counter()
      run()
      if round_number:  # the first one is a warm-up
        seconds[name].append(time.perf_counter() - start_time)
  return {name: float(np.median(times)) for name, times in seconds.items()}


if __name__ == '__main__':
  main()
