"""Tokens: corpora encoded once into a cache, with a given or learned vocabulary."""
