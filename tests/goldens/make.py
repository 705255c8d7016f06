"""Draws configs and writes what the package computes: python -m tests.goldens.make COMMAND.

`models` and `runs` replace the goldens: to run them is to declare that today's numbers are right.
`models NAME ...` replaces only those of some models.
`quick` only selects anew which of the models are in the quick tier.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, train
from ngrammer_jax.checkpoints import manifest
from tests.goldens import models, runs

TRANSFORMERS, RECURRENT = 48, 30
CANDIDATES, QUICK = 1500, 6
# Heads of the n-gram layer with parts of at least three features: a norm of two forgets them.
SMALL = {'width': 24, 'dtype': 'float64'}


def transformer(rng: np.random.Generator) -> dict[str, Any]:
  """A Transformer of any options; many cannot be."""
  pick = lambda *options: options[rng.integers(len(options))]
  rare = lambda *options: pick(*options) if rng.random() < 0.3 else options[0]
  position = pick(
    *('rope', 'sinusoid', 'relative', 'shaw', 'table', 'segment_sinusoid', 'learned', 'none')
  )
  positional = {
    'rope': {'min_timescale': pick(1.0, 2.0), 'max_timescale': pick(10_000.0, 50.0)},
    'relative': {'shared_biases': pick(True, False), 'clamp_length': pick(None, 3)},
    'shaw': {'max_length': pick(5, 12), 'clamp_length': pick(None, 4)},
    'table': {'max_length': 9},
    'learned': {'max_length': 7},
  }
  memory, span = rng.random() < 0.75, rng.random() < 0.5
  length = pick(4, 6, 9)
  orders, layer = pick((2,), (3,), (2, 3)), pick('input', 'begin', 'middle', 'end', 'attention')
  layers, convolution = pick(1, 2, 3), pick(None, 2, 3, 4)
  model = {
    'layers': layers,
    'heads': 2,
    'feed_forward_width': pick(12, 12, 0),
    'activation': pick('gelu', 'relu', 'silu', 'squared_relu', 'softmax'),
    'gated': pick(True, False),
    'bias': pick(True, False),
    'feed_forward_bias': pick(None, True, False),
    'position': position,
    'positional': rare({}, None) if position not in positional else positional[position],
    'per_dim_scale': pick(True, False),
    'norm': pick('pre', 'post', 'post_skip', 'hybrid', 'primer'),
    'norm_epsilon': rare(1e-6, 1e-2),
    'final_norm': pick(True, False),
    'convolution': convolution,
    'shared_query_key': convolution is not None and pick(True, False),
    'scan_layers': pick(True, False),
    'remat': pick('none', 'minimal', 'full'),
    'kernel': rare(None, 'xla'),
    'ngram': None,
    'memory': None,
    'span': None,
    'persistent': None,
    **_head(rng),
  }
  if rng.random() < 0.6:
    attention = layer == 'attention'
    pairing = [pick('previous', 'attended', 'none') for _ in range(pick(1, layers))]
    model['ngram'] = {
      'clusters': pick(4, 4, 4, None),
      'vocabulary_size': pick(32, 64),
      'dim': pick(3, 4),
      'heads': None if attention else pick(None, 2, 4),
      'combine': pick('concat', 'add'),
      'orders': orders,
      'distinct_start': pick(True, False),
      'layer': layer,
      'pairing': pairing if attention else ['previous'],
      'decay': pick(0.999, 0.9),
      'epsilon': rare(1e-6, 1e-2),
      'prenormalize': pick(True, False),
      'empty': pick('shrink', 'keep', 'revive'),
      'padding_trains': attention and pick(True, False),
    }
    head_width = SMALL['width'] // (model['ngram']['heads'] or 2)
    if model['ngram']['combine'] == 'add':
      model['ngram']['dim'] = head_width
    elif len(orders) * model['ngram']['dim'] > head_width - 3:
      model['ngram'] |= {'dim': 3, 'orders': (2,)}
  if memory:
    model['memory'] = {
      'length': length,
      'first': pick('empty', 'zeros'),
      'same_length': pick('no', 'memory', 'memory_and_self', 'memory_alone'),
      'across_documents': pick(True, False),
    }
  if memory and span:
    model['span'] = {
      'kind': pick('adaptive', 'dynamic'),
      'limit': length,
      'ramp': pick(1, 3, 4),
      'penalty': pick(2e-6, 0.1),
      'renormalize': pick(True, False),
    }
  if rng.random() < 0.4:
    kind = pick('all_attention', 'attention_split', 'single_head', 'head_split')
    model['persistent'] = {'vectors': rare(5, 0), 'kind': kind}
  if rng.random() < 0.15:
    model |= {'dropout': 0.25, 'attention_dropout': 0.25, 'inner_dropout': 0.25}
  return model


def recurrent(rng: np.random.Generator) -> dict[str, Any]:
  """A recurrent model of any options; many cannot be."""
  pick = lambda *options: options[rng.integers(len(options))]
  kinds = ('none', 'attention', 'key_value', 'key_value_predict', 'ngram', 'recurrent_memory')
  readout = pick(*kinds)
  fields = {
    'hidden': 24,
    'cell': pick('lstm', 'lstm', 'rnn'),
    'readout': readout,
    'carry_memory': pick(True, False),
    'forget_bias': pick(1.0, 0.5),
  }
  if readout in kinds[1:4]:
    fields |= {'window': pick(1, 3, 5), 'empty_slots': pick('mask', 'zeros')}
  elif readout == 'ngram':
    fields['slices'] = pick(2, 3, 4)
  elif readout == 'recurrent_memory':
    more = {'temporal_tables': pick(1, 2), 'gate_bias': pick(True, False)}
    fields |= more | {'window': pick(2, 4)}
  model = {'recurrent': fields, **_head(rng)}
  if rng.random() < 0.3:
    model |= {'heads': 2, 'ngram': {'clusters': 4, 'vocabulary_size': 32, 'dim': 3}}
  if rng.random() < 0.2:
    model['dropout'] = 0.25
  if model['tie_embeddings'] or model['adaptive_softmax'] is not None:
    model['width'] = 24 // {'key_value': 2, 'key_value_predict': 3}.get(
      readout, fields.get('slices', 1)
    )
  return model


def _head(rng: np.random.Generator) -> dict[str, Any]:
  pick = lambda *options: options[rng.integers(len(options))]
  model = {
    'tie_embeddings': pick(True, False),
    'scale_embeddings': pick(True, False),
    'softmax_bias': pick(True, True, False),
    'vocabulary_chunk': pick(None, 5, 23),
    'adaptive_softmax': None,
  }
  if rng.random() < 0.25:
    model['adaptive_softmax'] = {
      'cutoffs': pick((), (6,), (6, 14)),
      'divisor': pick(1, 2),
      'embedding_width': pick(None, 8, 4),
      'tied_projections': pick((True,), (False,)),
      'project_same_width': pick(True, False),
    }
  return model


def draw(kind: Any, count: int, seed: int) -> list[dict[str, Any]]:
  """Cases that have every option at least three times, and many pairs of them."""
  rng, candidates = np.random.default_rng(seed), []
  while len(candidates) < CANDIDATES:
    case = {'model': SMALL | kind(rng), 'prefix': bool(rng.integers(2))}
    data = {'corpus': 'text', 'path': 'text.txt', 'vocabulary': 'words'}
    try:
      model = experiment.resolve({'model': case['model'], 'data': data}).model
    except errors.BadInput:
      continue
    case['prefix'] &= model.sees_later_tokens
    candidates.append((case, models.options(case)))
  single, pairs, chosen = collections.Counter(), collections.Counter(), []
  for _ in range(count):

    def gain(candidate):
      _, found = candidate
      new = sum(max(0, 3 - single[option]) ** 2 for option in found)
      return 20 * new + sum(not pairs[pair] for pair in itertools.combinations(found, 2))

    best = max(candidates, key=gain)
    single.update(best[1])
    pairs.update(itertools.combinations(best[1], 2))
    candidates.remove(best)
    chosen.append(best[0])
  every = collections.Counter(option for _, found in candidates for option in found)
  rare = {option: single[option] for option in every if single[option] < 3}
  print(f'{kind.__name__}: {count} cases, {len(single)} options, less than three times: {rare}')
  return chosen


def make_models() -> None:
  """Writes `models.json` and `models.npz`."""
  cases = {}
  for kind, count, seed in ((transformer, TRANSFORMERS, 0), (recurrent, RECURRENT, 1)):
    for i, case in enumerate(draw(kind, count, seed)):
      cases[f'{kind.__name__}_{i:02d}'] = case
  write_cases(cases)
  write_models(list(cases), {})


def write_models(names: list[str], arrays: dict[str, np.ndarray]) -> None:
  """Writes `models.npz`, with new arrays of the models that are named."""
  jax.config.update('jax_enable_x64', True)
  for name in names:
    case = models.cases()[name]
    with tempfile.TemporaryDirectory() as folder:
      found = models.compute(case, pathlib.Path(folder))
    arrays[name], arrays[f'{name}/names'] = np.stack(list(found.values())), '\n'.join(found)
    zero = [key for key, value in found.items() if not value.any()]
    print(name, found['loss'][0], len(found), 'zero:', *zero, flush=True)
  np.savez_compressed(models.FOLDER / 'models.npz', **arrays)


def write_cases(cases: dict[str, dict[str, Any]]) -> None:
  """Writes `models.json`, and which of the cases are quick."""
  quick = covering(cases)
  text = ',\n'.join(
    f'"{name}": {json.dumps(case | {"quick": name in quick})}' for name, case in cases.items()
  )
  (models.FOLDER / 'models.json').write_text('{\n' + text + '\n}\n')


def covering(cases: dict[str, dict[str, Any]]) -> list[str]:
  """QUICK cases, in which most options of all of them occur, but for other numbers."""
  is_number = lambda option: re.search(r'=[-\d.e]+$', option) is not None
  options = {name: {o for o in models.options(c) if not is_number(o)} for name, c in cases.items()}
  missing, chosen = set().union(*options.values()), []

  def cost(name):
    """To compile, about."""
    model = cases[name]['model']
    return 0.9 + 0.6 * model['layers'] if name.startswith('transformer') else 1

  while len(chosen) < QUICK:
    best = max(cases, key=lambda name: len(missing & options[name]) / cost(name))
    missing -= options[best]
    chosen.append(best)
  return chosen


def make_runs() -> None:
  """Trains each run to its end, and keeps its checkpoint in the middle and what followed."""
  for row in runs.ROWS:
    kept = models.FOLDER / 'checkpoints' / row
    shutil.rmtree(kept, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      os.environ['NGRAMMER_JAX_CACHE'] = f'{folder}/cache'
      runs.write_text(pathlib.Path('text.txt'))
      train.main([f'--config={runs.__file__}:{row}', '--workdir=run'])
      found = runs.losses(pathlib.Path('run'))
      (kept / 'run' / 'checkpoints').mkdir(parents=True)
      for name in ('config.json', 'corpus.json', 'vocabulary.json', 'metrics.jsonl'):
        shutil.copy(f'run/{name}', kept / 'run')
      middle = f'checkpoints/{runs.RESTORED}'
      shutil.copytree(f'run/{middle}', kept / 'run' / middle)
      _forget_place(kept / 'run' / middle)
    (kept / 'losses.json').write_text(json.dumps(found, indent=1) + '\n')
    print(row, found)


def _forget_place(checkpoint: pathlib.Path) -> None:
  """Removes the one file of a checkpoint that says where it was written."""
  (checkpoint / 'commit_success.txt').unlink()
  written = manifest.read(checkpoint)
  del written.files['commit_success.txt']
  manifest.write(checkpoint, written)


if __name__ == '__main__':
  with np.load(models.FOLDER / 'models.npz') as before:
    known = dict(before)
  commands = {
    'models': lambda *names: write_models(names, known) if names else make_models(),
    'runs': make_runs,
    'quick': lambda: write_cases(models.cases()),
  }
  commands[sys.argv[1]](*sys.argv[2:])
