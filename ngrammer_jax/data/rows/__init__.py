"""Rows: the tokens that each row of the batch reads at a step, from a cache or from shards."""
