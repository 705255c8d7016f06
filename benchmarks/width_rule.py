"""Coordinate check of the width rule: how activations grow with the width.

  python benchmarks/width_rule.py --json=width_rule.json --figure=docs/width_rule.png

Models of two layers and different widths take five steps of Adam on the same random tokens, with
the same learning rate, with and without `optimizer.width_rule=mup`. The table has the root mean
squares of the outputs of the blocks and of the logits afterwards, and their fitted exponent of the
width.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import block, language_model
from ngrammer_jax.training import programs

WIDTHS = (32, 64, 128, 256)
STEPS, B, T, V = 5, 4, 16, 64
NAMES = ('block 0', 'block 1', 'logits')
RULE = experiment.OptimizerConfig(
  learning_rate=0.02,
  schedule='constant',
  warmup_steps=0,
  clip_norm=None,
  epsilon=1e-12,
  width_rule='mup',
  base_width=WIDTHS[0],
)
NO_RULE = dataclasses.replace(RULE, width_rule=None, base_width=None)


def activations(width: int, optimizer: experiment.OptimizerConfig, **fields) -> list[float]:
  """Returns the root mean squares of the block outputs and of the logits after the steps.

  Args:
    width: width of the model; heads have 16 features.
    optimizer: the optimizer.
    **fields: further fields of the model.
  """
  model = model_config.ModelConfig(
    width=width, layers=2, heads=width // 16, feed_forward_width=2 * width, **fields
  )
  config = experiment.Config(
    model=model,
    optimizer=optimizer,
    training=experiment.TrainingConfig(steps=STEPS, batch_size=B, segment_length=T),
  )
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
  tokens = np.random.default_rng(0).integers(0, V, (STEPS, B, T + 1)).astype(np.int32)
  inputs, targets = tokens[..., :-1], tokens[..., 1:]
  no_starts, all_valid = np.zeros(inputs.shape, bool), np.ones(inputs.shape, np.float32)
  segments = token_batch.Batch(inputs, targets, no_starts, all_valid)

  run = programs.Programs(config, V, mesh)
  state = run.create()
  run.compile(state, segments)
  state, _ = run.call(state, segments, STEPS)

  module = language_model.build(model, V)

  @jax.jit
  def outputs(variables):
    memory = language_model.empty_memory(model, B)
    (hidden, *_), captured = module.apply(
      variables,
      inputs[0],
      memory,
      capture_intermediates=lambda module, _: isinstance(module, block.Block),
      mutable='intermediates',
    )
    of_blocks = captured['intermediates']
    layers = [of_blocks[f'layer_{i}']['__call__'][0][0] for i in range(model.layers)]
    return [*layers, module.apply(variables, hidden, method='logits')]

  with sharding.use(mesh):
    arrays = outputs(state.variables)
  return [float(np.sqrt(np.mean(np.square(array)))) for array in arrays]


def exponents(values: np.ndarray) -> np.ndarray:
  """Returns the exponent of the width for each column of values [widths, columns]."""
  return np.polyfit(np.log(WIDTHS), np.log(values), 1)[0]


def plot(path: pathlib.Path, results: dict[str, np.ndarray]) -> None:
  """Draws the activations by width, with and without the rule."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, len(results), figsize=(8, 3.2), sharey=True)
  for axis, (title, values) in zip(axes, results.items(), strict=True):
    for name, column in zip(NAMES, values.T, strict=True):
      axis.plot(WIDTHS, column, marker='o', label=name)
    axis.set(title=title, xscale='log', yscale='log', xlabel='width', xticks=WIDTHS)
    axis.set_xticks(WIDTHS, map(str, WIDTHS))
    axis.minorticks_off()
  axes[0].set_ylabel('root mean square after 5 steps')
  axes[0].legend()
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main() -> None:
  """Measures and prints the activations of all widths."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--json', type=pathlib.Path)
  parser.add_argument('--figure', type=pathlib.Path)
  args = parser.parse_args()
  results = {}
  for title, optimizer in (('no rule', NO_RULE), ('width_rule=mup', RULE)):
    values = np.array([activations(width, optimizer) for width in WIDTHS])
    results[title] = values
    print(title)
    for name, column, exponent in zip(NAMES, values.T, exponents(values), strict=True):
      numbers = '  '.join(f'{value:8.3f}' for value in column)
      print(f'  {name:8} {numbers}   width^{exponent:+.2f}')
  if args.json is not None:
    args.json.write_text(json.dumps({k: v.tolist() for k, v in results.items()}) + '\n')
  if args.figure is not None:
    plot(args.figure, results)


if __name__ == '__main__':
  main()
