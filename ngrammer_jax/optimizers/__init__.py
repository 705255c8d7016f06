"""Optimizers of dense weights and of n-gram tables."""

from ngrammer_jax.optimizers.adagrad_tables import with_adagrad_tables as with_adagrad_tables
