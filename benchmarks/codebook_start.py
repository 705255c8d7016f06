"""Codebook perplexity of a trained model for each start of the centroids, before any training.

  python -m benchmarks.codebook_start --model=hf:FOLDER --text=FILE --block=15

The quantiser inputs are the hidden states before a block. Perplexity is exp of the entropy of the
share of tokens in each cluster, a mean over heads, on batches held out from the start.
"""

import argparse
import pathlib
import tempfile

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import command_line, sharding
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers.ngram import quantizer
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.runs import model_source
from ngrammer_jax.training import init_from
from ngrammer_jax.training import state as train_state

B, T = 4, 512
MEMORY = 'model.ngram_memories.0'


def batches(path: pathlib.Path, vocabulary, count: int) -> list[token_batch.Batch]:
  """Returns the first segments of a text."""
  tokens = vocabulary.encode(path.read_bytes()[: 8 * B * T * count])[: B * T * count]
  tokens = np.asarray(tokens, np.int32).reshape(count, B, T)
  starts = np.zeros((B, T), bool)
  valid = np.ones((B, T), np.float32)
  starts[:, 0] = True
  return [token_batch.Batch(each, each, starts, valid) for each in tokens]


def main(argv: list[str] | None = None) -> None:
  """Prints the perplexity of each start."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--model', required=True, help='as in --config.init_from')
  parser.add_argument('--text', type=pathlib.Path, required=True, help='text file')
  parser.add_argument('--block', type=int, required=True, help='number of the block')
  parser.add_argument('--held_out', type=int, default=4, help='number of held-out batches')
  args = parser.parse_args(argv)
  overrides = {
    'init_from': args.model,
    'data.path': str(args.text),
    'seed': '0',
    'training.batch_size': str(B),
    'training.segment_length': str(T),
    f'{MEMORY}.key': 'clusters',
    f'{MEMORY}.layers': f'({args.block},)',
    'model.dtype': 'float32',
  }
  spec = args.model if ':' in args.model else f'hf:{args.model}'
  config = command_line.resolve(spec, list(overrides.items()))
  source = model_source.resolve(args.model, '--model').open()
  model = language_model.build(config.model, source.model.vocabulary_size)
  boxed = model_variables.abstract(model)
  replicated = sharding.replicated(source.mesh)
  place = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), replicated)
  variables = jax.tree.map(place, nn.unbox(boxed))
  memory = language_model.empty_memory(config.model, B)
  state = train_state.TrainState(
    place(np.int32(0)), variables['params'], variables['codebook'], {}, memory
  )
  (options,) = config.model.ngram_memories
  drawn = -(-8 * options.clusters // (B * T))  # batches, see `training.centroids`
  segments = batches(args.text, source.vocabulary, drawn + args.held_out)
  with tempfile.TemporaryDirectory() as folder:
    start = init_from.Start(config, pathlib.Path(folder))
    read = lambda step, rows: token_batch.map_batches(lambda array: array[rows], segments[step])
    state = start(state, read)

  @jax.jit
  def inputs(params, codebook, segment):
    _, updated = model.apply(
      {'params': params, 'codebook': codebook},
      segment.tokens_BxT,
      memory,
      starts_BxT=segment.starts_BxT,
      mutable=[quantizer.INPUTS],
    )
    return jax.tree.leaves(updated[quantizer.INPUTS])[0]

  with sharding.use(source.mesh):
    x = np.concatenate(
      [np.asarray(inputs(state.params, state.codebook, each)) for each in segments[drawn:]]
    )
  (centroids,) = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.codebook)
    if path[-1].key == 'centroids'
  ]
  print_perplexities(x, centroids, args.text)


def print_perplexities(x: np.ndarray, centroids: jax.Array, text: pathlib.Path) -> None:
  """Prints the perplexity of the clusters of inputs, with random and with drawn centroids."""
  N, K, H = centroids.shape
  bound = (6 / (N * (K + H))) ** 0.5
  uniform = np.random.default_rng(0).uniform(-bound, bound, centroids.shape).astype('float32')
  print(f'{N} heads of {K} clusters, {x.shape[0] * T:,} tokens of {text}')
  for name, start in {'uniform': uniform, 'hidden': centroids}.items():
    ids_RxN = np.asarray(quantizer.nearest_centroids(x, jnp.asarray(start))).reshape(-1, N)
    shares = [np.bincount(ids_R, minlength=K) / len(ids_R) for ids_R in ids_RxN.T]
    perplexities = [np.exp(-sum(p * np.log(p) for p in share if p)) for share in shares]
    used = np.mean([(share > 0).mean() for share in shares])
    print(f'{name:8} perplexity {np.mean(perplexities):.1f}, clusters used {used:.0%}')


if __name__ == '__main__':
  main()
