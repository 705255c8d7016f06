"""Speed of Engram: the layer beside the official torch demo, and a model with and without it.

  pip install torch sympy
  python benchmarks/ngram_memories.py layer --demo=engram_demo_v1.py --branches=4 --json=layer.json
  python benchmarks/ngram_memories.py model --json=model.json

`layer`: engram_demo_v1.py is a file of github.com/deepseek-ai/Engram, not of this project; its
tokenizer is replaced by the identity on 99,092 ids. Both layers have orders 2 and 3
with 8 heads of 64 values and the same rows, and are measured in turn: the forward pass from token
ids on, and a training step with gradients of all parameters, Adam for the dense ones, and the
optimizer of each side for the table (torch: Adam, as in the paper; here Adagrad). The best of all
rounds counts; a ratio is the time of the demo over the time of ngrammer_jax. Below stand `jnp.take`
of the same rows alone, the products of the layer alone at the speed of this machine, and the
temporaries of the compiled programs.

`model`: 12 layers of width 512 without Engram, with it in layers 1 and 6 (256 values a token, one
branch), and with its convolution too.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import runpy
import sys
import time
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import model_overhead
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers import NGramMemory, context
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.optimizers import partition, row_gradient

V = 99_092  # compressed ids of DeepSeek's vocabulary
MODEL_VOCABULARY = 32_000


def layer_options(rows: int) -> NGramMemoryConfig:
  """Returns Engram as in the demo, with other rows."""
  options = NGramMemoryConfig.from_preset('engram')
  return dataclasses.replace(options, key='tokens', layers=(1,), rows=(rows,), optimizer='adagrad')


def make_jax(options: argparse.Namespace) -> tuple[dict, dict]:
  """Returns functions that run the layer once, and the temporary bytes of their programs."""
  B = options.rows
  T = options.length
  G = options.branches
  D = options.width
  memory = layer_options(options.table_rows)
  layer = NGramMemory(memory, V, D, block=1, branches=G)
  random = np.random.default_rng(0)
  h, cotangent = (jnp.asarray(random.normal(size=(B, T, G, D)), jnp.float32) for _ in range(2))
  tokens = jnp.asarray(random.integers(0, V, (B, T)), jnp.int32)
  segment = context.Context(tokens_BxT=tokens)
  boxed = jax.eval_shape(layer.init, jax.random.key(0), h[:1, :1], segment_of(tokens[:1, :1]))
  labels = partition.labels(boxed['params'])
  optimizer = partition.make(experiment.OptimizerConfig(clip_norm=None), 1000, labels)
  params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), h[:1, :1], segment_of(tokens[:1, :1])))
  state = [params['params'], jax.jit(optimizer.init)(params['params'])]

  @jax.jit
  def forward(params, h):
    return layer.apply({'params': params}, h, segment)[0]

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def train(params, opt_state, h):
    def loss(params, perturbations):
      variables = {'params': params, **perturbations}
      (y, _), updated = layer.apply(variables, h, segment, mutable=[table.LOOKUPS])
      return (y * cotangent).sum(), (updated[table.LOOKUPS],)

    gradient, lookups, _ = row_gradient.grad(loss, params, 1)
    gradient = row_gradient.join(gradient, lookups, params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return row_gradient.apply_updates(params, updates, jax.random.key(0)), opt_state

  def run_train():
    state[:] = train(*state, h)
    jax.block_until_ready(state)

  runs = {'forward': lambda: jax.block_until_ready(forward(state[0], h)), 'train': run_train}
  programs = {'forward': forward.lower(state[0], h), 'train': train.lower(*state, h)}
  rows = jnp.asarray(random.integers(0, len(state[0]['table']), (B, T, 16)), jnp.int32)
  take = jax.jit(lambda table, rows: jnp.take(table, rows, axis=0))
  runs['take'] = lambda: jax.block_until_ready(take(state[0]['table'], rows))
  return runs, {
    name: lowered.compile().memory_analysis().temp_size_in_bytes
    for name, lowered in programs.items()
  }


def segment_of(tokens_BxT: jax.Array) -> context.Context:
  """Returns a segment of one document in each row."""
  return context.Context(tokens_BxT=tokens_BxT)


def make_torch(options: argparse.Namespace) -> dict:
  """Returns functions that run the layer of the demo once."""
  import torch

  demo = load_demo(options.demo)
  demo['engram_cfg'].engram_vocab_size = [options.table_rows] * 2
  demo['engram_cfg'].layer_ids = [1]
  demo['backbone_config'].hidden_size = options.width
  demo['backbone_config'].hc_mult = options.branches
  layer = demo['Engram'](layer_id=1)
  shape = options.rows, options.length, options.branches, options.width
  generator = torch.Generator().manual_seed(0)
  h, cotangent = (torch.randn(*shape, generator=generator) for _ in range(2))
  tokens = np.random.default_rng(0).integers(0, V, shape[:2])
  optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)

  def forward():
    with torch.no_grad():
      layer(h, tokens)

  def train():
    optimizer.zero_grad()
    (layer(h, tokens) * cotangent).sum().backward()
    optimizer.step()

  return {'forward': forward, 'train': train}


def load_demo(path: pathlib.Path) -> dict:
  """Returns the names that the demo defines, with a tokenizer that changes no id."""

  class Tokenizer:
    lookup_table = np.arange(V)

    def __len__(self):
      return V

    def __call__(self, ids):
      return ids

  for name, attributes in (
    ('transformers', ('AutoTokenizer',)),
    ('tokenizers', ('normalizers', 'Regex')),
  ):
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(dict.fromkeys(attributes))
  names = runpy.run_path(str(path))
  make_tokenizer = lambda tokenizer_name_or_path: Tokenizer()
  # The functions of the demo look names up here.
  names['NgramHashMapping'].__init__.__globals__['CompressedTokenizer'] = make_tokenizer
  return names['NgramHashMapping'].__init__.__globals__


def products_seconds(options: argparse.Namespace) -> tuple[float, float]:
  """Returns the operations of the layer's products, and their seconds as one product."""
  M = 1024
  tokens = options.rows * options.length
  outputs = (options.branches + 1) * options.width
  a = jnp.ones((tokens, M))
  b = jnp.ones((M, outputs))
  return 2 * tokens * M * outputs, model_overhead.min_seconds(jax.jit(jnp.matmul), a, b)


def run_layer(options: argparse.Namespace) -> dict:
  """Prints and returns the times of both layers."""
  jax_runs, temporary = make_jax(options)
  libraries = {'ngrammer_jax': jax_runs, 'torch demo': make_torch(options)}
  times = {(library, name): [] for library, runs in libraries.items() for name in runs}
  for round_number in range(options.rounds + 1):
    for library, runs in libraries.items():
      for name, run in runs.items():
        run()  # fills the caches again after the other library
        start = time.perf_counter()
        run()
        if round_number:  # the first one is a warm-up
          times[library, name].append(time.perf_counter() - start)
  result = {'temporary_bytes': temporary}
  for (library, name), seconds in times.items():
    best = min(seconds)
    median = float(np.median(seconds))
    print(f'{library:<14}{name:<9}{best:8.3f} s, median {median:.3f} s')
    result[f'{library}/{name}'] = {'best_s': best, 'median_s': median}
  for name in ('forward', 'train'):
    ratio = min(times['torch demo', name]) / min(times['ngrammer_jax', name])
    result[f'{name}_ratio'] = ratio
    print(f'{name}_ratio: {ratio:.2f}; temporaries {temporary[name] / 2**20:,.0f} MiB')
  operations, seconds = products_seconds(options)
  result['products'] = {'operations': operations, 'seconds': seconds}
  print(f'products of a forward pass: {operations / 1e9:.1f} GFLOP, {seconds:.3f} s')
  return result


def run_model(options: argparse.Namespace) -> dict:
  """Prints and returns the speed of the models."""
  plain = experiment.ModelConfig(
    layers=12, width=512, heads=8, feed_forward_width=1408, scan_layers=False
  )
  engram = NGramMemoryConfig(
    layers=(1, 6), orders=(2, 3), heads=8, rows=(options.table_rows,), width=16, norm_epsilon=1e-6
  )
  with_memory = lambda memory: dataclasses.replace(plain, ngram_memories=(memory,))
  configs = {
    'plain model': plain,
    'engram': with_memory(engram),
    'engram, convolution': with_memory(dataclasses.replace(engram, convolution=4)),
  }
  models = {
    name: model_overhead.programs(config, MODEL_VOCABULARY, options)
    for name, config in configs.items()
  }
  D = plain.width
  M = 16 * 16
  block = 2 * (4 * D * D + 3 * D * plain.feed_forward_width) + 2 * options.length * D
  model_operations = plain.layers * block + 2 * MODEL_VOCABULARY * D
  share = len(engram.layers) * 2 * M * 2 * D / model_operations
  print(f'operations of Engram: {100 * share:.2f} % of those of the model without it')
  return {'operations_share': share, **model_overhead.compare(models, options)}


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=('layer', 'model'))
  parser.add_argument('--demo', type=pathlib.Path, help='engram_demo_v1.py, for `layer`')
  parser.add_argument('--branches', type=int, default=1, help='branches of the residual stream')
  parser.add_argument('--rows', type=int, default=8, help='rows of a batch')
  parser.add_argument('--width', type=int, default=1024)
  parser.add_argument('--table_rows', type=int, default=2**18, help='rows of a head')
  parser.add_argument('--length', type=int, default=1024)
  parser.add_argument('--decoded', type=int, default=32, help='tokens decoded for each row')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  run = {'layer': run_layer, 'model': run_model}[options.what]
  settings = {key: str(value) for key, value in vars(options).items()}
  result = {'settings': settings, **run(options)}
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
