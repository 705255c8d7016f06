"""Files: what a file is, its bytes, decompressed and from buckets, and the split that it is of."""
