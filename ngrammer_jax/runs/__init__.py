"""Trained runs: `load_run` and `load_pretrained` open one."""

from ngrammer_jax.runs.run import Run, corpus_opener, load_pretrained, load_run

__all__ = ['Run', 'corpus_opener', 'load_pretrained', 'load_run']
