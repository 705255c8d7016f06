"""Memories of product keys: search by halves of keys, and sums of the rows that are found."""
