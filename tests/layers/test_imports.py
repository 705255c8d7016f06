"""A layer for another model brings its own files and what they need, nothing of a training."""

import subprocess
import sys

import pytest

from ngrammer_jax import layers

SCRIPT = """
import sys
from ngrammer_jax.layers import NGrammer
from ngrammer_jax.optimizers import with_adagrad_tables
names = [name.split('.') for name in sys.modules if name.startswith('ngrammer_jax.')]
print(sorted({name[1] for name in names}))
print(sorted({name[2] for name in names if name[1] == 'config' and len(name) > 2}))
print(sorted({name[2] for name in names if name[1] == 'layers' and len(name) > 2}))
print(sorted({name[3] for name in names if name[1:3] == ['layers', 'attention'] and len(name) > 3}))
"""
ROOMS = ['config', 'errors', 'layers', 'optimizers']
CONFIG = [
  'activations',
  'fields',
  'formatting',
  'initial',
  'kernels',
  'ngram',
  'place',
  'positions',
  'presets',
  'relations',
]
LAYERS = [
  'activations',
  'attention',
  'axis_names',
  'context',
  'convolution',
  'dense',
  'document_masks',
  'mesh_axes',
  'ngram',
  'normalization',
  'row_sums',
  'state',
  'token_classes',
  'token_ids',
]
ATTENTION = ['cache', 'position', 'rotary_scaling']


def test_one_layer():
  command = [sys.executable, '-c', SCRIPT]
  output = subprocess.run(command, capture_output=True, text=True, check=True)
  assert output.stdout == f'{ROOMS}\n{CONFIG}\n{LAYERS}\n{ATTENTION}\n'


USES = """
import pkgutil
from ngrammer_jax import layers
modules = [module.name for module in pkgutil.iter_modules(layers.__path__)]
assert set(dir(layers)) == {*layers.__all__, *modules}, dir(layers)
for name in dir(layers):
  assert getattr(layers, name).__name__.endswith(name)
from ngrammer_jax.layers import *
assert NGrammer.__module__ == 'ngrammer_jax.layers.ngram.ngrammer'
"""


def test_layers_and_submodules_are_attributes():
  """In a process of its own: a module that was imported is an attribute without `__getattr__`."""
  subprocess.run([sys.executable, '-c', USES], check=True)
  with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
    _ = layers.Unknown
