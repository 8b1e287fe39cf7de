"""Data parallelism, written to be read: how ranks that train on different rows share one step."""
