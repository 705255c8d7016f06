"""Tokens: corpora that are encoded once into a cache, with a vocabulary that may be learned."""
