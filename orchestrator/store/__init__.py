"""Results: Parquet parts, manifest, the one locked writer, buckets, several runs read as one."""
