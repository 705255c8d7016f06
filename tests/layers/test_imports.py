"""A layer for another model brings its own files and what they need, nothing of a training."""

import subprocess
import sys

SCRIPT = """
import sys
from ngrammer_jax.layers import NGrammer
from ngrammer_jax.optimizers import with_adagrad_tables
names = [name.split('.') for name in sys.modules if name.startswith('ngrammer_jax.')]
print(sorted({name[1] for name in names}))
print(sorted({name[2] for name in names if name[1] == 'config' and len(name) > 2}))
"""
ROOMS = ['config', 'errors', 'layers', 'optimizers']
CONFIG = [
  'fields',
  'formatting',
  'initial',
  'kernels',
  'ngram',
  'place',
  'positions',
  'recurrent',
  'relations',
  'span',
]


def test_one_layer():
  command = [sys.executable, '-c', SCRIPT]
  output = subprocess.run(command, capture_output=True, text=True, check=True)
  assert output.stdout == f'{ROOMS}\n{CONFIG}\n'
