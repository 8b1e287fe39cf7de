"""Results in a bucket: list, fetch, put, and a local working copy."""
