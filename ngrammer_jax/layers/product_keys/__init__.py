"""Product-key memories: search by halves of keys, and sums of the rows."""
