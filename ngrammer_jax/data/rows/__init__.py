"""Rows: the tokens of each batch row at a step, from a cache or from shards."""
