"""Language models with explicit memory, in JAX and Flax Linen."""

__version__ = '0.1.0'
