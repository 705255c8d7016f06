"""Documents: the corpora of a config as documents by split, of whole files, sections or shards."""
