"""Trained runs: `load_run` and `load_pretrained` open one."""

from ngrammer_jax.runs.corpus import open_corpus
from ngrammer_jax.runs.load import load_pretrained, load_run
from ngrammer_jax.runs.run import Run

__all__ = ['Run', 'load_pretrained', 'load_run', 'open_corpus']
