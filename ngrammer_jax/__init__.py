"""Language models with explicit memory, in JAX and Flax Linen.

run = ngrammer_jax.load_run('runs/quickstart') opens a trained run (see `runs.Run`).
ngrammer_jax.pretrained() lists the models that come with the package, and
run = ngrammer_jax.load_pretrained(NAME) opens one of them.
"""

import typing

if typing.TYPE_CHECKING:
  from ngrammer_jax.runs import load_pretrained, load_run
  from ngrammer_jax.runs.pretrained import pretrained

__version__ = '0.4.0'
__all__ = ['load_pretrained', 'load_run', 'pretrained']


def __getattr__(name: str) -> object:
  """Imports JAX and the rest only to open a run."""
  if name == 'pretrained':
    from ngrammer_jax.runs import pretrained

    return pretrained.pretrained
  if name in ('load_pretrained', 'load_run'):
    from ngrammer_jax import runs

    return getattr(runs, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
