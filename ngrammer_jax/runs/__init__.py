"""Trained runs: `load_run` and `load_pretrained` open one."""

import typing

if typing.TYPE_CHECKING:
  from ngrammer_jax.runs.corpus import open_corpus
  from ngrammer_jax.runs.load import load_pretrained, load_run
  from ngrammer_jax.runs.run import Run

__all__ = ['Run', 'load_pretrained', 'load_run', 'open_corpus']


def __getattr__(name: str) -> object:
  """Imports JAX and the rest only to open a run; sources are resolved without it."""
  if name == 'Run':
    from ngrammer_jax.runs import run

    return run.Run
  if name == 'open_corpus':
    from ngrammer_jax.runs import corpus

    return corpus.open_corpus
  if name in ('load_pretrained', 'load_run'):
    from ngrammer_jax.runs import load

    return getattr(load, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
