"""Files: their formats, their decompressed bytes, also from buckets, and their splits."""
