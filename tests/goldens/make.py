"""Writes what the package computes for the stored configs: python -m tests.goldens.make COMMAND.

`models` and `runs` replace the goldens: to run them is to declare that today's numbers are right.
`models NAME ...` replaces only those of some models. The configs of `models.json` were drawn once,
and are data now.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile

import jax
import numpy as np

from ngrammer_jax import train
from ngrammer_jax.checkpoints import manifest
from tests.goldens import models, runs


def make_models(*names: str) -> None:
  """Writes `models.npz`, with new arrays of the models that are named, or of all."""
  jax.config.update('jax_enable_x64', True)
  cases = models.cases()
  arrays = {}
  if names:
    with np.load(models.FOLDER / 'models.npz') as before:
      arrays = dict(before)
  for name in names or cases:
    case = cases[name]
    with tempfile.TemporaryDirectory() as folder:
      found = models.compute(case, pathlib.Path(folder))
    arrays[name], arrays[f'{name}/names'] = np.stack(list(found.values())), '\n'.join(found)
    zero = [key for key, value in found.items() if not value.any()]
    print(name, found['loss'][0], len(found), 'zero:', *zero, flush=True)
  np.savez_compressed(models.FOLDER / 'models.npz', **arrays)


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
  {'models': make_models, 'runs': make_runs}[sys.argv[1]](*sys.argv[2:])
