"""Language models with explicit memory, in JAX and Flax Linen.

run = ngrammer_jax.load_run('runs/quickstart') opens a trained run (see `runs.Run`).
"""

import typing

if typing.TYPE_CHECKING:
  from ngrammer_jax.runs import load_run

__version__ = '0.1.0'
__all__ = ['load_run']


def __getattr__(name: str) -> object:
  """Imports JAX and the rest only when a run is opened."""
  if name == 'load_run':
    from ngrammer_jax import runs

    return runs.load_run
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
